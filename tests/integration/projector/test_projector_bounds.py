"""Numbers that events may hold and columns cannot: each is stored as the nearest that its column holds."""

from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.inputs.external_events import GpuFaulted, TaskExited, TaskStarted
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Usage
from penstock.runtime.settings import Settings
from penstock_services.projector.core.projection import JOB_CHANGES, Batch, Projection
from penstock_services.projector.shell import service
from penstock_services.projector.shell.store import LARGEST, REPLACED, Store
from tests.support.cluster.driver import CellDriver, node_spec
from tests.support.cluster.random_cell import RandomCell
from tests.support.gateway import projector_cell
from tests.support.gateway.projector_cell import LEDGER, assert_equals_replay, busy, projecting, reached

pytestmark = pytest.mark.postgres
log, cell = projector_cell.log, projector_cell.cell

HUGE = 10**30


@pytest_asyncio.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    await service.prepare_schema(dsn, "penstock")
    found = await Store.open(dsn, "penstock", "default")
    yield found
    await found.close()


def drained() -> tuple[Replica, Batch]:
    """Rows of every table, from a busy cell."""
    projection = Projection(Replica())
    for offset, value in enumerate(busy(60).values):
        projection.take(value, offset)
    return projection.replica, projection.drain()


async def kinds(connection: asyncpg.Connection) -> list[tuple[str, str, str]]:
    """(table, column, type) of every column of whole numbers that rows fill."""
    rows = await connection.fetch(
        "SELECT relname::text, attname::text, format_type(atttypid, NULL) FROM pg_class JOIN pg_attribute "
        "ON attrelid = pg_class.oid WHERE relnamespace = 'penstock'::regnamespace AND relkind = 'r' AND "
        "attnum > 0 AND NOT attisdropped"
    )
    tables = (*REPLACED, "decisions", "events")
    return [tuple(row) for row in rows if row[0] in tables and row[2] in LARGEST]


@pytest.mark.parametrize("number", [HUGE, -HUGE, 1 << 63, 1 << 31])
async def test_every_column_holds_whatever_stands_in_its_row(store: Store, number: int) -> None:
    """Columns of today and of tomorrow alike: the bounds come from the tables themselves."""
    found = await kinds(store.connection)
    assert len(found) > 40, "every table has columns of whole numbers"
    for table, column, kind in found:
        if (table, column) in {
            ("gpus", "gpu"),
            ("decisions", "seq"),
            ("events", "seq"),
            ("decisions", "n"),
            ("events", "n"),
        }:
            continue  # keys: several rows would become one
        replica, batch = drained()
        one = batch[table][-1]
        one[column] = [number] if kind.endswith("[]") else number
        transaction = store.connection.transaction()
        await transaction.start()
        await store.apply(replica, 0, batch)
        keys = REPLACED.get(table, "seq, n").split(", ")
        where = " AND ".join(f"{key} = ${place}" for place, key in enumerate(keys, 1))
        stored = await store.connection.fetchval(
            f"SELECT {column} FROM {table} WHERE {where}", *(one[key] for key in keys)
        )
        largest = LARGEST[kind]
        nearest = max(-largest, min(number, largest))
        assert stored == ([nearest] if kind.endswith("[]") else nearest), (table, column)
        await transaction.rollback()


async def test_changes_of_jobs_are_bounded_as_well(store: Store) -> None:
    """A job that ends writes only some of its columns."""
    replica, batch = drained()
    job = batch["jobs"].pop()
    await store.apply(replica, 0, Batch({name: [] for name in batch} | {"jobs": [job]}))
    change = {name: job[name] for name in JOB_CHANGES} | {"exit_code": HUGE, "ended_ms": -HUGE}
    await store.apply(
        replica, replica.offset, Batch({name: [] for name in batch} | {"job_changes": [change]})
    )
    stored = await store.connection.fetchrow(
        "SELECT exit_code, ended_ms FROM jobs WHERE job_id = $1", job["job_id"]
    )
    assert tuple(stored) == (LARGEST["integer"], -LARGEST["bigint"])


async def test_what_a_broken_node_counts_reaches_the_tables(
    dsn: str, log: EmbeddedLog, cell: Settings
) -> None:
    """Its pid, its processor time and its memory have no upper bound in the event; the events' own rows have
    the numbers."""
    placer = CellDriver()
    placer.join(node_spec("n1", 2))
    placer.submit("j1")
    token = placer.job("j1").token
    task = {"node_id": "n1", "task_id": "j1.1.w0", "token": token}
    usage = Usage(cpu_ms=1 << 70, host_memory_mib=1 << 71, gpu_memory_mib=1 << 72)
    placer.feed(GpuFaulted(node_id="n1", gpu=1, uuid="GPU-n1-1", fault="xid", code=1 << 70))
    placer.feed(TaskStarted(**task, pid=1 << 70, started_ms=1))
    placer.feed(TaskExited(**task, cause="exited", exit_code=0, started_ms=1, exited_ms=2, usage=usage))
    async with projecting(cell, log):
        await log.append([Message(LEDGER, value) for value in placer.values])
        await reached(dsn, len(placer.values))
        await assert_equals_replay(cell, log)
    connection = await asyncpg.connect(dsn)
    try:
        query = "SELECT data->>'code' FROM penstock.events WHERE type = 'penstock.gpu.faulted'"
        assert int(await connection.fetchval(query)) == 1 << 70
        assert int(await connection.fetchval("SELECT usage->>'cpu_ms' FROM penstock.tasks")) == 1 << 70
        assert await connection.fetchval("SELECT status FROM penstock.jobs") == "succeeded"
    finally:
        await connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_tables_hold_what_follows_from_the_ends_of_ranges(
    cell: Settings, log: EmbeddedLog, seed: int
) -> None:
    """A random cell whose users, nodes and services claim the largest and the smallest of everything."""
    placer = RandomCell(seed, PlacerSettings(profile="penstock"), 60, extremes=0.5)
    assert placer.readers is not None
    placer.run()
    await log.append([Message(LEDGER, value) for value in placer.readers.values])
    async with projecting(cell, log):
        await reached(cell.need_dsn("the test"), placer.head.seq)
    await assert_equals_replay(cell, log)
