"""The log with the ledger's amendments applied, and the wait of a reader for one.

Ideal: every reader takes the same record at an offset, whenever it reads. Departure: an amendment counts for
readers that are opened after it; the others have not passed its record, or the record could be decoded and
has no amendment.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.errors import LogError, NotAllowed
from penstock.ledger.record.amendment import amend
from penstock.ledger.record.record import UndecodableRecord
from penstock.log.over import LogOver
from penstock.log.port import MAX_READ_RECORDS, Log, Partition, Reader, Record
from penstock.model.inputs.amendments import LedgerAmended
from penstock.model.schema.errors import EventError
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import from_wire, signed_bytes
from penstock.runtime.crash_only import causes
from penstock.runtime.keys.node_keys import by_gateway

logger = logging.getLogger(__name__)


class Signer(NamedTuple):
    """Cell and key of the gateway that signs amendments."""

    cell: str
    key: bytes


class AmendedLog(LogOver):
    """A log whose readers of the ledger take amended records; all else is the log's own.

    `signer`: amendments without its signature are skipped, with a warning. None, of services without the key:
    the log lets none but the gateway write them, and the placer, which alone gives out resources, verifies
    each.
    """

    def __init__(self, log: Log, signer: Signer | None = None) -> None:
        super().__init__(log)
        self._signer = signer

    @classmethod
    def over(cls, log: Log, signer: Signer | None = None) -> "AmendedLog":
        """The log itself where it is amended already, by the same signer's amendments or for a reader without
        the key."""
        if not isinstance(log, AmendedLog):
            return cls(log, signer)
        return log if signer in (None, log._signer) else cls(log.inner, signer)

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        found = self.inner.reader(start, batch_ms=batch_ms)
        cells = [place.index for place in start if place.topic == Topic.LEDGER]
        return AmendedReader(self, found, cells) if cells else found

    async def amendments(self, cell_index: int) -> dict[int, list[LedgerAmended]]:
        """Offset in the ledger → its amendments, oldest first. Raises `LogError`."""
        place = Partition(Topic.AMENDMENTS, cell_index)
        found: dict[int, list[LedgerAmended]] = {}
        try:
            end = (await self.inner.end_offsets([place]))[place]
        except NotAllowed as error:
            logger.warning("the ledger is read without amendments: %s", error)
            return found
        except LogError as error:
            if "does not exist" not in str(error):
                raise
            return found  # an installation of an earlier version
        reader = self.inner.reader({place: 0})
        try:
            while reader.position(place) < end:
                for record in await reader.read():
                    amendment = self.read(record)
                    if amendment is not None:
                        found.setdefault(amendment.offset, []).append(amendment)
        finally:
            await reader.close()
        return found

    def read(self, record: Record) -> LedgerAmended | None:
        """The amendment in one record of the topic;
        None, with a warning: it is none, or not the gateway's."""
        try:
            found = from_wire(record.headers, record.value, Topic.AMENDMENTS)
        except EventError as error:
            logger.warning("%s offset %d is not an amendment: %s", Topic.AMENDMENTS, record.offset, error)
            return None
        assert isinstance(found.data, LedgerAmended), "the topic has no other events"
        if self._signer is not None:
            data = signed_bytes(self._signer.cell, found.id, found.type, record.value)
            if not by_gateway(self._signer.key, record.headers, data):
                logger.warning("%s offset %d is not signed by the gateway", Topic.AMENDMENTS, record.offset)
                return None
        return found.data


class AmendedReader:
    """Reads as the log does, with the amendments that exist at its first read. Not for concurrent use."""

    def __init__(self, log: AmendedLog, reader: Reader, cells: Sequence[int]) -> None:
        self._log = log
        self._reader = reader
        self._cells = cells
        self._amendments: dict[tuple[int, int], list[LedgerAmended]] | None = None
        """(cell's index, offset) → amendments. None: not read yet."""

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        if self._amendments is None:
            self._amendments = {
                (cell, offset): found
                for cell in self._cells
                for offset, found in (await self._log.amendments(cell)).items()
            }
        records = await self._reader.read(max_records=max_records, timeout_ms=timeout_ms)
        if not self._amendments:
            return records
        return [self._amended(record, self._amendments) for record in records]

    def position(self, partition: Partition) -> int:
        return self._reader.position(partition)

    async def close(self) -> None:
        await self._reader.close()

    def _amended(self, record: Record, known: Mapping[tuple[int, int], Sequence[LedgerAmended]]) -> Record:
        if record.partition.topic != Topic.LEDGER:
            return record
        for amendment in known.get((record.partition.index, record.offset), ()):
            value = amend(record.value, amendment)
            if value is not None:  # the first that helps counts, for every reader alike
                return replace(record, value=value)
        return record


def undecodable_in(error: BaseException) -> UndecodableRecord | None:
    """The undecodable record that ended an attempt; None: something else did."""
    return next((leaf for leaf in causes(error) if isinstance(leaf, UndecodableRecord)), None)


class Repairs:
    """What one reader of one cell's ledger does about records that it cannot decode: it names them once and
    waits for an amendment."""

    def __init__(self, name: str, log: Log, cell_index: int) -> None:
        self._name = name
        self._log = AmendedLog.over(log)
        self._place = Partition(Topic.AMENDMENTS, cell_index)
        self._tried: dict[int, int] = {}
        """Offset in the ledger → amendments up to here did not help."""

    async def wait(self, found: UndecodableRecord) -> None:
        """Returns once there is an amendment of this record that was not tried yet. Raises `LogError`."""
        if found.offset not in self._tried:
            logger.error(
                "%s stops: %s. Nothing of this cell is read beyond it; all goes on by itself once that is "
                "mended: %s",
                self._name,
                found,
                found.remedy,
                extra={"undecodable": found},
            )
            self._tried[found.offset] = 0
        reader = self._log.reader({self._place: self._tried[found.offset]})
        try:
            while True:
                for record in await reader.read():
                    self._tried[found.offset] = record.offset + 1
                    amendment = self._log.read(record)
                    if amendment is not None and amendment.offset == found.offset:
                        return
        finally:
            await reader.close()

    async def attempt(self, work: Callable[[], Awaitable[None]], ready: asyncio.Event | None = None) -> None:
        """One attempt of a crash-only service; returns after a repair, for the next. `ready`: set meanwhile,
        for whoever waits to start the services that an operator needs for a repair."""
        try:
            await work()
        except Exception as error:
            found = undecodable_in(error)
            if found is None:
                raise
        else:
            return
        if ready is not None:
            ready.set()
        await self.wait(found)
