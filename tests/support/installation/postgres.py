"""An embedded Postgres for a block."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.runtime.database.postgres_server import PostgresServer


@asynccontextmanager
async def embedded_postgres(folder: Path) -> AsyncIterator[str]:
    """The DSN of a Postgres that runs inside the block; its data stay in `folder`."""
    server = PostgresServer()
    try:
        yield await server.start(folder)
    finally:
        await server.stop()
