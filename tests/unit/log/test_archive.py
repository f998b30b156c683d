"""The archive of a log: segments whose digests are checked, joined to the log as one."""

from pathlib import Path

import msgspec
import pytest

from penstock.errors import ConfigurationError, OffsetOutOfRange
from penstock.log import archive as archive_module
from penstock.log.archive import Archive, Index, Writer
from penstock.log.archived import ArchivedLog
from penstock.log.lookup import records_at
from penstock.log.port import Log, Message, Partition, Record
from tests.support.log.memory_log import MemoryBroker, MemoryLog

PLACE, OTHER = Partition("penstock.ledger.v1", 0), Partition("penstock.jobs.v1", 0)
COUNT, ARCHIVED, FIRST = 20, 12, 11
"""Records of the log; of these in the archive; and the oldest that the log still has."""


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "SEGMENT_RECORDS", 5)


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    broker.create({PLACE.topic: 1, OTHER.topic: 1})
    log = MemoryLog(broker, "placer")
    for number in range(COUNT):
        headers = (("ce_id", b"%d" % number),)
        await log.append(
            [
                Message(PLACE, b"\xff record %d" % number, headers, b"key"),
                Message(OTHER, b"other %d" % number),
            ]
        )
    return broker


@pytest.fixture
def archive(broker: MemoryBroker, tmp_path: Path) -> Archive:
    found = Archive(tmp_path / "archive")
    writer = Writer(found, PLACE)
    for record in broker.records(PLACE)[:ARCHIVED]:
        writer.add(record)
    writer.commit()
    broker.expire(PLACE, FIRST)
    return found


@pytest.fixture
def log(broker: MemoryBroker, archive: Archive) -> Log:
    return ArchivedLog(MemoryLog(broker, "placer"), archive)


async def read(log: Log, start: dict[Partition, int], count: int) -> list[Record]:
    reader = log.reader(start)
    found: list[Record] = []
    while len(found) < count:
        found += await reader.read(max_records=4)
    assert await reader.read(timeout_ms=0) == []  # clock: none is asked, it takes what is there
    positions = {place: reader.position(place) for place in start}
    assert positions == dict.fromkeys(start, COUNT)
    await reader.close()
    return found


@pytest.mark.parametrize("start", [0, 3, 5, 10, 11, 12, 19])
async def test_a_reader_cannot_tell_archive_from_log(log: Log, broker: MemoryBroker, start: int) -> None:
    """A replay begins anywhere: every record comes once, in order, byte for byte as it was written."""
    assert await read(log, {PLACE: start}, COUNT - start) == broker.records(PLACE)[start:]


async def test_several_partitions_of_which_one_is_archived(log: Log, broker: MemoryBroker) -> None:
    """Replay reads the ledger from its archive and inputs that were never archived."""
    found = await read(log, {PLACE: 0, OTHER: 2}, 2 * COUNT - 2)
    assert [record for record in found if record.partition == PLACE] == broker.records(PLACE)
    assert [record for record in found if record.partition == OTHER] == broker.records(OTHER)[2:]


async def test_the_whole_begins_where_the_archive_begins(log: Log, broker: MemoryBroker) -> None:
    """A snapshot's head that only the archive has is found, so the snapshot is believed."""
    assert await log.begin_offsets([PLACE, OTHER]) == {PLACE: 0, OTHER: 0}
    found = await records_at(log, {PLACE: 7, OTHER: 7})
    assert found == {PLACE: broker.records(PLACE)[7], OTHER: broker.records(OTHER)[7]}


async def test_an_archive_grows(log: Log, archive: Archive, broker: MemoryBroker) -> None:
    """The second archiving goes on where the first one ended, in segments of its own."""
    before = archive.index(PLACE)
    writer = Writer(archive, PLACE)
    assert writer.end == ARCHIVED
    for record in broker.records(PLACE)[ARCHIVED:16]:
        writer.add(record)
    index = writer.commit()
    assert index.segments[: len(before.segments)] == before.segments
    assert (index.first, index.end) == (0, 16)
    broker.expire(PLACE, 15)
    assert await read(log, {PLACE: 0}, COUNT) == broker.records(PLACE)


async def test_nothing_counts_before_it_is_committed(archive: Archive, broker: MemoryBroker) -> None:
    """The machine fails while segments are written: the next archiving writes them again."""
    before = archive.index(PLACE)
    for _ in range(2):
        writer = Writer(archive, PLACE)
        for record in broker.records(PLACE)[ARCHIVED:]:
            writer.add(record)
        assert archive.index(PLACE) == before
    assert writer.commit().end == COUNT


@pytest.mark.parametrize("harm", ["missing", "altered", "cut", "exchanged"])
async def test_a_damaged_segment_is_named(log: Log, archive: Archive, harm: str) -> None:
    """A disk loses a file, or a hand edits one: no reader takes a record of it, and the message names the
    file."""
    first, second = archive.index(PLACE).segments[:2]
    folder = archive.folder / PLACE.topic / "0"
    path = folder / second.name
    match harm:
        case "missing":
            path.unlink()
        case "altered":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "exchanged":
            path.write_bytes((folder / first.name).read_bytes())
    with pytest.raises(ConfigurationError, match=second.name):
        await read(log, {PLACE: 0}, COUNT)


async def test_a_gap_between_archive_and_log_is_named(log: Log, broker: MemoryBroker) -> None:
    """Records were deleted by other means, or an old copy of the archive was restored."""
    broker.expire(PLACE, ARCHIVED + 2)
    with pytest.raises(ConfigurationError, match=rf"up to offset {ARCHIVED}, and the log begins at 14"):
        await read(log, {PLACE: 0}, COUNT)


async def test_an_index_without_a_segment_is_damaged(log: Log, archive: Archive) -> None:
    """An operator takes a line out of the index: the gap is named."""
    path = archive.folder / PLACE.topic / "0" / archive_module.INDEX
    index = archive.index(PLACE)
    path.write_bytes(msgspec.json.encode(Index((index.segments[0], index.segments[2]), index.last_id)))
    with pytest.raises(ConfigurationError, match="lacks offsets 5 to 10"):
        await log.begin_offsets([PLACE])


async def test_the_archive_of_another_log_is_refused(archive: Archive, tmp_path: Path) -> None:
    """Two cells share one directory by mistake, or the topics were created anew."""
    other = MemoryBroker()
    other.create({PLACE.topic: 1})
    log = ArchivedLog(MemoryLog(other, "placer"), archive)
    with pytest.raises(ConfigurationError, match=r"of another log.*there is no record"):
        await log.begin_offsets([PLACE])
    await log.append([Message(PLACE, b"theirs %d" % number) for number in range(COUNT)])
    with pytest.raises(ConfigurationError, match="of another log"):
        await log.begin_offsets([PLACE])


async def test_an_archive_that_is_newer_than_a_restored_log_is_named(log: Log, broker: MemoryBroker) -> None:
    """Postgres was restored from last week's backup, the archive from yesterday's: it is the same log, and
    the remedy another one."""
    broker.restore(PLACE, ARCHIVED - 2)
    with pytest.raises(
        ConfigurationError, match=f"ends at {ARCHIVED - 2}: the log was restored.*as old as the backup"
    ):
        await log.begin_offsets([PLACE])


async def test_below_the_archive_there_is_nothing(broker: MemoryBroker, tmp_path: Path) -> None:
    """The archive begins later than the log did: a reader is refused, and waits for nothing."""
    archive = Archive(tmp_path / "archive")
    writer = Writer(archive, PLACE)
    for record in broker.records(PLACE)[4:ARCHIVED]:
        writer.add(record)
    writer.commit()
    broker.expire(PLACE, FIRST)
    log = ArchivedLog(MemoryLog(broker, "placer"), archive)
    assert (await log.begin_offsets([PLACE]))[PLACE] == 4
    with pytest.raises(OffsetOutOfRange):
        await read(log, {PLACE: 0}, COUNT)


def test_two_archivers_exclude_each_other(archive: Archive) -> None:
    """An operator starts the command twice."""
    with archive.lock(), pytest.raises(ConfigurationError, match="another program"), archive.lock():
        pass
