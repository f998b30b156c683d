"""Replay: decide everything again from the log and compare byte for byte.

Each valid ledger record names its cause. The input is read again from its topic, exactly the same core
answers it, and the resulting record must equal the one in the ledger, which is upcast where an earlier
version wrote a fact in another form. Each term names the version that decided its records: where they differ,
the report names that version. Replay writes nothing and emits no trace.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import orjson
from msgspec.structs import replace

from penstock import __version__
from penstock.ledger.fold.evolve import FOLD_VERSION, fold
from penstock.ledger.record.record import Amended, Head, RawFact, RawRecord, entry, read, read_valid, write
from penstock.ledger.replica.digest import restated
from penstock.ledger.replica.replica import Replica
from penstock.log.open import open_log
from penstock.log.port import Log, Partition, Record
from penstock.model.decisions.ledger_events import PlacementDecided, TermStarted
from penstock.model.schema.event import wire_type
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.model.wire.codec import decode, written
from penstock.model.wire.upcasters import SPLIT
from penstock.runtime.following.amended_log import AmendedLog
from penstock.runtime.following.snapshots import check_beginning, load_replica
from penstock.runtime.settings import Settings
from penstock_services.placer.core.answer import (
    Input,
    Moment,
    answer_input,
    answer_term,
    answer_timer,
    failure_of,
    forgery_of,
)
from penstock_services.placer.core.step import PlacerCore

MAX_DIFFERENCES = 10  # reported; the count goes on
PROGRESS_EVERY = 5_000  # records
PLACEMENT = wire_type(PlacementDecided)
INPUT_WAIT_MS = 5_000  # time-out for an input that a ledger record names


class Decider(NamedTuple):
    """The code version that decided a term's records."""

    code_version: str = __version__
    fold_version: int = FOLD_VERSION

    @property
    def text(self) -> str:
        return (
            f"{self.code_version} (fold {self.fold_version})" if self.code_version else "an unnamed version"
        )


@dataclass(slots=True)
class Report:
    """Result of a replay. `identical` is the verdict."""

    records: int = 0
    void: int = 0
    """Records on the partition that the chain rule refuses (zombies, foreign bytes)."""
    identical: int = 0
    different: int = 0
    amended: int = 0
    """Records that an operator amended: their facts are taken, and not decided again."""
    head_seq: int = 0
    head_id: str = ""
    seconds: float = 0.0
    records_per_s: float = 0.0
    differences: list[dict[str, Any]] = field(default_factory=list)
    version: str = field(default_factory=lambda: Decider().text)
    """The replaying version."""
    decided_by: dict[str, dict[str, int]] = field(default_factory=dict)
    """Version, as each term names it → number of its records, of those that differ,
    the first and the last."""
    decision: dict[str, Any] | None = None
    """The requested record, as decided again."""


def replay(
    settings: Settings,
    until: int | None = None,
    decision: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Replays this cell's ledger through a connection of its own: `{"ok": …}` and the report. Raises
    `LogError`, `LookupError`."""
    return asyncio.run(_replay(settings, until, decision, progress))


def replay_fresh(settings: Settings, records: int | None = None) -> dict[str, Any]:
    """As `replay`, by a decider that starts from the newest snapshot, and so knows nothing of before: at most
    so many records after it.

    A decider's caches only save work: whatever a fresh one decides otherwise was decided by something that is
    not in the ledger.
    """
    return asyncio.run(_replay(settings, records, None, lambda _: None, fresh=True))


async def _replay(
    settings: Settings,
    until: int | None,
    decision: str | None,
    progress: Callable[[int], None],
    *,
    fresh: bool = False,
) -> dict[str, Any]:
    log = await AmendedLog(open_log(settings.log_url, "replay", settings.archive)).start()
    try:
        start = await load_replica(settings, log) if fresh else Replica()
        if fresh and until is not None:
            until += start.head.seq
        report = await Replayer(log, settings.cell_index, start).run(until, decision, progress)
    finally:
        await log.close()
    return {"ok": report.different == 0, **asdict(report)}


class Replayer:
    """Re-decides one cell's ledger from its first record,
    or after a snapshot (`start`, which is folded on)."""

    def __init__(self, log: Log, cell_index: int, start: Replica | None = None) -> None:
        start = Replica() if start is None else start
        self._log = log
        self._ledger = Partition(Topic.LEDGER, cell_index)
        self._offset = start.offset
        self._core = PlacerCore(start.state)
        self._head = start.head
        self._decider = Decider("", 0)
        read = start.state.positions
        self._inputs = {
            topic: (
                log.reader({Partition(topic, cell_index): read.get((topic, cell_index), 0)}),
                deque[Record](),
            )
            for topic in INPUT_TOPICS
        }
        self.report = Report(head_seq=start.head.seq, head_id=start.head.id)

    async def run(
        self,
        until: int | None = None,
        decision: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Report:
        """Up to record `until` (default: the head now). `decision`: a seq, or a job, for its last
        placement; the re-decided record is reported."""
        began = perf_counter()
        await check_beginning(self._log, self._ledger, self._offset)
        end = (await self._log.end_offsets([self._ledger]))[self._ledger]
        reader = self._log.reader({self._ledger: self._offset})
        report = self.report
        try:
            while reader.position(self._ledger) < end and (until is None or report.head_seq < until):
                for record in await reader.read():
                    if until is not None and report.head_seq >= until:
                        break
                    await self._one(record, decision)
                    if report.records % PROGRESS_EVERY == 0:
                        progress(report.records)
        finally:
            await reader.close()
            for inputs, _ in self._inputs.values():
                await inputs.close()
        report.seconds = round(perf_counter() - began, 3)
        report.records_per_s = round(report.records / max(report.seconds, 1e-9), 1)
        return report

    async def _one(self, record: Record, decision: str | None) -> None:
        found = read_valid(self._head, record.value)
        if found is None:
            self.report.void += 1
            return
        head, raw = found
        if isinstance(record.value, Amended):
            self._take(head, raw, record.offset)
            return
        again = await self._again(raw)
        self._head = head
        identical, report = again == upcast(record.value), self.report
        report.head_seq, report.head_id = head.seq, head.id
        self._count(raw.seq, identical)
        if not identical and len(report.differences) < MAX_DIFFERENCES:
            differs = difference(raw.seq, record.value, again)
            report.differences.append({**differs, "decided_by": self._decider.text})
        if decision is not None and asked_for(raw, decision):
            report.decision = {
                "seq": raw.seq,
                "identical": identical,
                "decided_by": self._decider.text,
                "record": orjson.loads(again),
            }

    def _take(self, head: Head, raw: RawRecord, offset: int) -> None:
        """Folds an amended record, as each placer after the amendment has: what was decided there could not
        be read."""
        fold(self._core.state, raw, offset=offset)
        self._core, self._head = PlacerCore(self._core.state), head
        report = self.report
        report.records += 1
        report.amended += 1
        report.head_seq, report.head_id = head.seq, head.id

    def _count(self, seq: int, identical: bool) -> None:
        report = self.report
        report.records += 1
        report.identical += identical
        report.different += not identical
        own = report.decided_by.setdefault(
            self._decider.text, {"records": 0, "different": 0, "first_seq": seq}
        )
        own["records"] += 1
        own["different"] += not identical
        own["last_seq"] = seq

    async def _again(self, raw: RawRecord) -> bytes:
        """The record's bytes, decided anew after the same head at the same time."""
        moment = Moment(raw.seq, raw.term, raw.now_ms)
        failure = failure_of(raw)
        if raw.cause.topic is not None:
            found = await self._input(raw.seq, raw.cause.topic, raw.cause.offset)
            forgery = forgery_of(raw)
            draft = answer_input(self._core, moment, found, failure, lambda *_: forgery).draft
        elif raw.cause.timer_id is not None:
            draft = answer_timer(self._core, moment, raw.cause.timer_id, failure).draft
        else:
            fact, *accepted = [decode(fact.type, bytes(fact.data)) for fact in raw.facts]
            assert isinstance(fact, TermStarted), "only a term begins without input or timer"
            self._decider = Decider(fact.code_version, fact.fold_version)
            draft = answer_term(self._core, moment, fact, accepted)
        if raw.digest:
            draft = replace(draft, digest=restated(self._core.state, raw.digest))
        return write(Head(raw.seq - 1, raw.parent, raw.term), draft)[1]

    async def _input(self, seq: int, topic: str, offset: int) -> Input:
        """The input that ledger record `seq` answers, at this offset. Raises `LookupError` if it is no longer
        in the log."""
        reader, waiting = self._inputs[Topic(topic)]
        while True:
            while waiting:
                record = waiting.popleft()
                if record.offset == offset:
                    return Input(*record.partition, record.offset, record.headers, record.value)
            records = await reader.read(timeout_ms=INPUT_WAIT_MS)
            if not records:
                raise LookupError(
                    f"ledger record {seq} answers {topic} offset {offset}, which cannot be read again: the "
                    f"input was accepted at another offset, or is gone; `penstock replay --until {seq - 1}` "
                    "compares what comes before"
                )
            waiting.extend(records)


def upcast(value: bytes) -> bytes:
    """The record as this version writes it: facts of an older form in the present one.
    Others stay as they are."""
    raw = read(value)
    if not any(fact.type in SPLIT for fact in raw.facts):
        return value
    body = orjson.loads(value)
    body["facts"] = [entry(fact) for fact in map(RawFact.event, raw.facts)]
    return orjson.dumps(body, default=written)


def asked_for(record: RawRecord, decision: str) -> bool:
    """Whether `decision` names this record's seq, or a job that it places."""
    if decision == str(record.seq):
        return True
    places = (fact.event() for fact in record.facts if fact.type == PLACEMENT)
    return any(getattr(place, "job_id", None) == decision for place in places)


def difference(seq: int, recorded: bytes, again: bytes) -> dict[str, Any]:
    """The first field in which two records differ."""
    old, new = orjson.loads(recorded), orjson.loads(again)
    fields = [name for name in old if old[name] != new.get(name)]
    name = fields[0] if fields else "bytes"
    return {"seq": seq, "field": name, "recorded": old.get(name), "again": new.get(name)}
