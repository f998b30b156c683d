"""Tiered log: a log and the archive of its oldest records, read as one log.

Ideal: a reader cannot tell which of the two a record comes from. Departures: a read of the archive costs a
whole segment, and the archive is read only below the beginning of the log.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

from penstock.errors import ConfigurationError
from penstock.ledger.record.record import record_id
from penstock.log.archive import Archive, Index
from penstock.log.lookup import records_at
from penstock.log.over import LogOver
from penstock.log.port import MAX_READ_RECORDS, Log, Partition, Reader, Record


class ArchivedLog(LogOver):
    """Appends go to the log; records that the log no longer has are read from the archive.

    Raises `ConfigurationError` where the archive does not belong to the log, ends before the log begins, or
    is damaged.
    """

    def __init__(self, log: Log, archive: Archive) -> None:
        super().__init__(log)
        self.archive = archive

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        return ArchivedReader(self, start, batch_ms)

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        begins = await self.inner.begin_offsets(partitions)
        indexes = await self.indexes(begins)
        return {
            place: min(begin, indexes[place].first) if place in indexes else begin
            for place, begin in begins.items()
        }

    async def indexes(self, begins: Mapping[Partition, int]) -> dict[Partition, Index]:
        """The indexes of the archived ones of these partitions (partition → the log's first offset); each
        continues in its log."""
        found: dict[Partition, Index] = {}
        for place, begin in begins.items():
            index = await asyncio.to_thread(self.archive.index, place)
            if index.segments:
                await self._check(place, begin, index)
                found[place] = index
        return found

    async def _check(self, place: Partition, begin: int, index: Index) -> None:
        where = f"the archive {self.archive.folder} holds {place.topic} partition {place.index}"
        if index.end < begin:
            raise ConfigurationError(
                f"{where} up to offset {index.end}, and the log begins at {begin}: what lies between is "
                "missing. Restore the newest copy of the archive"
            )
        end = (await self.inner.end_offsets([place]))[place]
        if 0 < end < index.end:
            raise ConfigurationError(
                f"{where} up to offset {index.end}, and the log ends at {end}: the log was restored from a "
                "backup that is older than the archive. Restore a newer backup of the log; or the copy of "
                f"the archive that is as old as the backup. Without one move {self.archive.folder} away: "
                f"what lies before offset {begin} can then not be looked back at"
            )
        last = (await records_at(self.inner, {place: index.end - 1}))[place]
        if last is None or record_id(last.value) != index.last_id:
            there = "there is no record" if last is None else f"that is {record_id(last.value)}"
            raise ConfigurationError(
                f"{where}, but of another log: its record at offset {index.end - 1} is {index.last_id}, and "
                f"in this log {there}. Give each log its own PENSTOCK_ARCHIVE; or, where this topic was "
                "created anew and accepted, move its folder away; or, where the log was restored from a "
                "backup, restore the copy of the archive that is as old"
            )


class ArchivedReader:
    """Reads the archive up to where the log begins, then the log. Not for concurrent use."""

    def __init__(self, log: ArchivedLog, start: Mapping[Partition, int], batch_ms: int) -> None:
        self._log = log
        self._positions = dict(start)
        self._batch_ms = batch_ms
        self._left: dict[Partition, tuple[int, Index]] | None = None
        """Partitions whose position is in the archive: the first offset of their log, and their index. None:
        not yet known."""
        self._buffer: deque[Record] = deque()
        self._rest: Reader | None = None

    def position(self, partition: Partition) -> int:
        return self._positions[partition] if self._rest is None else self._rest.position(partition)

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        if self._rest is None:
            if self._left is None:
                self._left = await self._archived()
            while self._left and not self._buffer:
                await self._load(self._left)
            if self._buffer:
                taken = [self._buffer.popleft() for _ in range(min(max_records, len(self._buffer)))]
                self._positions[taken[-1].partition] = taken[-1].offset + 1
                return taken
            self._rest = self._log.inner.reader(self._positions, batch_ms=self._batch_ms)
        return await self._rest.read(max_records=max_records, timeout_ms=timeout_ms)

    async def close(self) -> None:
        if self._rest is not None:
            await self._rest.close()
        else:
            self._left, self._buffer = {}, deque()

    async def _archived(self) -> dict[Partition, tuple[int, Index]]:
        begins = await self._log.inner.begin_offsets(self._positions)
        below = {place: begins[place] for place, at in self._positions.items() if at < begins[place]}
        indexes = await self._log.indexes(below)
        return {
            place: (begins[place], index)
            for place, index in indexes.items()
            if index.first <= self._positions[place]
        }

    async def _load(self, left: dict[Partition, tuple[int, Index]]) -> None:
        """Loads the next records of one partition into the buffer."""
        place, (begin, index) = next(iter(left.items()))
        at = self._positions[place]
        segment = index.holding(at) if at < begin else None
        if segment is None:
            del left[place]
            return
        records = await asyncio.to_thread(self._log.archive.read, place, segment)
        self._buffer.extend(record for record in records if at <= record.offset < begin)
        if not self._buffer:
            self._positions[place] = min(segment.end, begin)
