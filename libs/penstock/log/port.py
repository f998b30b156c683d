"""The `Log` port: ordered, durable partitions of records, with two adapters, a third in memory for tests, and
one conformance suite.

Ideal: a total order per partition; an append that returns is durable and visible to every reader, and
readers never see a record before its predecessors. Departure: an append that *fails* may still have
happened (`AppendFailed`), since no network protocol can rule that out; readers therefore accept records
by the ledger's chain rule and never by their sender.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import msgspec

MAX_RECORD_BYTES = 1_000_000  # value bytes; below Kafka's default max.message.bytes of 1,048,588
MAX_BATCH_RECORDS = 2_000  # records per append; larger batches are split by the adapter, in order
MAX_READ_RECORDS = 2_000  # records per read

Headers = tuple[tuple[str, bytes], ...]


class Partition(NamedTuple):
    """One totally ordered sequence of records."""

    topic: str
    index: int  # type: ignore[assignment]  # shadows tuple.index, which has no use here


class Message(msgspec.Struct, frozen=True, gc=False):
    """A record to be written. `key` only labels the record: the partition is chosen by the caller.

    `at`: the offset that the record must get; if another record has it, nothing of its batch is written and
    the append raises `OffsetTaken`. Only logs with `conditional` take it.
    """

    partition: Partition
    value: bytes
    headers: Headers = ()
    key: bytes | None = None
    at: int | None = None


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record as read. `offset` rises strictly within its partition (without promise of no gaps)."""

    partition: Partition
    offset: int
    value: bytes
    headers: Headers
    key: bytes | None
    timestamp_ms: int


class Reader(Protocol):
    """Reads the partitions that it was opened on, each from its own position. Not for concurrent use."""

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        """Waits for at least one record and returns all available ones, up to `max_records`.

        Per partition in offset order; partitions may interleave. `timeout_ms=None` waits for ever,
        0 returns at once. Returns [] on time-out. Cancelling it loses nothing: the next read continues.
        Raises `OffsetOutOfRange` when the position is not in the log, `LogError` when the log is lost
        for good; shorter outages are waited out by the adapter.
        """
        ...

    def position(self, partition: Partition) -> int:
        """Offset of the next record that `read` would return from this partition."""
        ...

    async def close(self) -> None:
        """Frees the reader; idempotent."""
        ...


class Log(Protocol):
    """One connection to the log under one identity."""

    @property
    def conditional(self) -> bool:
        """Whether `append` is a compare-and-append for messages with `at`,
        atomic over all partitions of one batch."""
        ...

    async def start(self) -> Self:
        """Connects; waits for the log to be reachable within the adapter's own bound, else `LogError`."""
        ...

    async def create(self, topics: Mapping[str, int]) -> None:
        """Creates topics (name → partition count) that do not exist; idempotent; never shrinks one.

        Nothing else creates a topic. Raises `ConfigurationError` for one that exists and could lose records.
        """
        ...

    async def append(self, messages: Sequence[Message]) -> list[int]:
        """Writes the messages and returns their offsets, in the order given, once all are durable.

        Concurrent calls are coalesced (client-side group commit) and keep their call order per
        partition. All or nothing *within one partition of one call* is not promised: on `AppendFailed`
        any prefix may be in the log. Raises `TooLarge` or `NotAllowed` before anything is written.
        """
        ...

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        """A reader positioned at the given offsets (0 = the beginning).

        `batch_ms` > 0 lets the adapter gather records for so long *under load*; the first record after
        an idle moment is never delayed.
        """
        ...

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Per partition the offset that the next appended record will have (at least)."""
        ...

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Per partition the offset of its oldest record; of a partition without records its end."""
        ...

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """Deletes the records of each partition below this offset, for ever; already deleted ones are not an
        error.

        For administrators: nothing but the archiver calls it. Raises `NotAllowed`, `LogError`.
        """
        ...

    async def close(self) -> None:
        """Frees all resources; flushes nothing, since appends are awaited by their callers. Idempotent."""
        ...
