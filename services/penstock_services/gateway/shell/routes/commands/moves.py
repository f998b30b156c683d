"""`POST /v1/jobs/{id}/move`:
an operator moves a running job to nodes that are reserved for it until its arrival."""

import asyncio
import secrets

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.clock import wall_ms
from penstock.ledger.state.state import CellState
from penstock.ledger.views import Row, move
from penstock.model.proposals import MigrationProposed
from penstock.model.wire.envelope import Envelope
from penstock.proposals.validate import validate
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import MoveAct, read_move
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.document import request_body
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, json_body
from penstock_services.gateway.shell.routes.jobs import SOURCE, commanded

router = APIRouter(prefix="/v1/jobs", tags=["operators"])

PROPOSER = "gateway"
DECIDED_WITHIN_S = 5.0  # the response waits so long for the placer's answer


@router.post(
    "/{job_id}/move", status_code=202, openapi_extra=request_body(MoveAct), dependencies=[needs(Role.OPERATE)]
)
async def move_job(job_id: str, request: Request) -> Response:
    """The job is stopped, saves within its grace, and starts on these nodes, which are reserved for it
    meanwhile. It costs the user no retry.

    Body: `{"to": ["node-b1"], "reason": "…"}`, a node for each task in rank order or one for all. 200 once it
    is decided; 202 if that takes longer.
    """
    act = read_move(await json_body(request, '{"to": ["node-b1"]}'))
    await commanded(request, job_id)
    gateway = gateway_of(request)
    state = gateway.follower.state
    proposal = _proposal(state, job_id, act, caller_of(request).by)
    verdict = validate(state, proposal)
    if not verdict.accepted:
        raise Problem(409, verdict.reason, f"{verdict.detail}; nothing was changed")
    before = _token(state, job_id)
    envelope = Envelope(
        id=proposal.proposal_id, source=SOURCE, time_ms=wall_ms(), data=proposal, correlation_id=job_id
    )
    await gateway.appender.append([envelope])
    found = await _decided(gateway, job_id, before)
    more = {"nodes": list(proposal.nodes), "decided": found is not None, "move": found}
    return answer({"job_id": job_id, **more}, 202 if found is None else 200)


def _proposal(state: CellState, job_id: str, act: MoveAct, by: str) -> MigrationProposed:
    job = state.jobs.get(job_id)
    tasks = 1 if job is None else max(1, len(job.tasks))
    return MigrationProposed(
        proposal_id=f"move-{secrets.token_hex(12)}",
        proposer=PROPOSER,
        job_id=job_id,
        nodes=act.to * tasks if len(act.to) == 1 else act.to,
        reason=act.reason or "",
        by=by,
    )


def _token(state: CellState, job_id: str) -> int:
    """Token of its latest move; 0: it has none."""
    job = state.jobs.get(job_id)
    return 0 if job is None or job.moves.latest is None else job.moves.latest.token


async def _decided(gateway: Gateway, job_id: str, before: int) -> Row | None:
    """Its new move; None if the placer has not decided it in time, or has refused it after all."""
    try:
        async with asyncio.timeout(DECIDED_WITHIN_S):
            while True:
                changed = gateway.follower.next_change()
                state = gateway.follower.state
                if _token(state, job_id) != before and job_id in state.jobs:
                    return move(state.jobs[job_id])
                await changed.wait()
    except TimeoutError:
        return None
