"""`POST /v1/jobs/{id}/cores`: an operator gives the running tasks of a job other numbers of CPU cores."""

import asyncio
import secrets
from collections import Counter

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.clock import wall_ms
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.ledger.views import Row
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.proposals import CoresProposed
from penstock.model.wire.envelope import Envelope
from penstock.proposals.validate import validate
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import CoresAct, read_cores
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.document import request_body
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, json_body
from penstock_services.gateway.shell.routes.jobs import SOURCE, commanded

router = APIRouter(prefix="/v1/jobs", tags=["operators"])

PROPOSER = "gateway"
APPLIED_WITHIN_S = 5.0  # the response waits so long for the nodes' answers


@router.post(
    "/{job_id}/cores",
    status_code=202,
    openapi_extra=request_body(CoresAct),
    dependencies=[needs(Role.OPERATE)],
)
async def cores(job_id: str, request: Request) -> Response:
    """Each running worker of the job, or the named task, gets this number of cores for the rest of the
    attempt.

    Body: `{"cores": 4, "task": "w0", "reason": "…"}`. 200 once the nodes have answered; 202 if that takes
    longer: `tasks` lists the answers so far.
    """
    act = read_cores(await json_body(request, '{"cores": 4}'))
    await commanded(request, job_id)
    gateway = gateway_of(request)
    state = gateway.follower.state
    asked = _proposals(state, job_id, act, caller_of(request).by)
    for proposal in asked:
        verdict = validate(state, proposal)
        if not verdict.accepted:
            raise Problem(409, verdict.reason, f"{verdict.detail}; nothing was changed")
    _refuse_crowd(state, asked)
    envelopes = [
        Envelope(id=found.proposal_id, source=SOURCE, time_ms=wall_ms(), data=found, correlation_id=job_id)
        for found in asked
    ]
    await gateway.appender.append(envelopes)
    tasks = await _outcome(gateway, job_id, [found.task_id for found in asked], act.cores)
    return answer({"job_id": job_id, "tasks": tasks}, 200 if all(task["applied"] for task in tasks) else 202)


def _proposals(state: CellState, job_id: str, act: CoresAct, by: str) -> list[CoresProposed]:
    """One for each task. Raises `Problem` where none runs."""
    job = state.jobs.get(job_id)
    running = [
        task_id
        for task_id, task in ({} if job is None else job.tasks).items()
        if task.status is TaskStatus.RUNNING
        and (
            task.place.role == "worker"
            if act.task is None
            else act.task in (task_id, task_id.rpartition(".")[2])
        )
    ]
    if not running:
        what = (
            f"no worker of job {job_id} runs"
            if act.task is None
            else f"no task {act.task} of job {job_id} runs"
        )
        raise Problem(
            409,
            "not_running",
            f"{what}; nothing was changed. `cores` in the job's file are for its next attempt",
        )
    return [
        CoresProposed(
            proposal_id=f"cores-{secrets.token_hex(12)}",
            proposer=PROPOSER,
            task_id=task_id,
            cores=act.cores,
            reason=act.reason or "",
            by=by,
        )
        for task_id in running
    ]


def _refuse_crowd(state: CellState, asked: list[CoresProposed]) -> None:
    """Raises `Problem` where a node has enough cores for each of them, but not for all."""
    more: Counter[str] = Counter()
    for found in asked:
        place = state.jobs[found.task_id.rsplit(".", 2)[0]].tasks[found.task_id].place
        more[place.node_id] += found.cores - len(place.cores)
    for node_id, count in more.items():
        free = state.nodes[node_id].free_core_mask.bit_count()
        if count > free:
            detail = f"its workers on {node_id} would need {count} cores more, and {free} are free there"
            raise Problem(409, "infeasible", f"{detail}; nothing was changed")


async def _outcome(gateway: Gateway, job_id: str, asked: list[str], wanted: int) -> list[Row]:
    """The cores of each task, once its node has answered or the time is over."""
    try:
        async with asyncio.timeout(APPLIED_WITHIN_S):
            while True:
                changed = gateway.follower.next_change()
                rows = [_row(gateway.follower.state.jobs.get(job_id), task_id, wanted) for task_id in asked]
                if all(row["applied"] or row["problem"] for row in rows):
                    return rows
                await changed.wait()
    except TimeoutError:
        return [_row(gateway.follower.state.jobs.get(job_id), task_id, wanted) for task_id in asked]


def _row(job: JobState | None, task_id: str, wanted: int) -> Row:
    task = None if job is None else job.tasks.get(task_id)
    if task is None:
        return {"task_id": task_id, "cores": [], "applied": False, "enforced": "", "problem": "it has ended"}
    known, has = task.cores.adjusted, len(task.place.cores) == wanted
    return {
        "task_id": task_id,
        "cores": list(task.place.cores),
        "applied": has and (known is None or bool(known.enforced)),
        "enforced": "" if known is None else known.enforced,
        "problem": known.problem if known is not None and has else "",
    }
