"""`GET /v1/stream`: the ledger's events as they are projected, as server-sent events.

An event's id is its position in the ledger, `seq.n`. A client that reconnects with `Last-Event-ID` gets every
later event once, in order. Without a `Last-Event-ID` the first frame, which has no event, has the id of the
position where the stream begins, since the connection may break before the first event. Nothing is polled:
the projector's commit wakes the streams.
"""

import time
from collections.abc import AsyncIterator, Collection
from typing import Annotated

import orjson
from asyncpg import Record
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from penstock.model.inputs.followers import MAX_FOLLOWED
from penstock.runtime.race import first_of
from penstock_services.gateway.core.access import Caller, Role
from penstock_services.gateway.core.cursor import MAX_N, MAX_SEQ, Cursor, read_cursor
from penstock_services.gateway.core.problems import BadField, Problem, invalid
from penstock_services.gateway.core.visible import event_for, sees_all
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.gateway import Gateway, gateway_of
from penstock_services.gateway.shell.routes.jobs import find_job

router = APIRouter(prefix="/v1", tags=["events"])

PAGE = 500
MAX_STREAMS = 256
QUIET_S = 25.0  # a comment after so long without an event, so that both ends detect a dead connection
RECONNECT_MS = 500


@router.get("/stream", response_class=StreamingResponse, dependencies=[needs(Role.READ)])
async def stream(
    request: Request,
    job: Annotated[str | None, Query(max_length=128, description="Only this job's events")] = None,
    after: Annotated[
        str | None, Query(max_length=64, description="As Last-Event-ID; 0 for everything that is stored")
    ] = None,
    until: Annotated[
        int | None, Query(ge=0, le=MAX_SEQ, description="End after this record, instead of never")
    ] = None,
    follows: Annotated[
        list[Annotated[str, Field(max_length=128)]] | None,
        Query(max_length=MAX_FOLLOWED, description="Jobs of which this stream is the follower (`tied_to`)"),
    ] = None,
) -> StreamingResponse:
    """Events from now on, or from `Last-Event-ID` on; for ever, or until a record.

    A job with `tied_to: follower` lives as long as a stream names it in `follows`, and its `tied_grace_ms`
    longer.
    """
    gateway = gateway_of(request)
    for job_id in follows or ():
        row = await find_job(gateway, job_id)
        caller_of(request).demand_tenant(row["owner"], f"to follow job {job_id}, which")
    if gateway.streams >= MAX_STREAMS:
        raise Problem(429, "overloaded", f"{gateway.streams} streams are open already", retry_after_s=5)
    text, name = request.headers.get("last-event-id"), "Last-Event-ID"
    if text is None:
        text, name = after, "after"
    cursor = await _start(gateway, None if text is None else read_cursor(text, name), name)
    lead = f"id: {cursor.seq}.{cursor.n}\n" if text is None else ""
    return StreamingResponse(
        _frames(
            gateway,
            caller_of(request),
            cursor,
            job,
            MAX_SEQ if until is None else until,
            lead,
            dict.fromkeys(follows or ()),
        ),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _start(gateway: Gateway, cursor: Cursor | None, name: str) -> Cursor:
    """The start position. Raises `Problem`: 410 when events after the cursor are no longer stored, 400 beyond
    the end."""
    found = await gateway.store.row(
        "SELECT seq || ' ' || coalesce((SELECT min(seq) FROM events), 0) FROM positions LIMIT 1"
    )
    head, first = (int(part) for part in (found or "0 0").split())
    if cursor is None:
        return Cursor(head, MAX_N)
    if cursor.seq > max(head, gateway.follower.state.seq):
        raise invalid(
            "no place in the stream", [BadField(name, f"{cursor.seq} is ahead of {head}", "start anew")]
        )
    if 0 < cursor.seq < first - 1:
        detail = (
            f"events before record {first} are no longer stored; start with 0 for all that are, and "
            "reload what you show"
        )
        raise Problem(410, "no_longer_kept", detail)
    return cursor


def _frame(caller: Caller, row: Record) -> bytes:
    """One event, as the caller may see it."""
    found = row["found"]
    if not sees_all(caller):
        found = orjson.dumps(event_for(caller, orjson.loads(found), row["owner"])).decode()
    return f"id: {row['seq']}.{row['n']}\ndata: {found}\n\n".encode()


async def _frames(
    gateway: Gateway,
    caller: Caller,
    cursor: Cursor,
    job_id: str | None,
    until: int,
    lead: str,
    follows: Collection[str],
) -> AsyncIterator[bytes]:
    """Frames, the first one with `lead`, until the client leaves, the gateway stops, or all of record `until`
    is sent.

    Meanwhile the stream is the follower of the jobs `follows`.
    """
    gateway.streams += 1
    gateway.followers.opened(follows, stream := object())
    gateway.follower.wake()
    try:
        yield f"{lead}retry: {RECONNECT_MS}\n\n".encode()
        while not gateway.stopping.is_set():
            change, projected = gateway.store.next_change(), gateway.store.projected_seq
            rows = await gateway.store.events_after(cursor, job_id, PAGE)
            wanted = [row for row in rows if row["seq"] <= until]
            if wanted:
                cursor = Cursor(wanted[-1]["seq"], wanted[-1]["n"])
                yield b"".join(_frame(caller, row) for row in wanted)
            if len(wanted) < len(rows) or (len(rows) < PAGE and projected >= until):
                return
            if len(rows) < PAGE and not await first_of(
                change.wait(), gateway.stopping.wait(), timeout_s=QUIET_S
            ):
                yield b": quiet\n\n"
    except Problem:
        return  # the database is down: the client reconnects with its Last-Event-ID
    finally:
        gateway.streams -= 1
        gateway.followers.closed(follows, stream, time.monotonic())
        gateway.follower.wake()
