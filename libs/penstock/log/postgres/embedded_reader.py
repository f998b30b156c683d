"""Reader of the embedded log: records arrive from memory when they follow on, else from the table."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from penstock.errors import LogError, OffsetOutOfRange
from penstock.log.batching import TokenBucket
from penstock.log.port import MAX_READ_RECORDS, Partition, Record
from penstock.log.postgres.embedded_schema import unpack_headers

MAX_BUFFER_RECORDS = 20_000  # a reader this far behind reads from the table again
MAX_BUFFER_BYTES = 32_000_000  # value bytes, as above
LOOK_TIMEOUT_S = 0.25  # bound on the look into the table of a read with time-out 0


class Source(Protocol):
    """The interface of a log that its readers use."""

    def raise_if_lost(self) -> None: ...
    def detach(self, reader: "EmbeddedReader", partitions: Iterable[Partition]) -> None: ...
    async def partition_ids(self, partitions: Iterable[Partition]) -> dict[Partition, int]: ...
    def name_of(self, partition_id: int) -> Partition: ...
    async def read_heads(self, ids: Iterable[int]) -> dict[int, int]: ...
    async def read_rows(self, ids: Sequence[int], first: Sequence[int], limit: int) -> list[Any]: ...


class EmbeddedReader:
    """Invariant per partition: position ≤ end, and the buffer holds exactly the offsets position … end - 1.

    `heads` are lower bounds of the next offsets; where `unsure`, the table may hold more and must be queried.
    """

    def __init__(self, log: Source, start: Mapping[Partition, int], *, batch_ms: int) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._log = log
        self._positions = dict(start)
        self._ends = dict(start)
        self._heads = dict.fromkeys(start, 0)
        self._unsure = set(start)
        self._behind = dict.fromkeys(start)  # an ordered set: the unsure partitions and those with end < head
        self._doubts = 0  # how often `look_again` was called
        self._buffer: deque[Record] = deque()
        self._buffer_bytes = 0
        self._bucket = TokenBucket(batch_ms, loop.time)
        self._waiter: asyncio.Future[None] | None = None
        self._fill_task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._closed = False

    def position(self, partition: Partition) -> int:
        return self._positions[partition]

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        now_s = self._loop.time
        deadline_s = None if timeout_ms is None else now_s() + timeout_ms / 1000
        looked = False
        while True:
            delay_s = self._bucket.delay_s() if self._buffer else 0.0
            if self._buffer and (delay_s == 0 or len(self._buffer) >= max_records):
                return self._take(max_records)
            self._check()
            self._fill_if_behind()
            wait_s = None if deadline_s is None else deadline_s - now_s()
            if wait_s is not None and wait_s <= 0 and (looked or self._fill_task is None):
                return self._take(max_records)
            if timeout_ms == 0:
                wait_s = LOOK_TIMEOUT_S  # also bounds the wait during an outage
            looked = True
            if self._buffer:
                wait_s = delay_s if wait_s is None else min(delay_s, wait_s)
            await self._wait(wait_s)

    async def close(self) -> None:
        self._closed = True
        self._wake()
        self._log.detach(self, self._positions)
        if self._fill_task is not None:
            self._fill_task.cancel()
            await asyncio.gather(self._fill_task, return_exceptions=True)
            self._fill_task = None

    # --- called by the log, on the same event loop -------------------------------------------------------

    def push(self, partition: Partition, base: int, records: list[Record]) -> None:
        """Records `base`, `base + 1`, … of the partition were committed."""
        full = len(self._buffer) >= MAX_BUFFER_RECORDS or self._buffer_bytes >= MAX_BUFFER_BYTES
        if self._ends[partition] == base and not full:
            self._buffer.extend(records)
            self._buffer_bytes += sum(len(record.value) for record in records)
            self._ends[partition] = base + len(records)
        self.on_head(partition, base + len(records))
        self._wake()

    def on_head(self, partition: Partition, head: int) -> None:
        """The partition's next offset is at least `head`."""
        self._heads[partition] = max(head, self._heads[partition])
        if self._ends[partition] < head:
            self._behind[partition] = None
            self._wake()

    def look_again(self) -> None:
        """To be called when notifications may have been missed, or the log is lost."""
        self._doubts += 1
        self._unsure.update(self._heads)
        self._behind.update(dict.fromkeys(self._heads))
        self._wake()

    # --- inside ------------------------------------------------------------------------------------------

    def _take(self, max_records: int) -> list[Record]:
        buffer = self._buffer
        if len(buffer) <= max_records:
            taken = list(buffer)
            buffer.clear()
            self._buffer_bytes = 0
        else:
            taken = [buffer.popleft() for _ in range(max_records)]
            self._buffer_bytes -= sum(len(record.value) for record in taken)
        for record in taken:
            self._positions[record.partition] = record.offset + 1
        if taken:
            self._bucket.took()
        return taken

    def _check(self) -> None:
        if self._closed:
            raise LogError("the reader is closed")
        if self._error is not None:
            raise self._error
        self._log.raise_if_lost()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self, timeout_s: float | None) -> None:
        self._waiter = self._loop.create_future()
        timer = None if timeout_s is None else self._loop.call_later(max(timeout_s, 0), self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _fill_if_behind(self) -> None:
        if self._behind and self._fill_task is None:
            self._fill_task = self._loop.create_task(self._fill())
            self._fill_task.add_done_callback(self._filled)

    def _filled(self, task: "asyncio.Task[None]") -> None:
        self._fill_task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error if isinstance(error, Exception) else LogError(str(error))
        self._wake()

    async def _fill(self) -> None:
        """Reads from the table the records that did not come through memory. Runs beside `read`, so that
        cancelling one read leaves it undisturbed."""
        ids = await self._log.partition_ids(self._behind)
        await self._learn_heads({ids[partition]: partition for partition in ids if partition in self._unsure})
        wanted = [partition for partition in ids if self._ends[partition] < self._heads[partition]]
        if wanted:
            first = [self._ends[partition] for partition in wanted]
            rows = await self._log.read_rows(
                [ids[partition] for partition in wanted], first, MAX_READ_RECORDS
            )
            self._store(rows)
            for partition, asked in zip(wanted, first, strict=True):
                if len(rows) < MAX_READ_RECORDS and self._ends[partition] == asked:
                    raise OffsetOutOfRange(f"{partition} no longer holds offset {asked}, nor any after it")
        for partition in ids:  # a partition that is still behind goes to the end of the queue
            self._behind.pop(partition, None)
            if partition in self._unsure or self._ends[partition] < self._heads[partition]:
                self._behind[partition] = None

    async def _learn_heads(self, names: dict[int, Partition]) -> None:
        """Queries the table for the heads of these partitions (by row id)."""
        if not names:
            return
        doubts, ends = self._doubts, dict(self._ends)
        for partition_id, head in (await self._log.read_heads(names)).items():
            partition = names[partition_id]
            if not 0 <= ends[partition] <= head:
                raise OffsetOutOfRange(f"{partition} holds offsets 0 to {head}, asked for {ends[partition]}")
            self._heads[partition] = max(head, self._heads[partition])
        if doubts == self._doubts:  # else the answer may be older than the doubt
            self._unsure.difference_update(names.values())

    def _store(self, rows: list[Any]) -> None:
        for partition_id, offset, timestamp_ms, key, headers, value in rows:
            partition = self._log.name_of(partition_id)
            end = self._ends[partition]
            if offset < end:
                continue  # came through memory while the query ran
            if offset != end:
                raise OffsetOutOfRange(f"{partition} no longer holds offset {end}; the oldest is {offset}")
            self._buffer.append(Record(partition, offset, value, unpack_headers(headers), key, timestamp_ms))
            self._buffer_bytes += len(value)
            self._ends[partition] = offset + 1
            self._heads[partition] = max(self._heads[partition], offset + 1)
