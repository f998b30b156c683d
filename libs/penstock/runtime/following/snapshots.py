"""Snapshots of a cell's state, stored in Postgres beside the read models; every replica may start from one.

A snapshot only saves time: one that is missing, damaged, of another version or of another ledger is skipped
for an older one, and in the end for the beginning of the ledger. Its ledger is proven: its head is the digest
of a record, which contains its parent's digest, and so depends on the whole ledger up to there (LAW 3).
"""

import asyncio
import gc
import logging
import zlib
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import asyncpg

from penstock.errors import ConfigurationError
from penstock.ledger.record.record import Head, record_id
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import Damaged, dump_parts, format_id, load_lines
from penstock.ledger.state.state import CellState
from penstock.log.lookup import records_at
from penstock.log.port import Log, Partition
from penstock.model.schema.topics import Topic
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.settings import Settings

logger = logging.getLogger(__name__)

MAX_SNAPSHOTS = 64  # snapshots per cell; at one per 20,000 records they reach 1.3 million records back
COMPRESSION = 1  # zlib's fastest: a snapshot is taken while the projector works
CONNECT_TIMEOUT_S = 5.0
UNPACKED_BYTES = 1 << 18  # decompressed at once
MAX_BODY_BYTES = 1 << 30  # decompressed; 100,000 live jobs with their specs need about 100 MB

Store: TypeAlias = asyncpg.Connection | asyncpg.Pool

_SAVE = """
INSERT INTO {schema}.snapshots (cell, seq, head_id, term, head_offset, format, sha256, body)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (cell, seq) DO UPDATE SET
    head_id = excluded.head_id, term = excluded.term, head_offset = excluded.head_offset,
    format = excluded.format, sha256 = excluded.sha256, body = excluded.body
"""
_PRUNE = """
DELETE FROM {schema}.snapshots WHERE cell = $1 AND seq < (
    SELECT min(seq) FROM (
        SELECT seq FROM {schema}.snapshots WHERE cell = $1 ORDER BY seq DESC LIMIT $2
    ) AS newest
)
"""
_LATEST = """
SELECT seq, head_id, term, head_offset, sha256, body FROM {schema}.snapshots
WHERE cell = $1 AND seq <= $2 AND format = $3 ORDER BY seq DESC LIMIT 1
"""
FAR = (1 << 63) - 1


class Until(NamedTuple):
    """Bound on a snapshot's position in the ledger."""

    seq: int = FAR
    """Of its head, inclusive."""
    offset: int = FAR
    """Of its head, exclusive."""


NEWEST = Until()


async def save_snapshot(store: Store, cell: str, replica: Replica, *, schema: str | None = None) -> int:
    """Stores the replica, which must not change before this returns; returns the compressed size in bytes.

    Encoding happens in a thread: the event loop goes on. Removes all but the newest `MAX_SNAPSHOTS`.
    """
    schema = schema or schema_of(cell)
    head, head_offset = replica.head, replica.head_offset
    body = await asyncio.to_thread(_packed, replica.state)
    assert replica.head is head, (
        f"folded on from {head.seq} to {replica.head.seq} while its snapshot was taken"
    )
    digest = sha256(body).hexdigest()
    await store.execute(
        _SAVE.format(schema=schema),
        cell,
        head.seq,
        head.id,
        head.term,
        head_offset,
        format_id(),
        digest,
        body,
    )
    await store.execute(_PRUNE.format(schema=schema), cell, MAX_SNAPSHOTS)
    return len(body)


class Stored(NamedTuple):
    """A snapshot as stored in the table; `restore` makes a replica of it."""

    seq: int
    head_id: str
    term: int
    head_offset: int
    sha256: str
    body: bytes


async def stored_snapshots(
    store: Store, cell: str, log: Log, ledger: Partition, until: Until = NEWEST, schema: str | None = None
) -> AsyncIterator[Stored]:
    """The snapshots of this format and this ledger, newest first, not yet decoded.

    Those of another ledger are skipped with a warning, and those from before the ledger's beginning, which
    cannot be proven, without one. Raises `LogError`.
    """
    begin = (await log.begin_offsets([ledger]))[ledger]
    query = _LATEST.format(schema=schema or schema_of(cell))
    seq = until.seq
    while True:
        try:
            row = await store.fetchrow(query, cell, seq, format_id())
        except asyncpg.UndefinedTableError:
            return  # the projector has never run here
        if row is None:
            return
        stored = Stored(*row)
        if stored.head_offset < begin:
            return
        if stored.head_offset < until.offset:
            found = await head_id_at(log, ledger, stored.head_offset)
            if found == stored.head_id:
                yield stored
            else:
                logger.warning(
                    "the snapshot of seq %d is of another ledger (its head is %s; at offset %d of %s/%d "
                    "lies %s); trying an older one",
                    stored.seq,
                    stored.head_id,
                    stored.head_offset,
                    *ledger,
                    found or "no record",
                )
        seq = stored.seq - 1


async def head_id_at(log: Log, ledger: Partition, head_offset: int) -> str | None:
    """The id of the record at this offset, to compare with the id of a head that was read there; None: no
    record.

    This is the one proof that a state was folded from this ledger. Raises `LogError`.
    """
    record = (await records_at(log, {ledger: head_offset}))[ledger]
    return None if record is None else record_id(record.value)


class Written(NamedTuple):
    """A valid record that the projector has read, and its position; `epoch`: the ledger's then."""

    head: Head
    head_offset: int
    epoch: int


async def projected(store: Store, cell: str) -> Written | None:
    """The newest record in the cell's read models; None: the projector has never run here."""
    query = f"SELECT seq, head_id, term, head_offset, epoch FROM {schema_of(cell)}.positions WHERE cell = $1"
    try:
        row = await store.fetchrow(query, cell)
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError):
        return None  # or not in its present version
    return None if row is None else Written(Head(*row[:3]), row["head_offset"], row["epoch"])


def restore(stored: Stored) -> Replica:
    """The replica as it was, ready to be folded on. Raises `Damaged`. Pure; about 20 µs per live job: in a
    thread or a worker."""
    state = load_lines(_lines(stored.body, stored.sha256))
    if state.seq != stored.seq:
        raise Damaged(f"it is of seq {state.seq}")
    head = Head(stored.seq, stored.head_id, stored.term)
    return Replica(state, head, stored.head_offset + 1, stored.head_offset)


async def restored(stored: Stored) -> Replica:
    """`restore` in a thread: the event loop goes on. Raises `Damaged`.

    Ideal: it costs the loop nothing. Departure: loop and thread share the interpreter's lock. A garbage
    collection in between would traverse all that was just loaded, which has no cycles, so these objects are
    excluded from collections.
    """
    gc.disable()
    try:
        replica = await asyncio.to_thread(restore, stored)
        gc.freeze()
        return replica
    finally:
        gc.enable()


async def load_latest(
    store: Store, cell: str, log: Log, ledger: Partition, until: Until = NEWEST, schema: str | None = None
) -> Replica:
    """The newest usable snapshot up to this bound, ready to be folded on; else an empty replica, if the
    ledger begins at 0.

    The replica's `offset` is the position from which to read the ledger's partition. Snapshots that are
    damaged or of another ledger are skipped with a warning. Raises `LogError`, and `ConfigurationError` where
    the ledger begins later.
    """
    async for stored in stored_snapshots(store, cell, log, ledger, until, schema):
        try:
            return await restored(stored)
        except Damaged as error:
            warn_damaged(stored, error)
    await check_beginning(log, ledger, 0)
    return Replica()


async def check_beginning(log: Log, ledger: Partition, offset: int) -> None:
    """Raises `ConfigurationError` with the remedy where the ledger begins after this offset, because its head
    is archived."""
    begin = (await log.begin_offsets([ledger]))[ledger]
    if offset < begin:
        raise ConfigurationError(
            f"{ledger.topic} partition {ledger.index} begins at offset {begin}, and is needed from offset "
            f"{offset} on: its head was archived. Set PENSTOCK_ARCHIVE to the archive's directory; or, for "
            "a service, give it the database with the snapshots (PENSTOCK_DSN)"
        )


def warn_damaged(stored: Stored, error: Damaged) -> None:
    """Logs that a snapshot is skipped."""
    logger.warning("the snapshot of seq %s is refused (%s); trying an older one", stored.seq, error)


def _packed(state: CellState) -> bytes:
    packer = zlib.compressobj(COMPRESSION)
    return b"".join([*(packer.compress(part) for part in dump_parts(state)), packer.flush()])


def _lines(body: bytes, digest: str) -> Iterator[bytes]:
    """Raises `Damaged`."""
    if sha256(body).hexdigest() != digest:
        raise Damaged("its sha256 differs")
    opener, size, rest = zlib.decompressobj(), 0, b""
    while not opener.eof:
        try:
            raw = opener.decompress(opener.unconsumed_tail or body, UNPACKED_BYTES)
        except zlib.error as error:
            raise Damaged(str(error)) from error
        size, body = size + len(raw), b""
        if size > MAX_BODY_BYTES or (not raw and not opener.eof):
            raise Damaged("it ends early or is too large")
        *lines, rest = (rest + raw).split(b"\n")
        yield from lines
    yield rest


async def load_latest_from(
    dsn: str, cell: str, log: Log, ledger: Partition, until: Until = NEWEST
) -> Replica:
    """`load_latest` for a caller without a connection.
    Raises asyncpg's errors for an unreachable database."""
    connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
    try:
        return await load_latest(connection, cell, log, ledger, until)
    finally:
        await connection.close()


async def load_replica(settings: Settings, log: Log) -> Replica:
    """The latest usable snapshot, else an empty replica: without Postgres a service folds from the beginning.

    Raises `ConfigurationError` where the ledger's beginning was archived and cannot be read.
    """
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    if settings.dsn is not None:
        try:
            return await load_latest_from(settings.dsn, settings.cell, log, ledger)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            logger.warning("no snapshot, folding from the beginning: Postgres cannot be reached (%s)", error)
    await check_beginning(log, ledger, 0)
    return Replica()
