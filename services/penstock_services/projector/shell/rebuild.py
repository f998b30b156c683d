"""`verify` and `rebuild`: the whole ledger projected once more, beside the tables, in one transaction.

Ideal: the tables are compared with the ledger at one point in time. That holds: the transaction sees the
tables as of its first statement, their position included, and the ledger up to that position never changes.
Writes of `verify` are never committed, so a crash leaves nothing behind.
"""

import logging
from collections.abc import Mapping
from typing import Any

import asyncpg

from penstock.errors import LogError, StoreError
from penstock.ledger.record.record import GENESIS
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Partition
from penstock.model.schema.topics import Topic
from penstock.runtime.database.migrations import load_migrations, schema_of
from penstock.runtime.following.snapshots import check_beginning, save_snapshot
from penstock.runtime.settings import Settings
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell.store import CONNECT_TIMEOUT_S, REMOVE_JOBS, REPLACED, Store

logger = logging.getLogger(__name__)

MIGRATIONS = "penstock_services.projector.migrations"
KEYS: Mapping[str, str] = {**REPLACED, "decisions": "seq, n", "events": "seq, n", "positions": "cell"}
SHOWN = 10  # differences per table in the answer
READ_TIMEOUT_MS = 30_000  # the records exist; a log that returns none for so long is broken


async def verify(settings: Settings, log: Log) -> dict[str, Any]:
    """Compares every row. `{"ok", "seq", "records", "tables": {name: rows}, "differences": [...],
    "different": n}`.

    A difference is `{"table", "key", "stored", "replayed"}`; None where a row is missing. Raises
    `StoreError`.
    """
    schema = schema_of(settings.cell)
    connection = await _connect(settings)
    try:
        transaction = connection.transaction(isolation="repeatable_read")
        await transaction.start()
        try:
            offset, seq = await _stored_position(connection, schema, settings.cell)
            side = f"{schema[:48]}_verify"
            store, replica = await _project(connection, side, settings, log, offset)
            forgotten_ms = await _remove_as(connection, schema, side, settings.cell)
            found: dict[str, Any] = {
                "ok": True,
                "seq": seq,
                "records": offset,
                "tables": {},
                "differences": [],
            }
            found["different"] = 0
            for table, key in KEYS.items():
                await _compare(store, schema, side, table, key, found)
            found["forgotten_ms"] = forgotten_ms
            if replica.head.seq != seq:
                found["ok"] = False
            return found
        finally:
            await transaction.rollback()
    finally:
        await connection.close(timeout=CONNECT_TIMEOUT_S)


async def rebuild(settings: Settings, log: Log) -> dict[str, Any]:
    """Rebuilds every table from the ledger, in one transaction: readers see the old rows, then the new.

    A running projector finds its position moved, and goes on from the new one. Snapshots are taken anew.
    """
    schema = schema_of(settings.cell)
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    connection = await _connect(settings)
    try:
        async with connection.transaction():
            end = (await log.end_offsets([ledger]))[ledger]
            side = f"{schema[:48]}_rebuild"
            _, replica = await _project(connection, side, settings, log, end)
            # First of all its tables: a projector that waits here holds no lock that this transaction needs.
            await connection.execute(f"LOCK TABLE {schema}.positions IN ACCESS EXCLUSIVE MODE")
            counts: dict[str, int] = {}
            await connection.execute(f"TRUNCATE {', '.join(f'{schema}.{table}' for table in KEYS)}")
            for table in KEYS:
                done = await connection.execute(f"INSERT INTO {schema}.{table} SELECT * FROM {side}.{table}")
                counts[table] = int(done.rpartition(" ")[2])
            await connection.execute(f"DELETE FROM {schema}.snapshots WHERE cell = $1", settings.cell)
            if replica.head != GENESIS:
                await save_snapshot(connection, settings.cell, replica, schema=schema)
            await connection.execute(f"DROP SCHEMA {side} CASCADE")
            await connection.execute(
                "SELECT pg_notify('penstock_projected', $1)", f"{schema}:{replica.head.seq}"
            )
        return {"ok": True, "seq": replica.head.seq, "records": end, "tables": counts}
    finally:
        await connection.close(timeout=CONNECT_TIMEOUT_S)


async def _connect(settings: Settings) -> asyncpg.Connection:
    try:
        return await asyncpg.connect(settings.need_dsn("the projector"), timeout=CONNECT_TIMEOUT_S)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"Postgres cannot be reached: {error}") from error


async def _stored_position(connection: asyncpg.Connection, schema: str, cell: str) -> tuple[int, int]:
    """(offset, seq); raises `StoreError` when there is nothing to verify."""
    try:
        row = await connection.fetchrow(
            f"SELECT next_offset, seq FROM {schema}.positions WHERE cell = $1", cell
        )
    except asyncpg.UndefinedTableError as error:
        raise StoreError(f"there are no read models in {schema}; start the projector first") from error
    if row is None:
        raise StoreError(f"the read models in {schema} are of no cell yet; start the projector first")
    return row["next_offset"], row["seq"]


async def _project(
    connection: asyncpg.Connection, side: str, settings: Settings, log: Log, end: int
) -> tuple[Store, Replica]:
    """Fills a new schema from the ledger's records below offset `end`, inside the caller's transaction."""
    try:
        await connection.execute(f"CREATE SCHEMA {side}")
    except asyncpg.InsufficientPrivilegeError as error:
        raise StoreError(f"{error}: give an administrator's URL as PENSTOCK_DSN") from error
    await connection.execute(f"SET LOCAL search_path TO {side}")
    for migration in load_migrations(MIGRATIONS):
        await connection.execute(migration.sql)
    store = await Store.prepare(connection, side, settings.cell)
    projection = Projection(Replica())
    replica = projection.replica
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    await check_beginning(log, ledger, 0)
    reader = log.reader({ledger: 0})
    try:
        while replica.offset < end:
            expected = replica.offset
            records = await reader.read(timeout_ms=READ_TIMEOUT_MS)
            if not records:
                raise LogError(f"the ledger shows no record at offset {expected}, although it ends at {end}")
            for record in records:
                if record.offset < end:
                    projection.take(record.value, record.offset)
            await store.apply(replica, expected, projection.drain())
    finally:
        await reader.close()
    return store, replica


async def _remove_as(connection: asyncpg.Connection, live: str, side: str, cell: str) -> int:
    """Removes the same old rows as the read models;
    returns up to when, in ms of the ledger's time, 0: none."""
    query = f"SELECT forgotten_ms FROM {live}.positions WHERE cell = $1"
    forgotten_ms: int = await connection.fetchval(query, cell)
    await connection.execute(f"SET LOCAL search_path TO {side}")
    await connection.fetchval(REMOVE_JOBS, forgotten_ms, cell)
    return forgotten_ms


async def _compare(store: Store, live: str, side: str, table: str, key: str, found: dict[str, Any]) -> None:
    """Adds one table's row count and differences to `found`."""
    connection = store.connection
    names = [name.strip() for name in key.split(",")]
    retained = ""
    if table == "events":  # old ones are removed after a while
        first = await connection.fetchval(f"SELECT min(seq) FROM {live}.events")
        retained = f" WHERE seq >= {first or 0}"
    query = (
        f"SELECT row_to_json(s)::text AS stored, row_to_json(r)::text AS replayed, "
        f"{' || $$.$$ || '.join(f'coalesce(s.{name}, r.{name})::text' for name in names)} AS key "
        f"FROM (SELECT * FROM {live}.{table}{retained}) AS s FULL JOIN (SELECT * FROM "
        f"{side}.{table}{retained}) AS r "
        f"USING ({key}) WHERE row_to_json(s)::text IS DISTINCT FROM row_to_json(r)::text"
    )
    found["tables"][table] = await connection.fetchval(f"SELECT count(*) FROM {live}.{table}")
    different = await connection.fetch(f"SELECT * FROM ({query}) AS d ORDER BY key LIMIT {SHOWN}")
    if different:
        found["ok"] = False
        found["different"] += await connection.fetchval(f"SELECT count(*) FROM ({query}) AS d")
        found["differences"] += [
            {"table": table, "key": row["key"], "stored": row["stored"], "replayed": row["replayed"]}
            for row in different
        ]
