"""The projector's tables over versions: migrations, and upgrades of tables that hold jobs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from penstock.errors import ConfigurationError, StoreError
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.runtime.database.migrations import Migration, load_migrations, migrate
from penstock.runtime.settings import Settings
from penstock_services.projector.shell import service
from penstock_services.projector.shell.rebuild import rebuild, verify
from tests.support.cluster.hand_placer import HandPlacer, node_spec
from tests.support.gateway import projector_cell
from tests.support.gateway.projector_cell import assert_equals_replay, projecting, reached

pytestmark = pytest.mark.postgres
log, cell = projector_cell.log, projector_cell.cell


async def test_migrations_are_applied_once_and_never_changed(dsn: str) -> None:
    """Two services start at once and both migrate; later somebody edits an applied file."""
    files = load_migrations("penstock_services.projector.migrations")
    assert files
    first, second = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    applied = await asyncio.gather(migrate(first, "penstock", files), migrate(second, "penstock", files))
    assert sorted(map(len, applied)) == [0, len(files)]
    edited = [Migration(files[0].name, files[0].sql, "0" * 64), *files[1:]]
    with pytest.raises(ConfigurationError, match=r"0001_read_models\.sql was changed after it was applied"):
        await migrate(first, "penstock", edited)
    broken = Migration("9999_broken.sql", "CREATE TABLE half (x integer); SELECT nonsense;", "1" * 64)
    with pytest.raises(StoreError, match=r"9999_broken\.sql of penstock failed, nothing was changed"):
        await migrate(first, "penstock", [*files, broken])
    assert await first.fetchval("SELECT to_regclass('penstock.half')") is None
    assert await migrate(first, "penstock", files) == []
    await first.close()
    await second.close()


async def test_tables_of_a_newer_version_serve_the_former_one_where_that_is_safe(dsn: str) -> None:
    """A release is set back: it had added a column, and that is no reason to stay down. The next one renames
    what this one reads."""
    files = load_migrations("penstock_services.projector.migrations")
    number = len(files) + 1
    more = Migration(
        f"{number:04}_more.sql", "ALTER TABLE jobs ADD COLUMN colour text NOT NULL DEFAULT ''", "2" * 64
    )
    renamed = Migration(
        f"{number + 1:04}_other.sql", "-- needs: 9.9\nALTER TABLE jobs RENAME colour TO hue", "3" * 64
    )
    connection = await asyncpg.connect(dsn)
    assert await migrate(connection, "penstock", [*files, more]) == [file.name for file in (*files, more)]
    assert await migrate(connection, "penstock", files) == []
    assert await migrate(connection, "penstock", [*files, more, renamed]) == [renamed.name]
    with pytest.raises(
        ConfigurationError, match=r"_other\.sql\): it needs Penstock 9\.9 or later, and this is 0\."
    ):
        await migrate(connection, "penstock", files)
    await connection.close()


async def test_the_projector_writes_beside_columns_of_a_newer_version(
    dsn: str, cell: Settings, log: EmbeddedLog
) -> None:
    """A release is set back. It had added columns that may not be empty to every table; what they hold is not
    this version's to say."""
    placer = with_jobs()
    async with projecting(cell, log):
        pass
    connection = await asyncpg.connect(dsn)
    tables = ("jobs", "tasks", "nodes", "gpus", "events", "decisions", "positions", "snapshots")
    for table in tables:
        await connection.execute(
            f"ALTER TABLE penstock.{table} ADD COLUMN colour text NOT NULL DEFAULT 'green'"
        )
    await placer.send(log)
    async with projecting(cell, log):
        await reached(dsn, len(placer.values))
        await connection.execute("UPDATE penstock.jobs SET colour = 'red' WHERE job_id = 'runs'")
        placer.finish("runs")
        await placer.send(log)
        await reached(dsn, len(placer.values))
    found = await connection.fetch("SELECT job_id, status, colour FROM penstock.jobs ORDER BY job_id")
    assert [tuple(row) for row in found] == [("ended", "succeeded", "green"), ("runs", "succeeded", "red")]
    for table in tables:
        await connection.execute(f"ALTER TABLE penstock.{table} DROP COLUMN colour")
    await connection.close()
    await assert_equals_replay(cell, log)


def with_jobs() -> HandPlacer:
    """One of its jobs has ended, one runs."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 4))
    placer.run(["ended"])
    placer.submit("runs", gpus=3)
    placer.start("runs")
    return placer


@asynccontextmanager
async def older(
    dsn: str, cell: Settings, log: EmbeddedLog, placer: HandPlacer, migration: str, undo: str
) -> AsyncIterator[asyncpg.Connection]:
    """Tables that hold all that the placer has decided, as they were before this migration; a connection to
    them. `undo`: SQL."""
    await placer.send(log)
    async with projecting(cell, log):
        await reached(dsn, len(placer.values))
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.execute(f"{undo}; DELETE FROM penstock.migrations WHERE name LIKE '{migration}%'")
    await connection.close()
    async with projecting(cell, log):
        pass


async def test_an_upgrade_names_the_gpus_of_what_runs(dsn: str, cell: Settings, log: EmbeddedLog) -> None:
    """Tables from before tasks named their GPUs: the migration fills in those of tasks that run; of the
    others a rebuild."""
    placer = with_jobs()
    async with older(dsn, cell, log, placer, "0007", "ALTER TABLE penstock.tasks DROP COLUMN gpu_uuids"):
        pass
    found = await verify(cell, log)
    assert [difference["key"] for difference in found["differences"]] == ["ended.1.w0"]
    await rebuild(cell, log)
    await assert_equals_replay(cell, log)


async def test_an_upgrade_counts_the_cores_of_jobs(dsn: str, cell: Settings, log: EmbeddedLog) -> None:
    """Tables from before jobs showed their cores: the migration counts those of their tasks, of one that
    waits none."""
    placer, shown = with_jobs(), "SELECT job_id, cores FROM penstock.jobs ORDER BY job_id"
    placer.submit("waits", gpus=4)
    async with older(dsn, cell, log, placer, "0011", "ALTER TABLE penstock.jobs DROP COLUMN cores") as tables:
        before = await tables.fetch(shown)
    assert [row["job_id"] for row in before if row["cores"]] == ["ended", "runs"]
    connection = await asyncpg.connect(dsn)
    assert await connection.fetch(shown) == before
    await connection.close()
    await assert_equals_replay(cell, log)


async def test_a_changed_migration_ends_the_service_until_it_is_mended(
    dsn: str, cell: Settings, log: EmbeddedLog
) -> None:
    """The projector does not write into tables that it does not know; it reports that and ends, repetition
    mends nothing."""
    async with projecting(cell, log):
        pass
    connection = await asyncpg.connect(dsn)
    await connection.execute("UPDATE penstock.migrations SET sha256 = repeat('0', 64)")
    with pytest.raises(ConfigurationError, match="was changed after it was applied"):
        await service.run(cell, asyncio.Event(), log=log)
    files = load_migrations("penstock_services.projector.migrations")
    for file in files:
        await connection.execute(
            "UPDATE penstock.migrations SET sha256 = $2 WHERE name = $1", file.name, file.sha256
        )
    await connection.close()
    async with projecting(cell, log):
        pass
