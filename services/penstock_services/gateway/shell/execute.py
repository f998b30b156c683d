"""`POST /v1/jobs/{id}/exec`: runs a command in a running task, for its owner or an operator; recorded as it
begins and as it ends."""

import asyncio
import secrets
import shlex
from collections.abc import AsyncIterator

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from msgspec.structs import replace

from penstock.ledger.job_state import JobState, TaskState
from penstock.model.command_runs import JobCommandRun
from penstock.model.topics import MAX_EVENT_BYTES
from penstock.model.types import MAX_TEXT
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.acts import ExecAct, read_fields
from penstock_services.gateway.core.log_text import Member, Unreadable
from penstock_services.gateway.core.problems import BadField, Problem, invalid
from penstock_services.gateway.shell.gateway import Gateway, content_type, gateway_of, read_body
from penstock_services.gateway.shell.jobs import append_event, as_asked_by, commanded
from penstock_services.gateway.shell.roles import caller_of, needs

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

MEDIA_TYPE = "application/x-ndjson"
MAX_NAMED = 4  # tasks in a message


@router.post(
    "/{job_id}/exec",
    response_class=StreamingResponse,
    dependencies=[needs(Role.SUBMIT, Role.OPERATE)],
    responses={200: {"content": {MEDIA_TYPE: {}}}},
)
async def execute(job_id: str, request: Request) -> Response:
    """Body: `{"command": ["nvidia-smi"], "task": "w0"}`; a job of one task needs no `task`. Answer: one
    object per line, `{"stdout": BASE64}` and `{"stderr": BASE64}` as they come, at last `{"exit_code": N}` or
    `{"problem": …}`.
    """
    body = await read_body(request, MAX_EVENT_BYTES)
    if content_type(request) != "application/json":
        raise Problem(415, "content_type", "send application/json")
    act = read_fields(body, ExecAct)
    text = shlex.join(act.command)
    if len(text) > MAX_TEXT:
        field = BadField("command", f"has {len(text)} characters of {MAX_TEXT}", "put the rest into a script")
        raise invalid("this command cannot be recorded", [field])
    await commanded(request, job_id)
    gateway, caller = gateway_of(request), caller_of(request)
    job, task_id, task = _task(gateway, job_id, act.task)
    run = as_asked_by(caller, JobCommandRun(job_id=job_id, task_id=task_id, command=text))
    try:
        lines = gateway.logs.command(task.place.node_id, task_id, job.token, act.command)
    except Unreadable as error:
        raise Problem(502, "node_unreachable", str(error)) from error
    await _record(gateway, run)  # nothing runs that is not recorded
    return StreamingResponse(_carried(gateway, run, lines), media_type=MEDIA_TYPE)


def _task(gateway: Gateway, job_id: str, name: str | None) -> tuple[JobState, str, TaskState]:
    """The job, and its one running task, or the one of this name. Raises `Problem`."""
    job = gateway.follower.state.jobs.get(job_id)
    tasks = {} if job is None else job.tasks
    running = {
        task_id: task
        for task_id, task in tasks.items()
        if task.started_ms is not None and task.exited_ms is None
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


async def _carried(gateway: Gateway, run: JobCommandRun, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The command's lines. Its end is recorded also if the caller leaves, with whom the command ends."""
    end = replace(run, problem="the connection of its caller ended, and the command with it")
    try:
        async for line in lines:
            if b'"exit_code"' in line:
                end = replace(run, exit_code=orjson.loads(line)["exit_code"])
            yield line
        if end.exit_code is None:
            raise Unreadable("the node ended the answer before the command")
    except Unreadable as error:
        end = replace(run, problem=str(error)[:MAX_TEXT])
        yield orjson.dumps({"problem": str(error)}) + b"\n"
    finally:
        recording = asyncio.ensure_future(_record(gateway, end))
        gateway.marking.add(recording)
        recording.add_done_callback(gateway.marking.discard)


async def _record(gateway: Gateway, run: JobCommandRun) -> None:
    """Raises `Problem`."""
    event_id = f"exec-{run.job_id}-{secrets.token_hex(8)}"
    await append_event(gateway, "exec", event_id, event_id, run, {"penstock.command": run.command})
