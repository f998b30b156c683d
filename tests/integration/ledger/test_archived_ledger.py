"""A ledger whose head is archived, on both real logs: one ledger for readers that have the archive, and a
clear refusal without it."""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from infra.devservers.kafka import KafkaBroker
from penstock.errors import ConfigurationError
from penstock.ledger.replica.replica import Replica
from penstock.log.archive import Archive
from penstock.log.archived import ArchivedLog
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted, NodeJoined
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.event import Event
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.following.snapshots import save_snapshot
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.archive import archive, verify
from penstock_services.placer.shell.replay import Replayer, Report
from penstock_services.placer.shell.service import run as run_placer
from penstock_services.projector.shell import rebuild
from penstock_services.projector.shell.service import prepare_schema
from penstock_services.projector.shell.service import run as run_projector
from tests.support.cluster.hand_placer import estimate, node_spec
from tests.support.installation.services import beside
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres
_cells = itertools.count(
    58
)  # below those of other modules: the broker makes a partition of each topic for every lower one


both_logs = pytest.mark.parametrize(
    "settings",
    ["embedded", pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.slow])],
    indirect=True,
)


@pytest.fixture
def settings(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Settings:
    """With an archive; each on a cell of its own."""
    folder = str(tmp_path / "archive")
    if getattr(request, "param", "embedded") == "embedded":
        return Settings(log_url=dsn, dsn=dsn, archive=folder)
    request.getfixturevalue("patient_kafka")
    broker: KafkaBroker = request.getfixturevalue("kafka")
    index = next(_cells)
    return Settings(
        log_url=f"kafka://{broker.bootstrap}", dsn=dsn, archive=folder, cell_index=index, cell=f"c{index}"
    )


class Cell:
    """A placer and a projector, started and stopped as the test needs them, and what they read."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings = settings
        self.log = log
        self.ledger = Partition(Topic.LEDGER, settings.cell_index)
        self._sent = 0

    async def send(self, *events: Event) -> None:
        messages = []
        for event in events:
            self._sent += 1
            headers, value = to_wire(Envelope(id=f"e{self._sent}", source="/test", time_ms=1, data=event))
            assert event.TOPIC is not None
            messages.append(Message(Partition(event.TOPIC, self.settings.cell_index), value, headers))
        await self.log.append(messages)

    async def cancelled(self, first: int, count: int) -> None:
        """So many jobs come and go: two records each."""
        for number in range(first, first + count):
            job_id = f"j{number}"
            await self.send(
                JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",))),
                JobCancelRequested(job_id=job_id),
            )

    async def folded(self, records: int) -> Replica:
        """The ledger's valid records up to there, as a reader of archive and log has them."""
        replica, reader = Replica(), open_whole(self).reader({self.ledger: 0})
        while replica.head.seq < records:
            for record in await reader.read():
                if replica.head.seq < records:
                    replica.take(record.value, record.offset)
        await reader.close()
        return replica

    @asynccontextmanager
    async def at_work(self, settings: Settings, log: Log) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for run in (run_placer, run_projector):
                stop, ready = asyncio.Event(), asyncio.Event()
                work = run(settings, stop, log=log, ready=ready)
                await stack.enter_async_context(beside(work, stop, ready))
            yield

    async def projected(self, seq: int) -> None:
        connection = await asyncpg.connect(self.settings.dsn)
        query = f"SELECT seq FROM {schema_of(self.settings.cell)}.positions"

        async def holds() -> bool:
            return (await connection.fetchval(query) or 0) >= seq

        await await_until(holds, f"record {seq} in the tables")
        await connection.close()

    async def snapshot(self, seq: int) -> Replica:
        """As the projector takes it."""
        replica = await self.folded(seq)
        connection = await asyncpg.connect(self.settings.dsn)
        await save_snapshot(connection, self.settings.cell, replica)
        await connection.close()
        return replica

    async def begins(self) -> dict[str, int]:
        places = [Partition(topic, self.settings.cell_index) for topic in CELL_TOPICS]
        return {place.topic: at for place, at in (await self.log.begin_offsets(places)).items()}


def open_whole(cell: Cell) -> Log:
    """The log with its archive."""
    assert cell.settings.archive is not None
    return ArchivedLog(cell.log, Archive(cell.settings.archive))


async def replayed(cell: Cell, log: Log) -> Report:
    report = await Replayer(log, cell.settings.cell_index).run()
    assert report.different == 0, report.differences
    return report


async def refused(cell: Cell) -> str:
    """Why a placer without archive and snapshots does not start."""
    settings = cell.settings.model_copy(update={"archive": None, "dsn": None})
    with pytest.raises(ConfigurationError) as caught:
        await run_placer(settings, asyncio.Event(), log=cell.log)
    return str(caught.value)


@pytest.fixture
async def cell(settings: Settings) -> AsyncIterator[Cell]:
    """With 84 ledger records: a term, a node, a job that waits for its node to answer, 80 of jobs that
    ended."""
    log = await open_log(settings.log_url, "test").start()
    await log.create(dict.fromkeys(CELL_TOPICS, settings.cell_index + 1))
    cell = Cell(settings, log)
    async with cell.at_work(settings, log):
        await cell.send(
            NodeJoined(node=node_spec("n0", 2)), JobSubmitted(job_id="runs", spec=JobSpec(command=("true",)))
        )
        await cell.send(JobEstimated(job_id="runs", estimate=estimate()))
        await cell.cancelled(0, 40)
        await cell.folded(84)
        await cell.projected(84)
    yield cell
    await log.close()


async def printed_by_verify_archive(settings: Settings) -> dict[str, Any]:
    """As an operator types it."""
    environment = {
        "PENSTOCK_LOG": settings.log_url,
        "PENSTOCK_DSN": settings.dsn or "",
        "PENSTOCK_ARCHIVE": settings.archive or "",
        "PENSTOCK_CELL": settings.cell,
        "PENSTOCK_CELL_INDEX": str(settings.cell_index),
    }
    checking = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock_services.placer",
        "verify-archive",
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await checking.communicate()
    found = json.loads(printed)
    assert isinstance(found, dict)
    return found


@both_logs
async def test_one_ledger_with_its_archive(cell: Cell) -> None:
    """After a year the ledger's head goes to a file server: the live system goes on without it, and
    everything that looks back finds all records with it."""
    settings, without = cell.settings, cell.settings.model_copy(update={"archive": None})
    snapshot = await cell.snapshot(50)
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_ARCHIVE: .* holds nothing"):
        await verify(settings, cell.log)
    before = await replayed(cell, cell.log)
    assert (await archive(settings, cell.log, leave=84))["archived"] == 0, "no snapshot is that old"
    assert set((await cell.begins()).values()) == {0}
    copied = await archive(settings, cell.log, leave=20, delete=False)  # or it was killed before it deleted
    assert set((await cell.begins()).values()) == {0}
    assert (await replayed(cell, open_whole(cell))).records == before.records
    found = await archive(settings, cell.log, leave=20)
    assert (found["until_seq"], copied["archived"] > 0, found["archived"]) == (50, True, 0), found
    begins = await cell.begins()
    assert begins[Topic.LEDGER] == snapshot.head_offset
    positions = snapshot.state.positions
    assert begins[Topic.JOBS] == positions[(Topic.JOBS, settings.cell_index)] - 1

    text = await refused(cell)
    assert "begins at offset" in text
    assert "PENSTOCK_ARCHIVE" in text
    with pytest.raises(ConfigurationError, match="PENSTOCK_ARCHIVE"):
        await replayed(cell, cell.log)
    with pytest.raises(ConfigurationError, match="PENSTOCK_ARCHIVE"):
        await rebuild.verify(without, cell.log)
    async with cell.at_work(without, cell.log):
        await cell.cancelled(100, 20)
        await cell.projected(before.records + 41)

    whole = open_whole(cell)
    after = await replayed(cell, whole)
    assert after.records == before.records + 41
    verified = await rebuild.verify(settings, whole)
    assert verified["ok"], verified
    assert (await printed_by_verify_archive(settings))["until_seq"] == 50
    stop, ready = asyncio.Event(), asyncio.Event()
    placer = run_placer(settings.model_copy(update={"dsn": None}), stop, log=whole, ready=ready)
    async with beside(placer, stop, ready):
        pass

    await cell.snapshot(100)
    assert (await archive(settings, cell.log, leave=20))["until_seq"] == 100
    assert (await archive(settings, cell.log, leave=60))["archived"] == 0, (
        "an older snapshot takes nothing back"
    )
    assert (await replayed(cell, open_whole(cell))).records == after.records + 1
    folder = Path(settings.archive or "") / Topic.LEDGER / str(settings.cell_index)
    segment = sorted(folder.glob("*.gz"))[1]
    content = bytearray(segment.read_bytes())
    content[100] ^= 1
    segment.write_bytes(content)
    with pytest.raises(ConfigurationError, match=segment.name):
        await replayed(cell, open_whole(cell))
    with pytest.raises(ConfigurationError, match=segment.name):
        await verify(settings, cell.log)


async def test_nothing_leaves_the_log_for_a_wrong_snapshot(cell: Cell) -> None:
    """The database is another cell's, or a bug made its snapshot: the archive holds nothing of it, and the
    log everything."""
    replica = await cell.folded(50)
    replica.state.ended["never"] = "succeeded"
    connection = await asyncpg.connect(cell.settings.dsn)
    await save_snapshot(connection, cell.settings.cell, replica)
    await connection.close()
    with pytest.raises(ConfigurationError, match="is not what the ledger folds to"):
        await archive(cell.settings, cell.log, leave=20)
    assert set((await cell.begins()).values()) == {0}
    assert (await replayed(cell, open_whole(cell))).records == 84


async def test_a_projector_that_is_further_back_needs_the_archive(cell: Cell) -> None:
    """The database was lost: its tables are filled from the archive, and without it the projector names what
    it needs."""
    await cell.snapshot(50)
    await archive(cell.settings, cell.log, leave=20)
    connection = await asyncpg.connect(cell.settings.dsn)
    await connection.execute(f"DROP SCHEMA {schema_of(cell.settings.cell)} CASCADE")
    await connection.close()
    await prepare_schema(cell.settings.dsn or "", schema_of(cell.settings.cell))
    without = cell.settings.model_copy(update={"archive": None})
    with pytest.raises(ConfigurationError, match="PENSTOCK_ARCHIVE"):
        await run_projector(without, asyncio.Event(), log=cell.log)
    stop, ready = asyncio.Event(), asyncio.Event()
    async with beside(run_projector(cell.settings, stop, log=open_whole(cell), ready=ready), stop, ready):
        await cell.projected(84)
