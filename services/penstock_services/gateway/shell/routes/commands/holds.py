"""`POST /v1/jobs/{id}/hold` and `/release`: a job must not start, or may start again."""

import asyncio
import secrets

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.model.inputs.external_events import JobHoldRequested, JobReleaseRequested
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import read_act
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.gateway import Gateway, gateway_of, json_body
from penstock_services.gateway.shell.routes.jobs import accepted, append_event, as_asked_by, commanded

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

APPLIED_WITHIN_S = 2.0  # the placer answers within milliseconds


@router.post("/{job_id}/hold", status_code=202, dependencies=[needs(Role.SUBMIT, Role.OPERATE)])
async def hold(job_id: str, request: Request) -> Response:
    """The job does not start until it is released; running tasks run on.
    Body (optional): `{"reason": "…"}`."""
    reason = await _reason(request)
    await commanded(request, job_id)
    gateway, caller = gateway_of(request), caller_of(request)
    job = gateway.follower.state.jobs.get(job_id)
    if job is not None and job.held is not None:
        raise Problem(409, "already_held", f"job {job_id} is held already, by {job.held.by or 'its tenant'}")
    after = gateway.follower.state.seq
    return await _order(
        gateway, "hold", as_asked_by(caller, JobHoldRequested(job_id=job_id, reason=reason, after=after))
    )


@router.post("/{job_id}/release", status_code=202, dependencies=[needs(Role.SUBMIT, Role.OPERATE)])
async def release(job_id: str, request: Request) -> Response:
    """Ends a hold. One that an operator placed is ended by an operator."""
    reason = await _reason(request)
    await commanded(request, job_id)
    gateway, caller = gateway_of(request), caller_of(request)
    job = gateway.follower.state.jobs.get(job_id)
    if job is not None and job.held is None:
        raise Problem(409, "not_held", f"job {job_id} is not held; nothing was changed")
    if job is not None and job.held is not None and job.held.by_operator and Role.OPERATE not in caller.roles:
        detail = (
            f"{job.held.by or 'an operator'} holds job {job_id}; ask there, or use a token with the "
            "role operate"
        )
        raise Problem(403, "held_by_operator", detail)
    after = gateway.follower.state.seq
    return await _order(
        gateway,
        "release",
        as_asked_by(caller, JobReleaseRequested(job_id=job_id, reason=reason, after=after)),
    )


async def _reason(request: Request) -> str:
    return read_act(await json_body(request, optional=True)).reason or ""


async def _order(gateway: Gateway, act: str, event: JobHoldRequested | JobReleaseRequested) -> Response:
    """Appends the event; the response waits a moment for its effect, so that the next query shows it."""
    event_id = f"{act}-{event.job_id}-{secrets.token_hex(8)}"
    await append_event(gateway, act, event_id, event_id, event, {"penstock.reason": event.reason})
    try:
        async with asyncio.timeout(APPLIED_WITHIN_S):
            while True:
                changed = gateway.follower.next_change()
                job = gateway.follower.state.jobs.get(event.job_id)
                if job is not None and job.commanded_seq > event.after:
                    break
                await changed.wait()
    except TimeoutError:
        pass
    return accepted(event.job_id, 202)
