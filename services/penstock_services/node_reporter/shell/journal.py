"""Write-ahead journal of the node: one SQLite file with tokens, tasks, the next order to read, and the outbox
of unsent events.

Ideal: every change is on disk before anything follows from it. Departure: only changes on which LAW 4 rests
(orders accepted or refused) wait for the disk; state that the task folders or a new boot id prove again after
a crash of the machine is written without waiting, and still survives the death of this process.

Bounded: the core drops ended tasks beyond `MAX_ENDED_REMEMBERED`, and events are deleted once acknowledged.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.errors import PenstockError
from penstock.log.port import Headers, Message, Partition
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import HandOverCheckpoint
from penstock.model.inputs.external_events import NodeJoined, OrderRefused, TaskExited
from penstock.model.nouns.nodes import GpuFault, NodeSpec
from penstock.model.schema.event import Event, wire_type
from penstock.model.wire.codec import as_written
from penstock.model.wire.nearest import TOLERATED, tolerated
from penstock_services.node_reporter.core.state import (
    MAX_HANDOVERS,
    Break,
    Change,
    Forget,
    HandOver,
    NodeState,
    Put,
    Status,
    Task,
    hand_over,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gpu_tokens (uuid TEXT PRIMARY KEY, token INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS faults (
    uuid TEXT PRIMARY KEY, boot_id TEXT NOT NULL, fault TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tasks (
    task_id TEXT PRIMARY KEY, token INTEGER NOT NULL, changed INTEGER NOT NULL, row TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS handovers (job_id TEXT PRIMARY KEY, token INTEGER NOT NULL, row TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL,
    headers TEXT NOT NULL, value BLOB NOT NULL
);
"""


_TASK = msgspec.json.Decoder(Task)
_HANDOVER = msgspec.json.Decoder(HandOverCheckpoint)
_FAULT = msgspec.json.Decoder(GpuFault)


def _task(row: str) -> Task:
    """Also of a later version: its reports have the nearest values that this one knows, as at the placer."""
    try:
        return _TASK.decode(row)
    except msgspec.ValidationError:
        fields = json.loads(row)
        _take_nearest(fields, "exited", TaskExited)
        _take_nearest(fields, "refusal", OrderRefused)
        for name in ("cores", "bandwidth"):
            _take_nearest(fields.get(name, {}), "answer", TaskAdjusted)
        return _TASK.decode(json.dumps(fields))


def _take_nearest(fields: dict[str, Any], name: str, kind: type[Event]) -> None:
    report = tolerated(wire_type(kind), json.dumps(fields.get(name)).encode())
    if report is not None:
        fields[name] = as_written(report)


def _fault(text: str) -> GpuFault:
    try:
        return _FAULT.decode(text)
    except msgspec.ValidationError:
        return _FAULT.decode(json.dumps({**json.loads(text), "fault": TOLERATED[NodeJoined.TYPE]["fault"]}))


class JournalFailed(PenstockError):
    """The journal cannot be read or written (disk full, read-only, damaged): no order may be acted on."""


class Outgoing(NamedTuple):
    """An event to send; `id` is its envelope's, `seq` its place in the outbox."""

    id: str
    message: Message
    seq: int = 0


def connect_file(path: Path) -> sqlite3.Connection:
    """The database in a file that only the reporter's user can read."""
    database = sqlite3.connect(path, isolation_level=None, timeout=1)
    path.chmod(0o600)
    return database


class Journal:
    """One connection; not for concurrent use. Every method may raise `JournalFailed`."""

    def __init__(self, path: Path, connect: Callable[[Path], sqlite3.Connection] = connect_file) -> None:
        """`connect`: opens the database, in autocommit mode."""
        with self._failing():
            self._db = connect(path)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
            self._settle()
            self._changed: int = self._db.execute("SELECT coalesce(max(changed), 0) FROM tasks").fetchone()[0]

    def close(self) -> None:
        self._db.close()

    def _settle(self) -> None:
        """Copies the write-ahead log of an earlier process into the database, and waits for the disk.

        A sync that failed leaves its transaction readable but perhaps not on the disk, and the next sync of
        the same file may well succeed: only a new write proves it. Nothing may be recovered from it before.
        """
        busy, _, _ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("another process uses the journal")

    def load(self, spec: NodeSpec) -> NodeState:
        """The state as of the last write; tasks retain the boot id of their start."""
        uuids = tuple(gpu.uuid for gpu in spec.gpus)
        state = NodeState(spec.node_id, spec.boot_id, uuids, machine_id=spec.machine_id, cores=spec.cores)
        with self._failing():
            state.gpu_tokens = dict(self._db.execute("SELECT uuid, token FROM gpu_tokens"))
            faults = self._db.execute("SELECT fault FROM faults WHERE boot_id = ?", (spec.boot_id,))
            state.faults = {fault.uuid: fault for fault in (_fault(text) for (text,) in faults)}
            for (row,) in self._db.execute("SELECT row FROM tasks ORDER BY changed"):
                task = _task(row)
                (state.ended if task.status is Status.ENDED else state.tasks)[task.task_id] = task
            for (row,) in self._db.execute("SELECT row FROM handovers ORDER BY token"):
                hand_over(state, _HANDOVER.decode(row))
        state.forgotten_token = self.number("forgotten_token", -1)
        return state

    def clear_faults(self) -> None:
        """The GPUs were repaired, or the machine has booted anew."""
        with self._failing(), self._transaction(durable=True):
            self._db.execute("DELETE FROM faults")

    def number(self, key: str, default: int) -> int:
        """A number stored by `write`, or the default."""
        with self._failing():
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else int(row[0])

    def write(
        self,
        changes: Iterable[Change],
        events: Iterable[Outgoing],
        numbers: Mapping[str, int],
        *,
        durable: bool,
    ) -> None:
        """All in one transaction. `durable`: returns after the disk write."""
        with self._failing(), self._transaction(durable=durable):
            for change in changes:
                self._write_change(change)
            for event_id, message, _ in events:
                text = json.dumps([[name, raw.decode()] for name, raw in message.headers])
                self._db.execute(
                    "INSERT INTO outbox (id, topic, partition, headers, value) VALUES (?, ?, ?, ?, ?)",
                    (event_id, message.partition.topic, message.partition.index, text, message.value),
                )
            for item in numbers.items():
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", item)

    def pending(self, limit: int) -> list[Outgoing]:
        """The oldest unacknowledged events, in order."""
        with self._failing():
            rows = self._db.execute(
                "SELECT seq, id, topic, partition, headers, value FROM outbox ORDER BY seq LIMIT ?", (limit,)
            ).fetchall()
        return [
            Outgoing(id_, Message(Partition(topic, partition), value, _headers(text)), seq)
            for seq, id_, topic, partition, text, value in rows
        ]

    def acknowledge(self, through_seq: int) -> None:
        """The log has everything up to here."""
        with self._failing(), self._transaction(durable=False):
            self._db.execute("DELETE FROM outbox WHERE seq <= ?", (through_seq,))

    def _write_change(self, change: Change) -> None:
        if isinstance(change, Put):
            task = change.task
            self._changed += 1
            self._db.execute(
                "INSERT OR REPLACE INTO tasks VALUES (?, ?, ?, ?)",
                (task.task_id, task.token, self._changed, msgspec.json.encode(task).decode()),
            )
            self._db.executemany(
                "INSERT INTO gpu_tokens VALUES (?, ?) ON CONFLICT (uuid) DO UPDATE SET token = max(token, "
                "excluded.token)",
                [(gpu, task.token) for gpu in task.gpus],
            )
        elif isinstance(change, Break):
            fault = change.fault
            text = msgspec.json.encode(fault).decode()
            self._db.execute(
                "INSERT OR REPLACE INTO faults VALUES (?, ?, ?)", (fault.uuid, change.boot_id, text)
            )
        elif isinstance(change, HandOver):
            row = msgspec.json.encode(change.order).decode()
            self._db.execute(
                "INSERT OR REPLACE INTO handovers VALUES (?, ?, ?)",
                (change.order.job_id, change.order.token, row),
            )
            self._db.execute(
                "DELETE FROM handovers WHERE token < (SELECT token FROM handovers ORDER BY token DESC LIMIT "
                "1 OFFSET ?)",
                (MAX_HANDOVERS - 1,),
            )
        elif isinstance(change, Forget):
            self._db.execute("DELETE FROM tasks WHERE task_id = ?", (change.task_id,))
            self._db.execute(
                "INSERT INTO meta VALUES ('forgotten_token', ?) ON CONFLICT (key) DO UPDATE SET value = "
                "max(value, excluded.value)",
                (change.token,),
            )

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @staticmethod
    @contextmanager
    def _failing() -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            raise JournalFailed(f"the journal cannot be used: {error}") from error


def _headers(text: str) -> Headers:
    return tuple((name, value.encode()) for name, value in json.loads(text))
