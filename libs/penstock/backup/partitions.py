"""Copy of log partitions into segments, and back into an empty log at the same offsets.

The ledger names inputs by their offsets, and snapshots name the ledger's: so each record gets its old offset
again. Offsets that the copy does not have (archived, expired or accepted as lost) are filled with empty
records; those before the first record are deleted at once, as they were before.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from penstock.backup.manifest import CopiedHead, CopiedPartition, digest_of
from penstock.errors import ConfigurationError, LogError
from penstock.ledger.record.record import GENESIS, Head, read_valid, record_id
from penstock.log.archive import INDEX, Archive, Writer
from penstock.log.port import MAX_BATCH_RECORDS, Log, Message, Partition, Record
from penstock.model.decisions.ledger_events import LedgerAccepted
from penstock.model.schema.event import wire_type
from penstock.runtime.following.snapshots import Written

READ_WITHIN_MS = 30_000  # the records exist; a log that returns none for so long is broken

Counted = Callable[[int], None]
"""Called with the number of records that were just copied."""


class HeadFollower:
    """Follows the ledger's chain from the read models' newest record, or from the ledger's beginning."""

    def __init__(self, known: Written | None) -> None:
        self.head = GENESIS if known is None else known.head
        self.offset = -1 if known is None else known.head_offset
        self.epoch = 0 if known is None else known.epoch
        self._proven = self.head == GENESIS

    def take(self, record: Record) -> None:
        """The ledger's next record.
        Raises `ConfigurationError` where the read models are of another ledger."""
        if record.offset == self.offset:
            self._proven = record_id(record.value) == self.head.id
        if record.offset <= self.offset:
            return
        self.check()
        found = read_valid(self.head, record.value)
        if found is None:
            return
        (self.head, read), self.offset = found, record.offset
        for fact in read.facts:
            if fact.type == _ACCEPTED and isinstance(accepted := fact.event(), LedgerAccepted):
                self.epoch = accepted.epoch

    def check(self) -> None:
        """Raises `ConfigurationError` unless the read models' newest record was met at its offset."""
        if not self._proven:
            raise ConfigurationError(
                f"PENSTOCK_DSN: its read models end with record {self.head.seq} ({self.head.id}) at offset "
                f"{self.offset}, where the ledger has no such record: log and database do not belong "
                "together; give both of one cell"
            )

    def found(self) -> CopiedHead:
        self.check()
        return CopiedHead(self.head.seq, self.head.id, self.head.term, self.offset, self.epoch)


_ACCEPTED = wire_type(LedgerAccepted)


class Span(NamedTuple):
    """One partition as it was at the beginning of the copy: offsets `first` ≤ offset < `end`."""

    place: Partition
    first: int
    end: int


async def copy_out(
    log: Log, archive: Archive, span: Span, counted: Counted, follower: HeadFollower | None = None
) -> CopiedPartition:
    """Copies these records. Raises `LogError`, and `ConfigurationError` as `HeadFollower` does."""
    place, copied, sha256 = span.place, 0, ""
    if span.first < span.end:
        writer = Writer(archive, place)
        reader = log.reader({place: span.first})
        try:
            while reader.position(place) < span.end:
                records = await reader.read(timeout_ms=READ_WITHIN_MS)
                if not records:
                    raise LogError(f"{place.topic} shows no record at offset {reader.position(place)}")
                records = [record for record in records if record.offset < span.end]
                await asyncio.to_thread(_add, writer, records, follower)
                copied += len(records)
                counted(len(records))
        finally:
            await reader.close()
        await asyncio.to_thread(writer.commit)
        sha256 = digest_of(archive.folder_of(place) / INDEX) if copied else ""
    return CopiedPartition(place.topic, place.index, span.first, span.end, copied, sha256)


def _add(writer: Writer, records: Sequence[Record], follower: HeadFollower | None) -> None:
    for record in records:
        writer.add(record)
    if follower is not None:
        _follow(follower, records)


def _follow(follower: HeadFollower, records: Sequence[Record]) -> None:
    for record in records:
        follower.take(record)


async def copy_back(log: Log, archive: Archive, part: CopiedPartition, counted: Counted) -> None:
    """Writes the copied records to a partition without any. Raises `LogError` where another program writes
    there meanwhile."""
    place, at = part.place, 0
    writing: asyncio.Task[None] | None = None

    async def write(first: int, messages: list[Message], real: int) -> None:
        offsets = await log.append(messages)
        if offsets[0] != first or offsets[-1] != first + len(messages) - 1:
            raise LogError(
                f"another program wrote to {place.topic} partition {place.index} while it was restored "
                f"(offset {offsets[0]}, not {first}): stop all services and node-reporters, empty log and "
                "database, and restore again"
            )
        counted(real)

    try:
        async for messages, real in _batches(archive, part):
            following = asyncio.create_task(
                write(at, messages, real)
            )  # appends keep the order of their calls
            at += len(messages)
            if writing is not None:
                await writing
            writing = following
        if writing is not None:
            await writing
    except BaseException:
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        raise
    if part.first:
        await log.delete_before({place: part.first})


async def _batches(archive: Archive, part: CopiedPartition) -> AsyncIterator[tuple[list[Message], int]]:
    """All messages from offset 0 to the end, in batches, each with the number of copied records in it."""
    place, at = part.place, 0
    segments = archive.index(place).segments if part.sha256 else ()
    loading = [
        asyncio.create_task(asyncio.to_thread(archive.read, place, segment)) for segment in segments[:1]
    ]
    for number in range(len(segments)):
        records = await loading.pop()
        loading += [
            asyncio.create_task(asyncio.to_thread(archive.read, place, segment))
            for segment in segments[number + 1 : number + 2]
        ]
        for start in range(0, len(records), MAX_BATCH_RECORDS):
            batch = records[start : start + MAX_BATCH_RECORDS]
            for filler in _fillers(place, at, batch[0].offset):
                yield filler, 0
            at = batch[0].offset
            messages: list[Message] = []
            for record in batch:
                messages += [Message(place, b"")] * (record.offset - at)
                messages.append(Message(place, record.value, record.headers, record.key))
                at = record.offset + 1
            yield messages, len(batch)
    for filler in _fillers(place, at, part.end):
        yield filler, 0


def _fillers(place: Partition, start: int, end: int) -> list[list[Message]]:
    """Empty records for these offsets, which no valid ledger record and no answered input has."""
    return [
        [Message(place, b"")] * min(MAX_BATCH_RECORDS, end - at)
        for at in range(start, end, MAX_BATCH_RECORDS)
    ]


async def check_chain(archive: Archive, part: CopiedPartition, head: CopiedHead, counted: Counted) -> None:
    """Reads every record of the partition;
    of a whole ledger the chain must lead to `head`. Raises `ConfigurationError`."""
    follower = HeadFollower(None)
    for segment in archive.index(part.place).segments if part.sha256 else ():
        records = await asyncio.to_thread(archive.read, part.place, segment)
        await asyncio.to_thread(_follow, follower, records)
        counted(len(records))
    if part.first == 0 and follower.head != Head(head.seq, head.id, head.term):
        raise ConfigurationError(
            f"the chain of the copied ledger ends at record {follower.head.seq} ({follower.head.id}), not "
            f"at {head.seq} ({head.id}) as the manifest says: use another copy"
        )
