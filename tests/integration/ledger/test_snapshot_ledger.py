"""Snapshots of another ledger: the topics were made anew, or the cell's index changed, and Postgres stayed as
it was."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest

from penstock.errors import ConfigurationError
from penstock.ledger.record.record import record_id
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Partition
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.following.snapshots import save_snapshot
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.estimator.shell.store import RunStore
from penstock_services.placer.shell.service import run as run_placer
from penstock_services.projector.shell.rebuild import rebuild
from penstock_services.projector.shell.service import prepare_schema
from penstock_services.projector.shell.service import run as run_projector
from tests.integration.estimator.test_estimator_service import SPEC, Placer
from tests.integration.placer.test_placer_service import Cell as PlacerCell
from tests.support.cluster.hand_placer import HandPlacer, node_spec
from tests.support.gateway.gateway_cell import Cell, running
from tests.support.gateway.projector_cell import assert_equals_replay, projecting, reached
from tests.support.installation.services import beside
from tests.support.log.memory_log import MemoryBroker, MemoryLog

pytestmark = pytest.mark.postgres
LEDGER = Partition(Topic.LEDGER, 0)


def folded(values: list[bytes]) -> Replica:
    replica = Replica()
    for offset, value in enumerate(values):
        replica.take(value, offset)
    return replica


def busy(name: str, jobs: int) -> HandPlacer:
    """A ledger in which so many jobs called after it have ended: four records each, after two."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 1))
    placer.run([f"{name}-{number}" for number in range(jobs)])
    return placer


async def save(dsn: str, *replicas: Replica) -> None:
    """As their projector wrote them before."""
    await prepare_schema(dsn, schema_of("default"))
    connection = await asyncpg.connect(dsn)
    for replica in replicas:
        await save_snapshot(connection, "default", replica)
    await connection.close()


@asynccontextmanager
async def placer_on(cell: PlacerCell, dsn: str | None) -> AsyncIterator[None]:
    settings = Settings(log_url="memory", dsn=dsn)
    async with AsyncExitStack() as stack:
        for run, name in ((run_placer, "placer"), (run_estimator, "estimator")):
            stop, ready = asyncio.Event(), asyncio.Event()
            work = run(settings, stop, log=cell.log(name), ready=ready)
            await stack.enter_async_context(beside(work, stop, ready))
        yield


async def test_a_placer_believes_only_its_own(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """All topics were deleted and made anew, and have grown beyond the snapshot: jobs are answered all the
    same, and the warning names both heads."""
    theirs, cell = folded(busy("theirs", 3).values), PlacerCell()
    nodes = asyncio.create_task(cell.nodes.run())
    async with placer_on(cell, None):
        for number in range(6):
            await cell.submit(f"ours-{number}")
        await cell.until(lambda replica: len(replica.state.ended) == 6)
    await save(dsn, theirs)
    with caplog.at_level(logging.WARNING):
        async with placer_on(cell, dsn):
            await cell.submit("after")
            replica = await cell.until(lambda replica: "after" in replica.state.ended)
    nodes.cancel()
    await asyncio.gather(nodes, return_exceptions=True)
    assert len(replica.state.ended) == 7
    [warned] = {text for text in caplog.messages if "another ledger" in text}
    there = cell.broker.records(LEDGER)[theirs.head.seq - 1].value
    assert theirs.head.id in warned
    assert record_id(there) in warned


@pytest.mark.parametrize("grown", [True, False], ids=["grown beyond", "still shorter"])
async def test_a_gateway_passes_over_those_of_another(dsn: str, grown: bool) -> None:
    """It serves what its own ledger holds, now and at any record; an older snapshot of its own is still of
    use."""
    ours, theirs = busy("ours", 4), busy("theirs", 3 if grown else 9)
    assert grown == (len(ours.values) > len(theirs.values))
    await save(dsn, folded(ours.values[:6]), folded(theirs.values))
    async with running(dsn) as cell:
        cell.placer = ours
        ours.submit("waits", gpus=9)
        await cell.tell()
        status = await cell.caught_up()
        assert (status["seq"], status["jobs"]) == (len(ours.values), {"queued": 1})
        await _explains(cell, len(ours.values))
    async with running(dsn) as cell:
        await _explains(cell, len(ours.values))
        ended = (await cell.http.get("/v1/jobs")).json()["jobs"]
        assert {job["job_id"] for job in ended} == {"waits", *(f"ours-{n}" for n in range(4))}


async def _explains(cell: Cell, at: int) -> None:
    answer = await cell.http.get(f"/v1/jobs/waits/why?at={at}")
    assert (answer.status_code, answer.json()["reason"]) == (200, "never_fits_gpus"), answer.text


async def test_an_estimator_passes_over_those_of_another(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """`PENSTOCK_CELL_INDEX` changed: the database is the other cell's. Its own ledger is folded, and none of
    it is void."""
    log: Log = MemoryLog(MemoryBroker())
    await log.create(dict.fromkeys(CELL_TOPICS, 2))
    await save(dsn, folded(busy("theirs", 1).values[:4]))
    store = await RunStore.open(dsn, "default")
    await store.add([], 5)
    await store.close()
    placer = Placer(log)
    await placer.start_term()
    for number, offset in enumerate(await placer.submit(*(f"job-{n}" for n in range(6)))):
        await placer.record(JobSubmitted(job_id=f"job-{number}", spec=SPEC), offset=offset)
    stop = asyncio.Event()
    settings = Settings(log_url="memory", dsn=dsn, cell_index=1)
    with caplog.at_level(logging.INFO):
        work = asyncio.create_task(run_estimator(settings, stop, log=log))
        reader = log.reader({Partition(Topic.ESTIMATES, 1): 0})
        estimated = 0
        while estimated < 6:
            estimated += len(await reader.read())
        assert estimated == 6
        stop.set()
        await work
    assert (
        "folded the ledger to seq 7 (0 void records), 6 live jobs, 6 of them not estimated" in caplog.messages
    )


@pytest.mark.parametrize("grown", [True, False], ids=["grown beyond", "still shorter"])
async def test_a_projector_does_not_mix_two_ledgers(dsn: str, grown: bool) -> None:
    """Its tables are of the old ledger: it stops, with both ids. After the rebuild it goes on from there."""
    theirs, ours = busy("theirs", 3), busy("ours", 4 if grown else 1)
    old, new = (MemoryLog(MemoryBroker(), name) for name in ("old", "new"))
    settings = Settings(log_url="memory", dsn=dsn)
    for log, placer in ((old, theirs), (new, ours)):
        await log.create({Topic.LEDGER: 1})
        await placer.send(log)
    async with projecting(settings, old):
        await reached(dsn, len(theirs.values))
    await save(dsn, folded(theirs.values[:9]))
    there = record_id(ours.values[len(theirs.values) - 1]) if grown else "no record"
    with pytest.raises(
        ConfigurationError, match=rf"{theirs.head.id}.*{there}.*another log.*projections rebuild"
    ):
        await run_projector(settings, asyncio.Event(), log=new)
    assert (await rebuild(settings, new))["ok"]
    ours.run(["later"])
    await ours.send(new)
    async with projecting(settings, new):
        await reached(dsn, len(ours.values))
    await assert_equals_replay(settings, new)
