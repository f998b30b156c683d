"""Subprocess with one Faust app: windows of telemetry in a table that is rebuilt from its changelog topic on
Kafka.

Started by `FaustWindows`, which sends one line of JSON (`Asked`) and receives frames: the length in four
bytes, then a JSON array of windows. The first frame has all windows, each later one the changed windows. A
frame with an object (`Refused`) is the last one. The process ends when its standard input does, so with its
parent.

The windows are those of `penstock.scheduling.acting.telemetry_windows`. Faust has the consumer group, the
table and its changelog, and no part in decisions. Ideal: at-least-once, as Faust promises it. Departures of
faust-streaming 0.15.3, and the workarounds:

- It commits a sample while the change of the table still lies in a buffer, and goes on where that change
  could not be written. Here a sample is acknowledged once its change is in the changelog, in the order of
  reading, and a failed write ends the process.
- Its windowed tables expire by the machine's clock, never after a rebuild, and not in the changelog. Here the
  table has `HELD_WINDOWS` slots per node that are reused: nothing is deleted, so that compaction bounds the
  changelog.
- A recovery waits for the last record of the changelog, which compaction may have removed if it was a
  deletion. There are none.
- Its consumer hands the partitions to read to a thread as a set that it changes meanwhile, and an empty set
  stands for all: records then read from a paused partition are lost to a group without positions. Here the
  thread gets a copy.
- An agent that raises is started again, and the records that it had read are lost. Here any error ends the
  process; the service begins anew (crash-only).
- Without a broker its stop hangs and leaves threads and tasks that cannot be cancelled. Hence a process,
  which ends for certain.
- Environment variables override its settings, and it would create topics and serve HTTP. Here it gets no
  environment, and may do neither.
"""

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, BinaryIO

import faust
import msgspec
import uvloop
from faust.transport.drivers import aiokafka
from faust.types import TP, EventT, FutureMessage
from yarl import URL

from penstock.errors import ConfigurationError, LogError, PenstockError
from penstock.exits import Exit
from penstock.log.kafka.aiokafka_gaps import accept_any_header_name
from penstock.log.kafka.kafka import Connection, KafkaLog
from penstock.log.kafka.reader import wire_headers
from penstock.log.open import open_log
from penstock.log.port import Partition, Record
from penstock.model.schema.errors import EventError
from penstock.model.schema.topics import GUARD_GROUPS, NODE_PARTITIONS, Topic
from penstock.runtime.following.telemetry import sampled
from penstock.runtime.race import first_of
from penstock.scheduling.acting.telemetry_windows import HELD_WINDOWS, NodeWindow
from penstock_services.contention_guard.shell.faust_windows import KINDS, LENGTH_BYTES, Asked, Refused
from penstock_services.contention_guard.shell.windows import Held

LOG = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 1_000  # samples; more wait in Faust's own queue
SESSION_S = 6.0  # Kafka's smallest: after a kill the group's partitions are given out again only then
HEARTBEAT_S = 1.0
REBALANCE_S = 10.0
REQUEST_S = 10.0  # Faust's default for a write is 20 minutes
COMMIT_S = 2.0  # positions; nothing is committed where nothing was read
MAX_BATCH_BYTES = 1_000_000
CATCH_UP_S = 30.0  # of the start without a processed record
STOP_S = 2.0  # to leave the group, so that a successor need not wait for SESSION_S

encoded = msgspec.json.Encoder(enc_hook=dict).encode
"""`enc_hook`: the mapping of a window without tasks is a read-only one."""


class _Table(faust.Table[bytes, bytes]):
    """Returns the pending write of each change."""

    written: FutureMessage

    def send_changelog(self, *args: Any, **options: Any) -> FutureMessage:
        self.written = super().send_changelog(*args, **options)
        return self.written


class _Consumer(aiokafka.Consumer):
    """Polls the partitions that are active at the call, even if one is paused before its thread begins."""

    async def _getmany(self, active_partitions: Set[TP] | None, timeout: float) -> Any:
        return await super()._getmany(set(active_partitions or ()), timeout)


class Transport(aiokafka.Transport):
    """Faust's transport to Kafka, with a consumer that loses no records."""

    Consumer = _Consumer


class _Places:
    """Slots of the table and their windows, per node. Slots are reused: those of windows that are not held
    any more, the oldest one's first."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[int, int]] = {}

    def of(self, window: NodeWindow, held: Set[int]) -> int:
        """Its slot, 0 – HELD_WINDOWS - 1. No two slots have windows of one time. `held`: begins of the node's
        windows that are held, this one among them."""
        places = self._nodes.setdefault(window.node_id, {})
        if window.begin_ms not in places:
            free = set(range(HELD_WINDOWS)) - set(places.values())
            places[window.begin_ms] = min(free) if free else places.pop(min(places.keys() - held))
        return places[window.begin_ms]

    def restore(self, window: NodeWindow, place: int) -> None:
        """Restores an entry of the table."""
        self._nodes.setdefault(window.node_id, {})[window.begin_ms] = place


class WindowTable:
    """Reads the telemetry topic by Faust and holds the latest windows of each node. `kafka`: started."""

    def __init__(self, kafka: KafkaLog, cell_index: int, folder: str) -> None:
        """`folder`: Faust makes one for its tables; this table has no files."""
        self._kafka = kafka
        self._cell_index = cell_index
        self._group = f"{GUARD_GROUPS}{cell_index}"
        self._folder = folder
        self._app: faust.App
        self._table: _Table
        self._held = Held()
        self._places = _Places()
        self._changed: dict[tuple[str, int], NodeWindow] = {}
        self._news = asyncio.Event()
        self._unacknowledged: asyncio.Queue[tuple[EventT[Any], FutureMessage | None]] = asyncio.Queue(
            MAX_UNACKNOWLEDGED
        )
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end: dict[Partition, int] = {}
        """End offsets of telemetry at the start."""
        self._dealt_with: dict[Partition, int] = {}
        """Partition of telemetry → all records before this offset are processed."""
        self._assigned: Set[Partition] | None = None
        """None: the table is not built yet."""
        self._caught_up = asyncio.Event()

    async def begin(self) -> Sequence[NodeWindow]:
        """As `Windows`. Raises `ConfigurationError` where the changelog topic has wrong settings."""
        await self._kafka.create({Topic.GUARD_WINDOWS: NODE_PARTITIONS})
        await self._kafka.committed(self._group)  # reports a missing right by its name
        telemetry = [Partition(Topic.TELEMETRY, index) for index in range(NODE_PARTITIONS)]
        self._dealt_with = await self._kafka.begin_offsets(telemetry)
        self._end = await self._kafka.end_offsets(telemetry)
        self._app = self._new_app(self._kafka.connection)
        await self._unless_ended(self._app.start())
        await self._unless_ended(self._catch_up())
        self._changed.clear()
        self._news.clear()
        return self._held.all()

    async def _catch_up(self) -> None:
        """Raises `LogError` where Faust makes no progress."""
        before: dict[Partition, int] = {}
        while before != self._dealt_with:
            before = dict(self._dealt_with)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._caught_up.wait(), CATCH_UP_S)
                return
        raise LogError(
            f"Faust has read nothing of {Topic.TELEMETRY} for {CATCH_UP_S:.0f} s; it is behind in "
            f"{self._behind(self._assigned or ())}"
        )

    async def read(self) -> Sequence[NodeWindow]:
        """As `Windows`."""
        await self._unless_ended(self._news.wait())
        changed = [self._changed[key] for key in sorted(self._changed)]
        self._changed.clear()
        self._news.clear()
        return changed

    async def stop(self) -> None:
        """Leaves the group. May hang, and may leave threads: the caller bounds it,
        and ends the process after it."""
        await self._app.stop()

    # --- Faust -------------------------------------------------------------------------------------------

    def _new_app(self, connection: Connection) -> faust.App:
        app = faust.App(
            self._group,
            loop=asyncio.get_running_loop(),
            env={},
            datadir=self._folder,
            broker=[URL(f"kafka://{address}") for address in connection.bootstrap.split(",")],
            broker_client_id=f"penstock-{connection.identity}-faust",
            broker_credentials=_credentials(connection),
            broker_session_timeout=SESSION_S,
            broker_heartbeat_interval=HEARTBEAT_S,
            broker_rebalance_timeout=REBALANCE_S,
            broker_request_timeout=REQUEST_S,
            broker_commit_interval=COMMIT_S,
            producer_request_timeout=REQUEST_S,
            producer_max_batch_size=MAX_BATCH_BYTES,
            processing_guarantee="at_least_once",
            store="memory://",
            table_standby_replicas=0,
            topic_allow_declare=False,
            topic_disable_leader=True,
            stream_wait_empty=False,
            web_enabled=False,
            Table=_Table,
        )
        app.transport = Transport(app.conf.broker_consumer, app)
        raw: dict[str, Any] = {
            "key_type": bytes,
            "value_type": bytes,
            "key_serializer": "raw",
            "value_serializer": "raw",
            "partitions": NODE_PARTITIONS,
            "allow_empty": True,
        }
        changelog = app.topic(Topic.GUARD_WINDOWS, acks=False, **raw)
        self._table = app.Table(
            "windows",
            key_type=bytes,
            value_type=bytes,
            changelog_topic=changelog,
            partitions=NODE_PARTITIONS,
            on_recover=self._rebuild,
        )  # type: ignore[assignment]
        app.agent(app.topic(Topic.TELEMETRY, **raw), name="windows")(self._follow)  # type: ignore[arg-type]
        return app

    async def _follow(self, stream: faust.Stream[bytes]) -> None:
        """Merges samples as they come; each is acknowledged after its writes."""
        acknowledging = asyncio.create_task(self._acknowledge(stream))
        try:
            async for event in stream.noack().events():
                await self._unacknowledged.put((event, self._take(event)))
        except Exception as error:  # noqa: BLE001 - Faust would start the agent again and go on behind it
            self._fail(error)
        finally:
            acknowledging.cancel()

    async def _acknowledge(self, stream: faust.Stream[bytes]) -> None:
        try:
            while True:
                event, written = await self._unacknowledged.get()
                if written is not None:
                    if not written.done():
                        await asyncio.wait([written])
                    written.result()
                await stream.ack(event)
                message = event.message
                self._advance(Partition(message.topic, message.partition), message.offset + 1)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _take(self, event: EventT[Any]) -> FutureMessage | None:
        """Merges the sample. Returns the write of its change, if there is any."""
        message: Any = event.message  # its headers are the pairs that aiokafka read
        record = Record(
            Partition(message.topic, message.partition),
            message.offset,
            message.value or b"",
            wire_headers(message.headers),
            message.key,
            round(message.timestamp * 1_000),
        )
        try:
            one = sampled(record)
        except EventError as error:  # invalid telemetry is skipped
            LOG.warning("telemetry %s@%d: %s", record.partition, record.offset, error)
            return None
        if one is None or (window := self._held.add(one)) is None:
            return None
        place = self._places.of(window, self._held.begins(window.node_id))
        self._table[_key(self._cell_index, window.node_id, place)] = encoded(window)
        self._report(window)
        return self._table.written

    def _report(self, window: NodeWindow) -> None:
        self._changed[window.node_id, window.begin_ms] = window
        self._news.set()

    async def _rebuild(self) -> None:
        """Rebuilds the table from its changelog: at the start, and after each rebalance.

        Windows that another guard of the cell has merged meanwhile count as changed here.
        """
        before = {(window.node_id, window.begin_ms): window for window in self._held.all()}
        self._held, self._places = Held(), _Places()
        for key, value in self._table.data.items():
            try:
                cell_index, _, place = msgspec.json.decode(key, type=tuple[int, str, int])
                window = msgspec.json.decode(value, type=NodeWindow)
            except msgspec.DecodeError as error:
                LOG.warning("%s, key %.100r: %s", Topic.GUARD_WINDOWS, key, error)
                continue
            if cell_index == self._cell_index:
                self._held.restore(window)
                self._places.restore(window, place)
                if before.get((window.node_id, window.begin_ms)) != window:
                    self._report(window)
        for partition, offset in (await self._kafka.committed(self._group)).items():
            self._advance(partition, offset)
        self._assigned = {Partition(*place) for place in self._app.consumer.assignment()} & self._end.keys()
        self._look()

    def _advance(self, partition: Partition, offset: int) -> None:
        """All records before this offset are processed."""
        self._dealt_with[partition] = max(offset, self._dealt_with.get(partition, 0))
        self._look()

    def _look(self) -> None:
        if not self._caught_up.is_set() and self._assigned is not None and not self._behind(self._assigned):
            self._caught_up.set()

    def _behind(self, assigned: Iterable[Partition]) -> Mapping[int, int]:
        """Index of a partition → offset of the last record that `begin` waits for."""
        return {
            partition.index: self._end[partition] - 1
            for partition in assigned
            if self._dealt_with[partition] < self._end[partition]
        }

    # --- failures ----------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _unless_ended(self, work: Awaitable[Any]) -> None:
        """Awaits it. Raises the error that ended Faust if that comes first."""
        await first_of(work, self._ended())

    async def _ended(self) -> None:
        await first_of(self._app.wait_until_stopped(), asyncio.shield(self._failed))
        raise LogError(f"Faust has ended: {self._app.crash_reason!r}")


def _key(cell_index: int, node_id: str, place: int) -> bytes:
    """Key of a window's record in the changelog, which guards of several cells share."""
    return msgspec.json.encode((cell_index, node_id, place))


def _credentials(connection: Connection) -> Any:
    if connection.sasl is not None:
        return faust.SASLCredentials(
            username=connection.sasl.user,
            password=connection.sasl.password,
            ssl_context=connection.tls,
            mechanism="SCRAM-SHA-256",
        )
    return None if connection.tls is None else faust.SSLCredentials(connection.tls)


# --- the process -----------------------------------------------------------------------------------------


async def _parent_gone() -> None:
    """Returns when standard input ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


class _Process:
    """Serves one parent. `out`: the pipe to it; `write` blocks while the parent does not read, and Kafka's
    heartbeats go on in their own thread."""

    def __init__(self, asked: Asked, out: BinaryIO) -> None:
        self._asked = asked
        self._out = out

    async def work(self) -> None:
        """Until the parent is gone, or an error: the last frame has the reason. Never returns."""
        status = Exit.OK
        try:
            await self._work()
        except Exception as error:  # noqa: BLE001 - the parent raises it, and starts anew
            status = Exit.PROBLEM
            kind = next((name for name, kind in KINDS.items() if isinstance(error, kind)), "LogError")
            text = str(error) if isinstance(error, PenstockError) else repr(error)
            with suppress(BrokenPipeError):
                self._send(Refused(kind, text))
        os._exit(status)  # at once, without waiting for Faust's threads

    async def _work(self) -> None:
        log = open_log(self._asked.log_url, "contention-guard")
        if not isinstance(log, KafkaLog):
            raise ConfigurationError("Faust reads Kafka only: the log's URL must begin with kafka://")
        accept_any_header_name(
            self
        )  # slower, which Faust's pace hides; one forged record must not end every attempt
        with tempfile.TemporaryDirectory(prefix="penstock-windows-") as folder:
            table = WindowTable(await log.start(), self._asked.cell_index, folder)
            await first_of(self._serve(table), _parent_gone())
            with suppress(Exception):
                async with asyncio.timeout(STOP_S):
                    await table.stop()

    async def _serve(self, table: WindowTable) -> None:
        self._send(await table.begin())
        while True:
            self._send(await table.read())

    def _send(self, frame: Iterable[NodeWindow] | Refused) -> None:
        body = encoded(frame)
        self._out.write(len(body).to_bytes(LENGTH_BYTES) + body)
        self._out.flush()


def main() -> None:
    """Never returns."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal and systemd send them to parent and child
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's output must not get between the frames
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s contention-guard %(levelname)s %(name)s: %(message)s"
    )
    for name in (
        "faust",
        "mode",
        "aiokafka.consumer.group_coordinator",
        "penstock.log.kafka.kafka",
        "penstock.log.kafka.trouble",
    ):
        logging.getLogger(name).setLevel(
            logging.CRITICAL
        )  # errors end the process, with the reason as the last frame; the parent logs that Kafka is down
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Asked)
    uvloop.run(_Process(asked, out).work())


if __name__ == "__main__":
    main()
