"""Restoration of a copy into an empty log and an empty database.

    digests ─▶ is the target empty? ─▶ records, rows and files ─▶ the ledger's last record is there ─▶ a new
    epoch

The new epoch fences what happened after the copy: orders of the lost history have lower tokens than every
order from now on, and nothing is placed until each node has joined anew and what it ran without the ledger's
knowledge has ended (decision 26).
"""

from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import asyncpg

from penstock.backup import epochs, files, tables
from penstock.backup.manifest import CopiedPartition, Manifest, archive_in, read_manifest
from penstock.backup.partitions import copy_back
from penstock.backup.progress import Progress
from penstock.backup.verify import check_digests
from penstock.errors import ConfigurationError, LogError
from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.log.topic_settings import topic_partitions
from penstock.model.nouns.types import MAX_TEXT
from penstock.model.schema.topics import Topic
from penstock.runtime.following.snapshots import head_id_at
from penstock.runtime.race import all_of
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.accept import accept_ledger


class Restored(NamedTuple):
    """`left`: what the copy holds and was not put back: variables of files, and dead letters that another
    cell shares."""

    manifest: Manifest
    epoch: int
    left: list[str]


async def restore(
    copy: Path,
    settings: Settings,
    env: Mapping[str, str],
    progress: Progress,
    epoch: int | None = None,
    reason: str = "",
) -> Restored:
    """Restores the copy; afterwards the services may start. `env` names where its files go. `epoch`: above
    all that were used.

    Raises `ConfigurationError` before anything is changed where copy, target or epoch do not fit; `LogError`,
    `StoreError` where log or database fail: the target then holds a part, and has to be emptied.
    """
    if len(reason) > MAX_TEXT:
        raise ConfigurationError(f"--reason: {len(reason)} characters; give {MAX_TEXT} at most")
    manifest = read_manifest(copy)
    _check_cell(manifest, settings)
    known = max(manifest.head.epoch, epochs.highest(copy.parent, manifest.cell))
    chosen = epochs.choose(known, epoch)
    await check_digests(copy, manifest)
    async with AsyncExitStack() as stack:
        database = None
        if manifest.schemas:
            dsn = settings.need_dsn("a copy with tables")
            database = await stack.enter_async_context(tables.database(dsn))
            for schema in manifest.schemas:
                tables.migrations_of(schema)
                await tables.check_empty(database, schema)
        files.check_free(manifest.files, env)
        log = await open_log(settings.log_url, "restore").start()
        stack.push_async_callback(log.close)
        await log.create(topic_partitions(settings.cell_index + 1))
        parts = await _empty_parts(log, manifest)
        progress.expect(sum(part.records for part in parts) + manifest.rows)
        await _put_back(copy, manifest, parts, log, database, progress)
        left = files.copy_back(copy, manifest.files, env)
        await _check_head(log, manifest)
        epochs.enter(copy.parent, manifest.cell, chosen)
        why = reason or f"restored from the copy of {manifest.taken_ms} ms"
        await accept_ledger(settings, chosen, why, log)
    left += [str(part.topic) for part in manifest.partitions if part not in parts]
    return Restored(manifest, chosen, left)


def _check_cell(manifest: Manifest, settings: Settings) -> None:
    given = (settings.cell, settings.cell_index)
    if given != (manifest.cell, manifest.cell_index):
        raise ConfigurationError(
            f"PENSTOCK_CELL, PENSTOCK_CELL_INDEX: the copy is of cell {manifest.cell} with index "
            f"{manifest.cell_index}, not of {given[0]} with {given[1]}; set them as the copied cell had them"
        )


async def _empty_parts(log: Log, manifest: Manifest) -> list[CopiedPartition]:
    """The partitions to restore. Dead letters of another cell may be there already: nothing refers to their
    offsets, so the copy's are left out. Raises `ConfigurationError` for any other partition with records."""
    ends = await log.end_offsets([part.place for part in manifest.partitions])
    found = []
    for part in manifest.partitions:
        if not ends[part.place]:
            found.append(part)
        elif part.topic != Topic.DEAD_LETTERS:
            raise ConfigurationError(
                f"PENSTOCK_LOG: {part.topic} partition {part.index} has {ends[part.place]} records, and "
                "nothing was changed; stop all "
                "services and node-reporters, and give a log without records (a new database, or Kafka "
                "without this cell's topics)"
            )
    return found


async def _put_back(
    copy: Path,
    manifest: Manifest,
    parts: list[CopiedPartition],
    log: Log,
    database: asyncpg.Connection | None,
    progress: Progress,
) -> None:
    archive = archive_in(copy)
    work: list[Awaitable[None]] = [copy_back(log, archive, part, progress) for part in parts]
    if database is not None:
        work.append(_rows_back(copy, manifest, database, progress))
    await all_of(*work)


async def _rows_back(
    copy: Path, manifest: Manifest, database: asyncpg.Connection, progress: Progress
) -> None:
    async with database.transaction():
        for schema in manifest.schemas:
            await tables.copy_back(database, schema, copy, progress)


async def _check_head(log: Log, manifest: Manifest) -> None:
    """Raises `LogError` unless the ledger's last valid record is where the manifest says."""
    ledger, head = manifest.partitions[0], manifest.head
    if head.offset < ledger.first:
        return  # an empty ledger
    found = await head_id_at(log, ledger.place, head.offset)
    if found != head.id:
        raise LogError(
            f"the restored ledger has {found or 'no record'} at offset {head.offset}, and the copy "
            f"{head.id}: empty log and database, "
            "and restore again"
        )
