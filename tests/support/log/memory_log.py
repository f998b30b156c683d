"""A log in memory: the whole contract of `Log`, without disk or network.

One `MemoryBroker` is the shared truth; each `MemoryLog` is one connection to it under one identity. The
broker has the hooks that tests need: failing appends before or after the write, write rights per topic, and
loss of records.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from penstock.clock import wall_ms
from penstock.errors import AppendFailed, LogError, NotAllowed, OffsetOutOfRange, OffsetTaken
from penstock.log.batching import TokenBucket
from penstock.log.group_commit import check_sizes
from penstock.log.port import MAX_READ_RECORDS, Message, Partition, Reader, Record


class MemoryBroker:
    """Partitions, write rights (`allow`: topic → identities; a topic not named is open) and pending
    faults."""

    def __init__(
        self,
        *,
        allow: Mapping[str, set[str]] | None = None,
        clock: Callable[[], int] = wall_ms,
        conditional: bool = False,
    ) -> None:
        self.conditional = conditional  # as the embedded log; else as Kafka
        self.allow: dict[str, set[str]] = dict(allow or {})
        self._clock = clock
        self._records: dict[Partition, list[Record]] = {}
        self._first: dict[Partition, int] = {}
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order, so that a seeded run repeats
        self._faults: list[bool] = []

    def fail_next_append(self, *, after_write: bool) -> None:
        """The next append raises `AppendFailed`; its records are in the log iff `after_write`. May be
        queued."""
        self._faults.append(after_write)

    def create(self, topics: Mapping[str, int]) -> None:
        """Adds partitions that do not exist yet."""
        for topic, count in topics.items():
            for index in range(count):
                self._records.setdefault(Partition(topic, index), [])

    def records(self, partition: Partition) -> list[Record]:
        """All records of one partition, oldest first; raises `LogError` when it does not exist."""
        try:
            return self._records[partition]
        except KeyError:
            raise LogError(f"{partition} does not exist: create its topic first") from None

    def first(self, partition: Partition) -> int:
        """Offset of the oldest record that is left."""
        self.records(partition)
        return self._first.get(partition, 0)

    def expire(self, partition: Partition, before: int) -> None:
        """Retention, or an administrator, removes all records before this offset."""
        self._first[partition] = before

    def restore(self, partition: Partition, end: int = 0) -> None:
        """The partition is as it was when it ended at `end`; at 0: as if deleted and created again."""
        del self.records(partition)[end:]
        self._first[partition] = min(end, self.first(partition))

    def append(self, identity: str, messages: Sequence[Message]) -> list[int]:
        """Appends at once, or fails as asked by `fail_next_append`."""
        check_sizes(messages)
        for partition in {message.partition for message in messages}:
            self.records(partition)
            allowed = self.allow.get(partition.topic)
            if allowed is not None and identity not in allowed:
                raise NotAllowed(f"{identity} may not write {partition.topic}")
        self._check_offsets(messages)
        fault = self._faults.pop(0) if self._faults and messages else None
        if fault is False:
            raise AppendFailed("asked to fail before the write")
        offsets = self._write(messages)
        if fault is True:
            raise AppendFailed("asked to fail after the write")
        return offsets

    def _check_offsets(self, messages: Sequence[Message]) -> None:
        """Raises `OffsetTaken` unless each message with `at` would get that offset."""
        ends: dict[Partition, int] = {}
        for message in messages:
            if message.at is not None and not self.conditional:
                raise LogError("this log cannot write a record at a given offset only")
            end = ends.get(message.partition, len(self._records[message.partition]))
            if message.at is not None and message.at != end:
                raise OffsetTaken(f"{message.partition} ends at {end}, not at {message.at}")
            ends[message.partition] = end + 1

    def _write(self, messages: Sequence[Message]) -> list[int]:
        timestamp_ms = self._clock()
        offsets = []
        for message in messages:
            records = self._records[message.partition]
            offsets.append(len(records))
            headers = tuple(message.headers)
            records.append(
                Record(message.partition, len(records), message.value, headers, message.key, timestamp_ms)
            )
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
        return offsets

    async def changed(self, timeout_s: float | None) -> None:
        """Waits for the next append, at most so long."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await asyncio.wait(
                {waiter}, timeout=timeout_s
            )  # clock: a read's time-out, which the port promises
        finally:
            self._waiting.pop(waiter, None)


class MemoryLog:
    """One connection to a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker, identity: str = "test") -> None:
        self._broker = broker
        self._identity = identity
        self._closed = False

    async def start(self) -> Self:
        return self

    @property
    def conditional(self) -> bool:
        return self._broker.conditional

    async def create(self, topics: Mapping[str, int]) -> None:
        self._broker.create(topics)

    async def append(self, messages: Sequence[Message]) -> list[int]:
        if self._closed:
            raise AppendFailed("the log is closed")
        offsets = self._broker.append(self._identity, messages)
        await asyncio.sleep(0)  # as on the real logs, others run before the caller knows
        return offsets

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        return _MemoryReader(self._broker, start, batch_ms)

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return {partition: len(self._broker.records(partition)) for partition in partitions}

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return {partition: self._broker.first(partition) for partition in partitions}

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        for partition, offset in offsets.items():
            self._broker.expire(partition, max(offset, self._broker.first(partition)))

    async def close(self) -> None:
        self._closed = True


class _MemoryReader:
    def __init__(self, broker: MemoryBroker, start: Mapping[Partition, int], batch_ms: int) -> None:
        self._broker = broker
        self._positions = dict(start)
        self._bucket = TokenBucket(batch_ms, asyncio.get_running_loop().time)

    def position(self, partition: Partition) -> int:
        return self._positions[partition]

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        now_s = asyncio.get_running_loop().time
        deadline_s = None if timeout_ms is None else now_s() + timeout_ms / 1000
        while True:
            available = self._available()
            if available >= max_records or (available and self._bucket.delay_s() == 0):
                return self._take(max_records)
            wait_s = None if deadline_s is None else deadline_s - now_s()
            if wait_s is not None and wait_s <= 0:
                return self._take(max_records)
            if available:  # under load: gather for a moment
                delay_s = self._bucket.delay_s()
                await asyncio.sleep(
                    delay_s if wait_s is None else min(delay_s, wait_s)
                )  # clock: as the port promises
            else:
                await self._broker.changed(wait_s)

    async def close(self) -> None:
        pass

    def _available(self) -> int:
        count = 0
        for partition, position in self._positions.items():
            first, end = self._broker.first(partition), len(self._broker.records(partition))
            if not first <= position <= end:
                raise OffsetOutOfRange(f"{partition} holds offsets {first} to {end}, asked for {position}")
            count += end - position
        return count

    def _take(self, max_records: int) -> list[Record]:
        taken: list[Record] = []
        for partition, position in self._positions.items():
            part = self._broker.records(partition)[position : position + max_records - len(taken)]
            taken += part
            self._positions[partition] = position + len(part)
        if taken:
            self._bucket.took()
            # A partition that is always full must not starve the ones behind it: the next read starts with
            # another.
            first = next(iter(self._positions))
            self._positions[first] = self._positions.pop(first)
        return taken
