"""Read models in Postgres: one statement per batch writes all rows and moves the position.

The statement begins with a compare-and-set of the position. Of two projectors only one can match it; the
other writes nothing at all and raises `Superseded`.

Commits do not wait for the disk (`synchronous_commit=off`): position and rows are lost together, if at all,
and then projected again from the ledger, which does wait.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

import asyncpg
import orjson

from penstock.errors import StoreError
from penstock.ledger.record.record import Head
from penstock.ledger.replica.replica import Replica
from penstock.ledger.views import Row
from penstock_services.projector.core.projection import JOB_CHANGES, Batch

CHANNEL = "penstock_projected"  # payload: `schema:seq` of the new position
CONNECT_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 60.0  # one batch; an fsync on an overloaded disk can take seconds

# Table → its key; rows of these tables replace older ones.
REPLACED = {"jobs": "job_id", "tasks": "task_id", "nodes": "node_id", "gpus": "node_id, gpu"}
APPENDED = ("decisions", "events")

REMOVE_UNTIL = """
SELECT max(ended_ms) FROM (SELECT ended_ms FROM jobs WHERE ended_ms < $1 ORDER BY ended_ms LIMIT $2) AS oldest
"""
REMOVE_JOBS = """
WITH gone AS (DELETE FROM jobs WHERE ended_ms <= $1 RETURNING job_id),
their_tasks AS (DELETE FROM tasks USING gone WHERE tasks.job_id = gone.job_id),
their_decisions AS (DELETE FROM decisions USING gone WHERE decisions.job_id = gone.job_id),
other_decisions AS (DELETE FROM decisions WHERE job_id IS NULL AND at_ms <= $1),
noted AS (UPDATE positions SET forgotten_ms = greatest(forgotten_ms, $1) WHERE cell = $2)
SELECT count(*) FROM gone
"""

LARGEST: Mapping[str, int] = MappingProxyType(
    {
        kind + array: (1 << bits) - 1
        for kind, bits in (("smallint", 15), ("integer", 31), ("bigint", 63))
        for array in ("", "[]")
    }
)
"""Type of a column → the largest number that it holds; events may hold larger ones."""

NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")  # an escaped NUL without a further backslash before it


class Superseded(StoreError):
    """Another projector has moved the position."""


Columns = dict[str, dict[str, str]]
"""Table → its columns, in their order → their SQL types."""

Bounds = dict[str, int]
"""Column of whole numbers → the largest that it holds."""


def _bounds(columns: Mapping[str, str]) -> Bounds:
    return {name: LARGEST[kind] for name, kind in columns.items() if kind in LARGEST}


def _saturate(rows: Sequence[Row], bounds: Bounds) -> None:
    """Puts the nearest number that its column holds in place of each that lies outside; the event has the
    number itself."""
    for row in rows:
        for name, largest in bounds.items():
            value = row[name]
            if value is None:
                continue
            if isinstance(value, int):
                if not -largest <= value <= largest:
                    row[name] = _within(value, largest)
            elif any(not -largest <= number <= largest for number in value):
                row[name] = [_within(number, largest) for number in value]


def _within(number: int, largest: int) -> int:
    return max(-largest, min(number, largest))


def _statement(columns: Columns) -> str:
    """The one statement of a batch. Parameters: $1 cell, $2 … $9 the new position, $10 the expected offset,
    then one JSON array for each of `REPLACED`, for `job_changes`, `shrunk` and `forgotten`, then one array
    for each column of each of `APPENDED`: most rows are theirs, and arrays spare Postgres the parsing."""
    parts = [
        "moved AS (UPDATE positions SET next_offset = $2, seq = $3, head_id = $4, term = $5, now_ms = $6, "
        "frozen = $7, head_offset = $8, epoch = $9 WHERE cell = $1 AND next_offset = $10 RETURNING cell)"
    ]
    number = count(11)
    for table, key in REPLACED.items():
        names = ", ".join(columns[table])
        news = ", ".join(f"excluded.{name}" for name in columns[table])
        parts.append(
            f"put_{table} AS (INSERT INTO {table} ({names}) SELECT "
            f"{', '.join('r.' + name for name in columns[table])} "
            f"FROM moved, json_populate_recordset(NULL::{table}, ${next(number)}::json) AS r "
            f"ON CONFLICT ({key}) DO UPDATE SET ({names}) = ROW({news}))"
        )
    parts.append(
        f"changed_jobs AS (UPDATE jobs SET ({', '.join(JOB_CHANGES)}) = "
        f"ROW({', '.join('r.' + n for n in JOB_CHANGES)}) "
        f"FROM moved, json_populate_recordset(NULL::jobs, ${next(number)}::json) AS r WHERE jobs.job_id = "
        "r.job_id)"
    )
    parts.append(
        "shrunk AS (DELETE FROM gpus USING moved, json_populate_recordset(NULL::gpus, "
        f"${next(number)}::json) AS r "
        "WHERE gpus.node_id = r.node_id AND gpus.gpu >= r.gpu)"
    )
    parts.append(
        "forgotten AS (DELETE FROM nodes USING moved, json_populate_recordset(NULL::nodes, "
        f"${next(number)}::json) AS r "
        "WHERE nodes.node_id = r.node_id)"
    )
    for table in APPENDED:
        names = ", ".join(columns[table])
        arrays = ", ".join(f"${next(number)}::{kind}[]" for kind in columns[table].values())
        parts.append(
            f"put_{table} AS (INSERT INTO {table} ({names}) SELECT "
            f"{', '.join('r.' + name for name in columns[table])} "
            f"FROM moved, unnest({arrays}) AS r({names}))"
        )
    return (
        "WITH "
        + ",\n".join(parts)
        + f"\nSELECT pg_notify('{CHANNEL}', current_schema() || ':' || $3::bigint::text) FROM moved"
    )


async def _columns(connection: asyncpg.Connection, schema: str) -> Columns:
    """Of all tables of a batch. From the catalog itself: `information_schema` costs the server's process 2
    MiB permanently."""
    tables = (*REPLACED, *APPENDED)
    rows = await connection.fetch(
        "SELECT relname, attname, format_type(atttypid, NULL) AS kind FROM pg_class JOIN pg_attribute ON "
        "attrelid = pg_class.oid WHERE relnamespace = to_regnamespace($1) AND relname = ANY($2::text[]) AND "
        "attnum > 0 AND NOT attisdropped ORDER BY attnum",
        schema,
        tables,
    )
    found: Columns = {table: {} for table in tables}
    for table, column, kind in rows:
        found[table][column] = kind
    return found


class Store:
    """One projector's connection to its schema."""

    def __init__(self, connection: asyncpg.Connection, schema: str, cell: str) -> None:
        self.connection = connection
        self.schema = schema
        self._cell = cell
        self._apply = ""
        self._columns: Columns = {}
        self._bounds: dict[str, Bounds] = {}

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
        """On a connection whose search path is the migrated schema; inserts the cell's first position."""
        store = cls(connection, schema, cell)
        await connection.execute(
            "INSERT INTO positions VALUES ($1, 0, 0, $2, 0, 0, '', -1, 0) ON CONFLICT (cell) DO NOTHING",
            cell,
            "0" * 32,
        )
        store._use(await _columns(connection, schema))
        return store

    def _use(self, columns: Columns) -> None:
        self._columns, self._apply = columns, _statement(columns)
        self._bounds = {table: _bounds(found) for table, found in columns.items()}
        jobs = self._bounds["jobs"]
        self._bounds["job_changes"] = {name: jobs[name] for name in JOB_CHANGES if name in jobs}

    def _leave_out_unknown(self, batch: Batch) -> None:
        """Columns that a later version added have their defaults (`penstock.runtime.database.migrations`)."""
        unknown = {
            table: self._columns[table].keys() - batch[table][0].keys()
            for table in (*REPLACED, *APPENDED)
            if batch[table] and len(batch[table][0]) < len(self._columns[table])
        }
        if any(unknown.values()):
            self._use(
                {
                    table: {name: kind for name, kind in found.items() if name not in unknown.get(table, ())}
                    for table, found in self._columns.items()
                }
            )

    async def position(self) -> tuple[int, Head, int]:
        """(ledger offset to read next, head, offset of the head's record)."""
        row = await self.connection.fetchrow("SELECT * FROM positions WHERE cell = $1", self._cell)
        return row["next_offset"], Head(row["seq"], row["head_id"], row["term"]), row["head_offset"]

    async def apply(self, replica: Replica, expected_offset: int, batch: Batch) -> None:
        """Position and effect in one transaction. Raises `Superseded`, `StoreError`."""
        state, head = replica.state, replica.head
        self._leave_out_unknown(batch)
        for table, bounds in self._bounds.items():
            _saturate(batch[table], bounds)
        rows: list[Any] = [_json(batch[table]) for table in (*REPLACED, "job_changes", "shrunk", "forgotten")]
        for table in APPENDED:
            for name, kind in self._columns[table].items():
                values = [row[name] for row in batch[table]]
                rows.append([_text(value) for value in values] if kind == "json" else values)
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
                replica.head_offset,
                state.epoch,
                expected_offset,
                *rows,
            )
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            raise StoreError(f"the batch up to seq {head.seq} was not written: {error}") from error
        if moved is None:
            raise Superseded(f"offset {expected_offset} has been projected by another projector")

    async def remove_events(self, before_seq: int) -> None:
        """Removes events of records before `before_seq` (bounded retention)."""
        await self.connection.execute("DELETE FROM events WHERE seq < $1", before_seq)

    async def remove_jobs(self, before_ms: int, limit: int) -> bool:
        """Removes about `limit` of the jobs that ended before this time of the ledger, oldest first, with
        their tasks and decisions, and decisions without a job; returns whether more are left."""
        until_ms = await self.connection.fetchval(REMOVE_UNTIL, before_ms, limit)
        if until_ms is None:
            return False
        forgotten = await self.connection.fetchval(REMOVE_JOBS, until_ms, self._cell)
        return bool(forgotten >= limit)

    async def close(self) -> None:
        """Idempotent."""
        if not self.connection.is_closed():
            await self.connection.close(timeout=CONNECT_TIMEOUT_S)


def _json(rows: Any) -> str:
    """JSON, such as an array of rows.
    Postgres' text cannot hold NUL: it becomes the replacement character."""
    raw = orjson.dumps(rows)
    if b"\\u0000" in raw:
        raw = NUL.sub(rb"\1\\ufffd", raw)
    return raw.decode()


def _text(value: Any) -> str | None:
    return None if value is None else _json(value)
