"""Message log on Kafka. The only file that constructs aiokafka objects (`_Clients`); Faust constructs its own
(decision 102).

Ideal: all writes are in flight at once. Departure: aiokafka has at most one produce request per broker and
producer in flight, so the ledger, the orders and all other topics have a producer each, and each producer has
one writer that gathers a batch while the previous write is under way. The producers are idempotent: over an
outage aiokafka repeats unacknowledged requests without duplicates. After the time-out of a write its outcome
is unknown (`AppendFailed`), and its producer is dropped with all batches that it may still hold.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
)

from penstock.clock import wall_ms
from penstock.errors import AppendFailed, ConfigurationError, LogError, NotAllowed, PenstockError, TooLarge
from penstock.log.group_commit import GroupCommit, PartlyFailed
from penstock.log.kafka import retries
from penstock.log.kafka.aiokafka_gaps import abandon_producer, never_create_topics, within_bound
from penstock.log.kafka.reader import FETCH_WAIT_MS, KafkaReader
from penstock.log.kafka.retries import DENIED, answered, started
from penstock.log.kafka.topics import KafkaTopics
from penstock.log.kafka.trouble import pass_on_trouble
from penstock.log.port import Message, Partition, Reader
from penstock.tls import client_context

logger = logging.getLogger(__name__)

FETCH_PARTITION_BYTES = 2 << 20
FETCH_ROUTINE_MS = 5_000  # aiokafka's consumer looks at itself at least so often
MAX_BATCH_BYTES = 1_048_000  # below the broker's default message.max.bytes of 1,048,588
OWN_PRODUCERS = ("ledger", "orders")  # second part of a topic's name

_PROTOCOLS = {  # by name and password?, encrypted? → Kafka's name for it
    (False, False): "PLAINTEXT",
    (True, False): "SASL_PLAINTEXT",
    (False, True): "SSL",
    (True, True): "SASL_SSL",
}
_TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
Result = TypeVar("Result")


class Sasl(NamedTuple):
    """Name and password for SCRAM-SHA-256."""

    user: str
    password: str


class Connection(NamedTuple):
    """Address and credentials for a client constructed elsewhere (Faust's), for the same cluster and
    identity."""

    bootstrap: str
    identity: str
    sasl: Sasl | None
    tls: ssl.SSLContext | None


class _Clients:
    """Constructs every aiokafka object, so that no setting differs by accident."""

    def __init__(self, bootstrap: str, identity: str, sasl: Sasl | None, tls: ssl.SSLContext | None) -> None:
        pass_on_trouble()
        never_create_topics()
        self._settings: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "client_id": f"penstock-{identity}",
            "request_timeout_ms": retries.REQUEST_TIMEOUT_MS,
            "security_protocol": _PROTOCOLS[sasl is not None, tls is not None],
            "ssl_context": tls,
        }
        if sasl is not None:
            self._settings |= {
                "sasl_mechanism": "SCRAM-SHA-256",
                "sasl_plain_username": sasl.user,
                "sasl_plain_password": sasl.password,
            }

    def producer(self) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            **self._settings, acks="all", enable_idempotence=True, linger_ms=0, max_batch_size=MAX_BATCH_BYTES
        )

    def consumer(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            **self._settings,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            consumer_timeout_ms=FETCH_ROUTINE_MS,
            max_partition_fetch_bytes=FETCH_PARTITION_BYTES,
        )

    def admin(self) -> AIOKafkaAdminClient:
        return AIOKafkaAdminClient(**self._settings)


def _family(topic: str) -> str:
    """The producer that writes this topic: `penstock.ledger.v1` → "ledger"."""
    name = topic.split(".")[1] if "." in topic else topic
    return name if name in OWN_PRODUCERS else "others"


class KafkaLog:
    """One identity's connections to a Kafka cluster."""

    conditional = False  # Kafka has no compare-and-append

    def __init__(
        self, bootstrap: str, identity: str, *, sasl: Sasl | None = None, ca: str | None = None
    ) -> None:
        """`ca`: PEM file of the authorities that sign brokers' certificates, "system", or None: not
        encrypted.

        Raises `ConfigurationError` for a file that cannot be used.
        """
        self._bootstrap = bootstrap
        self._ca = ca
        self._tls = None if ca is None else client_context(ca, "?ca")
        self.connection = Connection(bootstrap, identity, sasl, self._tls)
        self._identity = identity if sasl is None or sasl.user == identity else f"{identity} (as {sasl.user})"
        self._clients = _Clients(bootstrap, identity, sasl, self._tls)
        self._admin: AIOKafkaAdminClient | None = None
        self._topics = KafkaTopics(self._identity, self._admin_url(sasl), self._ask)
        self._offsets_consumer: AIOKafkaConsumer | None = None
        self._control_lock = asyncio.Lock()
        self._counts: dict[str, int] = {}
        self._counts_lock = asyncio.Lock()
        self._writers: dict[str, _Writer] = {}
        self._readers: set[KafkaReader] = set()
        self._closed = False

    async def start(self) -> Self:
        """Waits for the cluster; raises `LogError` with the address and the identity that were tried.

        Raises `ConfigurationError` at once where encryption does not fit: waiting would not help.
        """
        if self._tls is not None:
            await self._shake_hands(self._tls)
        self._admin = await self._started(self._clients.admin, retries.START_LIMIT_S)
        return self

    @property
    def topics(self) -> KafkaTopics:
        """Settings of topics, and rights on them, for administrators."""
        return self._topics

    async def create(self, topics: Mapping[str, int]) -> None:
        """Raises `ConfigurationError` for a topic whose settings could lose records, with the remedy."""
        found = await self._topics.create(topics)
        self._counts |= {topic: described.partitions for topic, described in found.items()}

    async def append(self, messages: Sequence[Message]) -> list[int]:
        if self._closed:
            raise AppendFailed("the log is closed")
        if any(message.at is not None for message in messages):
            raise LogError("Kafka cannot write a record at a given offset only")
        partitions = {message.partition for message in messages}
        if self._counts_lock.locked() or any(
            partition.index >= self._counts.get(partition.topic, 0) for partition in partitions
        ):
            await self.require(partitions)
        families = {_family(partition.topic) for partition in partitions}
        if len(families) == 1:
            return await self._writer(families.pop()).commit.append(messages)
        return await self._append_to_several(sorted(families), messages)

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        reader = KafkaReader(self, start, batch_ms=batch_ms)
        self._readers.add(reader)
        return reader

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await self._offsets(partitions, lambda consumer, names: consumer.end_offsets(names))

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await self._offsets(partitions, lambda consumer, names: consumer.beginning_offsets(names))

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        wanted = {
            TopicPartition(*place): RecordsToDelete(offset) for place, offset in offsets.items() if offset
        }
        if wanted:
            await self._ask(lambda admin: admin.delete_records(wanted))

    async def committed(self, group: str) -> dict[Partition, int]:
        """Committed offsets of a consumer group, for the partitions that have one. Raises `LogError`."""
        found = await self._ask(lambda admin: admin.list_consumer_group_offsets(group))
        return {Partition(*place): position.offset for place, position in found.items()}

    async def close(self) -> None:
        self._closed = True
        for reader in list(self._readers):
            await reader.close()
        for writer in self._writers.values():
            await writer.close()
        async with self._control_lock:
            if self._offsets_consumer is not None:
                await within_bound(self._offsets_consumer.stop())
                self._offsets_consumer = None
            if self._admin is not None:
                await within_bound(self._admin.close())
                self._admin = None

    # --- for readers -------------------------------------------------------------------------------------

    def detach(self, reader: KafkaReader) -> None:
        """Removes a reader that has closed itself."""
        self._readers.discard(reader)

    async def started_consumer(self) -> AIOKafkaConsumer:
        """A connected consumer without assignment; waits out an outage within `START_LIMIT_S`."""
        return await self._started(self._clients.consumer, retries.START_LIMIT_S)

    async def require(self, partitions: Iterable[Partition]) -> None:
        """Raises `LogError` for a partition that does not exist, `NotAllowed` for one that this identity may
        not see."""
        wanted = list(partitions)
        async with self._counts_lock:  # first come, first served: appends keep their order
            unknown = {topic for topic, index in wanted if index >= self._counts.get(topic, 0)}
            if unknown:
                found = await self._topics.describe(unknown)
                self._counts |= {topic: described.partitions for topic, described in found.items()}
        for partition in wanted:
            if partition.index >= self._counts.get(partition.topic, 0):
                raise LogError(f"{partition} does not exist: create its topic first")

    # --- inside ------------------------------------------------------------------------------------------

    async def _offsets(
        self,
        partitions: Iterable[Partition],
        ask: Callable[[AIOKafkaConsumer, list[TopicPartition]], Awaitable[dict[TopicPartition, int]]],
    ) -> dict[Partition, int]:
        wanted = list(partitions)
        await self.require(wanted)
        async with self._control_lock:
            if self._offsets_consumer is None:
                self._offsets_consumer = await self.started_consumer()
            try:
                found = await ask(
                    self._offsets_consumer, [TopicPartition(*partition) for partition in wanted]
                )
            except DENIED as error:
                raise NotAllowed(f"{self._identity} may not read {error}") from error
            except KafkaError as error:
                raise LogError(f"Kafka did not answer with the offsets: {error!r}") from error
        return {partition: found[TopicPartition(*partition)] for partition in wanted}

    def _admin_url(self, sasl: Sasl | None) -> str:
        """Template of an administrator's URL, for commands in messages."""
        names = "" if sasl is None else "ADMIN:PASSWORD@"
        return f"kafka://{names}{self._bootstrap}" + (f"?ca={self._ca}" if self._ca else "")

    async def _shake_hands(self, tls: ssl.SSLContext) -> None:
        """Distinguishes a wrong certificate from a broker that is away: aiokafka reports both alike, after
        `START_LIMIT_S`."""
        for address in self._bootstrap.split(","):
            host, _, port = address.rpartition(":")
            try:
                async with asyncio.timeout(retries.REQUEST_TIMEOUT_MS / 1000):
                    _, writer = await asyncio.open_connection(host, int(port), ssl=tls)
            except ssl.SSLCertVerificationError as error:
                raise ConfigurationError(
                    f"the certificate of {address} is not accepted ({error.verify_message}): ?ca= must name "
                    f"the authority that signed it, and the certificate must name {host}; it is {self._ca}"
                ) from error
            except ssl.SSLError as error:
                raise ConfigurationError(
                    f"{address} does not speak TLS as we do ({error.reason}): leave out ?ca= for a listener "
                    "without"
                ) from error
            except OSError:
                continue  # one of several brokers may be away
            writer.close()

    def _writer(self, family: str) -> "_Writer":
        if family not in self._writers:
            self._writers[family] = _Writer(
                f"{family} of {self._identity}", self._identity, self._started_producer
            )
        return self._writers[family]

    async def _started_producer(self) -> AIOKafkaProducer:
        return await self._started(self._clients.producer, retries.DELIVERY_TIMEOUT_S)

    async def _append_to_several(self, families: list[str], messages: Sequence[Message]) -> list[int]:
        """One append over several producers: each gets its part, concurrently."""
        parts = {name: [m for m in messages if _family(m.partition.topic) == name] for name in families}
        answers = await asyncio.gather(
            *(self._writer(name).commit.append(part) for name, part in parts.items()), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            raise (
                errors[0]
                if len(errors) == len(answers)
                else AppendFailed(f"written in part; the rest: {errors[0]}")
            )
        offsets = {
            name: iter(answer)
            for name, answer in zip(parts, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
        return [next(offsets[_family(message.partition.topic)]) for message in messages]

    async def _started(self, make: Callable[[], Any], limit_s: float) -> Any:
        """A started client."""
        return await started(make, limit_s, self._identity, self._bootstrap)

    async def _ask(self, question: Callable[[AIOKafkaAdminClient], Awaitable[Result]]) -> Result:
        """Sends one admin request; repeats it while the cluster is away."""

        def attempt() -> Awaitable[Result]:
            if self._admin is None:
                raise LogError("the log is closed" if self._closed else "the log was not started")
            return question(self._admin)

        async with self._control_lock:
            return await answered(attempt, self._identity, self._bootstrap)


class _Writer:
    """One producer and its group commit."""

    def __init__(self, name: str, identity: str, start: Callable[[], Awaitable[AIOKafkaProducer]]) -> None:
        self.commit = GroupCommit(self._write, name=f"Kafka producer ({name})")
        self._identity = identity
        self._start = start
        self._producer: AIOKafkaProducer | None = None

    async def close(self) -> None:
        await self.commit.close()
        await self._drop()

    async def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await abandon_producer(producer)

    async def _write(self, batch: list[Message]) -> list[int]:
        """Sends one record batch per partition and awaits them together; repeats while messages are left."""
        if self._producer is None:
            try:
                self._producer = await self._start()
            except NotAllowed:
                raise
            except LogError as error:
                raise AppendFailed(str(error)) from error
        left: dict[Partition, list[int]] = {}
        for at, message in enumerate(batch):
            left.setdefault(message.partition, []).append(at)
        outcomes: list[int | PenstockError] = [-1] * len(batch)
        try:
            async with asyncio.timeout(retries.DELIVERY_TIMEOUT_S):
                while left:
                    left = await self._round(self._producer, batch, left, outcomes)
        except (KafkaError, OSError) as error:  # OSError: the time-out as well
            await self._drop()
            raise AppendFailed(f"not acknowledged: {error!r}") from error
        except BaseException:
            await self._drop()  # it may still hold batches of an unfinished round
            raise
        offsets = [outcome for outcome in outcomes if isinstance(outcome, int)]
        if len(offsets) < len(outcomes):
            await self._drop()  # its sequence numbers no longer fit the broker's
            raise PartlyFailed(outcomes)
        return offsets

    async def _round(
        self,
        producer: AIOKafkaProducer,
        batch: list[Message],
        left: dict[Partition, list[int]],
        outcomes: list[int | PenstockError],
    ) -> dict[Partition, list[int]]:
        """Sends one record batch for each partition; returns the messages that did not fit. A failed
        partition is not continued."""
        sent: list[tuple[Partition, list[int], asyncio.Future[Any]]] = []
        now_ms = wall_ms()
        for partition, indices in left.items():
            builder = producer.create_batch()
            count = 0
            for at in indices:
                message = batch[at]
                appended = builder.append(
                    timestamp=now_ms, key=message.key, value=message.value, headers=list(message.headers)
                )
                if appended is None:
                    break
                count += 1
            builder.close()
            if partition.index not in await producer.partitions_for(partition.topic):
                await producer.client.force_metadata_update()
            future = await producer.send_batch(builder, partition.topic, partition=partition.index)
            future.add_done_callback(_retrieve)
            sent.append((partition, indices[:count], future))
        await asyncio.wait([future for _, _, future in sent])
        rest: dict[Partition, list[int]] = {}
        for partition, indices, future in sent:
            error = self._error_of(future)
            behind = left[partition][len(indices) :]
            if error is not None:
                for at in (*indices, *behind):
                    outcomes[at] = error
                continue
            base = future.result().offset
            for rank, at in enumerate(indices):
                outcomes[at] = base + rank
            if behind:
                rest[partition] = behind
        return rest

    def _error_of(self, future: "asyncio.Future[Any]") -> PenstockError | None:
        error = future.exception()
        if error is None:
            # An offset below 0: the broker recognised a duplicate batch, and no longer has its offset.
            return AppendFailed("written, but its offset is lost") if future.result().offset < 0 else None
        if isinstance(error, DENIED):
            return NotAllowed(f"{self._identity} may not write {error}")
        if isinstance(error, _TOO_LARGE):
            return TooLarge(f"the broker's bound is below ours: {error!r}")
        return AppendFailed(repr(error))


def _retrieve(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()  # else asyncio would warn about exceptions that were never retrieved
