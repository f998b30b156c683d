"""Position and effect of a batch are one: whatever the connection dies at, both are there or neither is."""

from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from penstock.errors import StoreError
from penstock.ledger.replica.replica import Replica
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell.service import prepare_schema
from penstock_services.projector.shell.store import Store
from tests.support.cluster.driver import CellDriver, node_spec

SCHEMA = "penstock"


class DyingConnection:
    """Passes on so many statements; then the server is gone."""

    def __init__(self, real: asyncpg.Connection, statements: int) -> None:
        self._real = real
        self._left = statements

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in ("fetch", "fetchrow", "fetchval", "execute", "executemany"):
            return found

        async def statement(*arguments: Any, **options: Any) -> Any:
            if self._left == 0:
                self._real.terminate()
                raise asyncpg.ConnectionDoesNotExistError("the server was killed")
            self._left -= 1
            return await found(*arguments, **options)

        return statement


def ledger() -> list[bytes]:
    """A ledger in which one job ran."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("a")
    cell.start("a")
    cell.exit("a.1.w0")
    return cell.values


@pytest.mark.postgres
@pytest.mark.parametrize("statements", range(4))
async def test_a_batch_is_written_whole_or_not_at_all(dsn: str, statements: int) -> None:
    """Postgres is killed after the n-th statement of a batch; the projector starts again where it stood."""
    await prepare_schema(dsn, SCHEMA)
    store = await Store.open(dsn, SCHEMA, "default")
    projection = Projection(Replica())
    for offset, value in enumerate(ledger()):
        projection.take(value, offset)
    store.connection = DyingConnection(store.connection, statements)
    with suppress(StoreError):
        await store.apply(projection.replica, 0, projection.drain())
    store.connection.terminate()

    again = await Store.open(dsn, SCHEMA, "default")
    try:
        offset, _, _ = await again.position()
        rows = await again.connection.fetchval("SELECT count(*) FROM events")
        jobs = await again.connection.fetch("SELECT outcome FROM jobs")
        assert (offset > 0) == (rows > 0) == (len(jobs) > 0), f"position {offset}, {rows} events, {jobs}"
        assert (offset > 0) == (statements > 0)
    finally:
        await again.close()
