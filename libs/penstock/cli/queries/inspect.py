"""Lists of jobs, nodes, GPUs, waiting jobs and events: get, queue, events.

Rooms that one option asks for are imported when it is given.
"""

from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from penstock.cli.common import (
    JobArgument,
    LabelFilter,
    MaybeJobArgument,
    NameFilter,
    Output,
    OwnerFilter,
    StateFilter,
    chosen,
    find_job,
    gateway,
    rows_of,
)
from penstock.cli.completion import complete_node
from penstock.cli.following import follow
from penstock.cli.output import Format, dump, duration, present, present_one, remark, short_id, state
from penstock.cli.queries.tables import (
    NO_JOBS,
    as_of,
    clock,
    gpus_table,
    jobs_table,
    nodes_remarks,
    nodes_table,
)
from penstock.exits import Exit, Stop
from penstock.screen import plain_table

MAX_SEARCHED = 1_000  # the gateway's bound of one page
Limit = Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of jobs; the latest are shown.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Continue, and print again at each change.")]


def get_jobs(
    ctx: typer.Context,
    state: StateFilter = None,
    owner: OwnerFilter = None,
    name: NameFilter = None,
    label: LabelFilter = None,
    watch: Watch = False,
    deadline: Annotated[
        bool,
        typer.Option(
            "--deadline",
            help="Only jobs with a service class or deadline, with the probability of meeting it; lowest "
            "first.",
        ),
    ] = False,
    limit: Limit = 50,
    output: Output = Format.TABLE,
) -> None:
    """List jobs, the latest last."""
    wide = output is Format.WIDE or None
    filters = chosen(state, owner, name, label)
    if deadline:
        if watch or state is not None:
            raise Stop(
                Exit.BAD_SPEC,
                "--deadline: lists jobs that have not ended, once; leave out --watch and --state",
            )
        from penstock.cli.queries import deadlines

        deadlines.list_jobs(gateway(ctx), filters, limit, output)
        return
    if watch:
        from penstock.cli.queries import live

        live.watch_jobs(gateway(ctx), filters, limit, output, _left_of if wide else None)
        return
    answer = gateway(ctx).get("/v1/jobs", limit=limit, eta=wide, **filters)
    found = rows_of(answer, "jobs")

    def draw() -> RenderableType:
        jobs = sorted(found, key=lambda job: (job["submitted_ms"], job["submitted_seq"]))
        left = _left_of(jobs) if wide else None
        if jobs:
            return jobs_table(jobs, answer["now_ms"], left)
        return Text("No job fits." if filters else NO_JOBS)

    present(answer, output, draw)
    if answer["total"] > len(found):
        remark(
            f"{len(found)} of {answer['total']:,}; --limit {min(answer['total'], MAX_SEARCHED)} lists more"
        )


def _left_of(jobs: list[dict[str, Any]]) -> dict[str, str]:
    from penstock.cli.queries import eta

    return {job["job_id"]: eta.in_short(job.get("eta")) for job in jobs}


def get_job(
    ctx: typer.Context, job: JobArgument, watch: Watch = False, output: Output = Format.TABLE
) -> None:
    """Show one job as a line of the list; --watch follows it to its end."""
    client = gateway(ctx)
    found = find_job(client, job)
    if watch:
        from penstock.cli.queries import live

        live.follow_one(client, found["job_id"], output)
    present(found, output, lambda: jobs_table([found], found["now_ms"]))


def get_nodes(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """List nodes and their allocated resources."""
    answer = gateway(ctx).get("/v1/nodes")
    nodes = rows_of(answer, "nodes")

    def draw() -> RenderableType:
        return Group(nodes_table(nodes, wide=output is Format.WIDE), *map(Text, nodes_remarks(nodes)))

    present(answer, output, draw)


def get_gpus(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """List GPUs and the jobs on them."""
    answer = gateway(ctx).get("/v1/gpus")
    present(answer, output, lambda: gpus_table(rows_of(answer, "gpus"), wide=output is Format.WIDE))


def events(
    ctx: typer.Context,
    job: MaybeJobArgument = None,
    node: Annotated[
        str | None, typer.Option(help="Of this node, in place of a job.", autocompletion=complete_node)
    ] = None,
    go_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue: of a job until it ends, of a node until Ctrl-C.")
    ] = False,
    output: Output = Format.TABLE,
) -> None:
    """Print the events of a job, or of a node, in order. -o json: one event per line with --follow."""
    if (job is None) == (node is None):
        raise Stop(Exit.BAD_SPEC, "name a job, or a node with --node; one of the two")
    client = gateway(ctx)
    place = f"/v1/nodes/{quote(node)}" if node else f"/v1/jobs/{find_job(client, str(job))['job_id']}"
    if not go_on and output in (Format.JSON, Format.YAML):
        dump(client.get(f"{place}/events"), output)
        return
    if not go_on:
        happened = iter(rows_of(client.get(f"{place}/events"), "events"))
    elif node:
        happened = follow.events_of_node(client, node)
    else:
        happened = follow.events_of(client, place.rpartition("/")[2])
    for event in happened:
        lead = f"[dim]{event['seq']:>6}[/]  {clock(event['at_ms'])}"
        draw = partial(follow.print_event, event, lead, wide=output is Format.WIDE)
        present_one(event, output, draw)


def queue(
    ctx: typer.Context,
    owner: OwnerFilter = None,
    name: NameFilter = None,
    label: LabelFilter = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000, help="Maximum number of jobs; the first in the queue are shown.")
    ] = 100,
    output: Output = Format.TABLE,
) -> None:
    """List waiting jobs in queue order, each with its reason."""
    filters = chosen(None, owner, name, label)
    answer = gateway(ctx).get("/v1/queue", limit=limit, **filters)
    present(answer, output, lambda: _queue(answer, "No job that waits fits." if filters else "No job waits."))
    if (shown := len(rows_of(answer, "jobs"))) < answer["waiting"]:
        remark(f"{shown} of {answer['waiting']:,}; --limit {min(answer['waiting'], MAX_SEARCHED)} lists more")


def _why(row: dict[str, Any]) -> str:
    """Why a job waits; of one that can never run here: what it lacks, and what exists."""
    if row.get("now_or_never") == "never" and row.get("detail"):
        return f"can never run here: {row['detail']}"
    return str(row.get("text") or row.get("reason") or "")


def _queue(answer: dict[str, Any], empty: str) -> RenderableType:
    waiting = rows_of(answer, "jobs")
    if not waiting:
        return Text(empty)
    table = plain_table("#", "JOB", "NAME", "STATE", "WAITED", "WHY", right=("#", "WAITED"), wrap=("WHY",))
    for number, row in enumerate(waiting, start=1):
        table.add_row(
            str(row.get("position") or number),
            short_id(row["job_id"]),
            escape(row.get("name") or "–"),
            state(row["status"]),
            duration(row.get("waited_ms")),
            escape(_why(row)),
        )
    return Group(table, Text(as_of(answer), style="dim"))
