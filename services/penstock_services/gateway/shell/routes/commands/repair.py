"""`/v1/repair`: an operator amends the ledger record before which the cell stands still, because it cannot be
decoded or folded.

Nothing is written before the amended record, and what follows it, were folded on a copy of the replica.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.clock import wall_ms
from penstock.errors import LogError, one_line
from penstock.ledger.record.amendment import NotAmendable, Proposal, amend, place_as_written, propose
from penstock.ledger.record.record import Amended, UndecodableRecord, UnfoldableRecord
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump, load
from penstock.log.lookup import records_at
from penstock.log.port import Partition, Record
from penstock.model.inputs.amendments import LedgerAmended
from penstock.model.nouns.types import ShortText, Value
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.cursor import MAX_SEQ
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import read_fields
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.document import request_body
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, read_body

router = APIRouter(prefix="/v1/repair", tags=["operators"])

SOURCE = "/penstock/gateway"
NOBODY = "nobody"
"""Amends on a copy only."""
MAX_BODY_BYTES = 8_192  # a digest and a reason of 1,024 characters, each of which JSON may escape
MAX_TRIED_RECORDS = 100_000  # folded after the amended one; a placer that wrote more has read them itself
APPLIED_WITHIN_S = 5.0  # the response waits so long for this gateway's replica
READ_WITHIN_S = 20.0  # records that exist; a log that returns none for so long is broken


class RepairAct(Value, frozen=True, kw_only=True):
    """The proposal that the operator has seen, and why it is right."""

    sha256: str
    reason: ShortText = ""


@router.get("/{offset}", dependencies=[needs(Role.OPERATE)])
async def proposed(offset: int, request: Request) -> Response:
    """What would be amended in the ledger's record at this offset: each field with its value, its bound and
    the nearest legal value."""
    found, _ = await _proposal(gateway_of(request), offset)
    return answer(_row(offset, found))


@router.post(
    "/{offset}", status_code=202, openapi_extra=request_body(RepairAct), dependencies=[needs(Role.OPERATE)]
)
async def repair(offset: int, request: Request) -> Response:
    """Writes that amendment; every service of the cell goes on with it. Body: `{"sha256": …, "reason": …}`,
    the digest as proposed."""
    gateway = gateway_of(request)
    act = read_fields(await read_body(request, MAX_BODY_BYTES), RepairAct)
    found, record = await _proposal(gateway, offset)
    if act.sha256 != found.sha256:
        detail = (
            f"the record at offset {offset} is {found.sha256}, not {act.sha256 or 'empty'}; look at the "
            "proposal again"
        )
        raise Problem(409, "other_record", detail)
    amendment = _amendment(offset, found, by=caller_of(request).by, reason=act.reason, at_ms=wall_ms())
    await _try(gateway, record, amendment)
    event_id = f"amend-{offset}-{found.sha256[:32]}"
    await gateway.appender.append(
        [Envelope(id=event_id, source=SOURCE, time_ms=amendment.at_ms, data=amendment)]
    )
    applied = await _passed(gateway, offset)
    row = {
        **_row(offset, found),
        "by": amendment.by,
        "reason": act.reason,
        "event_id": event_id,
        "applied": applied,
    }
    return answer(row, 200 if applied else 202)


def _amendment(
    offset: int, found: Proposal, *, by: str = NOBODY, reason: str = "", at_ms: int = 0
) -> LedgerAmended:
    return LedgerAmended(
        offset=offset,
        seq=found.seq,
        sha256=found.sha256,
        facts=found.facts,
        by=by,
        reason=reason,
        at_ms=at_ms,
    )


def _row(offset: int, found: Proposal) -> dict[str, Any]:
    return {
        "offset": offset,
        "seq": found.seq,
        "sha256": found.sha256,
        "changes": [change._asdict() for change in found.changes],
    }


def _ledger(gateway: Gateway) -> Partition:
    return Partition(Topic.LEDGER, gateway.settings.cell_index)


async def _proposal(gateway: Gateway, offset: int) -> tuple[Proposal, Record]:
    """Raises `Problem` unless the cell stands before this record, and an amendment helps."""
    if not 0 <= offset <= MAX_SEQ:
        raise Problem(404, "no_record", f"{offset} is not an offset of the ledger")
    try:
        record = (await records_at(gateway.log, {_ledger(gateway): offset}))[_ledger(gateway)]
    except LogError as error:
        raise Problem(503, "log_down", f"the log is away: {error}", retry_after_s=2) from error
    if record is None:
        raise Problem(
            404,
            "no_record",
            f"the ledger has no record at offset {offset}; penstock doctor names the one at fault",
        )
    if isinstance(record.value, Amended):
        raise Problem(
            409,
            "already_amended",
            f"the record at offset {offset} is amended already; services go on by themselves",
        )
    stands, known = gateway.follower.undecodable, dict[int, str]()
    if isinstance(stands, UnfoldableRecord) and stands.offset == offset:
        known[stands.n] = stands.cause
    try:
        found = propose(record.value, offset, known)
    except NotAmendable as error:
        raise Problem(409, "not_amendable", str(error)) from error
    if stands is None or stands.offset != offset:
        where = (
            "the cell stands before no record"
            if stands is None
            else f"the cell stands before offset {stands.offset}"
        )
        raise Problem(
            409,
            "not_standing",
            f"{where}; at offset {offset} lies a void record, or one that was not reached yet",
        )
    return await asyncio.to_thread(_foldable, gateway.follower.replica, record, found, known), record


def _foldable(stands: Replica, record: Record, found: Proposal, without: dict[int, str]) -> Proposal:
    """The proposal without further facts that cannot be folded then, which `without` gets.
    In a thread, on a copy."""
    while True:
        value = amend(record.value, _amendment(record.offset, found))
        if value is None:
            return found  # `_try` says so
        try:
            _fold(stands, [(record.offset, value)])
        except UnfoldableRecord as error:
            without[place_as_written(found.facts, error.n)] = error.cause
            found = propose(record.value, record.offset, without)
        except UndecodableRecord:
            return found
        else:
            return found


async def _try(gateway: Gateway, record: Record, amendment: LedgerAmended) -> None:
    """Folds the amended record and its successors on a copy. Raises `Problem` where that fails."""
    value = amend(record.value, amendment)
    if value is None:
        raise Problem(
            409,
            "not_amendable",
            f"the amended record at offset {record.offset} cannot be decoded either; this is a bug",
        )
    try:
        values = await _successors(gateway, record.offset + 1)
    except LogError as error:
        raise Problem(503, "log_down", f"the log is away: {error}", retry_after_s=2) from error
    try:
        await asyncio.to_thread(_fold, gateway.follower.replica, [(record.offset, value), *values])
    except Exception as error:
        detail = f"with this amendment the record cannot be folded, so nothing was written: {one_line(error)}"
        raise Problem(409, "does_not_fold", detail) from error


async def _successors(gateway: Gateway, start: int) -> list[tuple[int, bytes]]:
    ledger = _ledger(gateway)
    end = min((await gateway.log.end_offsets([ledger]))[ledger], start + MAX_TRIED_RECORDS)
    found: list[tuple[int, bytes]] = []
    if start >= end:
        return found
    reader = gateway.log.reader({ledger: start})
    try:
        async with asyncio.timeout(READ_WITHIN_S):
            while reader.position(ledger) < end:
                found += [(record.offset, record.value) for record in await reader.read()]
    except TimeoutError:
        raise Problem(
            503, "log_down", f"the ledger was not read within {READ_WITHIN_S:g} s", retry_after_s=2
        ) from None
    finally:
        await reader.close()
    return found


def _fold(stands: Replica, values: Sequence[tuple[int, bytes]]) -> None:
    """In a thread: the replica does not change while it stands. The next record that cannot be decoded or
    folded has an amendment of its own."""
    copy = Replica(load(dump(stands.state)), stands.head, stands.offset, stands.head_offset)
    for n, (offset, value) in enumerate(values):
        try:
            copy.take(value, offset)
        except UndecodableRecord:
            if n == 0:
                raise
            return


async def _passed(gateway: Gateway, offset: int) -> bool:
    """Whether this gateway's replica has passed the record in time."""
    try:
        async with asyncio.timeout(APPLIED_WITHIN_S):
            while gateway.follower.replica.offset <= offset:
                await gateway.follower.next_change().wait()
    except TimeoutError:
        return False
    return True
