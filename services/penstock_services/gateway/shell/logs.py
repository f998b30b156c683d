"""`GET /v1/jobs/{id}/logs`: what a task printed, as its node-reporter on this machine wrote it down."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from penstock.runtime.race import first_of
from penstock.runtime.task_logs import log_path
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.gateway import Gateway, gateway_of
from penstock_services.gateway.shell.inotify import Watch
from penstock_services.gateway.shell.jobs import own_job
from penstock_services.gateway.shell.roles import needs

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

CHUNK_BYTES = 65_536
MAX_TAIL_BYTES = 1 << 20
MAX_WHOLE_BYTES = 64 << 20  # more than this is cut at the front, which the answer reports
MAX_LINES = 10_000


@router.get("/{job_id}/logs", response_class=StreamingResponse, dependencies=[needs(Role.READ)])
async def logs(
    job_id: str,
    request: Request,
    task: Annotated[
        str | None, Query(max_length=128, description="A task's id, or w0, ps1, … of the latest attempt")
    ] = None,
    follow: Annotated[bool, Query(description="Go on until the task has exited")] = False,
    tail: Annotated[int | None, Query(ge=1, le=MAX_LINES, description="Only the last lines")] = None,
) -> Response:
    """Standard output and error of one task; by default of worker 0 in the latest attempt."""
    gateway = gateway_of(request)
    await own_job(request, job_id, "output")
    if gateway.options.log_dir is None:
        detail = "no logs are kept on this machine; PENSTOCK_LOG_DIR names the node-reporters' folder"
        raise Problem(404, "no_logs", detail)
    while True:
        change = gateway.follower.next_change()
        task_id = await _task_id(gateway, job_id, task)
        if task_id is not None:
            break
        if not follow or not _is_live(gateway, job_id):
            if task is None:
                return Response(b"", media_type="text/plain; charset=utf-8")
            raise Problem(404, "no_task", f"job {job_id} has no task {task!r}")
        await change.wait()
    path = log_path(gateway.options.log_dir, job_id, task_id)
    chunks = _follow(gateway, job_id, task_id, path, tail) if follow else _whole(path, tail)
    return StreamingResponse(chunks, media_type="text/plain; charset=utf-8")


def _is_live(gateway: Gateway, job_id: str) -> bool:
    return job_id in gateway.follower.state.jobs or job_id in gateway.follower.pending


async def _task_id(gateway: Gateway, job_id: str, task: str | None) -> str | None:
    """The whole id of the task that is meant, of the latest attempt that has it; None if there is none."""
    name = (task or "w0").removeprefix(f"{job_id}.")
    job = gateway.follower.state.jobs.get(job_id)
    if job is not None:
        for task_id in job.tasks:
            if name in (task_id.rpartition(".")[2], task_id.removeprefix(f"{job_id}.")):
                return task_id
    await gateway.fresh()
    return await gateway.store.row(
        "SELECT task_id FROM tasks WHERE job_id = $1 AND ($2 = substr(task_id, length(job_id) + 2) "
        "OR $2 = reverse(split_part(reverse(task_id), '.', 1))) ORDER BY attempt DESC, rank LIMIT 1",
        job_id,
        name,
    )


def _read(path: Path, offset: int) -> bytes:
    """At most CHUNK_BYTES from there; empty where nothing is (yet)."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)
    except FileNotFoundError:
        return b""


def _start(path: Path, tail: int | None) -> int:
    """The offset where the wanted part begins."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    if tail is None:
        return max(0, size - MAX_WHOLE_BYTES)
    with path.open("rb") as file:
        first = max(0, size - MAX_TAIL_BYTES)
        file.seek(first)
        end = file.read(size - first)
    at = len(end.removesuffix(b"\n"))
    for _ in range(tail):
        at = end.rfind(b"\n", 0, at)
        if at < 0:
            return first
    return first + at + 1


async def _whole(path: Path, tail: int | None) -> AsyncIterator[bytes]:
    offset = await asyncio.to_thread(_start, path, tail)
    if tail is None and offset:
        yield f"[{offset} bytes before are left out]\n".encode()
    while chunk := await asyncio.to_thread(_read, path, offset):
        offset += len(chunk)
        yield chunk


def _is_over(gateway: Gateway, job_id: str, task_id: str) -> bool:
    """Whether the task has exited according to the ledger."""
    job = gateway.follower.state.jobs.get(job_id)
    task = None if job is None else job.tasks.get(task_id)
    return task is None or task.exited_ms is not None


async def _follow(
    gateway: Gateway, job_id: str, task_id: str, path: Path, tail: int | None
) -> AsyncIterator[bytes]:
    """The file as it grows; ends when the task has exited and everything has been sent, or the gateway stops."""
    await asyncio.to_thread(path.parent.mkdir, 0o700, True, True)
    offset = await asyncio.to_thread(_start, path, tail)
    with Watch(path.parent) as watch:
        while not gateway.stopping.is_set():
            change = gateway.follower.next_change()
            over = _is_over(gateway, job_id, task_id)  # asked before the last look at the file
            chunk = await asyncio.to_thread(_read, path, offset)
            if chunk:
                offset += len(chunk)
                yield chunk
            elif over:
                return
            else:
                await first_of(watch.changed(), change.wait(), gateway.stopping.wait())
