"""Tumbling windows of telemetry on Kafka, by Faust: a table of windows whose changelog topic rebuilds it after a restart.

The windows are those of `penstock.policies.telemetry_windows`; Faust has the consumer group, the table and its changelog, and nothing that
decides. Ideal: at-least-once, as Faust promises it. Departures of faust-streaming 0.15.3, and what is done about them:

- It commits a sample while the change of the table still lies in a buffer, and goes on where that change could not be written. Here a
  sample is acknowledged once its change is in the changelog, in the order of reading, and a failed write ends the attempt.
- Its windowed tables expire by the machine's clock, never after a rebuild, and not in the changelog. Here the table has `HELD_WINDOWS`
  places per node that are used again: nothing is deleted, so that compaction bounds the changelog.
- A recovery waits for the last record of the changelog, which compaction may have removed if it was a deletion. There are none.
- An agent that raises is started again, without what it had read. Here any error ends the attempt; the service begins anew (crash-only).
- Variables of the environment override its settings, and it would create topics and serve HTTP. It sees no environment, and may do neither.
"""

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import faust
import msgspec
from faust.types import EventT, FutureMessage
from yarl import URL

from penstock.errors import LogError
from penstock.log.aiokafka_gaps import accept_any_header_name, accept_utf8_only, within_bound
from penstock.log.kafka import Connection, KafkaLog
from penstock.log.kafka_reader import wire_headers
from penstock.log.port import Partition, Record
from penstock.model.errors import EventError
from penstock.model.topics import GUARD_GROUPS, NODE_PARTITIONS, Topic
from penstock.policies.telemetry_windows import NodeWindow
from penstock.runtime.race import first_of
from penstock_services.contention_guard.shell.windows import HELD_WINDOWS, Held, sampled

LOG = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED = 1_000  # samples; more wait in Faust's own queue
SESSION_S = 6.0  # Kafka's smallest: a guard that was killed holds up its successor for so long
HEARTBEAT_S = 1.0
REBALANCE_S = 10.0
REQUEST_S = 10.0  # Faust's default for a write is 20 minutes
COMMIT_S = 2.0  # positions; nothing is committed where nothing was read
MAX_BATCH_BYTES = 1_000_000

encoded = msgspec.json.Encoder(enc_hook=dict).encode
"""Of a window without tasks, the mapping is a read-only one."""

_UNDECODED = object()
"""Stands for the reader that met a record which aiokafka's decoder refuses; see `accept_any_header_name`."""


class _Table(faust.Table[bytes, bytes]):
    """Hands out the write of each change."""

    written: FutureMessage

    def send_changelog(self, *args: Any, **options: Any) -> FutureMessage:
        self.written = super().send_changelog(*args, **options)
        return self.written


class _Places:
    """Which place in the table has which window of a node. A place is used again, that of the oldest window first."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[int, int]] = {}

    def of(self, window: NodeWindow) -> int:
        """Its place, 0 – HELD_WINDOWS - 1; of a new window a free one, or the one of the oldest, which is held no more."""
        places = self._nodes.setdefault(window.node_id, {})
        if window.begin_ms not in places:
            free = set(range(HELD_WINDOWS)) - set(places.values())
            places[window.begin_ms] = min(free) if free else places.pop(min(places))
        return places[window.begin_ms]

    def restore(self, window: NodeWindow, place: int) -> None:
        """As the table has it."""
        self._nodes.setdefault(window.node_id, {})[window.begin_ms] = place


class FaustWindows:
    """A `Windows` on Kafka. `kafka`: not started; it is started and closed with this."""

    def __init__(self, kafka: KafkaLog, cell_index: int) -> None:
        self._kafka = kafka
        self._cell_index = cell_index
        self._group = f"{GUARD_GROUPS}{cell_index}"
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-windows-")
        """Faust makes one for its tables; these have no files."""
        self._app: faust.App | None = None
        self._table: _Table
        self._held = Held()
        self._places = _Places()
        self._changed: dict[tuple[str, int], NodeWindow] = {}
        self._news = asyncio.Event()
        self._unacknowledged: asyncio.Queue[tuple[EventT[Any], FutureMessage | None]] = asyncio.Queue(
            MAX_UNACKNOWLEDGED
        )
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begin: dict[Partition, int] = {}
        self._end: dict[Partition, int] = {}
        self._behind: dict[int, int] | None = None
        """Partition → offset of the last record that `begin` waits for; None: the table is not there yet."""
        self._caught_up = asyncio.Event()
        self.unreadable = 0
        """Records that could not be read: telemetry is looked at only, so they are counted and passed over."""

    async def begin(self) -> Sequence[NodeWindow]:
        """As `Windows`. Raises `ConfigurationError` where the changelog topic is not as it must be."""
        await self._kafka.start()
        await self._kafka.create({Topic.GUARD_WINDOWS: NODE_PARTITIONS})
        telemetry = [Partition(Topic.TELEMETRY, index) for index in range(NODE_PARTITIONS)]
        self._begin = await self._kafka.begin_offsets(telemetry)
        self._end = await self._kafka.end_offsets(telemetry)
        self._app = self._new_app(self._kafka.connection)
        await self._unless_failed(self._app.start())
        await self._unless_failed(self._caught_up.wait())
        accept_utf8_only(_UNDECODED)
        self._changed.clear()
        self._news.clear()
        return self._held.all()

    async def read(self) -> Sequence[NodeWindow]:
        """As `Windows`."""
        await self._unless_failed(self._news.wait())
        changed = [self._changed[key] for key in sorted(self._changed)]
        self._changed.clear()
        self._news.clear()
        return changed

    async def close(self) -> None:
        """As `Windows`. What was read and not acknowledged is read again by the next one."""
        app, self._app = self._app, None
        if app is not None:
            await within_bound(app.stop())
        await self._kafka.close()
        self._folder.cleanup()
        if self._failed.done():
            self._failed.exception()  # else asyncio would report that it was never retrieved
        self._failed.cancel()

    # --- Faust -------------------------------------------------------------------------------------------

    def _new_app(self, connection: Connection) -> faust.App:
        for name in ("faust", "mode"):
            logging.getLogger(name).setLevel(logging.WARNING)
        app = faust.App(
            self._group,
            loop=asyncio.get_running_loop(),
            env={},
            datadir=self._folder.name,
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
        raw: dict[str, Any] = {
            "key_type": bytes, "value_type": bytes, "key_serializer": "raw", "value_serializer": "raw",
            "partitions": NODE_PARTITIONS, "allow_empty": True,
        }  # fmt: skip
        changelog = app.topic(Topic.GUARD_WINDOWS, acks=False, **raw)
        self._table = app.Table(
            "windows", key_type=bytes, value_type=bytes, changelog_topic=changelog,
            partitions=NODE_PARTITIONS, on_recover=self._rebuild,
        )  # type: ignore[assignment]  # fmt: skip
        app.agent(app.topic(Topic.TELEMETRY, **raw), name="windows")(self._follow)  # type: ignore[arg-type]
        return app

    async def _follow(self, stream: faust.Stream[bytes]) -> None:
        """Merges samples as they come; their acknowledgement follows the writes."""
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
                self._advance(event.message.partition, event.message.offset)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _take(self, event: EventT[Any]) -> FutureMessage | None:
        """Merges the sample; the write of its change, if there is any."""
        message: Any = event.message  # its headers are the pairs that aiokafka read
        record = Record(
            Partition(message.topic, message.partition), message.offset, message.value or b"",
            wire_headers(message.headers), message.key, round(message.timestamp * 1_000),
        )  # fmt: skip
        try:
            one = sampled(record)
        except EventError as error:
            self.unreadable += 1
            LOG.warning("telemetry %s@%d: %s", record.partition, record.offset, error)
            return None
        if one is None or (window := self._held.add(one)) is None:
            return None
        self._table[_key(self._cell_index, window.node_id, self._places.of(window))] = encoded(window)
        self._changed[window.node_id, window.begin_ms] = window
        self._news.set()
        return self._table.written

    async def _rebuild(self) -> None:
        """The table is as its changelog has it: at the start, and whenever partitions were given out anew."""
        self._held, self._places = Held(), _Places()
        for key, value in self._table.data.items():
            try:
                cell_index, _, place = msgspec.json.decode(key, type=tuple[int, str, int])
                window = msgspec.json.decode(value, type=NodeWindow)
            except (msgspec.DecodeError, TypeError) as error:  # TypeError: a record without a key
                self.unreadable += 1
                LOG.warning("%s, key %.100r: %s", Topic.GUARD_WINDOWS, key, error)
                continue
            if cell_index == self._cell_index:
                self._held.restore(window)
                self._places.restore(window, place)
        committed = await self._kafka.committed(self._group)
        assert self._app is not None, "the app calls this"
        ours = {Partition(*place) for place in self._app.consumer.assignment()} & self._end.keys()
        self._behind = {
            place.index: self._end[place] - 1
            for place in ours
            if max(self._begin[place], committed.get(place, 0)) < self._end[place]
        }
        self._advance(-1, -1)

    def _advance(self, partition: int, offset: int) -> None:
        """This record is dealt with, and those before it."""
        if self._behind is not None and not self._caught_up.is_set():
            if offset >= self._behind.get(partition, offset + 1):
                del self._behind[partition]
            if not self._behind:
                self._caught_up.set()

    # --- failures ----------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _unless_failed(self, work: Any) -> None:
        """Awaits it. Raises `LogError` if Faust ends before."""
        await first_of(work, self._ended())

    async def _ended(self) -> None:
        app = self._app
        assert app is not None, "`begin` comes first"
        await first_of(app.wait_until_stopped(), asyncio.shield(self._failed))
        if isinstance(app.crash_reason, UnicodeDecodeError):
            accept_any_header_name(_UNDECODED)  # the next attempt is past the record when it begins to serve
        raise LogError(f"Faust has ended: {app.crash_reason!r}")


def _key(cell_index: int, node_id: str, place: int) -> bytes:
    """Of a window's record in the changelog, which guards of several cells share."""
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
