"""Message log in Postgres: for one machine, or a few programs that share one database (architecture §5).

Ideal: a write costs its fsync and nothing else. Departures: one round trip for the whole batch over all its
partitions, and a notification. Readers opened on the *same* `EmbeddedLog` get committed records straight from
memory; others are woken by the notification and read them from the table.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import asyncpg

from penstock.backoff import retry
from penstock.errors import AppendFailed, LogError, NotAllowed, OffsetTaken
from penstock.log.group_commit import GroupCommit
from penstock.log.port import Message, Partition, Reader, Record
from penstock.log.postgres.embedded_reader import EmbeddedReader
from penstock.log.postgres.embedded_schema import (
    ADD_PARTITIONS,
    ANY_EXPIRED,
    APPEND,
    BEGINNINGS,
    CHANNEL,
    DELETE_BEFORE,
    EVERYTHING,
    EXPIRE,
    EXPIRE_ALONE,
    HEADS,
    OWN_RIGHTS,
    PARTITIONS,
    READ,
    READ_OWN,
    SOME_HIDDEN,
    VERSION,
    ensure_schema,
    made_by,
    pack_headers,
)
from penstock.log.topic_settings import FOR_EVER, RETENTION_MS

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0  # one attempt; Postgres on the same machine answers within 50 ms
OUTAGE_LIMIT_S = 60.0  # a crash recovery takes seconds; beyond this the log counts as lost
WRITE_BATCH_MS = 4  # under load; a transaction costs 1 ms of CPU besides its records
WRITE_TIMEOUT_S = 30.0  # one batch; an fsync on a struggling disk can take seconds
EXPIRE_EVERY = 20_000  # records appended between two looks for expired ones; at most so many stay too long
EXPIRE_BATCH = 250  # oldest records per partition and transaction; of 32 partitions in 80 ms
DELETE_BATCH = 5_000  # records of one partition and transaction
NOTHING_DELETED = "DELETE 0"
REMEDY = (
    "an administrator runs python -m penstock.local.postgres_setup"  # creates tables, partitions and rights
)
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.02, 1.0

# Errors by which clients see a restarting, recovering or vanished server.
OUTAGES = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InternalClientError,
)


class EmbeddedLog:
    """One connection pair to the log's database: one writes, one listens and reads."""

    conditional = True

    def __init__(self, dsn: str, identity: str) -> None:
        self._dsn = dsn
        self._identity = identity
        self._ids: dict[Partition, int] = {}
        self._names: dict[int, Partition] = {}
        self._ids_lock = asyncio.Lock()
        self._commit = GroupCommit(self._write, name=f"embedded log ({identity})", batch_ms=WRITE_BATCH_MS)
        self._writer: asyncpg.Connection | None = None
        self._writer_pid = 0
        self._listener: asyncpg.Connection | None = None
        self._listener_up = asyncio.Event()
        self._listener_lock = asyncio.Lock()
        self._reconnecting: asyncio.Task[None] | None = None
        self._feeds: dict[Partition, list[EmbeddedReader]] = {}
        self._lost: LogError | None = None
        self._closed = False
        self._expiring: asyncio.Task[None] | None = None
        self._appended = 0
        self._read = READ
        self._expires = False

    async def start(self) -> Self:
        """Connects and creates the tables; raises `LogError` when the database stays away."""
        try:
            self._writer = await self._connect()
            await self._make_tables(self._writer)
            self._writer_pid = self._writer.get_server_pid()
            reads_all, self._expires = await self._writer.fetchrow(OWN_RIGHTS)
            self._read = READ if reads_all else READ_OWN
            await self._listen()
            await self._load_ids()
            self._expire_soon()
        except asyncpg.InsufficientPrivilegeError as error:
            await self.close()
            raise NotAllowed(f"the embedded log refuses {self._identity}: {error}; {REMEDY}") from error
        except (*OUTAGES, asyncpg.PostgresError) as error:
            await self.close()
            raise LogError(f"the embedded log cannot be prepared: {error}") from error
        except BaseException:
            await self.close()
            raise
        return self

    async def create(self, topics: Mapping[str, int]) -> None:
        """Only the owner of the tables may add partitions; where none are missing, none are added."""
        await self._load_ids()
        wanted = {Partition(topic, index) for topic, count in topics.items() for index in range(count)}
        if wanted <= self._ids.keys():
            return
        await self._query(ADD_PARTITIONS, list(topics), list(topics.values()))
        await self._load_ids()

    async def append(self, messages: Sequence[Message]) -> list[int]:
        ids = self._ids
        if self._ids_lock.locked() or any(message.partition not in ids for message in messages):
            await self.partition_ids({message.partition for message in messages})
        return await self._commit.append(messages)

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        reader = EmbeddedReader(self, start, batch_ms=batch_ms)
        for partition in start:
            self._feeds.setdefault(partition, []).append(reader)
        return reader

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        wanted = list(partitions)
        ids = await self.partition_ids(wanted)
        heads = await self.read_heads(ids.values())
        return {partition: heads[ids[partition]] for partition in wanted}

    async def begin_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        wanted = list(partitions)
        ids = await self.partition_ids(wanted)
        first = {row["id"]: row["first"] for row in await self._query(BEGINNINGS, list(ids.values()))}
        return {partition: first[ids[partition]] for partition in wanted}

    async def delete_before(self, offsets: Mapping[Partition, int]) -> None:
        """Deletes in small transactions, oldest records first: a crash leaves no gap."""
        ids = await self.partition_ids(offsets)
        connection = await self._connect(" (archive)")
        try:
            if await connection.fetchval(SOME_HIDDEN):
                raise NotAllowed(
                    f"{self._identity} may not delete records: an administrator's log URL is needed"
                )
            for partition, offset in offsets.items():
                while (
                    await connection.execute(DELETE_BEFORE, ids[partition], offset, DELETE_BATCH)
                    != NOTHING_DELETED
                ):
                    pass
        except asyncpg.InsufficientPrivilegeError as error:
            raise NotAllowed(f"{self._identity} may not delete records: {error}") from error
        except (*OUTAGES, asyncpg.PostgresError) as error:
            raise LogError(f"the embedded log cannot be shortened: {error}") from error
        finally:
            connection.terminate()

    async def close(self) -> None:
        self._closed = True
        await self._commit.close()
        for task in (self._reconnecting, self._expiring):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for connection in (self._writer, self._listener):
            if connection is not None and not connection.is_closed():
                connection.terminate()  # no call waits for what is in flight
        self._writer = self._listener = None
        self._fail(LogError("the log is closed"))

    # --- for readers -------------------------------------------------------------------------------------

    def detach(self, reader: EmbeddedReader, partitions: Iterable[Partition]) -> None:
        """Removes the reader from those that get committed records."""
        for partition in partitions:
            readers = self._feeds.get(partition, [])
            if reader in readers:
                readers.remove(reader)
            if not readers:
                self._feeds.pop(partition, None)

    def raise_if_lost(self) -> None:
        """Raises the `LogError` of an outage that lasts, if there is one."""
        if self._lost is not None:
            raise LogError(*self._lost.args) from self._lost.__cause__

    async def partition_ids(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Row ids; raises `LogError` for a partition that does not exist."""
        wanted = list(partitions)
        async with self._ids_lock:
            if any(partition not in self._ids for partition in wanted):
                await self._load_ids()
        for partition in wanted:
            if partition not in self._ids:
                raise LogError(f"{partition} does not exist: create its topic first")
        return {partition: self._ids[partition] for partition in wanted}

    def name_of(self, partition_id: int) -> Partition:
        """The partition with this row id, which `partition_ids` has returned before."""
        return self._names[partition_id]

    async def read_heads(self, ids: Iterable[int]) -> dict[int, int]:
        """Next offset per row id, as committed. Waits out outages."""
        rows = await self._query(HEADS, list(ids))
        return {row["id"]: row["head"] for row in rows}

    async def read_rows(self, ids: Sequence[int], first: Sequence[int], limit: int) -> list[Any]:
        """At most `limit` rows from the given offsets on, in order within each id. Waits out outages."""
        return await self._query(self._read, list(ids), list(first), limit)

    async def reading(self) -> asyncpg.Connection:
        """The connection that reads, once it is up; raises `LogError` when the log is lost."""
        while True:
            self.raise_if_lost()
            listener = self._listener
            if listener is not None and not listener.is_closed():
                return listener
            self._on_listener_gone(listener)
            await self._listener_up.wait()

    async def _query(self, query: str, *arguments: object) -> list[Any]:
        while True:
            connection = await self.reading()
            try:
                async with self._listener_lock:
                    rows: list[Any] = await connection.fetch(query, *arguments)
            except OUTAGES as error:
                if not connection.is_closed():
                    connection.terminate()
                self._on_listener_gone(connection)
                if self._closed:
                    raise LogError("the log is closed") from error
            except asyncpg.InsufficientPrivilegeError as error:
                raise NotAllowed(f"the embedded log refuses {self._identity}: {error}; {REMEDY}") from error
            except asyncpg.PostgresError as error:
                raise LogError(f"the embedded log cannot be read: {error}") from error
            else:
                return rows

    # --- connections -------------------------------------------------------------------------------------

    async def _make_tables(self, writer: asyncpg.Connection) -> None:
        """Makes the tables on a connection of its own, closed afterwards: a server process caches its catalog
        look-ups, 3 MiB."""
        if await made_by(writer) >= VERSION:
            return
        connection = await self._connect(" (tables)")
        try:
            await ensure_schema(connection)
        finally:
            connection.terminate()

    async def _connect(self, purpose: str = "") -> asyncpg.Connection:
        """Connects with back-off. Raises `LogError` after `OUTAGE_LIMIT_S`,
        or at once when retrying cannot help."""
        settings = {"application_name": f"penstock {self._identity}{purpose}", "synchronous_commit": "on"}
        try:
            return await retry(
                lambda: asyncpg.connect(self._dsn, timeout=CONNECT_TIMEOUT_S, server_settings=settings),
                OUTAGES,
                first_s=FIRST_BACKOFF_S,
                longest_s=LAST_BACKOFF_S,
                limit_s=OUTAGE_LIMIT_S,
            )
        except OUTAGES as error:
            raise LogError(
                f"the embedded log's database stayed away for {OUTAGE_LIMIT_S:.0f} s: {error}"
            ) from error
        except (ValueError, asyncpg.PostgresError) as error:
            raise LogError(f"the embedded log's database refuses us: {error}") from error

    async def _listen(self) -> None:
        connection = await self._connect()
        try:
            await connection.add_listener(CHANNEL, self._on_notification)
        except BaseException:
            connection.terminate()
            raise
        connection.add_termination_listener(self._on_listener_gone)
        self._listener, self._lost = connection, None
        self._listener_up.set()
        self._look_again()  # commits made while the listener was down

    def _on_listener_gone(self, connection: asyncpg.Connection | None) -> None:
        if self._closed or connection is None or connection is not self._listener:
            return
        self._listener = None
        self._listener_up.clear()
        self._reconnecting = asyncio.create_task(
            self._reconnect(), name=f"reconnect embedded log ({self._identity})"
        )

    async def _reconnect(self) -> None:
        """Listens again; the server may go away again between connect and LISTEN.

        While it stays away for long the log counts as lost: every call raises, until the server is back.
        """
        await retry(
            self._listen,
            (LogError, asyncpg.PostgresError, *OUTAGES),
            first_s=FIRST_BACKOFF_S,
            longest_s=LAST_BACKOFF_S,
            on_failure=self._on_failure,
        )

    def _on_failure(self, error: Exception, _pause_s: float) -> None:
        if isinstance(error, OUTAGES):
            return
        refused = f"the embedded log's database refuses us: {error}"
        self._fail(error if isinstance(error, LogError) else LogError(refused))

    def _fail(self, error: LogError) -> None:
        self._lost = error
        self._listener_up.set()
        self._look_again()

    def _look_again(self) -> None:
        for reader in {id(reader): reader for readers in self._feeds.values() for reader in readers}.values():
            reader.look_again()

    def _on_notification(self, _connection: object, pid: int, _channel: str, payload: object) -> None:
        if pid == self._writer_pid:
            return  # our own commit: the records come from memory, or `_write` fails and makes readers look
        if payload == EVERYTHING:
            self._look_again()
            return
        for item in str(payload).split(","):
            partition_id, head = item.split(":")
            name = self._names.get(int(partition_id))
            if name is not None:
                for reader in self._feeds.get(name, ()):
                    reader.on_head(name, int(head))

    async def _load_ids(self) -> None:
        for row in await self._query(PARTITIONS):
            partition = Partition(row["topic"], row["index"])
            self._ids[partition] = row["id"]
            self._names[row["id"]] = partition

    # --- retention ---------------------------------------------------------------------------------------

    def _expire_soon(self) -> None:
        """Starts to delete records older than their topic's retention, in the background,
        if this role may."""
        if self._expires and (self._expiring is None or self._expiring.done()):
            self._expiring = asyncio.create_task(
                self._expire(), name=f"expire embedded log ({self._identity})"
            )

    async def _expire(self) -> None:
        """Deletes the oldest records of each partition, as far as all of them have expired. Failing costs
        disk only.

        On a connection of its own, see `_make_tables`.
        """
        limited = {topic: ms for topic, ms in RETENTION_MS.items() if ms != FOR_EVER}
        terms = (list(limited), list(limited.values()))
        try:
            connection = await self._connect(" (retention)")
            try:
                if not await connection.fetchval(ANY_EXPIRED, *terms):
                    return
                while True:
                    async with connection.transaction():
                        if not await connection.fetchval(EXPIRE_ALONE):
                            return
                        if not await connection.fetchval(EXPIRE, *terms, EXPIRE_BATCH):
                            return
            finally:
                connection.terminate()
        except (LogError, *OUTAGES, asyncpg.PostgresError) as error:
            logger.warning("expired records stay until the next try: %s", error)

    # --- the writer --------------------------------------------------------------------------------------

    async def _write(self, batch: list[Message]) -> list[int]:
        """One transaction for the whole batch. Any doubt about its outcome is `AppendFailed`."""
        writer = self._writer
        if writer is None or writer.is_closed():
            try:
                writer = self._writer = await self._connect()
            except LogError as error:
                raise AppendFailed(str(error)) from error
            self._writer_pid = writer.get_server_pid()
        ids = sorted({self._ids[message.partition] for message in batch})
        slot_of = {self._names[row_id]: slot for slot, row_id in enumerate(ids)}
        counts = [0] * len(ids)
        slots, ranks = [], []
        wanted: list[int | None] = [None] * len(ids)
        for message in batch:
            slot = slot_of[message.partition]
            if message.at is not None:
                base = message.at - counts[slot]
                if wanted[slot] not in (None, base):
                    raise OffsetTaken(f"two writers of {message.partition}")
                wanted[slot] = base
            slots.append(slot + 1)  # Postgres counts array elements from 1
            ranks.append(counts[slot])
            counts[slot] += 1
        try:
            bases, stamp_ms = await writer.fetchrow(
                APPEND,
                ids,
                counts,
                slots,
                ranks,
                [message.key for message in batch],
                [pack_headers(message.headers) for message in batch],
                [message.value for message in batch],
                wanted,
                timeout=WRITE_TIMEOUT_S,
            )
        except asyncpg.InsufficientPrivilegeError as error:
            raise NotAllowed(f"{self._identity} may not write the log: {error}") from error
        except asyncpg.SerializationError as error:
            raise OffsetTaken(str(error)) from error
        except (*OUTAGES, asyncpg.PostgresError) as error:
            writer.terminate()
            self._writer_pid = 0  # its commit may still come, and then its notification is news
            self._look_again()  # if it was committed, no notification will wake this log's readers
            raise AppendFailed(f"{type(error).__name__}: {error}") from error
        offsets = [bases[slot - 1] + rank for slot, rank in zip(slots, ranks, strict=True)]
        self._appended += len(batch)
        if self._appended >= EXPIRE_EVERY:
            self._appended = 0
            self._expire_soon()
        self._fan_out(batch, offsets, slot_of, bases, stamp_ms)
        return offsets

    def _fan_out(
        self,
        batch: list[Message],
        offsets: list[int],
        slot_of: dict[Partition, int],
        bases: list[int],
        stamp_ms: int,
    ) -> None:
        """Gives the committed records to this log's own readers."""
        fresh: dict[Partition, list[Record]] = {
            partition: [] for partition in slot_of if partition in self._feeds
        }
        if not fresh:
            return
        for message, offset in zip(batch, offsets, strict=True):
            partition = message.partition
            records = fresh.get(partition)
            if records is not None:
                headers = tuple(message.headers)
                records.append(Record(partition, offset, message.value, headers, message.key, stamp_ms))
        for partition, records in fresh.items():
            for reader in self._feeds.get(partition, ()):
                reader.push(partition, bases[slot_of[partition]], records)
