"""Schema migrations of Postgres: numbered SQL files, applied in order, once, in one transaction under an
advisory lock.

Estimator, gateway and projector have their tables as package data (`migrations/NNNN_name.sql`); each owns one
schema. Applied files are recorded with their sha256: a file that changed after it was applied is an error.

An earlier version goes on beside files that it does not know, so that an upgrade has a way back: a file adds
columns with defaults, tables and indexes. One that does more begins with `-- needs: VERSION`, the lowest
version that may use the schema then. Decision 127.
"""

import logging
import re
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

import asyncpg

from penstock import __version__
from penstock.errors import ConfigurationError, StoreError
from penstock.model.wire.additions import is_newer

LOCK_KEY = 0x70656E6D69677261  # advisory lock around all migrations of a database: "penmigra"
FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
NEEDS = re.compile(r"-- needs: (\d+(?:\.\d+)*)\n")
SCHEMA_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


logger = logging.getLogger(__name__)


class Migration(NamedTuple):
    """One file. `sha256`: digest of its bytes."""

    name: str
    sql: str
    sha256: str

    @property
    def needs(self) -> str:
        """Lowest version that may use the schema then; empty: any."""
        found = NEEDS.match(self.sql)
        return "" if found is None else found[1]


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

    Raises `ConfigurationError` when an applied file was changed, or is unknown here and needs a newer
    version; `StoreError` when a file fails: then the schema is unchanged.
    """
    if not SCHEMA_NAME.fullmatch(schema):
        raise StoreError(f"{schema!r} is not a schema name; use small letters, digits and _")
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
        await connection.execute(
            "ALTER TABLE migrations ADD COLUMN IF NOT EXISTS needs text NOT NULL DEFAULT ''"
        )
        rows = await connection.fetch("SELECT name, sha256, needs FROM migrations ORDER BY name")
        known = {row["name"]: row["sha256"] for row in rows}
        _refuse_changes(schema, known, migrations)
        _refuse_newer(schema, {row["name"]: row["needs"] for row in rows}, migrations)
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
                "INSERT INTO migrations (name, sha256, needs) VALUES ($1, $2, $3)",
                migration.name,
                migration.sha256,
                migration.needs,
            )
            applied.append(migration.name)
    return applied


def _refuse_changes(schema: str, known: dict[str, str], migrations: list[Migration]) -> None:
    """Raises `ConfigurationError` where the applied migrations differ from the files."""
    ours = {migration.name: migration.sha256 for migration in migrations}
    for name, digest in known.items():
        if ours.get(name, digest) != digest:
            raise ConfigurationError(
                f"migration {name} was changed after it was applied to {schema}; restore it and add a new "
                "file"
            )


def _refuse_newer(schema: str, applied: dict[str, str], migrations: list[Migration]) -> None:
    """Raises `ConfigurationError` where a file that is unknown here needs a later version."""
    unknown = {name: needs for name, needs in applied.items() if name not in {m.name for m in migrations}}
    for name, needs in unknown.items():
        if is_newer(needs):
            raise ConfigurationError(
                f"{schema} was migrated by a newer version ({name}): it needs Penstock {needs} or later, "
                f"and this is {__version__}"
            )
    if unknown:
        logger.info("%s has additions of a newer version: %s", schema, ", ".join(unknown))
