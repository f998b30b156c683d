"""`why` at a past record (time travel): the nearest snapshot, the records after it, and the same pure
`explain`.

Reading happens here on the loop; loading the snapshot and folding happen in a worker process.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any, NamedTuple

from penstock.errors import ConfigurationError
from penstock.ledger.record.record import GENESIS, Head, read_valid
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import Damaged
from penstock.ledger.views import Row, move
from penstock.log.port import Partition
from penstock.model.schema.topics import Topic
from penstock.model.wire.codec import as_written
from penstock.runtime.following.snapshots import (
    Stored,
    Until,
    check_beginning,
    restore,
    stored_snapshots,
    warn_damaged,
)
from penstock.runtime.pool import PoolBusy
from penstock.why.explain import UnknownJob, explain
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.gateway import Gateway

MAX_PAST_RECORDS = 100_000  # after the nearest snapshot; one is taken every 20,000
READ_WITHIN_S = 20.0


class Past(NamedTuple):
    """Result of a worker."""

    explanation: dict[str, Any]
    placed: bool
    """Whether the job had been placed by then, so that a placement's explanation exists."""
    move: Row | None
    """Its latest move by then (`penstock.ledger.views.move`)."""


def explain_past(stored: Stored | None, values: list[bytes], job_id: str) -> Past:
    """Folds valid records on a snapshot and explains the job.
    Raises `Damaged`, `UnknownJob`. For a worker."""
    replica = Replica() if stored is None else restore(stored)
    for offset, value in enumerate(values, replica.offset):
        replica.take(value, offset)
    found = as_written(explain(replica.state, job_id))
    job = replica.state.jobs.get(job_id)
    return Past(found, job is None or job.placed_ms is not None, None if job is None else move(job))


async def record_at(gateway: Gateway, at_ms: int) -> int:
    """The latest stored record of this time or before, by binary search: the ledger's time never goes back.

    For a record without events the one before is returned. Raises `Problem` 404.
    """
    await gateway.fresh()
    first = await gateway.store.fetch("SELECT seq, at_ms FROM events ORDER BY seq LIMIT 1")
    if not first or at_ms < first[0]["at_ms"]:
        if not first:
            raise Problem(404, "no_record", "nothing has happened yet")
        oldest, asked = (
            datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="seconds")
            for ms in (first[0]["at_ms"], at_ms)
        )
        raise Problem(404, "no_record", f"the oldest record that is stored is of {oldest}, after {asked}")
    low, high = first[0]["seq"], gateway.follower.state.seq
    while low < high:
        middle = (low + high + 1) // 2
        found = await gateway.store.fetch(
            "SELECT seq, at_ms FROM events WHERE seq BETWEEN $1 AND $2 ORDER BY seq LIMIT 1", middle, high
        )
        if found and found[0]["at_ms"] <= at_ms:
            low = found[0]["seq"]
        else:
            high = middle - 1
    return int(low)


async def explained(gateway: Gateway, job_id: str, at: int) -> Past:
    """The answer as of record `at`, which exists. Raises `Problem`."""
    pool, cell = gateway.store.pool, gateway.settings.cell
    async for stored in stored_snapshots(pool, cell, gateway.log, _ledger(gateway), Until(at)):
        try:
            return await _explained(gateway, stored, job_id, at)
        except Damaged as error:
            warn_damaged(stored, error)
    return await _explained(gateway, None, job_id, at)


async def _explained(gateway: Gateway, stored: Stored | None, job_id: str, at: int) -> Past:
    values = await _records(gateway, stored, at)
    try:
        return await gateway.workers.run(explain_past, stored, values, job_id)
    except PoolBusy as error:
        raise Problem(429, "overloaded", f"questions about the past: {error}", retry_after_s=2) from error
    except UnknownJob as error:
        raise Problem(404, "no_job", f"no job {job_id!r} as of record {at}") from error


async def _records(gateway: Gateway, stored: Stored | None, at: int) -> list[bytes]:
    """The valid records after the snapshot, up to record `at`. Raises `Problem` when they are too many."""
    head = GENESIS if stored is None else Head(stored.seq, stored.head_id, stored.term)
    if at - head.seq > MAX_PAST_RECORDS:
        raise _too_far(f"record {at} lies {at - head.seq} records behind the nearest snapshot")
    start = 0 if stored is None else stored.head_offset + 1
    try:
        await check_beginning(gateway.log, _ledger(gateway), start)
    except ConfigurationError as error:
        raise Problem(410, "archived", str(error)) from error
    reader = gateway.log.reader({_ledger(gateway): start})
    values: list[bytes] = []
    try:
        async with asyncio.timeout(READ_WITHIN_S):
            while head.seq < at:
                for record in await reader.read():
                    found = read_valid(head, record.value)
                    if found is not None and head.seq < at:
                        head = found[0]
                        values.append(record.value)
    except TimeoutError:
        raise _too_far(f"reading up to record {at} takes longer than {READ_WITHIN_S:g} s") from None
    finally:
        await reader.close()
    return values


def _ledger(gateway: Gateway) -> Partition:
    return Partition(Topic.LEDGER, gateway.settings.cell_index)


def _too_far(detail: str) -> Problem:
    return Problem(503, "too_far_back", f"{detail}; at most {MAX_PAST_RECORDS} records are replayed")
