"""Choice of the Postgres: the one that `PENSTOCK_DSN` names, else an embedded one that lives as long as this
process.

Departure from the ideal, one server per user for all programs: each data folder has its own server, so that
removing the folder removes everything.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from penstock.errors import ConfigurationError
from penstock.runtime.database.postgres_binaries import DSN_VARIABLE, find_binaries
from penstock.runtime.database.postgres_server import PostgresServer
from penstock.text.redaction import postgres_problem, without_password

__all__ = [
    "DSN_VARIABLE",
    "PostgresServer",
    "any_postgres",
    "check_dsn",
    "embedded_postgres",
    "find_binaries",
    "resolve_dsn",
]

CHECK_TIMEOUT_S = 5.0  # for an external server: it is up, or the setting is wrong


async def check_dsn(dsn: str) -> None:
    """Connects once. Raises `ConfigurationError` that names the setting; the password stays out of it."""
    if (problem := postgres_problem(dsn)) is not None:
        raise ConfigurationError(f"{DSN_VARIABLE}: {problem}, or unset it to use an embedded server")
    try:
        connection = await asyncpg.connect(dsn, timeout=CHECK_TIMEOUT_S)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise ConfigurationError(
            f"{DSN_VARIABLE}={without_password(dsn)} cannot be used: {type(error).__name__}: {error}. "
            f"Start that server or correct the setting, or unset {DSN_VARIABLE} to use an embedded server."
        ) from error
    await connection.close()


async def resolve_dsn(folder: Path) -> tuple[str, PostgresServer | None]:
    """A working DSN and, when a server had to be started for it, that server (the caller stops it).

    `folder` has the embedded server's data; it is not touched when `PENSTOCK_DSN` is set.
    Raises `ConfigurationError`.
    """
    configured = os.environ.get(DSN_VARIABLE, "").strip()
    if configured:
        await check_dsn(configured)
        return configured, None
    server = PostgresServer()
    return await server.start(folder), server


@asynccontextmanager
async def embedded_postgres(folder: Path) -> AsyncIterator[str]:
    """The DSN of a Postgres that runs inside the block; its data stay in `folder`."""
    server = PostgresServer()
    try:
        yield await server.start(folder)
    finally:
        await server.stop()


@asynccontextmanager
async def any_postgres(folder: Path) -> AsyncIterator[str]:
    """The DSN that `PENSTOCK_DSN` names, else that of an embedded server which runs inside the block."""
    dsn, server = await resolve_dsn(folder)
    try:
        yield dsn
    finally:
        if server is not None:
            await server.stop()
