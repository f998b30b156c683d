"""`watch` and `top`: tables that change when something happens, not by the clock.

A thread reads the gateway's stream; every burst of events leads to one fresh look. Without a terminal there
is one snapshot, and then a line per event.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.cli.common import (
    LabelFilter,
    NameFilter,
    OwnerFilter,
    StateFilter,
    chosen,
    gateway,
    rows_of,
)
from penstock.cli.completion import complete_job
from penstock.cli.following import follow
from penstock.cli.output import Format, dump, present_one, short_id
from penstock.cli.queries.tables import NO_JOBS, clock, counting_on, jobs_table, nodes_table
from penstock.client import Client
from penstock.exits import Exit, Stop
from penstock.screen import console
from penstock.text.counting import count

BURST_S = 0.2  # events within this time lead to one look: a gang's start is a dozen of them
TICKS_PER_S = 2  # running times on the screen; nothing is asked of the gateway for them
MAX_JOBS = 25
HEAD_AND_FOOT = 3  # lines
ACTIVE = ("submitted", "queued", "backoff", "launching", "running", "stopping")


def watch(
    ctx: typer.Context,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="Follow this job to its end; by default all jobs.",
            autocompletion=complete_job,
        ),
    ] = None,
    state: StateFilter = None,
    owner: OwnerFilter = None,
    name: NameFilter = None,
    label: LabelFilter = None,
) -> None:
    """Watch jobs change. With JOB: follow that job; exits with its exit code."""
    client = gateway(ctx)
    filters = chosen(state, owner, name, label)
    if job is None:
        watch_jobs(client, filters, MAX_JOBS, Format.TABLE)
        return
    if filters:
        raise Stop(
            Exit.BAD_SPEC, f"JOB and --{next(iter(filters))}: one job needs no filter; leave out either"
        )
    follow_one(client, client.job(job).job_id, Format.TABLE)


def follow_one(client: Client, job_id: str, form: Format) -> NoReturn:
    """Follows the job to its end and ends the command with its exit code.
    JSON and YAML: the job as it ended."""
    data = form in (Format.JSON, Format.YAML)
    job = follow.to_end(client, job_id, follow.Shows.NOTHING if data else follow.Shows.PHASES_AND_TAIL)
    if data:
        dump(job, form)
    raise typer.Exit(follow.exit_code(job, propagate=False))


LeftOf = Callable[[list[dict[str, Any]]], Mapping[str, str]]
"""Time left of each job that runs."""


def watch_jobs(
    client: Client, filters: Mapping[str, Any], limit: int, form: Format, left_of: LeftOf | None = None
) -> None:
    """Runs until Ctrl-C; with `left_of` the wide table.
    JSON and YAML: each existing job, then each job that changes."""
    if form in (Format.JSON, Format.YAML):
        _documents(client, filters, limit, form)
        return

    def fits(event: Mapping[str, Any]) -> bool:
        """Whether the event is about a job that the filters choose."""
        if not filters:
            return True
        job_id = event.get("job_id")
        return bool(job_id and client.get("/v1/jobs", prefix=job_id, limit=1, **filters)["jobs"])

    _live(client, lambda: _jobs(client, filters, limit, left_of), fits)


def _documents(client: Client, filters: Mapping[str, Any], limit: int, form: Format) -> None:
    after = _place(client)
    first = rows_of(client.get("/v1/jobs", limit=limit, **filters), "jobs")
    changed = (
        job
        for event in client.stream("/v1/stream", after)
        if (job_id := event.data.get("job_id"))
        for job in client.get("/v1/jobs", prefix=job_id, limit=1, **filters)["jobs"]
    )
    latest = None
    for job in chain(reversed(first), changed):
        if job != latest:  # a burst of events is one change
            present_one(latest := job, form, lambda: None)


def _place(client: Client) -> str:
    """The stream's position now: read before the first look, so that no change is missed."""
    status = client.status()
    return str(min(status.seq, status.projected_seq))


def top(ctx: typer.Context) -> None:
    """Watch nodes, GPUs and the jobs on them."""
    client = gateway(ctx)
    _live(client, lambda: _top(client))


def _jobs(
    client: Client, filters: Mapping[str, Any], limit: int, left_of: LeftOf | None
) -> Callable[[], RenderableType]:
    """One look; the result draws itself again with times that tick. A screen shows the latest jobs, as many
    as it has lines for."""
    answer = client.get("/v1/jobs", limit=limit, eta=left_of and True, **filters)
    jobs = sorted(rows_of(answer, "jobs"), key=lambda job: job["submitted_seq"])
    if not jobs:
        return lambda: Text("No job fits." if filters else NO_JOBS)
    if sys.stdout.isatty():
        jobs = jobs[-max(1, console().height - HEAD_AND_FOOT) :]
    left = None if left_of is None else left_of(jobs)
    foot = Text(f"{len(jobs)} of {answer['total']:,}" if answer["total"] > len(jobs) else "", style="dim")
    now = counting_on(answer["now_ms"])
    return lambda: Group(jobs_table(jobs, now(), left), foot)


def _top(client: Client) -> Callable[[], RenderableType]:
    nodes = rows_of(client.get("/v1/nodes"), "nodes")
    answer = client.get("/v1/jobs", limit=1_000)
    now = counting_on(answer["now_ms"])
    jobs = [job for job in rows_of(answer, "jobs") if job["status"] in ACTIVE]
    jobs.sort(key=lambda job: (job.get("placed_ms") is None, job["submitted_seq"]))
    gpus, free = sum(node["gpus"] for node in nodes), sum(node["gpus_free"] for node in nodes)
    running = sum(job["status"] in ("launching", "running") for job in jobs)
    waiting = sum(job["status"] in ("submitted", "queued", "backoff") for job in jobs)
    head = (
        f"{count(len(nodes), 'node')} · {gpus - free} of {count(gpus, 'GPU')} in use · {running} running "
        f"· {waiting} waiting"
    )
    more = len(jobs) - MAX_JOBS

    def draw() -> RenderableType:
        parts: list[RenderableType] = [Text(head, style="bold"), Text(), nodes_table(nodes)]
        if jobs:
            parts += [Text(), jobs_table(jobs[:MAX_JOBS], now())]
        if more > 0:
            parts.append(Text(f"and {more} more", style="dim"))
        return Group(*parts)

    return draw


def _live(
    client: Client,
    look: Callable[[], Callable[[], RenderableType]],
    fits: Callable[[Mapping[str, Any]], bool] = lambda event: True,
) -> None:
    """Draws until Ctrl-C. Without a terminal it prints the events that fit."""
    after = _place(client)
    draw = look()
    if not sys.stdout.isatty():
        console().print(draw())
        _lines(client, fits, after)
        return

    def again() -> bool:
        nonlocal draw
        draw = look()
        return True

    redraw(lambda: draw(), again, client.stream("/v1/stream", after))


def redraw(draw: Callable[[], RenderableType], look: Callable[[], bool], events: Iterator[object]) -> None:
    """Redraws the screen as time goes on; each burst of `events` leads to one `look`, until that returns
    False.

    Raises the `Stop` that ends the events.
    """
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()

    def read() -> None:
        try:
            for event in events:
                arrived.put(event)
        except Stop as stop:
            arrived.put(stop)

    threading.Thread(target=read, daemon=True).start()
    with Live(get_renderable=draw, console=console(), refresh_per_second=TICKS_PER_S) as live:
        more = True
        while more:
            burst = [arrived.get()]
            time.sleep(BURST_S)
            while not arrived.empty():
                burst.append(arrived.get())
            for event in burst:
                if isinstance(event, Stop):
                    raise event
            more = look()
            live.refresh()


def _lines(client: Client, fits: Callable[[Mapping[str, Any]], bool], after: str) -> None:
    """Prints a line per event, where there is no terminal."""
    for event in client.stream("/v1/stream", after):
        data = event.data
        if not fits(data):
            continue
        who = short_id(data.get("job_id") or data.get("node_id") or "")
        follow.print_event(data, f"{clock(data['at_ms'])}  {who:<12}")
