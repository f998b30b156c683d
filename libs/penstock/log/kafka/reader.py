"""Reader of the Kafka log: one consumer with manual assignment;
positions are held here, none is committed to Kafka."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from aiokafka import TopicPartition
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    ConsumerStoppedError,
    KafkaError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
)

from penstock.errors import LogError, NotAllowed, OffsetOutOfRange
from penstock.log.batching import TokenBucket
from penstock.log.kafka.aiokafka_gaps import (
    accept_any_header_name,
    accept_utf8_only,
    set_fetch_wait,
    watch_for_deletion,
    within_bound,
)
from penstock.log.port import MAX_READ_RECORDS, Headers, Partition, Record

LOOK_TIMEOUT_S = 0.25  # wait for the connection in a first read with time-out 0
LONG_POLL_MS = 60_000  # 'for ever' in pieces
MAX_UNDECODED = 20  # fetches in a row; some were under way when the decoding was changed
FETCH_WAIT_MS = 5_000  # of a long poll on a quiet log; the broker answers new records at once
BUSY_WAIT_MS = 25  # the same for a reader of several partitions that has just read
BUSY_S = 0.5  # after its last records a reader counts as busy
GATHER_BYTES = 1 << 20  # more than comes within a paced fetch, so that the fetch ends by its time


class Source(Protocol):
    """The interface of a log that its readers use."""

    def detach(self, reader: "KafkaReader") -> None: ...
    async def require(self, partitions: Iterable[Partition]) -> None: ...
    async def started_consumer(self) -> Any: ...


class KafkaReader:
    """Reader over one aiokafka consumer, which waits out outages:
    it repeats its fetches until the broker is back."""

    def __init__(self, log: Source, start: Mapping[Partition, int], *, batch_ms: int) -> None:
        self._log = log
        self._positions = dict(start)
        self._partitions = {TopicPartition(*partition): partition for partition in start}
        self._now_s = asyncio.get_running_loop().time
        self._bucket = TokenBucket(batch_ms, self._now_s)
        self._opening: asyncio.Task[Any] | None = None
        self._consumer: Any = None
        self._deleted: set[str] = set()
        """Topics that were deleted while they were read."""
        self._gathering: asyncio.TimerHandle | None = None
        self._undecoded = 0
        self._closed = False

    def position(self, partition: Partition) -> int:
        return self._positions[partition]

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        deadline_s = None if timeout_ms is None else self._now_s() + timeout_ms / 1000
        if self._consumer is None and not await self._opened(deadline_s):
            return []
        while True:
            wait_ms = LONG_POLL_MS
            if deadline_s is not None:
                wait_ms = min(LONG_POLL_MS, max(0, round((deadline_s - self._now_s()) * 1000)))
            fetched = await self._fetch(wait_ms, max_records)
            if fetched:
                self._undecoded = 0
                accept_utf8_only(self)
                self._bucket.took()
                self._ask_for(self._bucket.delay_s())
                return self._records(fetched)
            if deadline_s is not None and self._now_s() >= deadline_s:
                return []

    async def close(self) -> None:
        self._closed = True
        accept_utf8_only(self)
        self._log.detach(self)
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
            self._opening = None
        if self._gathering is not None:
            self._gathering.cancel()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await within_bound(consumer.stop())

    async def _opened(self, deadline_s: float | None) -> bool:
        """Whether the consumer is open in time.
        It is opened in a task of its own, as `read` may be cancelled."""
        if self._closed:
            raise LogError("the reader is closed")
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        wait_s = None if deadline_s is None else max(LOOK_TIMEOUT_S, deadline_s - self._now_s())
        await asyncio.wait({self._opening}, timeout=wait_s)
        opening = self._opening
        if opening is None or not opening.done():
            return False
        self._opening = None
        self._consumer = opening.result()
        return True

    async def _open(self) -> Any:
        await self._log.require(self._partitions.values())
        consumer = await self._log.started_consumer()
        self._deleted = watch_for_deletion(consumer)
        try:
            consumer.assign(list(self._partitions))
            for name, partition in self._partitions.items():
                if self._positions[partition] < 0:
                    raise OffsetOutOfRange(f"{partition} holds no offset {self._positions[partition]}")
                consumer.seek(name, self._positions[partition])
        except BaseException:
            await within_bound(consumer.stop())
            raise
        return consumer

    async def _fetch(self, wait_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        if self._closed:
            raise LogError("the reader is closed")
        try:
            fetched: dict[TopicPartition, list[Any]] = await self._consumer.getmany(
                timeout_ms=wait_ms, max_records=max_records
            )
        except UnicodeDecodeError as error:
            self._undecoded += 1
            if self._undecoded > MAX_UNDECODED:
                raise LogError(f"a record cannot be decoded: {error}") from error
            accept_any_header_name(self)  # fetched again, and then decoded
            return {}
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRange(f"not in the log: {error}") from error
        except (TopicAuthorizationFailedError, ClusterAuthorizationFailedError) as error:
            raise NotAllowed(f"may not be read: {error}") from error
        except (KafkaError, ConsumerStoppedError) as error:
            raise LogError(f"the log cannot be read: {error!r}") from error
        if self._deleted:  # later records may be from new topics with the same names
            raise LogError(f"deleted while it was read: {', '.join(sorted(self._deleted))}")
        return fetched

    def _ask_for(self, gather_s: float) -> None:
        """Sets the wait of the consumer's next fetches: an answer at once, or (under load) after `gather_s`.

        Ideal: each request names all partitions. Departure: aiokafka leaves out partitions with unread
        records for 0.1 s, and has one request under way: a request for idle partitions alone blocks the
        others for as long as the broker may wait. So this wait is short while a reader of several partitions
        is busy.
        """
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        loop = asyncio.get_running_loop()
        if gather_s > 0:
            set_fetch_wait(self._consumer, GATHER_BYTES, max(1, round(gather_s * 1_000)))
            self._gathering = loop.call_later(gather_s, self._ask_for, 0.0)
        elif len(self._partitions) > 1:
            set_fetch_wait(self._consumer, 1, BUSY_WAIT_MS)
            self._gathering = loop.call_later(BUSY_S, set_fetch_wait, self._consumer, 1, FETCH_WAIT_MS)
        else:
            set_fetch_wait(self._consumer, 1, FETCH_WAIT_MS)

    def _records(self, fetched: dict[TopicPartition, list[Any]]) -> list[Record]:
        records = []
        for name, part in fetched.items():
            partition = self._partitions[name]
            records += [
                Record(
                    partition,
                    item.offset,
                    item.value or b"",
                    wire_headers(item.headers),
                    item.key,
                    item.timestamp,
                )
                for item in part
            ]
            self._positions[partition] = part[-1].offset + 1
        return records


def wire_headers(found: Sequence[tuple[str, bytes | None]]) -> Headers:
    """Kafka's headers as the port has them. Kafka allows a header without a value, the port does not: it
    becomes empty bytes."""
    for _, raw in found:
        if raw is None:
            return tuple((name, raw or b"") for name, raw in found)
    return tuple(found)  # type: ignore[arg-type]  # the loop has checked it
