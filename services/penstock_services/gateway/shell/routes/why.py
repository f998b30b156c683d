"""`GET /v1/jobs/{id}/why`: the reasons now, or at any past record, from the same pure `explain`."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from penstock.ledger.state.state import CellState
from penstock.ledger.views import adjustments, checkpoint, fragment
from penstock.model.nouns.token import seq_of
from penstock.model.wire.codec import as_written
from penstock.why.doubts import distrust_text
from penstock.why.explain import MAX_NAMED, UnknownJob, explain, not_waiting
from penstock.why.queue_position import Line, line_of
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.cursor import MAX_SEQ
from penstock_services.gateway.core.forecasts import deadline
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.visible import reason_for, sees_all
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.answers.deadlines import outlook_of
from penstock_services.gateway.shell.answers.explained import move_of, placement_of, with_reasons
from penstock_services.gateway.shell.answers.past import explained, record_at
from penstock_services.gateway.shell.answers.starts import start_of
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, require_live
from penstock_services.gateway.shell.routes.jobs import find_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

FOLDED_WITHIN_S = 1.0  # the placer answers a submission within milliseconds


@router.get("/{job_id}/why", dependencies=[needs(Role.READ)])
async def why(
    job_id: str,
    request: Request,
    at: Annotated[int | None, Query(ge=0, le=MAX_SEQ, description="As of this ledger record")] = None,
    at_ms: Annotated[
        int | None,
        Query(
            ge=0,
            le=MAX_SEQ,
            description="As of the latest record of this time (ms since 1970) or before; ignored beside `at`",
        ),
    ] = None,
) -> Response:
    """Why it waits, or why it was placed there; now, or as of record `at`, or of the time `at_ms`.

    `start`: when a job in the queue is expected to start, and which jobs hold the resources it needs; null of
    the past and for other jobs. `deadline`: of a job with a deadline or a service class, as `GET
    /v1/deadlines` has it; null of the past and for others.
    """
    gateway = gateway_of(request)
    if at is None:
        await require_live(request)
    if at is None and at_ms is not None:
        at = await record_at(gateway, at_ms)
    found = await (_now(gateway, job_id) if at is None else _past(gateway, job_id, at))
    found["deadline"] = deadline.answer(outlook_of(gateway, job_id)) if at is None else None
    caller = caller_of(request)
    if sees_all(caller):
        return answer(found)
    return answer(reason_for(caller, found, (await find_job(gateway, job_id))["owner"]))


async def _now(gateway: Gateway, job_id: str) -> dict[str, Any]:
    """As of the latest record. Raises `Problem` 404."""
    if job_id in gateway.follower.pending:
        await _until_folded(gateway, job_id)
    state, now_ms = gateway.follower.state, gateway.follower.now_ms()
    job = state.jobs.get(job_id)
    line = _line(state, now_ms) if job is not None and job.in_line else None
    try:
        found: dict[str, Any] = as_written(explain(state, job_id, now_ms, line))
    except UnknownJob:
        return await _not_folded(gateway, job_id)
    start = start_of(gateway, job_id, line)
    if job is None:
        row = await find_job(gateway, job_id)
        found["detail"] = row["reason"] or ""
        found["text"] += _suspect(gateway, row["nodes"])
        found["placement"] = await placement_of(gateway, job_id, MAX_SEQ)
    else:
        found["placement"] = (
            await placement_of(gateway, job_id, seq_of(job.token)) if job.placed_ms is not None else None
        )
    found["adjustments"] = [] if job is None else adjustments(job)
    found["checkpoint"] = None if job is None else checkpoint(gateway.follower.state, job)
    found["unsaved"] = None if job is None else fragment(job.saving.unsaved)
    found["move"] = None if job is None else await move_of(gateway, job)
    found["unfollowed_ms"] = None if job is None else job.following.absent_ms
    found["start"] = start
    return found


def order_queue(state: CellState, now_ms: int) -> None:
    """Puts the queue in order, so that the first answer need not: 25 ms with 4,500 jobs waiting
    (`tests.bench.answers`)."""
    _line(state, now_ms, begin=True)


def _line(state: CellState, now_ms: int, *, begin: bool = False) -> Line | None:
    """The queue's order; None where the policy has a bug, which the answer names. `begin`: computes the first
    place already."""
    try:
        line = line_of(state, max(now_ms, state.now_ms))
        if begin and line.places is not None:
            next(iter(line.places), None)
        return line
    except Exception:  # noqa: BLE001 - see above
        return None


def _suspect(gateway: Gateway, nodes: list[str]) -> str:
    """` Suspect is node-0: 3 jobs failed there …`, of the nodes on which the job ended;
    empty: none is suspect."""
    state, now_ms = gateway.follower.state, gateway.follower.now_ms()
    known = [state.nodes[node_id] for node_id in nodes if node_id in state.nodes]
    texts = [text for node in known if (text := distrust_text(node, now_ms))]
    return f" Suspect is {'; '.join(texts[:MAX_NAMED])}." if texts else ""


async def _until_folded(gateway: Gateway, job_id: str) -> None:
    """Waits a moment for the placer's answer to a submission."""
    try:
        async with asyncio.timeout(FOLDED_WITHIN_S):
            while job_id in gateway.follower.pending:
                await gateway.follower.next_change().wait()
    except TimeoutError:
        return


async def _not_folded(gateway: Gateway, job_id: str) -> dict[str, Any]:
    """For a job that is not in the fold: just acknowledged, or ended long ago. Raises `Problem` 404."""
    row = await find_job(gateway, job_id)
    pending = row["outcome"] is None
    text, step = (
        (
            "The job is in the log, but the placer has not read it yet.",
            "Check that the placer runs (`penstock doctor`).",
        )
        if pending
        else (f"It has ended: {row['outcome']}.", "Read its output with `penstock logs`.")
    )
    answer = as_written(not_waiting(gateway.follower.state, job_id, row["status"], text, step))
    answer["now_ms"] = gateway.follower.now_ms()
    placement = None if pending else await placement_of(gateway, job_id, MAX_SEQ)
    return answer | {"detail": row["reason"] or "", "placement": placement, "start": None}


async def _past(gateway: Gateway, job_id: str, at: int) -> dict[str, Any]:
    """The answer as of record `at`, as if it were the last one. Raises `Problem`."""
    head = gateway.follower.state.seq
    if at > head:
        raise Problem(404, "no_record", f"record {at} does not exist yet; the latest is {head}")
    past = await explained(gateway, job_id, at)
    placement = await placement_of(gateway, job_id, at) if past.placed else None
    move = None if past.move is None else await with_reasons(gateway, job_id, past.move, at)
    return {**past.explanation, "placement": placement, "move": move, "start": None}
