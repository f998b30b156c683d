"""Schema migrations of Postgres: numbered SQL files, applied in order, once, in one transaction under an advisory lock.

A service has its files as package data (`migrations/NNNN_name.sql`) and owns one schema. Applied files are
recorded with their sha256: a file that changed after it was applied is an error.
"""

import re
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

import asyncpg

from penstock.errors import ConfigurationError, StoreError

LOCK_KEY = 0x70656E6D69677261  # advisory lock around all migrations of a database: "penmigra"
FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
SCHEMA_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


class Migration(NamedTuple):
    """One file. `sha256`: digest of its bytes."""

    name: str
    sql: str
    sha256: str


def schema_of(cell: str) -> str:
    """The schema of a cell's read models: `penstock` for the cell `default`; each cell has its own."""
    if cell == "default":
        return "penstock"
    simple = f"penstock_{cell}"
    return simple if SCHEMA_NAME.fullmatch(simple) else f"penstock_{sha256(cell.encode()).hexdigest()[:16]}"


def load_migrations(package: str) -> list[Migration]:
    """The files of `package`, in order. Raises `StoreError` for a gap, a double number or a bad name."""
    found: list[Migration] = []
    for entry in sorted(files(package).iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".sql"):
            continue
        match = FILE_NAME.fullmatch(entry.name)
        if match is None or int(match[1]) != len(found) + 1:
            raise StoreError(f"{package}/{entry.name}: expected {len(found) + 1:04}_name.sql")
        raw = entry.read_bytes()
        found.append(Migration(entry.name, raw.decode(), sha256(raw).hexdigest()))
    return found


async def migrate(connection: asyncpg.Connection, schema: str, migrations: list[Migration]) -> list[str]:
    """Brings `schema` up to date; returns the names applied now. Several programs may do so at once.

    Raises `ConfigurationError` when an applied file was changed or is unknown here (applied by a newer
    version), `StoreError` when a file fails: then the schema is unchanged.
    """
    if not SCHEMA_NAME.fullmatch(schema):
        raise StoreError(f"{schema!r} is no schema name; use small letters, digits and _")
    applied: list[str] = []
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK_KEY)
        if (
            await connection.fetchval("SELECT to_regnamespace($1)", schema) is None
        ):  # the schema's owner may lack the right to create schemas
            await connection.execute(f"CREATE SCHEMA {schema}")
        await connection.execute(f"SET LOCAL search_path TO {schema}")
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations "
            "(name text PRIMARY KEY, sha256 text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
        )
        known = {row["name"]: row["sha256"] for row in await connection.fetch("SELECT * FROM migrations")}
        _refuse_changes(schema, known, migrations)
        for migration in migrations:
            if migration.name in known:
                continue
            try:
                await connection.execute(migration.sql)
            except asyncpg.PostgresError as error:
                raise StoreError(
                    f"migration {migration.name} of {schema} failed, nothing was changed: {error}"
                ) from error
            await connection.execute(
                "INSERT INTO migrations (name, sha256) VALUES ($1, $2)", migration.name, migration.sha256
            )
            applied.append(migration.name)
    return applied


def _refuse_changes(schema: str, known: dict[str, str], migrations: list[Migration]) -> None:
    """Raises `ConfigurationError` where the applied migrations differ from the files."""
    ours = {migration.name: migration.sha256 for migration in migrations}
    for name, digest in known.items():
        if name not in ours:
            raise ConfigurationError(f"{schema} was migrated by a newer version ({name}); run that version")
        if ours[name] != digest:
            raise ConfigurationError(
                f"migration {name} was changed after it was applied to {schema}; restore it and add a new file"
            )
