"""Consistent copy of a running cell.

    one moment of the tables ─▶ end of the ledger ─▶ ends of the inputs ─▶ copy all of it ─▶ manifest

The order makes the copy consistent while everything goes on. What the tables hold is in the ledger by then,
and each input that the ledger answers, as each one that was acknowledged before, is in its topic by then. So
the copied ledger contains the causes of the copied tables, and the copied inputs contain those of the copied
ledger. Later inputs are answered again after a restoration.

Orders, telemetry and windows are not copied: orders are computed from the ledger (LAW 4), and no decision
rests on the others.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from penstock import __version__
from penstock.backup import epochs, files, tables
from penstock.backup.manifest import (
    FORMAT,
    LOG,
    CopiedFile,
    CopiedPartition,
    CopiedSchema,
    Manifest,
    archive_in,
    write_manifest,
)
from penstock.backup.partitions import HeadFollower, Span, copy_out
from penstock.backup.progress import Progress
from penstock.clock import wall_ms
from penstock.errors import ConfigurationError
from penstock.log.open import open_log
from penstock.log.port import Log, Partition
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.runtime.database.migrations import schema_of
from penstock.runtime.following.snapshots import Written, projected
from penstock.runtime.race import all_of
from penstock.runtime.settings import Settings


def partitions_of(cell_index: int) -> list[Partition]:
    """The partitions that are copied; the ledger is the first, since its end is read first."""
    cell = [Partition(topic, cell_index) for topic in (Topic.LEDGER, Topic.AMENDMENTS, *INPUT_TOPICS)]
    return [*cell, Partition(Topic.DEAD_LETTERS, 0)]


async def take(copy: Path, settings: Settings, env: Mapping[str, str], progress: Progress) -> Manifest:
    """Copies the cell into this folder, which must be new or empty. `env` names the files.

    Raises `ConfigurationError`, `LogError`, `StoreError`; the folder then holds no finished copy.
    """
    _make(copy)
    taken_ms = wall_ms()
    async with AsyncExitStack() as stack:
        known: Written | None = None
        database: asyncpg.Connection | None = None
        if settings.dsn is not None:
            database = await stack.enter_async_context(tables.database(settings.dsn))
            await stack.enter_async_context(tables.one_moment(database))
            known = await _projected(database, settings.cell)
        log = await open_log(settings.log_url, "backup", settings.archive).start()
        stack.push_async_callback(log.close)
        spans = await _spans(log, settings.cell_index)
        progress.expect(sum(span.end - span.first for span in spans))
        copied_files = await asyncio.to_thread(files.copy_out, copy, env)
        follower = HeadFollower(known)
        source = _Source(log, spans, follower, database)
        partitions, schemas = await _copy(copy, source, settings.cell, progress)
    manifest = _manifest(settings, taken_ms, follower, partitions, schemas, copied_files)
    epochs.enter(copy.parent, settings.cell, manifest.head.epoch)
    write_manifest(copy, manifest)
    return manifest


def _make(copy: Path) -> None:
    try:
        copy.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(copy.iterdir()):
            raise ConfigurationError(f"{copy} is not empty; give a new folder for each copy")
        (copy / LOG).mkdir()
    except OSError as error:
        raise ConfigurationError(
            f"{copy} cannot be written: {error.strerror}; give another folder"
        ) from error


async def _projected(database: asyncpg.Connection, cell: str) -> Written | None:
    """The read models' newest record; None without any. A failed query would end the transaction, so the
    table is looked up first."""
    if await database.fetchval("SELECT to_regclass($1) IS NULL", f"{schema_of(cell)}.positions"):
        return None
    return await projected(database, cell)


async def _spans(log: Log, cell_index: int) -> list[Span]:
    """The ledger's end before those of the inputs: see above."""
    places = partitions_of(cell_index)
    begins = await log.begin_offsets(places)
    ends = await log.end_offsets(places[:1])
    ends |= await log.end_offsets(places[1:])
    return [Span(place, begins[place], max(begins[place], ends[place])) for place in places]


async def _copy(
    copy: Path, source: "_Source", cell: str, progress: Progress
) -> tuple[list[CopiedPartition], list[CopiedSchema]]:
    archive = archive_in(copy)
    followers = [source.follower, *[None] * (len(source.spans) - 1)]
    work: list[Awaitable[Any]] = [
        copy_out(source.log, archive, span, progress, one)
        for span, one in zip(source.spans, followers, strict=True)
    ]
    if source.database is not None:
        work.append(tables.copy_out(source.database, cell, copy))
    found = await all_of(*work)
    partitions = found[: len(source.spans)]
    return partitions, found[len(partitions)] if source.database is not None else []


class _Source(NamedTuple):
    """The copied log and tables, as of the beginning of the copy.
    `follower`: of the ledger, the first of `spans`."""

    log: Log
    spans: Sequence[Span]
    follower: HeadFollower
    database: asyncpg.Connection | None


def _manifest(
    settings: Settings,
    taken_ms: int,
    follower: HeadFollower,
    partitions: Sequence[CopiedPartition],
    schemas: Sequence[CopiedSchema],
    copied_files: Sequence[CopiedFile],
) -> Manifest:
    return Manifest(
        format=FORMAT,
        version=__version__,
        cell=settings.cell,
        cell_index=settings.cell_index,
        taken_ms=taken_ms,
        head=follower.found(),
        partitions=tuple(partitions),
        schemas=tuple(schemas),
        files=tuple(copied_files),
    )
