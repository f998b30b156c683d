"""Choice of the Postgres: the one that `PENSTOCK_DSN` names, else an embedded one that lives as long as this
process.

Departure from the ideal, one server per user for all programs: each data folder has its own server, so that
removing the folder removes everything.
"""

import os
from pathlib import Path

import asyncpg

from penstock.errors import ConfigurationError
from penstock.runtime.database.postgres_binaries import DSN_VARIABLE
from penstock.runtime.database.postgres_server import PostgresServer
from penstock.text.redaction import postgres_problem, without_password

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
