"""Log, database and files of the installation that a command works on: the environment's, or those of a
folder of `penstock up`."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.backup.files import CODE
from penstock.errors import ConfigurationError
from penstock.local.lock import folder_lock
from penstock.runtime.database.postgres import resolve_dsn
from penstock.runtime.database.postgres_binaries import DSN_VARIABLE
from penstock.runtime.keys.log_keys import VARIABLE as NODE_LOG_KEY
from penstock.runtime.keys.node_keys import OPERATOR_KEY
from penstock.runtime.settings import Settings


class Place(NamedTuple):
    """`env` names the files that are copied."""

    settings: Settings
    env: Mapping[str, str]


@asynccontextmanager
async def running_or_stopped(folder: Path | None) -> AsyncIterator[Place]:
    """For a backup: of a folder whose `penstock up` runs,
    or of one that is stopped. Raises `ConfigurationError`."""
    if folder is None:
        yield Place(Settings.from_env(), os.environ)
        return
    if not os.path.isdir(folder):  # noqa: ASYNC240 - a command with nothing else to do
        raise ConfigurationError(f"--folder {folder}: there is none; give the folder of `penstock up`")
    url = folder / "postgres" / "url"
    lock = folder_lock(folder)
    try:
        lock.__enter__()
    except ConfigurationError:  # in use: `up` runs
        dsn = os.environ.get(DSN_VARIABLE) or (url.read_text().strip() if url.exists() else "")
        if not dsn:
            raise
        yield _place(folder, dsn)
        return
    try:
        async with _started(folder) as place:
            yield place
    finally:
        lock.__exit__(None, None, None)


@asynccontextmanager
async def stopped(folder: Path | None) -> AsyncIterator[Place]:
    """For a restoration: nothing else may use the folder. Raises `ConfigurationError`."""
    if folder is None:
        yield Place(Settings.from_env(), os.environ)
        return
    with folder_lock(folder):
        async with _started(folder) as place:
            yield place


@asynccontextmanager
async def _started(folder: Path) -> AsyncIterator[Place]:
    dsn, server = await resolve_dsn(folder / "postgres")
    try:
        yield _place(folder, dsn)
    finally:
        if server is not None:
            await server.stop()


def _place(folder: Path, dsn: str) -> Place:
    """The same paths as `penstock up` gives its services."""
    own = {
        OPERATOR_KEY: str(folder / "keys" / "operator.key"),
        NODE_LOG_KEY: str(folder / "keys" / "logs.key"),
        CODE: str(folder / "code"),
    }
    settings = Settings.from_env({**os.environ, DSN_VARIABLE: dsn})
    return Place(settings, {**os.environ, **own})
