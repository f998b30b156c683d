"""The read models in Postgres: one statement per batch writes all rows and moves the position (speed.md rule 7).

The statement begins with a compare-and-set of the position. Of two projectors only one can match it; the other
writes nothing at all and learns that it was overtaken.

Commits do not wait for the disk (`synchronous_commit=off`): position and rows are lost together, if at all, and
then projected again from the ledger, which does wait.
"""

import re
from typing import Any

import asyncpg
import orjson

from penstock.errors import StoreError
from penstock.ledger.record import Head
from penstock.ledger.replica import Replica
from penstock_services.projector.core.projection import Batch

CHANNEL = "penstock_projected"  # payload: `schema:seq` of the new position
CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 60.0  # one batch; an fsync on a struggling disk can take seconds

# Table → its key; rows of these tables replace older ones.
REPLACED = {"jobs": "job_id", "tasks": "task_id", "nodes": "node_id", "gpus": "node_id, gpu"}
APPENDED = ("decisions", "events")

NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")  # an escaped NUL that is not itself behind a backslash


class Overtaken(StoreError):
    """Another projector has moved the position."""


def _statement(columns: dict[str, list[str]]) -> str:
    """The one statement of a batch. Parameters: $1 cell, $2 … $7 the new position, $8 the expected offset, then
    one JSON array per table, in the order of `REPLACED`, the GPUs to remove, `APPENDED`."""
    parts = [
        "moved AS (UPDATE positions SET next_offset = $2, seq = $3, head_id = $4, term = $5, now_ms = $6, "
        "frozen = $7 WHERE cell = $1 AND next_offset = $8 RETURNING cell)"
    ]
    number = 9
    for table, key in REPLACED.items():
        names = ", ".join(columns[table])
        news = ", ".join(f"excluded.{name}" for name in columns[table])
        parts.append(
            f"put_{table} AS (INSERT INTO {table} ({names}) SELECT {', '.join('r.' + name for name in columns[table])} "
            f"FROM moved, json_populate_recordset(NULL::{table}, ${number}::json) AS r "
            f"ON CONFLICT ({key}) DO UPDATE SET ({names}) = ROW({news}))"
        )
        number += 1
    parts.append(
        f"shrunk AS (DELETE FROM gpus USING moved, json_populate_recordset(NULL::gpus, ${number}::json) AS r "
        "WHERE gpus.node_id = r.node_id AND gpus.gpu >= r.gpu)"
    )
    for table in APPENDED:
        number += 1
        names = ", ".join(columns[table])
        parts.append(
            f"put_{table} AS (INSERT INTO {table} ({names}) "
            f"SELECT {', '.join('r.' + name for name in columns[table])} "
            f"FROM moved, json_populate_recordset(NULL::{table}, ${number}::json) AS r)"
        )
    return (
        "WITH "
        + ",\n".join(parts)
        + f"\nSELECT pg_notify('{CHANNEL}', current_schema() || ':' || $3::bigint::text) FROM moved"
    )


class Store:
    """One projector's connection to its schema."""

    def __init__(self, connection: asyncpg.Connection, schema: str, cell: str) -> None:
        self.connection = connection
        self.schema = schema
        self._cell = cell
        self._apply = ""

    @classmethod
    async def open(cls, dsn: str, schema: str, cell: str) -> "Store":
        """Connects; the schema must have been migrated. Raises `StoreError`."""
        try:
            connection = await asyncpg.connect(
                dsn,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=COMMAND_TIMEOUT_S,
                server_settings={
                    "search_path": schema,
                    "application_name": "penstock read models",
                    "synchronous_commit": "off",
                    "jit": "off",
                },
            )
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise StoreError(f"Postgres cannot be reached: {error}") from error
        try:
            return await cls.prepare(connection, schema, cell)
        except BaseException:
            connection.terminate()
            raise

    @classmethod
    async def prepare(cls, connection: asyncpg.Connection, schema: str, cell: str) -> "Store":
        """On a connection whose search path is the migrated schema; enters the cell's first position."""
        store = cls(connection, schema, cell)
        await connection.execute(
            "INSERT INTO positions VALUES ($1, 0, 0, $2, 0, 0, '') ON CONFLICT (cell) DO NOTHING",
            cell,
            "0" * 32,
        )
        store._apply = _statement({table: await store.columns(table) for table in (*REPLACED, *APPENDED)})
        return store

    async def columns(self, table: str) -> list[str]:
        """In the table's order."""
        found = await self.connection.fetch(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = $1 AND table_name = $2 "
            "ORDER BY ordinal_position",
            self.schema,
            table,
        )
        return [row["column_name"] for row in found]

    async def position(self) -> tuple[int, Head]:
        """(ledger offset to read next, head)."""
        row = await self.connection.fetchrow("SELECT * FROM positions WHERE cell = $1", self._cell)
        return row["next_offset"], Head(row["seq"], row["head_id"], row["term"])

    async def apply(self, replica: Replica, expected_offset: int, batch: Batch) -> None:
        """Position and effect in one transaction. Raises `Overtaken`, `StoreError`."""
        state, head = replica.state, replica.head
        rows = [_json(batch[table]) for table in (*REPLACED, "shrunk", *APPENDED)]
        try:
            moved = await self.connection.fetchrow(
                self._apply,
                self._cell,
                replica.offset,
                head.seq,
                head.id,
                head.term,
                state.now_ms,
                state.frozen,
                expected_offset,
                *rows,
            )
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            raise StoreError(f"the batch up to seq {head.seq} was not written: {error}") from error
        if moved is None:
            raise Overtaken(f"offset {expected_offset} has been projected by somebody else")

    async def forget_events(self, before_seq: int) -> None:
        """Removes events of records before `before_seq` (bounded retention)."""
        await self.connection.execute("DELETE FROM events WHERE seq < $1", before_seq)

    async def close(self) -> None:
        """Idempotent."""
        if not self.connection.is_closed():
            await self.connection.close(timeout=CONNECT_TIMEOUT_S)


def _json(rows: list[dict[str, Any]]) -> str:
    """The rows as one JSON array. Postgres' text cannot hold NUL: it becomes the replacement character."""
    raw = orjson.dumps(rows)
    if b"\\u0000" in raw:
        raw = NUL.sub(rb"\1\\ufffd", raw)
    return raw.decode()
