"""`POST /v1/jobs/{id}/checkpoint`: asks a running job to save a checkpoint and to train on."""

import asyncio
import secrets

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.ledger.state.job.checkpoints import Checkpoint, Unsaved
from penstock.ledger.views import checkpoint as row_of
from penstock.model.inputs.external_events import JobCheckpointRequested
from penstock.model.nouns.transitions import JobStatus
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import read_act
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, json_body
from penstock_services.gateway.shell.routes.jobs import append_event, as_asked_by, commanded

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Before = tuple[Checkpoint | None, Unsaved | None]
SAVED_WITHIN_S = 5.0  # the response waits so long for the checkpoint


@router.post("/{job_id}/checkpoint", status_code=202, dependencies=[needs(Role.SUBMIT, Role.OPERATE)])
async def checkpoint(job_id: str, request: Request) -> Response:
    """The job saves a checkpoint at the end of an iteration, and trains on. Body (optional): `{"reason":
    "…"}`.

    200 with the checkpoint once it is reported; 202 with null if that takes longer, or if the job saves in a
    place of its own; 409 `not_saved` with the reason if no process of the job saves.
    """
    reason = read_act(await json_body(request, optional=True)).reason or ""
    await commanded(request, job_id)
    gateway, caller = gateway_of(request), caller_of(request)
    job = gateway.follower.state.jobs.get(job_id)
    if job is not None and job.spec.checkpoint == "none":
        detail = f"job {job_id} does not save; submit it with `checkpoint: sdk` or `signal`"
        raise Problem(409, "saves_nothing", detail)
    if job is not None and job.status is not JobStatus.RUNNING:
        raise Problem(409, "not_running", f"job {job_id} is {job.status}; nothing was asked")
    before = None if job is None else (job.saving.checkpoint, job.saving.unsaved)
    event = as_asked_by(caller, JobCheckpointRequested(job_id=job_id, reason=reason))
    event_id = f"checkpoint-{job_id}-{secrets.token_hex(8)}"
    await append_event(gateway, "checkpoint", event_id, event_id, event, {"penstock.reason": reason})
    own = job is not None and job.spec.checkpoint == "signal"
    saved = None if own else await _saved(gateway, job_id, before)
    return answer({"job_id": job_id, "checkpoint": saved}, 202 if saved is None else 200)


async def _saved(gateway: Gateway, job_id: str, before: Before | None) -> dict[str, object] | None:
    """The next reported checkpoint; None: not in time, or the job has ended. Raises `Problem` where no
    process of it saves."""
    saved, unsaved = before or (None, None)
    try:
        async with asyncio.timeout(SAVED_WITHIN_S):
            while (job := gateway.follower.state.jobs.get(job_id)) is not None:
                changed = gateway.follower.next_change()
                if job.saving.checkpoint is not None and job.saving.checkpoint is not saved:
                    return row_of(gateway.follower.state, job)
                if job.saving.unsaved is not None and job.saving.unsaved is not unsaved:
                    raise Problem(409, "not_saved", f"job {job_id} is not saved: {job.saving.unsaved.reason}")
                await changed.wait()
    except TimeoutError:
        pass
    return None
