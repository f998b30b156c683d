"""Postgres keeps a process for each connection, and that process keeps what it ever looked up in the
catalogs.

A cell on a small machine stands for months with its connections open: what only the very first start needs
(tables, migrations) must not stay in the memory of all the time after it.
"""

import asyncpg
import pytest

from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.topic_settings import topic_partitions
from penstock.model.schema.topics import CELL_TOPICS
from penstock_services.estimator.shell.store import RunStore
from penstock_services.projector.shell.service import prepare_schema
from penstock_services.projector.shell.store import Store

pytestmark = [pytest.mark.postgres]

HELD = "SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts"
MORE = 1.15  # of the first life to the second; both look up the same tables to use them


async def held_bytes(connection: asyncpg.Connection | None) -> int:
    """By the server's process behind this connection."""
    assert connection is not None
    found: int = await connection.fetchval(HELD)
    return found


async def test_the_log_that_made_its_tables_holds_no_more_than_the_next(dsn: str) -> None:
    """`penstock up` on a new machine, and once more after a boot: the writer's process is as small in both
    lives."""
    found = []
    for _ in range(2):
        log = await EmbeddedLog(dsn, "test").start()
        await log.create(topic_partitions())
        found.append(await held_bytes(log._writer))
        await log.close()
    assert found[0] <= MORE * found[1]


async def test_a_reader_of_the_log_does_not_pay_for_looking_at_retention(dsn: str) -> None:
    """Each program looks once whether anything has expired; the connection that goes on reading has not
    planned that."""
    log = await EmbeddedLog(dsn, "test").start()
    await log.create(dict.fromkeys(CELL_TOPICS, 1))
    assert log._expiring is not None
    await log._expiring
    kept = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%retention' || '_ms%'"
    assert await (await log.reading()).fetchval(kept) == 0
    await log.close()


async def test_the_estimator_that_made_its_tables_holds_no_more_than_the_next(dsn: str) -> None:
    found = []
    for _ in range(2):
        store = await RunStore.open(dsn, "default")
        found.append(await held_bytes(store._connection))
        await store.close()
    assert found[0] <= MORE * found[1]


async def test_the_projector_asks_for_its_columns_cheaply(dsn: str) -> None:
    """A question to `information_schema` would cost its process as much as all the projector's tables."""
    await prepare_schema(dsn, "penstock")
    bare = await asyncpg.connect(dsn)
    store = await Store.open(dsn, "penstock", "default")
    assert await held_bytes(store.connection) - await held_bytes(bare) < 1_000_000
    await store.close()
    await bare.close()
