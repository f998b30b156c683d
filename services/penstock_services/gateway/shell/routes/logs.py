"""`GET /v1/jobs/{id}/logs`: output of a job's tasks, from the nodes where they ran; all members, earlier
attempts, and live."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from penstock.clock import wall_ms
from penstock.model.nouns.types import MAX_MS
from penstock.runtime.files.task_logs import MAX_LINES
from penstock.runtime.race import cancelled, first_of
from penstock.sdk.job_file.units import DURATION_PATTERN, duration_ms
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.log_text import (
    AsJsonLines,
    Ask,
    AsText,
    Begin,
    Lines,
    Member,
    Piece,
    Text,
    Trouble,
)
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.access.roles import needs
from penstock_services.gateway.shell.gateway import Gateway, gateway_of
from penstock_services.gateway.shell.routes.jobs import own_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

MAX_STREAMS = 256
MAX_AT_ONCE = 128  # members of one job that are read in parallel, each over a connection of its own
WAITING_PIECES = 16  # of these members together, each at most a chunk
BEHIND_S = 10.0  # for the tables to hold the last attempt of a job that has ended
MAX_NAMED = 4  # tasks in a message


class Form(StrEnum):
    """Format of the output."""

    TEXT = "text"
    NDJSON = "ndjson"


CONTENT = {AsText.MEDIA_TYPE: {"schema": {"type": "string"}}, AsJsonLines.MEDIA_TYPE: {}}
TaskName = Annotated[
    str | None, Query(max_length=128, description="Only this task: its id, or w0, worker-0, ps1, …")
]
MAX_ATTEMPT = (1 << 31) - 1  # of the column in Postgres
AttemptNumber = Annotated[int | None, Query(ge=1, le=MAX_ATTEMPT, description="By default the latest")]
FirstAttempt = Annotated[
    int | None, Query(ge=1, le=MAX_ATTEMPT, description="With follow: the attempt to begin with")
]
Since = Annotated[
    str | None,
    Query(max_length=64, pattern=DURATION_PATTERN, description="Only what is no older, such as 5m"),
]
SinceMs = Annotated[
    int | None,
    Query(ge=0, le=MAX_MS, description="Only what was printed at this time or later, in ms since 1970"),
]


@router.get(
    "/{job_id}/logs",
    response_class=StreamingResponse,
    dependencies=[needs(Role.READ)],
    responses={200: {"content": CONTENT}},
)
async def logs(
    job_id: str,
    request: Request,
    task: TaskName = None,
    attempt: AttemptNumber = None,
    follow: Annotated[bool, Query(description="Go on until the job, or the attempt, has ended")] = False,
    first: FirstAttempt = None,
    tail: Annotated[
        int | None, Query(ge=1, le=MAX_LINES, description="Only the last lines of each task")
    ] = None,
    since: Since = None,
    since_ms: SinceMs = None,
    form: Annotated[Form, Query(alias="format", description="ndjson: one object per line")] = Form.TEXT,
) -> Response:
    """Standard output and error of a job's tasks;
    each line with its task before it where there are several."""
    gateway = gateway_of(request)
    await own_job(request, job_id, "output")
    ask = Ask(tail, since_ms, None if since is None else min(duration_ms(since), MAX_MS), wall_ms())
    if gateway.log_streams >= MAX_STREAMS:
        raise Problem(429, "overloaded", f"{MAX_STREAMS} streams of output are open already", retry_after_s=5)
    members = await _members(gateway, job_id, task, attempt)
    if (
        not members
        and not (follow and _may_begin(gateway, job_id, attempt))
        and (task is not None or attempt is not None)
    ):
        what = (
            f"task {task!r}"
            if attempt is None
            else f"attempt {attempt}" + (f" with {task!r}" if task else "")
        )
        there = [one.short for one in await _members(gateway, job_id, None, attempt)]
        named = ", ".join(there[:MAX_NAMED]) + (f", … {there[-1]}" if len(there) > MAX_NAMED else "")
        remedy = f"its tasks are {named}" if there else f"GET /v1/jobs/{job_id}/tasks lists them"
        raise Problem(404, "no_task", f"job {job_id} has no {what}; {remedy}")
    if follow:
        pieces = _followed(gateway, job_id, task, attempt, first, ask)
    else:
        pieces = _attempt(gateway, members, ask, follow=False)
    renderer = AsText() if form is Form.TEXT else AsJsonLines()
    return StreamingResponse(_rendered(gateway, pieces, renderer), media_type=renderer.MEDIA_TYPE)


async def _rendered(
    gateway: Gateway, pieces: AsyncIterator[Piece], renderer: AsText | AsJsonLines
) -> AsyncIterator[bytes]:
    gateway.log_streams += 1
    try:
        async for piece in pieces:
            if found := renderer.render(piece):
                yield found
    except Problem as problem:  # the database is down
        yield renderer.render(Trouble(problem.detail))
    finally:
        gateway.log_streams -= 1


def _is_live(gateway: Gateway, job_id: str) -> bool:
    return job_id in gateway.follower.state.jobs or job_id in gateway.follower.pending


def _begun(gateway: Gateway, job_id: str) -> int:
    """The latest attempt of a live job, 0: none has begun."""
    job = gateway.follower.state.jobs.get(job_id)
    return 0 if job is None else job.attempt


def _may_begin(gateway: Gateway, job_id: str, attempt: int | None) -> bool:
    """Whether an attempt is still to come, or this one. Of a running attempt all tasks are known."""
    if not _is_live(gateway, job_id):
        return False
    job = gateway.follower.state.jobs.get(job_id)
    return (job is None or not job.tasks) if attempt is None else attempt > _begun(gateway, job_id)


def _is_over(gateway: Gateway, member: Member) -> bool:
    """Whether the task has exited according to the ledger."""
    job = gateway.follower.state.jobs.get(member.job_id)
    task = None if job is None else job.tasks.get(member.task_id)
    return task is None or task.exit.at_ms is not None


async def _members(
    gateway: Gateway, job_id: str, task: str | None, attempt: int | None = None, first: int | None = None
) -> Sequence[Member]:
    """The tasks of this attempt, of the earliest one from `first` on, or of the latest; with `task` only the
    task of that name, of attempts that have one."""
    job = gateway.follower.state.jobs.get(job_id)
    if job is not None and job.tasks and job.attempt == (attempt or first or job.attempt):
        found = [
            Member(task_id, job_id, job.attempt, one.place.node_id, one.started_ms is not None)
            for task_id, one in job.tasks.items()
        ]
        if chosen := [one for one in found if task is None or one.is_called(task)]:
            return chosen
    await gateway.fresh()
    rows = await gateway.store.rows(
        "SELECT json_build_array(task_id, job_id, attempt, node_id, started_ms IS NOT NULL)::text FROM "
        "tasks WHERE job_id = $1 AND ($2::int IS NULL OR attempt = $2) AND attempt >= $3 ORDER BY attempt "
        f"{'DESC' if first is None else 'ASC'}, rank",
        job_id,
        attempt,
        first or 1,
    )
    found = [Member(*orjson.loads(row)) for row in rows]
    chosen = [one for one in found if task is None or one.is_called(task)]
    return [one for one in chosen if one.attempt == chosen[0].attempt]


async def _followed(
    gateway: Gateway, job_id: str, task: str | None, attempt: int | None, first: int | None, ask: Ask
) -> AsyncIterator[Piece]:
    """One attempt after another, from `first` or the latest on, until the job ends;
    with `attempt` that one."""
    while not gateway.stopping.is_set():
        changes = gateway.follower.next_change(), gateway.store.next_change()
        live, seq = _is_live(gateway, job_id), gateway.follower.state.seq  # before its attempts are read
        begun = _begun(gateway, job_id)
        if live and begun < (attempt or first or 1):
            # The job's record is enough here: in a long queue the tables are not queried at each change of
            # the cell.
            await first_of(changes[0].wait(), gateway.stopping.wait())
            continue
        members = await _members(gateway, job_id, task, attempt, first)
        if members:
            async for piece in _attempt(gateway, members, ask, follow=True):
                yield piece
            if attempt is not None:
                return
            first, ask = members[0].attempt + 1, ask._replace(tail=None)  # all output of a retry is new
            continue
        if gateway.store.projected_seq >= seq:
            if attempt is not None or not live:
                return
            first = begun + 1  # earlier attempts had no such task
            continue
        waits = [one.wait() for one in (*changes, gateway.stopping)]
        if not await first_of(*waits, timeout_s=None if live else BEHIND_S):
            return
    yield Trouble("the gateway stops; ask again")


async def _attempt(
    gateway: Gateway, members: Sequence[Member], ask: Ask, *, follow: bool
) -> AsyncIterator[Piece]:
    """One attempt's output: of several members one after the other,
    or in parallel where they are followed."""
    if not members:
        return
    yield Begin(members[0].attempt, members)
    several = len(members) > 1
    if not several or not follow:
        for member in members:
            async for piece in _member(gateway, member, ask, follow, several):
                yield piece
        return
    if len(members) > MAX_AT_ONCE:
        yield Trouble(
            f"{MAX_AT_ONCE} of {len(members)} tasks are followed at once, the next one when one of them has "
            f"ended; task={members[-1].short} is that one alone",
            final=False,
        )
    pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
    room = asyncio.Semaphore(WAITING_PIECES)

    at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def pump(member: Member) -> None:
        try:
            async with at_once:
                async for piece in _member(gateway, member, ask, follow, several):
                    await room.acquire()
                    pieces.put_nowait(piece)
        finally:
            pieces.put_nowait(None)

    work = [asyncio.ensure_future(pump(member)) for member in members]
    try:
        left = len(work)
        while left:
            found = await pieces.get()
            if found is None:
                left -= 1
            else:
                room.release()
                yield found
        await asyncio.gather(*work)
    finally:
        await cancelled(work)


async def _member(
    gateway: Gateway, member: Member, ask: Ask, follow: bool, several: bool
) -> AsyncIterator[Piece]:
    """One task's output; of one of several in whole lines."""
    lines = Lines()
    over = partial(_is_over, gateway, member)
    async for found in gateway.logs.read(member, ask, follow, over):
        if not several or not isinstance(found, Text):
            yield found
        elif data := lines.feed(found.data):
            yield Text(member, data)
    if rest := lines.end():
        yield Text(member, rest)
