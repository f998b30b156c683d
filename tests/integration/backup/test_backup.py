"""Copies of a cell: consistent while it works, proven by digests, and restored with every record at its
offset."""

import itertools
import json
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from penstock.backup import take as taking
from penstock.backup.epochs import REGISTER
from penstock.backup.manifest import MANIFEST, Manifest, archive_in, read_manifest
from penstock.backup.progress import Progress
from penstock.backup.restore import restore
from penstock.backup.take import partitions_of, take
from penstock.backup.verify import verify
from penstock.errors import ConfigurationError, LogError
from penstock.ledger.record.record import read
from penstock.log.port import Log, Message, Partition, Record
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.topic_settings import topic_partitions
from penstock.model.schema.topics import Topic
from penstock.runtime.keys.node_keys import OPERATOR_KEY, key_file_at
from penstock.runtime.settings import Settings
from tests.conftest import with_database
from tests.support.cluster.hand_placer import HandPlacer, node_spec
from tests.support.gateway.projector_cell import assert_equals_replay, projecting, reached

pytestmark = pytest.mark.postgres

LEDGER, JOBS = Partition(Topic.LEDGER, 0), Partition(Topic.JOBS, 0)
QUIET = Progress(lambda share, text="": None)
_databases = itertools.count(1)


async def execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(statement)
    await connection.close()


@pytest_asyncio.fixture
async def empty(postgres_dsn: str) -> AsyncIterator[Settings]:
    """The place of a restoration: a database without anything."""
    name = f"restored_{os.getpid()}_{next(_databases)}"
    await execute(postgres_dsn, f"CREATE DATABASE {name}")
    dsn = with_database(postgres_dsn, name)
    yield Settings(log_url=dsn, dsn=dsn)
    await execute(postgres_dsn, f"DROP DATABASE {name} WITH (FORCE)")


class Site:
    """A cell on the embedded log: its placer is played by hand, and answers inputs that lie in their
    topics."""

    def __init__(self, log: EmbeddedLog, settings: Settings) -> None:
        self.log = log
        self.settings = settings
        self.placer = HandPlacer()
        self._answered = 0

    async def submits(self, *job_ids: str) -> None:
        """Submission and estimate of each, acknowledged and then answered."""
        for job_id in job_ids:
            self.placer.submit(job_id)
        await self.answer()

    async def answer(self) -> None:
        """Appends the inputs of the new ledger records, and then these."""
        fresh, self._answered = self.placer.values[self._answered :], len(self.placer.values)
        causes = [read(value).cause for value in fresh]
        await self.log.append(
            [
                Message(
                    Partition(cause.topic, 0), f"input {cause.event_id}".encode(), (("ce_id", b"x"),), b"key"
                )
                for cause in causes
                if cause.topic is not None
            ]
        )
        await self.placer.send(self.log)


@pytest_asyncio.fixture
async def site(dsn: str) -> AsyncIterator[Site]:
    log = await EmbeddedLog(dsn, "test").start()
    await log.create(topic_partitions())
    found = Site(log, Settings(log_url=dsn, dsn=dsn))
    found.placer.join(node_spec("n0", 4))
    await found.submits("j1", "j2")
    yield found
    await log.close()


async def records_of(log: Log, places: Iterable[Partition]) -> dict[Partition, list[Record]]:
    begins, ends = await log.begin_offsets(places), await log.end_offsets(places)
    found: dict[Partition, list[Record]] = {}
    for place in places:
        found[place], reader = [], log.reader({place: begins[place]})
        while reader.position(place) < ends[place]:
            found[place] += await reader.read()
        await reader.close()
    return found


def content(records: Iterable[Record]) -> list[tuple[object, ...]]:
    return [(record.offset, record.value, record.headers, record.key) for record in records]


async def taken(site: Site, folder: Path) -> Manifest:
    return await take(folder, site.settings, {}, QUIET)


async def test_every_record_has_its_offset_again(site: Site, empty: Settings, tmp_path: Path) -> None:
    """Years of submissions were deleted from the jobs topic, and the ledger names those that are left by
    their offsets."""
    await site.submits(*(f"job-{number}" for number in range(5)))
    await site.log.delete_before({JOBS: 3})
    await taken(site, tmp_path / "copy")
    await restore(tmp_path / "copy", empty, {}, QUIET)
    places = partitions_of(0)
    log = await EmbeddedLog(empty.log_url, "test").start()
    before, after = await records_of(site.log, places), await records_of(log, places)
    assert await log.begin_offsets([JOBS]) == {JOBS: 3}
    await log.close()
    accepted = after[LEDGER].pop()
    assert [fact.type for fact in read(accepted.value).facts] == [
        "penstock.term.started.v1",
        "penstock.ledger.accepted.v1",
        "penstock.cell.frozen.v1",
    ]
    assert {place: content(found) for place, found in after.items()} == {
        place: content(found) for place, found in before.items()
    }


class Working(EmbeddedLog):
    """A log on which the cell goes on between any two questions."""

    site: Site

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        found = await super().end_offsets(partitions)
        await self.site.submits(f"meanwhile-{self.site.placer.head.seq}")
        return found


async def test_a_copied_ledger_names_no_input_that_the_copy_lacks(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are submitted and answered while the copy is taken. A ledger that answers an input which is not
    there is refused by placers."""
    log = Working(site.settings.log_url, "backup")
    log.site = site
    monkeypatch.setattr(taking, "open_log", lambda *_: log)
    manifest = await taken(site, tmp_path / "copy")
    ends = {part.topic: part.end for part in manifest.partitions}
    archive = archive_in(tmp_path / "copy")
    ledger = [
        read(record.value)
        for segment in archive.index(LEDGER).segments
        for record in archive.read(LEDGER, segment)
    ]
    assert len(ledger) == manifest.head.seq > 0
    assert ends[Topic.JOBS] > sum(record.cause.topic == Topic.JOBS for record in ledger)
    assert all(record.cause.offset < ends[record.cause.topic] for record in ledger if record.cause.topic)


async def test_tables_and_ledger_are_of_one_history(site: Site, empty: Settings, tmp_path: Path) -> None:
    """The read models are copied with their position, and those of the restored cell equal a replay of the
    restored ledger."""
    async with projecting(site.settings, site.log):
        await reached(site.settings.log_url, site.placer.head.seq)
        await site.submits("j3")
        manifest = await taken(site, tmp_path / "copy")
    assert manifest.head.id == site.placer.head.id
    await restore(tmp_path / "copy", empty, {}, QUIET)
    log = await EmbeddedLog(empty.log_url, "test").start()
    async with projecting(empty, log):
        await reached(empty.log_url, site.placer.head.seq + 1)
    await assert_equals_replay(empty, log)
    await log.close()


async def test_read_models_of_another_ledger_are_not_copied_with_it(
    site: Site, empty: Settings, tmp_path: Path
) -> None:
    """PENSTOCK_DSN and PENSTOCK_LOG are of two cells: their copy could never be started."""
    async with projecting(site.settings, site.log):
        await reached(site.settings.log_url, site.placer.head.seq)
    other = await EmbeddedLog(empty.log_url, "test").start()
    await other.create(topic_partitions())
    await HandPlacer(now_ms=5).send(other)
    await other.close()
    mixed = Settings(log_url=empty.log_url, dsn=site.settings.dsn)
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_DSN: .* do not belong together"):
        await take(tmp_path / "copy", mixed, {}, QUIET)
    assert not (tmp_path / "copy" / MANIFEST).exists()


@pytest.mark.parametrize("damage", ["a byte of a segment", "a byte of a key", "a file is gone", "unfinished"])
async def test_a_damaged_copy_is_refused_before_anything_is_changed(
    site: Site, empty: Settings, tmp_path: Path, damage: str
) -> None:
    """A disk flips a bit, a file is lost, or the machine lost power while the copy was taken."""
    copy, key = tmp_path / "copy", key_file_at(tmp_path / "operator.key")
    await take(copy, site.settings, {OPERATOR_KEY: str(key)}, QUIET)
    await verify(copy, QUIET)
    segment = next(copy.rglob("*.records.gz"))
    match damage:
        case "a file is gone":
            segment.unlink()
        case "unfinished":
            (copy / MANIFEST).unlink()
        case _:
            damaged = segment if damage == "a byte of a segment" else copy / "files" / OPERATOR_KEY
            content = bytearray(damaged.read_bytes())
            content[len(content) // 2] ^= 1
            damaged.write_bytes(content)
    for refused in (verify(copy, QUIET), restore(copy, empty, {}, QUIET)):
        with pytest.raises(ConfigurationError, match=r"was altered|cannot be read|no finished copy"):
            await refused
    connection = await asyncpg.connect(empty.log_url)
    assert await connection.fetchval("SELECT to_regnamespace('penstock_log')") is None
    await connection.close()


async def test_a_place_with_a_history_is_not_overwritten(site: Site, empty: Settings, tmp_path: Path) -> None:
    """An administrator names the living cell as the target, or one whose restoration was interrupted."""
    copy = tmp_path / "copy"
    await taken(site, copy)
    before = await site.log.end_offsets(partitions_of(0))
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_LOG: .* nothing was changed"):
        await restore(copy, site.settings, {}, QUIET)
    assert await site.log.end_offsets(partitions_of(0)) == before
    with pytest.raises(ConfigurationError, match="PENSTOCK_CELL"):
        await restore(copy, empty.model_copy(update={"cell": "other"}), {}, QUIET)
    with pytest.raises(ConfigurationError, match=r"--reason: .* at most"):
        await restore(copy, empty, {}, QUIET, reason="x" * 100_000)
    with pytest.raises(ConfigurationError, match=r"copy is not empty; give a new folder"):
        await taken(site, copy)
    async with projecting(site.settings, site.log):
        await reached(site.settings.log_url, site.placer.head.seq)
        await taken(site, tmp_path / "with-tables")
    rows = Settings(log_url=empty.log_url, dsn=site.settings.dsn)
    with pytest.raises(
        ConfigurationError, match=r"PENSTOCK_DSN: penstock\..* has rows, and nothing was changed"
    ):
        await restore(tmp_path / "with-tables", rows, {}, QUIET)


async def test_no_epoch_begins_twice(site: Site, empty: Settings, postgres_dsn: str, tmp_path: Path) -> None:
    """Monday's copy is restored, turns out to be of no use, and is replaced by Sunday's, which knows nothing
    of that: nodes have obeyed orders of the epoch that Monday's began."""
    sunday, monday = tmp_path / "sunday", tmp_path / "monday"
    await taken(site, sunday)
    await site.submits("j3")
    await taken(site, monday)
    assert (await restore(monday, empty, {}, QUIET)).epoch == 1
    await execute(empty.log_url, "DROP SCHEMA penstock_log CASCADE")
    with pytest.raises(ConfigurationError, match="--epoch: give one above 1"):
        await restore(sunday, empty, {}, QUIET, epoch=1)
    assert (await restore(sunday, empty, {}, QUIET)).epoch == 2
    assert json.loads((tmp_path / REGISTER).read_text()) == {"default": 2}
    again = await take(tmp_path / "tuesday", empty, {}, QUIET)
    assert again.head.epoch == 2


async def test_keys_come_back_as_they_were(site: Site, empty: Settings, tmp_path: Path) -> None:
    """The machine of the gateway is gone as well: its key, the tokens, and the code that jobs were sent
    with."""
    key = key_file_at(tmp_path / "old" / "operator.key")
    code = tmp_path / "old" / "code"
    (code / "a").mkdir(parents=True)
    (code / "a" / "digest.tar").write_bytes(b"code")
    await take(
        tmp_path / "copy", site.settings, {OPERATOR_KEY: str(key), "PENSTOCK_CODE_DIR": str(code)}, QUIET
    )
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700, "others would read the key"
    new = tmp_path / "new" / "operator.key"
    new.parent.mkdir()
    new.write_bytes(b"another")
    with pytest.raises(ConfigurationError, match=f"{OPERATOR_KEY}: .* differs from the copy"):
        await restore(tmp_path / "copy", empty, {OPERATOR_KEY: str(new)}, QUIET)
    new.unlink()
    found = await restore(tmp_path / "copy", empty, {OPERATOR_KEY: str(new)}, QUIET)
    assert (new.read_bytes(), new.stat().st_mode & 0o777) == (key.read_bytes(), 0o600)
    assert found.left == ["PENSTOCK_CODE_DIR"]
    assert (tmp_path / "copy" / "files" / "PENSTOCK_CODE_DIR" / "a" / "digest.tar").read_bytes() == b"code"


class Disturbed(EmbeddedLog):
    """A log to which a forgotten node-reporter writes as soon as its topics are there."""

    async def append(self, messages: list[Message]) -> list[int]:  # type: ignore[override]
        place = messages[0].partition
        if place.topic == Topic.NODES:
            await super().append([Message(place, b"joins")])
        return await super().append(messages)


async def test_who_writes_during_a_restoration_is_noticed(
    site: Site, empty: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node-reporter was not stopped: all later offsets of that topic would be others than those that the
    ledger names."""
    await taken(site, tmp_path / "copy")
    log = Disturbed(empty.log_url, "restore")
    monkeypatch.setattr("penstock.backup.restore.open_log", lambda *_: log)
    with pytest.raises(LogError, match=r"another program wrote to penstock\.nodes\.v1 .* stop all services"):
        await restore(tmp_path / "copy", empty, {}, QUIET)
    assert read_manifest(tmp_path / "copy").head.seq == site.placer.head.seq
