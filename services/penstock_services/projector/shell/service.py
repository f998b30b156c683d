"""Main loop of the projector service: reads the ledger's partition, folds, writes rows and position together,
takes snapshots.

Any failure drops the fold and starts again from the stored position (crash-only). A second projector on the
same cell loses the compare-and-set and pauses; the tables are the same whichever writes them.
"""

import asyncio
import logging

import asyncpg
from pydantic import Field

from penstock.errors import ConfigurationError, StoreError
from penstock.ledger.record.record import GENESIS, NO_PARENT
from penstock.ledger.replica.replica import Replica
from penstock.log.open import open_log
from penstock.log.port import Log, Partition
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.runtime.crash_only import crash_only
from penstock.runtime.database.migrations import load_migrations, migrate, schema_of
from penstock.runtime.failpoints import hit
from penstock.runtime.following.amended_log import AmendedLog, Repairs
from penstock.runtime.following.snapshots import (
    Until,
    check_beginning,
    head_id_at,
    load_latest,
    save_snapshot,
)
from penstock.runtime.following.state_digests import compare
from penstock.runtime.settings import EnvironmentSettings, Settings
from penstock_services.projector.core.projection import Projection
from penstock_services.projector.shell.store import CONNECT_TIMEOUT_S, Store

logger = logging.getLogger(__name__)

BATCH_MS = 150  # under load rows touched several times within it are written once
SNAPSHOT_RECORDS = 20_000  # between two snapshots; folding so many takes under half a second
MIN_SNAPSHOT_RECORDS = 500  # a clean stop takes none after fewer records
RETAINED_RECORDS = 1_000_000  # records of the ledger whose events stay in the database
REMOVE_EVERY_RECORDS = 10_000  # between two removals of old events and jobs
MAX_REMOVED_JOBS = 200  # after one batch of records: 10 ms of Postgres
ENDED_JOBS_DAYS = 365
DAY_MS = 86_400_000
MIGRATIONS = "penstock_services.projector.migrations"


class ProjectorSettings(EnvironmentSettings):
    """`PENSTOCK_EVENTS_KEPT`: so many ledger records retain their events in the database.
    `PENSTOCK_ENDED_JOBS_DAYS`: retention of ended jobs there, with their tasks and decisions; longer than
    that of an idempotency key, which looks them up."""

    events_kept: int = Field(RETAINED_RECORDS, ge=1, title="give a number above 0")
    ended_jobs_days: int = Field(ENDED_JOBS_DAYS, ge=31, title="give 31 or more")


async def prepare_schema(dsn: str, schema: str) -> None:
    """Migrates the schema. Raises `StoreError`, or `ConfigurationError` when Postgres cannot be reached."""
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"Postgres cannot be reached: {error}") from error
    try:
        for name in await migrate(connection, schema, load_migrations(MIGRATIONS)):
            logger.info("applied migration %s to %s", name, schema)
    finally:
        await connection.close()


class Projector:
    """One cell's projector."""

    def __init__(self, settings: Settings, log: Log, ready: asyncio.Event) -> None:
        self._settings = settings
        self._log = log
        self._ready = ready
        self._dsn = settings.need_dsn("the projector")
        self._schema = schema_of(settings.cell)
        self._ledger = Partition(Topic.LEDGER, settings.cell_index)
        retention = ProjectorSettings.from_env()
        self._retained = retention.events_kept
        self._ended_jobs_ms = retention.ended_jobs_days * DAY_MS

    async def attempt(self) -> None:
        """From the stored position on, until cancelled or until something fails."""
        await prepare_schema(self._dsn, self._schema)
        store = await Store.open(self._dsn, self._schema, self._settings.cell)
        try:
            replica = await self._recover(store)
            self._ready.set()
            await self._follow(store, Projection(replica))
        finally:
            await store.close()

    async def _recover(self, store: Store) -> Replica:
        """The fold as it was at the stored position, from a snapshot and the ledger after it."""
        offset, head, head_offset = await store.position()
        await check_beginning(self._log, self._ledger, max(0, head_offset))
        end = (await self._log.end_offsets([self._ledger]))[self._ledger]
        found = NO_PARENT if head == GENESIS else await head_id_at(self._log, self._ledger, head_offset)
        if found != head.id or end < offset:
            raise ConfigurationError(
                f"the read models in {self._schema} stand at record {head.seq} ({head.id}), but at its "
                f"offset {head_offset} this log, which ends at {end}, has {found or 'no record'}: they "
                "belong to another log. Give each log its own database, or run `penstock projections "
                "rebuild`"
            )
        replica = await load_latest(
            store.connection,
            self._settings.cell,
            self._log,
            self._ledger,
            Until(offset=offset),
            self._schema,
        )
        reader = self._log.reader({self._ledger: replica.offset})
        try:
            while replica.offset < offset:
                for record in await reader.read(max_records=min(2_000, offset - replica.offset)):
                    if record.offset < offset:
                        replica.take(record.value, record.offset)
                    replica.offset = min(record.offset + 1, offset)
        finally:
            await reader.close()
        return replica

    async def _follow(self, store: Store, projection: Projection) -> None:
        replica = projection.replica
        saved_seq = removed_seq = replica.head.seq
        old_jobs = True  # whether there may be some; the first batch checks
        reader = self._log.reader({self._ledger: replica.offset}, batch_ms=BATCH_MS)
        try:
            while True:
                expected = replica.offset
                records = await reader.read()
                hit("projector.batch_read")
                for record in records:
                    taken = projection.take(record.value, record.offset)
                    if taken is not None:
                        await compare(self._log, "projector", replica.state, taken, record)
                hit("projector.before_commit")
                await store.apply(replica, expected, projection.drain())
                hit("projector.after_commit")
                if replica.head.seq - saved_seq >= SNAPSHOT_RECORDS:
                    saved_seq = replica.head.seq
                    await save_snapshot(store.connection, self._settings.cell, replica, schema=self._schema)
                if replica.head.seq - removed_seq >= REMOVE_EVERY_RECORDS:
                    removed_seq = replica.head.seq
                    await store.remove_events(replica.head.seq - self._retained)
                    old_jobs = True
                if old_jobs:
                    old_jobs = await store.remove_jobs(
                        replica.state.now_ms - self._ended_jobs_ms, MAX_REMOVED_JOBS
                    )
        except asyncio.CancelledError:
            await self._snapshot_on_stop(store, replica, saved_seq)
            raise
        finally:
            await reader.close()

    async def _snapshot_on_stop(self, store: Store, replica: Replica, saved_seq: int) -> None:
        """A clean stop spares the next start its replay,
        unless the fold is ahead of the committed position."""
        if store.connection.is_closed() or replica.head.seq - saved_seq < MIN_SNAPSHOT_RECORDS:
            return
        try:
            _, head, _ = await store.position()
            if head == replica.head:
                await save_snapshot(store.connection, self._settings.cell, replica, schema=self._schema)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            logger.warning("no snapshot at this stop: %s", error)


async def run(
    settings: Settings, stop: asyncio.Event, *, log: Log | None = None, ready: asyncio.Event | None = None
) -> None:
    """The projector service until `stop`; see penstock.runtime.service."""
    settings.need_dsn("the projector")
    shared = log is not None
    log = AmendedLog.over(
        log if log is not None else await open_log(settings.log_url, "projector", settings.archive).start()
    )
    try:
        await log.create(dict.fromkeys(CELL_TOPICS, settings.cell_index + 1))
        ready = ready or asyncio.Event()
        projector, repairs = Projector(settings, log, ready), Repairs("projector", log, settings.cell_index)
        await crash_only("projector", lambda: repairs.attempt(projector.attempt, ready), stop)
    finally:
        if not shared:
            await log.close()
