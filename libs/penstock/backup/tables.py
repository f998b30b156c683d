"""Copy of the services' Postgres tables as of one moment, and back into an empty database.

Rows go out and in as Postgres's own text format, so a copy needs no other program and fits any release of the
server. The schemas are made by the migrations that the copy names: a service of a newer version applies its
further ones when it starts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from gzip import GzipFile
from pathlib import Path

import asyncpg

from penstock.backup.manifest import TABLES, CopiedSchema, CopiedTable, packing
from penstock.errors import ConfigurationError, StoreError
from penstock.local.postgres_setup import schemas
from penstock.runtime.database.database_roles import CONNECT_TIMEOUT_S
from penstock.runtime.database.migrations import Migration, load_migrations, migrate

CHUNK_BYTES = 1 << 20  # unpacked at once: memory stays bounded
_COLUMNS = """
SELECT c.relname AS name, array_agg(quote_ident(a.attname) ORDER BY a.attnum) AS columns
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = to_regnamespace($1) AND c.relkind = 'r' AND c.relname <> 'migrations'
GROUP BY c.relname ORDER BY c.relname
"""


@asynccontextmanager
async def database(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection. Converts Postgres's errors into `StoreError`."""
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
        try:
            yield connection
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)
    except asyncpg.InsufficientPrivilegeError as error:
        raise StoreError(f"{error}: give an administrator's URL as PENSTOCK_DSN") from error
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"Postgres: {error or type(error).__name__}") from error


@asynccontextmanager
async def one_moment(connection: asyncpg.Connection) -> AsyncIterator[None]:
    """A transaction that sees all tables as they are now."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await connection.execute("SELECT 1")  # the first statement fixes the moment
        yield


async def copy_out(connection: asyncpg.Connection, cell: str, copy: Path) -> list[CopiedSchema]:
    """Copies the tables of the cell's services, inside `one_moment`."""
    (copy / TABLES).mkdir()
    found = []
    for service, schema in schemas(cell).items():
        tables = await connection.fetch(_COLUMNS, schema)
        if await connection.fetchval("SELECT to_regclass($1) IS NULL", f"{schema}.migrations"):
            continue  # this service has never run here
        applied = await connection.fetch(f"SELECT name FROM {schema}.migrations ORDER BY name")
        copied = [await _table_out(connection, schema, row["name"], row["columns"], copy) for row in tables]
        found.append(CopiedSchema(service, schema, tuple(row["name"] for row in applied), tuple(copied)))
    return found


async def _table_out(
    connection: asyncpg.Connection, schema: str, table: str, columns: list[str], copy: Path
) -> CopiedTable:
    file = f"{TABLES}/{schema}.{table}.gz"
    with packing(copy / file) as packed:

        async def write(data: bytes) -> None:
            packed.write(data)

        query = f"SELECT {', '.join(columns)} FROM {schema}.{table}"
        done = await connection.copy_from_query(query, output=write, format="text")
    return CopiedTable(table, tuple(columns), int(done.rpartition(" ")[2]), file, packed.sha256)


async def check_empty(connection: asyncpg.Connection, copied: CopiedSchema) -> None:
    """Raises `ConfigurationError` where one of the copied tables has rows here."""
    for table in copied.tables:
        name = f"{copied.name}.{table.name}"
        if await connection.fetchval("SELECT to_regclass($1) IS NULL", name):
            continue
        if await connection.fetchval(f"SELECT EXISTS (SELECT FROM {name})"):
            raise ConfigurationError(
                f"PENSTOCK_DSN: {name} has rows, and nothing was changed; give a new database, or drop the "
                f"schema {copied.name}"
            )


def migrations_of(copied: CopiedSchema) -> list[Migration]:
    """The copied schema's migrations. Raises `ConfigurationError` where a newer version made the copy."""
    known = load_migrations(f"penstock_services.{copied.service}.migrations")
    if tuple(migration.name for migration in known[: len(copied.migrations)]) != copied.migrations:
        raise ConfigurationError(
            f"the copy of {copied.name} has migration {copied.migrations[-1]}, which this version does not "
            "know: restore it with the version that made it, or a newer one"
        )
    return known[: len(copied.migrations)]


async def copy_back(
    connection: asyncpg.Connection, copied: CopiedSchema, copy: Path, counted: Callable[[int], None]
) -> None:
    """Makes the schema and fills its tables, inside the caller's transaction."""
    await migrate(connection, copied.name, migrations_of(copied))
    for table in copied.tables:
        await connection.execute(
            f"DELETE FROM {copied.name}.{table.name}"
        )  # rows that a migration itself made
        done = await connection.copy_to_table(
            table.name,
            schema_name=copied.name,
            columns=[column.strip('"') for column in table.columns],
            source=_unpacked(copy / table.file),
            format="text",
        )
        if (rows := int(done.rpartition(" ")[2])) != table.rows:
            raise StoreError(
                f"{copied.name}.{table.name}: {rows} rows were restored, the copy has {table.rows}"
            )
        counted(rows)


async def _unpacked(path: Path) -> AsyncIterator[bytes]:
    with GzipFile(path) as packed:
        while data := await asyncio.to_thread(packed.read, CHUNK_BYTES):
            yield data
