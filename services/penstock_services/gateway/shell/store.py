"""The gateway's access to Postgres: reads the projector's tables, and writes its own idempotency keys."""

import asyncio
import logging
from datetime import datetime
from typing import Any, NamedTuple, Self

import asyncpg

from penstock.backoff import Backoff
from penstock.errors import StoreError
from penstock.runtime.database.migrations import load_migrations, migrate, schema_of
from penstock_services.gateway.core.cursor import Cursor
from penstock_services.gateway.core.problems import BadField, Problem, invalid

logger = logging.getLogger(__name__)

MIGRATIONS = "penstock_services.gateway.migrations"
CHANNEL = "penstock_projected"  # the projector's; payload `schema:seq`
ROLL_CALL = "penstock_roll_call"  # a gateway has started; payload: the gateways' schema
POOL = 8  # connections; reads are short
TIMEOUT_S = 10.0
KEY_DAYS = 30  # retention of an idempotency key
PRUNE_EVERY_KEYS = 1_000  # keys inserted between two removals of old ones; at least one removal per start
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0

OUTAGES = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InternalClientError,
)


class Key(NamedTuple):
    """The entry of an idempotency key."""

    spec_sha256: str
    job_id: str
    appended: bool
    fresh: bool
    """Inserted by this very call."""


def gateway_schema(cell: str) -> str:
    """Schema of the idempotency keys and standing connections, beside the cell's read models."""
    return f"{schema_of(cell)[:50]}_gateway"


class Store:
    """One pool, and one connection that is notified of the projector's progress."""

    def __init__(self, dsn: str, cell: str, log_url: str) -> None:
        self._dsn = dsn
        self._cell = cell
        # Where log and keys share one database, a durable append makes every commit before it durable.
        self._commit = "off" if log_url == dsn else "on"
        self.schema = schema_of(cell)
        self._own = gateway_schema(cell)
        self._prune_keys = (
            f"DELETE FROM {self._own}.idempotency WHERE created_at < now() - make_interval(days => $1)"
        )
        self._entered = 0
        self._pool: asyncpg.Pool | None = None
        self._listener: asyncpg.Connection | None = None
        self._listening: asyncio.Task[None] | None = None
        self._standing: set[str] = set()
        """Standing connections of nodes to this gateway."""
        self._answering: set[asyncio.Future[None]] = set()
        self.projected_seq = 0
        self._projected = asyncio.Event()

    async def start(self) -> Self:
        """Migrates the gateway's own tables and connects. Raises `StoreError`."""
        try:
            connection = await asyncpg.connect(self._dsn, timeout=TIMEOUT_S)
            try:
                await migrate(connection, self._own, load_migrations(MIGRATIONS))
                await connection.execute(self._prune_keys, KEY_DAYS)
            finally:
                await connection.close()
            self._pool = await asyncpg.create_pool(
                self._dsn,
                min_size=1,
                max_size=POOL,
                command_timeout=TIMEOUT_S,
                server_settings={
                    "search_path": self.schema,
                    "application_name": "penstock gateway",
                    "synchronous_commit": self._commit,
                    "jit": "off",
                },
            )
        except (*OUTAGES, asyncpg.PostgresError) as error:
            raise StoreError(f"Postgres cannot be used: {error}") from error
        self._listening = asyncio.create_task(self._listen(), name="gateway listens")
        return self

    async def close(self) -> None:
        """Idempotent."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        if self._listener is not None and not self._listener.is_closed():
            self._listener.terminate()
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None
        self._set_projected(self.projected_seq)

    @property
    def pool(self) -> asyncpg.Pool:
        assert self._pool is not None, "not started"
        return self._pool

    # ------------------------------------------------------------------------- position of the tables

    async def _listen(self) -> None:
        """Holds one listening connection; after each (re)connection the position is read once."""
        backoff = Backoff(FIRST_RETRY_S, MAX_RETRY_S)
        while True:
            lost = asyncio.Event()
            try:
                listener = self._listener = await asyncpg.connect(
                    self._dsn, timeout=TIMEOUT_S, server_settings={"search_path": self.schema}
                )
                listener.add_termination_listener(lambda _, lost=lost: lost.set())
                await listener.add_listener(CHANNEL, self._notified)
                await listener.add_listener(ROLL_CALL, self._called)
                await self._answer_roll_call()  # a roll call may have been missed
                try:
                    seq = await listener.fetchval("SELECT seq FROM positions WHERE cell = $1", self._cell)
                    self._set_projected(seq or 0)
                except asyncpg.UndefinedTableError:
                    logger.info("the projector has not run here yet")
                backoff.reset()
                await lost.wait()
            except (*OUTAGES, asyncpg.PostgresError) as error:
                logger.warning("the gateway cannot listen to the projector: %s", error)
            await asyncio.sleep(backoff.next_s())

    def _notified(self, connection: object, pid: int, channel: str, payload: object) -> None:
        schema, _, seq = str(payload).partition(":")
        if schema == self.schema:
            self._set_projected(int(seq))

    def _called(self, connection: object, pid: int, channel: str, payload: object) -> None:
        if payload == self._own:
            answering = asyncio.ensure_future(self._answer_roll_call())
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)

    def _set_projected(self, seq: int) -> None:
        self.projected_seq = seq
        self._projected.set()
        self._projected = asyncio.Event()

    async def projected(self, seq: int, within_s: float) -> bool:
        """Waits until the tables hold everything up to `seq`; False when that takes longer."""
        try:
            async with asyncio.timeout(within_s):
                while self.projected_seq < seq:
                    await self._projected.wait()
        except TimeoutError:
            return False
        return True

    def next_change(self) -> asyncio.Event:
        """Set when the projector has committed again. Take it before reading, so that no change is missed."""
        return self._projected

    # ------------------------------------------------------------------------------------------ reads

    async def fetch(self, query: str, *arguments: Any) -> list[asyncpg.Record]:
        """Raises `Problem`: 503 without Postgres or read models, 400 for a value that no column can hold."""
        try:
            return list(await self.pool.fetch(query, *arguments))
        except asyncpg.UndefinedTableError as error:
            detail = "the read models are not there yet; start the projector"
            raise Problem(503, "no_read_models", detail, retry_after_s=1) from error
        except asyncpg.DataError as error:  # a NUL, or a number beyond 64 bits
            field = BadField("request", str(error)[:256], "ask for a name or number that can exist")
            raise invalid("nothing can have such a name or number", [field]) from error
        except OUTAGES as error:
            raise Problem(503, "store_down", f"Postgres is away: {error}", retry_after_s=2) from error

    async def rows(self, query: str, *arguments: Any) -> list[str]:
        """The query's single column, JSON text per row. Raises `Problem`."""
        return [row[0] for row in await self.fetch(query, *arguments)]

    async def row(self, query: str, *arguments: Any) -> str | None:
        """The first row, or None."""
        found = await self.rows(query, *arguments)
        return found[0] if found else None

    async def with_owners(self, table: str, where: str, *arguments: Any) -> list[asyncpg.Record]:
        """(seq, n, JSON as `found`, `owner` of its job or None) of events or decisions. Raises `Problem`."""
        return await self.fetch(
            f"SELECT seq, n, row_to_json({table})::text AS found, "
            f"(SELECT owner FROM jobs WHERE jobs.job_id = {table}.job_id) AS owner "
            f"FROM {table} WHERE {where}",
            *arguments,
        )

    async def events_after(self, cursor: Cursor, job_id: str | None, limit: int) -> list[asyncpg.Record]:
        """Events of the stream after the cursor, as `with_owners`."""
        job = "AND job_id = $4 " if job_id is not None else ""
        where = f"(seq, n) > ($1, $2) {job}ORDER BY seq, n LIMIT $3"
        return await self.with_owners(
            "events", where, *cursor, limit, *([job_id] if job_id is not None else [])
        )

    # ------------------------------------------------------------------------------- idempotency keys

    async def enter_key(self, key: str, spec_sha256: str, job_id: str) -> Key:
        """Inserts the key, or returns the existing entry. Raises `Problem` 503."""
        table = f"{self._own}.idempotency"
        known = f"SELECT spec_sha256, job_id, appended, false FROM {table} WHERE key = $1"
        rows = await self.fetch(
            f"WITH entered AS (INSERT INTO {table} (key, spec_sha256, job_id) "
            "VALUES ($1, $2, $3) ON CONFLICT (key) DO NOTHING RETURNING spec_sha256, job_id, appended) "
            f"SELECT *, true AS fresh FROM entered UNION ALL {known}",
            key,
            spec_sha256,
            job_id,
        )  # empty: inserted by another request between the two halves of the statement
        self._entered += 1
        if self._entered % PRUNE_EVERY_KEYS == 0:
            await self.fetch(self._prune_keys, KEY_DAYS)
        return Key(*(rows or await self.fetch(known, key))[0])

    async def mark_appended(self, key: str) -> None:
        """The submission is in the log. An outage is harmless: a repeat then appends the same event again."""
        try:
            await self.pool.execute(f"UPDATE {self._own}.idempotency SET appended = true WHERE key = $1", key)
        except OUTAGES as error:
            logger.warning("an idempotency key could not be marked: %s", error)

    # --------------------------------------------------------------------------- standing connections

    async def enter_connection(self, node_id: str, connection_id: str) -> bool:
        """Records this as the node's latest connection to any gateway of the cell.
        False where Postgres is down."""
        self._standing.add(connection_id)
        return await self._noted(
            f"INSERT INTO {self._own}.connections (node_id, connection_id) VALUES ($1, $2) ON CONFLICT "
            "(node_id) DO UPDATE SET connection_id = excluded.connection_id, seen_at = excluded.seen_at",
            node_id,
            connection_id,
        )

    async def is_latest_connection(self, node_id: str, connection_id: str) -> bool:
        """Whether no gateway has had another connection, or a goodbye, since. True where Postgres is down."""
        query = f"SELECT connection_id FROM {self._own}.connections WHERE node_id = $1"
        try:
            return bool(await self.pool.fetchval(query, node_id) == connection_id)
        except OUTAGES as error:
            logger.warning("standing connections cannot be looked up: %s", error)
            return True

    def lost_connection(self, connection_id: str) -> None:
        """It has ended; its entry stays until it is removed or replaced."""
        self._standing.discard(connection_id)

    async def remove_connection(self, node_id: str, connection_id: str | None = None) -> None:
        """Removes the entry: the node's reporter has ended regularly,
        or this connection's break is reported."""
        await self._noted(
            f"DELETE FROM {self._own}.connections WHERE node_id = $1 AND connection_id = coalesce($2, "
            "connection_id)",
            node_id,
            connection_id,
        )

    async def call_roll(self) -> tuple[datetime, int]:
        """Asks all gateways for their connections. Returns the time by Postgres' clock, and the number of
        entries. Raises `Problem`."""
        [row] = await self.fetch(
            f"SELECT now(), (SELECT count(*) FROM {self._own}.connections) FROM pg_notify($1, $2)",
            ROLL_CALL,
            self._own,
        )
        return row[0], row[1]

    async def unanswered_since(self, moment: datetime) -> list[tuple[str, str]]:
        """(node, connection) that no gateway has claimed since. Raises `Problem`."""
        query = f"SELECT node_id, connection_id FROM {self._own}.connections WHERE seen_at < $1"
        return [(row[0], row[1]) for row in await self.fetch(query, moment)]

    async def _answer_roll_call(self) -> None:
        query = f"UPDATE {self._own}.connections SET seen_at = now() WHERE connection_id = ANY($1)"
        if self._standing:
            await self._noted(query, list(self._standing))

    async def _noted(self, query: str, *arguments: Any) -> bool:
        try:
            await self.pool.execute(query, *arguments)
        except OUTAGES as error:
            logger.warning("a standing connection cannot be entered: %s", error)
            return False
        return True
