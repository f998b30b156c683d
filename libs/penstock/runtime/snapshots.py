"""Snapshots of a cell's state, stored in Postgres beside the read models; every replica may start from one.

A snapshot only spares time: one that is damaged, of another version, or not there at all is passed over for an
older one, and in the end for the beginning of the ledger.
"""

import asyncio
import logging
import zlib
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import asyncpg

from penstock.ledger.record import Head
from penstock.ledger.replica import Replica
from penstock.ledger.snapshot import Damaged, dump, format_id, load
from penstock.runtime.migrations import schema_of

logger = logging.getLogger(__name__)

MAX_SNAPSHOTS = 64  # snapshots per cell; at one per 20,000 records they reach 1.3 million records back
COMPRESSION = 1  # zlib's fastest: a snapshot is taken while the projector works
CONNECT_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 1 << 30  # decompressed; 100,000 live jobs with their specs need about 100 MB

Store: TypeAlias = asyncpg.Connection | asyncpg.Pool

_SAVE = """
INSERT INTO {schema}.snapshots (cell, seq, head_id, term, next_offset, format, sha256, body)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (cell, seq) DO NOTHING
"""
_PRUNE = """
DELETE FROM {schema}.snapshots WHERE cell = $1 AND seq < (
    SELECT min(seq) FROM (SELECT seq FROM {schema}.snapshots WHERE cell = $1 ORDER BY seq DESC LIMIT $2) AS newest
)
"""
_LATEST = """
SELECT seq, head_id, term, next_offset, sha256, body FROM {schema}.snapshots
WHERE cell = $1 AND seq < $2 AND seq <= $3 AND format = $4 ORDER BY seq DESC LIMIT 1
"""
FAR = (1 << 63) - 1


async def save_snapshot(store: Store, cell: str, replica: Replica, *, schema: str | None = None) -> int:
    """Stores the replica as it is at the call; returns the compressed size in bytes. Removes all but the newest `MAX_SNAPSHOTS`."""
    schema = schema or schema_of(cell)
    raw, head, offset = dump(replica.state), replica.head, replica.offset
    body = await asyncio.to_thread(zlib.compress, raw, COMPRESSION)
    digest = sha256(body).hexdigest()
    await store.execute(
        _SAVE.format(schema=schema), cell, head.seq, head.id, head.term, offset, format_id(), digest, body
    )
    await store.execute(_PRUNE.format(schema=schema), cell, MAX_SNAPSHOTS)
    return len(body)


class Stored(NamedTuple):
    """A snapshot as it lies in the table; `restore` makes a replica of it."""

    seq: int
    head_id: str
    term: int
    next_offset: int
    sha256: str
    body: bytes


async def latest_stored(
    store: Store,
    cell: str,
    *,
    below: int = FAR,
    until_seq: int = FAR,
    until_offset: int = FAR,
    schema: str | None = None,
) -> Stored | None:
    """The newest snapshot of this format before `below` and up to `until_seq`, unread; None: there is none.

    `until_offset`: passes over snapshots that were taken further on in the ledger.
    """
    query = _LATEST.format(schema=schema or schema_of(cell))
    while True:
        try:
            row = await store.fetchrow(query, cell, below, until_seq, format_id())
        except asyncpg.UndefinedTableError:
            return None  # the projector has never run here
        if row is None or row["next_offset"] <= until_offset:
            return None if row is None else Stored(*row)
        below = row["seq"]


def restore(stored: Stored) -> Replica:
    """The replica as it was, ready to be folded on. Raises `Damaged`. Pure; about 20 µs per live job."""
    state = load(_unpacked(stored.body, stored.sha256))
    if state.seq != stored.seq:
        raise Damaged(f"it is of seq {state.seq}")
    return Replica(state, Head(stored.seq, stored.head_id, stored.term), stored.next_offset)


async def load_latest(
    store: Store, cell: str, *, until_seq: int = FAR, until_offset: int = FAR, schema: str | None = None
) -> Replica:
    """The newest usable snapshot at or before `until_seq`, ready to be folded on; else an empty replica.

    The replica's `offset` is where to read the ledger's partition from. Damaged snapshots are passed over with
    a warning.
    """
    below = FAR
    while True:
        stored = await latest_stored(
            store, cell, below=below, until_seq=until_seq, until_offset=until_offset, schema=schema
        )
        if stored is None:
            return Replica()
        try:
            return restore(stored)
        except Damaged as error:
            warn_damaged(stored, error)
            below = stored.seq


def warn_damaged(stored: Stored, error: Damaged) -> None:
    """Logs that a snapshot is passed over."""
    logger.warning("the snapshot of seq %s is refused (%s); trying an older one", stored.seq, error)


def _unpacked(body: bytes, digest: str) -> bytes:
    """Raises `Damaged`."""
    if sha256(body).hexdigest() != digest:
        raise Damaged("its sha256 differs")
    try:
        opener = zlib.decompressobj()
        raw = opener.decompress(body, MAX_BODY_BYTES)
    except zlib.error as error:
        raise Damaged(str(error)) from error
    if not opener.eof:
        raise Damaged("it ends early or is too large")
    return raw


async def load_latest_from(dsn: str, cell: str, *, until_offset: int = FAR) -> Replica:
    """`load_latest` for a caller without a connection; a database that cannot be reached raises what asyncpg raises."""
    connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
    try:
        return await load_latest(connection, cell, until_offset=until_offset)
    finally:
        await connection.close()
