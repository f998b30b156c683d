"""`POST /v1/jobs/{id}/exec` runs a command in a running task, `POST /v1/jobs/{id}/attach` joins the task's
own terminal: for its owner or an operator; recorded as it begins and as it ends."""

import shlex
from typing import TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.nouns.types import MAX_TEXT, Value
from penstock.runtime.http.http_switch import switch_of
from penstock.runtime.keys.log_keys import ATTACH_PATH, EXEC_PATH
from penstock.session_lines import PROTOCOL
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.log_text import Member
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.acts import AttachAct, ExecAct, read_fields
from penstock_services.gateway.shell.access.roles import caller_of, needs
from penstock_services.gateway.shell.document import request_body
from penstock_services.gateway.shell.gateway import Gateway, gateway_of, json_body
from penstock_services.gateway.shell.routes.commands.sessions import MEDIA_TYPE, Asked, begun
from penstock_services.gateway.shell.routes.jobs import as_asked_by, commanded

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

MAX_NAMED = 4  # tasks in a message
LEFT = "the connection of its caller ended, and the command with it"
ATTACHED, DETACHED = "penstock attach", "its caller has left the terminal"
EXEC_BODY = request_body(ExecAct)
_COMMAND = EXEC_BODY["requestBody"]["content"]["application/json"]["schema"]["properties"]["command"]
_COMMAND["prefixItems"] = [{**_COMMAND["items"], "minLength": 1}]


@router.post(
    "/{job_id}/exec",
    response_class=StreamingResponse,
    dependencies=[needs(Role.SUBMIT, Role.OPERATE)],
    responses={200: {"content": {MEDIA_TYPE: {}}}},
    openapi_extra=EXEC_BODY,
)
async def execute(job_id: str, request: Request) -> Response:
    """Body: `{"command": ["nvidia-smi"], "task": "w0"}`; a job of one task needs no `task`. Answer: one
    object per line, `{"stdout": BASE64}` and `{"stderr": BASE64}` as they come, at last `{"exit_code": N}` or
    `{"problem": …}`.

    With `"stdin": true` or `"terminal": "24x80"`, and `Upgrade: penstock-lines`, the connection goes over to
    such lines in both directions.
    """
    act = await _asked(request, ExecAct)
    text = shlex.join(act.command)
    if len(text) > MAX_TEXT:
        detail = (
            f"command: has {len(text)} characters of {MAX_TEXT} that are recorded; put the rest into a script"
        )
        raise Problem(413, "command_too_long", detail)
    await commanded(request, job_id)
    if act.stdin or act.terminal is not None:
        _demand_upgrade(request)
    gateway, caller = gateway_of(request), caller_of(request)
    job, task_id, task = _task(gateway, job_id, act.task)
    run = as_asked_by(caller, JobCommandRun(job_id=job_id, task_id=task_id, command=text))
    asked = {"task": task_id, "token": str(job.token)}
    if act.terminal is not None:
        asked |= {"terminal": act.terminal, "term": act.term}
    elif act.stdin:
        asked |= {"input": "1"}
    body = orjson.dumps(act.command)
    return await begun(gateway, run, task.place.node_id, Asked(EXEC_PATH, asked, body, LEFT))


@router.post(
    "/{job_id}/attach",
    response_class=StreamingResponse,
    status_code=101,
    dependencies=[needs(Role.SUBMIT, Role.OPERATE)],
    openapi_extra=request_body(AttachAct),
)
async def attach(job_id: str, request: Request) -> Response:
    """Body: `{"terminal": "24x80"}`, and `task` as for `exec`; with `Upgrade: penstock-lines`. The connection
    goes over to such lines in both directions; what the terminal showed last comes first, at last `{"ended":
    true}`.
    """
    act = await _asked(request, AttachAct)
    await commanded(request, job_id)
    _demand_upgrade(request)
    gateway, caller = gateway_of(request), caller_of(request)
    job, task_id, task = _task(gateway, job_id, act.task)
    if not job.spec.interactive:
        detail = (
            f"job {job_id} has no terminal, since it was not submitted with -it; `penstock exec -it {job_id} "
            f"-- bash` opens one in its task, `penstock logs -f {job_id}` shows its output"
        )
        raise Problem(409, "no_terminal", detail)
    run = as_asked_by(caller, JobCommandRun(job_id=job_id, task_id=task_id, command=ATTACHED))
    asked = {"task": task_id, "token": str(job.token), "terminal": act.terminal}
    return await begun(gateway, run, task.place.node_id, Asked(ATTACH_PATH, asked, b"", DETACHED))


A = TypeVar("A", bound=Value)


async def _asked(request: Request, kind: type[A]) -> A:
    """Raises `Problem`."""
    return read_fields(await json_body(request), kind)


def _demand_upgrade(request: Request) -> None:
    """Raises `Problem`."""
    if switch_of(request.scope) is None:
        detail = (
            f"input and terminals need `Upgrade: {PROTOCOL}`; a proxy before the gateway has to pass it on"
        )
        raise Problem(426, "no_upgrade", detail)


def _task(gateway: Gateway, job_id: str, name: str | None) -> tuple[JobState, str, TaskState]:
    """The job, and its one running task, or the one of this name. Raises `Problem`."""
    job = gateway.follower.state.jobs.get(job_id)
    tasks = {} if job is None else job.tasks
    running = {
        task_id: task
        for task_id, task in tasks.items()
        if task.started_ms is not None and task.exit.at_ms is None
    }
    if job is None or not running:
        raise Problem(
            409, "not_running", f"no task of job {job_id} is running; `penstock why {job_id}` tells more"
        )
    if job.spec.environment is not None and job.spec.environment.container is not None:
        detail = f"job {job_id} runs in a container, which commands cannot enter; have its program run it"
        raise Problem(409, "in_a_container", detail)
    members = [
        Member(task_id, job_id, job.attempt, task.place.node_id, True) for task_id, task in running.items()
    ]
    chosen = [one for one in members if name is None or one.is_called(name)]
    if len(chosen) != 1:
        named = ", ".join(one.short for one in members[:MAX_NAMED]) + (
            ", …" if len(members) > MAX_NAMED else ""
        )
        what = f"no running task {name!r}" if name is not None else f"{len(members)} running tasks"
        raise Problem(404, "no_task", f"job {job_id} has {what}; name one of {named}")
    return job, chosen[0].task_id, running[chosen[0].task_id]
