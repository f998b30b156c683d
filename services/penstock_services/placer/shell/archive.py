"""Archiving: the ledger below a verified snapshot, and the inputs that it answers, go into segments and leave
the log.

    copy ─▶ fold the copy ─▶ equal to the snapshot? ─▶ read back and enter into the index ─▶ delete from the
    log

Nothing is deleted before all of it is in the archive's indexes, so that an interrupted command can be
repeated. The snapshot's own record stays in the log, and so does the last answered record of each input: they
prove that archive, log and snapshots belong together.
"""

import asyncio
import logging
from typing import Any

import asyncpg

from penstock.errors import ConfigurationError, LogError, StoreError
from penstock.ledger.record.record import GENESIS, Head, read_valid
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import Damaged, dump, format_id, load
from penstock.log.archive import Archive, Writer
from penstock.log.archived import ArchivedLog
from penstock.log.port import Log, Partition
from penstock.model.schema.topics import Topic
from penstock.runtime.following.amended_log import AmendedLog
from penstock.runtime.following.snapshots import (
    CONNECT_TIMEOUT_S,
    Until,
    projected,
    restored,
    stored_snapshots,
    warn_damaged,
)
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.inputs import input_positions

LEAVE_RECORDS = 200_000  # of the ledger: the records that `why` and a start read most often
READ_WITHIN_MS = 10_000  # existing records come within milliseconds, or after an outage

logger = logging.getLogger(__name__)


def archive_of(settings: Settings) -> Archive:
    """Raises `ConfigurationError` where none is named."""
    if not settings.archive:
        raise ConfigurationError("PENSTOCK_ARCHIVE: not set; give the directory of the archive")
    return Archive(settings.archive)


async def archive(
    settings: Settings, log: Log, leave: int = LEAVE_RECORDS, *, delete: bool = True
) -> dict[str, Any]:
    """Archives all but the last `leave` records of the ledger, as far as the newest snapshot below them;
    returns a report.

    `log`: with the right to delete records. Raises `ConfigurationError` where a snapshot or the archive does
    not belong to this ledger; nothing is deleted then.
    """
    store = archive_of(settings)
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    whole = ArchivedLog(log, store)
    snapshot = await _snapshot(settings, whole, ledger, leave)
    if snapshot is None:
        return {"ok": True, "archived": 0, "reason": f"no snapshot is older than the last {leave} records"}
    with store.lock():
        end = store.index(ledger).end
        if snapshot.head_offset < end - 1:
            return {
                "ok": True,
                "archived": 0,
                "reason": f"the archive goes on to offset {end} already, further than the last {leave} "
                "records allow",
            }
        before = (await log.begin_offsets([ledger]))[ledger]
        copied = await _copy_ledger(whole, ledger, snapshot)
        positions = input_positions(snapshot.state, settings.cell_index)
        for place, position in positions.items():
            copied += await _copy(whole, Writer(store, place), place, position)
        # Their last records stay, so that each can be proven to continue the archive.
        first = {ledger: snapshot.head_offset} | {place: max(0, at - 1) for place, at in positions.items()}
        if delete:
            await log.delete_before(first)
    logger.info("archived %d records up to seq %d in %s", copied, snapshot.head.seq, store.folder)
    return {
        "ok": True,
        "archived": copied,
        "until_seq": snapshot.head.seq,
        "deleted_from_ledger": max(0, snapshot.head_offset - before) if delete else 0,
        "archive": str(store.folder),
    }


async def _snapshot(settings: Settings, log: Log, ledger: Partition, leave: int) -> Replica | None:
    """The newest usable snapshot of this ledger with so many records after it."""
    dsn = settings.need_dsn("the archive, which ends at a snapshot,")
    try:
        connection = await asyncpg.connect(dsn, timeout=CONNECT_TIMEOUT_S)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"Postgres cannot be reached: {error}") from error
    try:
        written = await projected(connection, settings.cell)
        if written is None:
            return None
        until = Until(seq=written.head.seq - leave)
        async for stored in stored_snapshots(connection, settings.cell, log, ledger, until):
            try:
                return await restored(stored)
            except Damaged as error:
                warn_damaged(stored, error)
        return None
    finally:
        await connection.close()


async def _copy_ledger(whole: ArchivedLog, ledger: Partition, snapshot: Replica) -> int:
    """Copies up to the snapshot's record and folds from the last archiving up to there. Raises
    `ConfigurationError` unless both agree."""
    writer = Writer(whole.archive, ledger)
    replica = await asyncio.to_thread(_archived_fold, whole.archive, ledger)
    copied, last = 0, snapshot.head_offset
    reader = AmendedLog(whole).reader({ledger: replica.offset})
    try:
        while replica.offset <= last:
            records = await reader.read(timeout_ms=READ_WITHIN_MS)
            if not records:
                raise LogError(f"{ledger.topic} shows no record at offset {replica.offset}")
            for record in records:
                if record.offset > last:
                    break
                replica.take(record.value, record.offset)
                if record.offset >= writer.end:
                    writer.add(record)
                    copied += 1
    finally:
        await reader.close()
    if replica.head != snapshot.head or dump(replica.state) != dump(snapshot.state):
        raise ConfigurationError(
            f"the snapshot of seq {snapshot.head.seq} ({snapshot.head.id}) is not what the ledger folds to "
            f"up to its record (seq {replica.head.seq}, {replica.head.id}): nothing was archived. Run "
            "`penstock projections rebuild`"
        )
    await asyncio.to_thread(writer.commit, (format_id(), dump(snapshot.state)))
    return copied


def _archived_fold(store: Archive, ledger: Partition) -> Replica:
    """The fold of the archive's records, as it was verified then;
    empty where that was another version's fold."""
    index = store.index(ledger)
    if index.fold is None or index.fold.format != format_id():
        return Replica()
    state = load(store.fold(ledger, index.fold))
    return Replica(state, Head(state.seq, index.last_id, state.term), index.end, index.end - 1)


async def _copy(whole: ArchivedLog, writer: Writer, place: Partition, until: int) -> int:
    """Copies the missing records of an input up to there."""
    begin = (await whole.inner.begin_offsets([place]))[place]
    start, copied = writer.end or begin, 0
    reader = whole.reader({place: start})
    try:
        while reader.position(place) < until:
            records = await reader.read(timeout_ms=READ_WITHIN_MS)
            if not records:
                raise LogError(f"{place.topic} shows no record at offset {reader.position(place)}")
            for record in records:
                if record.offset < until:
                    writer.add(record)
                    copied += 1
    finally:
        await reader.close()
    await asyncio.to_thread(writer.commit)
    return copied


async def verify(settings: Settings, log: Log) -> dict[str, Any]:
    """Reads every segment and proves the ledger's chain from its first record to the log's; returns a report.

    Raises `ConfigurationError` where nothing is archived, and with the segment's name where one is missing or
    altered.
    """
    store = archive_of(settings)
    ledger = Partition(Topic.LEDGER, settings.cell_index)
    if not (await asyncio.to_thread(store.index, ledger)).segments:
        raise ConfigurationError(
            f"PENSTOCK_ARCHIVE: {store.folder} holds nothing of {ledger.topic} partition {ledger.index}; "
            "name the directory that `penstock-placer archive` filled for this cell"
        )
    places = [ledger, *input_positions(Replica().state, settings.cell_index)]
    whole = ArchivedLog(log, store)
    begins = await log.begin_offsets(places)
    await whole.indexes(begins)
    checked: dict[Partition, int] = {}
    head = GENESIS
    for place in places:
        checked[place] = 0
        for segment in (await asyncio.to_thread(store.index, place)).segments:
            for record in await asyncio.to_thread(store.read, place, segment):
                checked[place] += 1
                if place == ledger and (found := read_valid(head, record.value)) is not None:
                    head = found[0]
    _check_chain(store, ledger, head)
    return {
        "ok": True,
        "archive": str(store.folder),
        "records": {str(place.topic): count for place, count in checked.items()},
        "until_seq": head.seq,
    }


def _check_chain(store: Archive, ledger: Partition, head: Head) -> None:
    last_id = store.index(ledger).last_id
    if head.id != last_id:
        raise ConfigurationError(
            f"the archive {store.folder} ends with record {last_id}, but its chain of valid records ends at "
            f"seq {head.seq} ({head.id}): restore it from a copy"
        )
