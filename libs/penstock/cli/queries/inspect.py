"""Read-only commands about jobs, nodes and GPUs: get, describe, events, why, queue."""

from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.cli.common import (
    JobArgument,
    LabelFilter,
    MaybeJobArgument,
    NameFilter,
    NodeArgument,
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
from penstock.cli.following.event_text import adjustment, checkpoint, first_of_kind, move, needs, reason_of
from penstock.cli.moments import moment
from penstock.cli.output import Format, dump, duration, memory, present, present_one, remark, short_id, state
from penstock.cli.queries import deadlines, eta, explain, live
from penstock.cli.queries.groups import turns_of
from penstock.cli.queries.tables import (
    NO_JOBS,
    as_of,
    clock,
    cordoned_by,
    gpus_table,
    isolation,
    jobs_table,
    labels_of,
    measures,
    node_state,
    nodes_remarks,
    nodes_table,
    status_of,
    suspected_for,
    tasks_table,
)
from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S
from penstock.exits import Exit, Stop
from penstock.screen import plain_table
from penstock.text.counting import count

MAX_SEARCHED = 1_000  # the gateway's bound of one page
Limit = Annotated[int, typer.Option(min=1, max=1_000, help="Maximum number of jobs; the latest are shown.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Continue, and print again at each change.")]
At = Annotated[
    str | None,
    typer.Option(metavar="10:42|5m|SEQ", help="As of this time, this long ago, or this record."),
]


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
        deadlines.list_jobs(gateway(ctx), filters, limit, output)
        return
    if watch:
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
    return {job["job_id"]: eta.in_short(job.get("eta")) for job in jobs}


def get_job(
    ctx: typer.Context, job: JobArgument, watch: Watch = False, output: Output = Format.TABLE
) -> None:
    """Show one job as a line of the list; --watch follows it to its end."""
    client = gateway(ctx)
    found = find_job(client, job)
    if watch:
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


def describe_job(ctx: typer.Context, job: JobArgument, output: Output = Format.TABLE) -> None:
    """Show one job: requested and allocated resources, tasks and times."""
    client = gateway(ctx)
    found = find_job(client, job)
    hidden = found.get("hidden")
    tasks = [] if hidden else rows_of(client.get(f"/v1/jobs/{found['job_id']}/tasks"), "tasks")
    remaining = eta.of_job(client, found["job_id"])
    whole = {**found, "tasks": tasks, "eta": remaining}
    show = _anothers_job if hidden else partial(_job, tasks=tasks, remaining=remaining)
    present(whole, output, lambda: show(found, wide=output is Format.WIDE))


def _anothers_job(found: dict[str, Any], *, wide: bool) -> RenderableType:
    """The fields of another tenant's job that are shown for scheduling."""
    del wide
    queue_ms, launch_ms, run_ms = follow.phases_ms(found, found["now_ms"])
    facts = {
        "Job": found["job_id"],
        "Owner": escape(found["owner"]),
        "State": status_of(found),
        "Nodes": escape(", ".join(found["nodes"])),
        "Gang": _gang(found),
        "Submitted": clock(found["submitted_ms"]),
        "Times": f"queued {duration(queue_ms)} · launched in {duration(launch_ms)} · ran {duration(run_ms)}",
    }
    hint = Text.from_markup("\n[dim]the rest is shown to its tenant and to operators[/]")
    return Group(_facts(facts), hint)


def _job(
    found: dict[str, Any], tasks: list[dict[str, Any]], remaining: eta.Answer | None, *, wide: bool
) -> RenderableType:
    """Everything about a job, as text."""
    spec, estimate = found["spec"], found.get("estimate")
    queue_ms, launch_ms, run_ms = follow.phases_ms(found, found["now_ms"])
    facts = {
        "Job": found["job_id"],
        "Name": escape(found["name"]),
        "Owner": escape(found["owner"]),
        "State": status_of(found) + (f" · {escape(reason_of(found))}" if found.get("reason") else ""),
        "Command": escape(" ".join(spec["command"])),
        "Folder": escape(spec.get("workdir") or "–"),
        "Environment": escape(
            " ".join(f"{kind} {text}" for kind, text in (spec.get("environment") or {}).items() if text)
        ),
        "Gang": _gang(found),
        "Attempt": f"{found['attempt']} of {spec['retry']['max_attempts'] + found['infrastructure_retries']}",
        "Needs": f"{needs(estimate['worker'])} per worker" if estimate else "not estimated yet",
        "Estimate": escape(f"{estimate['source']} · {estimate['confidence']:.0%} sure") if estimate else "–",
        "Submitted": clock(found["submitted_ms"]),
        "Times": f"queued {duration(queue_ms)} · launched in {duration(launch_ms)} · ran {duration(run_ms)}",
        "Training": escape(_training(spec)),
        "Remaining": escape(eta.in_a_line(remaining)) if remaining and not found.get("outcome") else "",
        "Iteration": _iteration(found.get("stages")),
        "Shapes": _shapes(estimate or {}),
        "Adjusted": escape("; ".join(map(adjustment, found.get("adjustments") or ()))),
        "When stopped": _stopping(spec),
        "Checkpoint": escape(checkpoint(found["checkpoint"])) if found.get("checkpoint") else "",
        "Not saved": escape((found.get("unsaved") or {}).get("reason", "")),
        "Priority": _priority(spec),
        "Retry of": spec.get("retry_of") or "",
        "Submitted by": " → ".join(spec.get("parents") or ()),
        "Tied to": explain.tied(spec, found.get("unfollowed_ms")),
        "Move": escape(move(found["move"])) if found.get("move") else "",
        "Shares GPUs": escape(
            ", ".join(f"with {short_id(job_id)}" for job_id in found.get("shares_gpus_with") or ())
        ),
        "Takes turns": escape(turns_of(found)),
        "Labels": escape(", ".join(f"{name}={value}" for name, value in (found.get("labels") or {}).items())),
        "Trace": found.get("trace_id") or "",
    }
    short = short_id(found["job_id"])
    hint = Text.from_markup(f"\n[dim]penstock why {short} · penstock logs {short}[/]")
    return Group(
        _facts(facts), *((Text(), tasks_table(tasks, found["now_ms"], wide=wide)) if tasks else ()), hint
    )


def _stopping(spec: dict[str, Any]) -> str:
    """`saves by the SDK; never to make way for another job`; empty where the job file has no such field."""
    saves = {"sdk": "saves by the SDK", "signal": "saves by itself"}.get(spec.get("checkpoint", "none"), "")
    stays = "" if spec.get("preemptible", True) else "never to make way for another job"
    early = "launches before its GPUs are free" if spec.get("prelaunch") else ""
    return "; ".join(filter(None, (saves, stays, early)))


def _priority(spec: dict[str, Any]) -> str:
    """`5 among the jobs of its owner`; empty for the default priority."""
    priority = spec.get("priority", 0)
    return f"{priority} among the jobs of its owner" if priority else ""


def _training(spec: dict[str, Any]) -> str:
    """The attributes of the training that the user gave: `resnet50, batches of 64, cv, pipelined, 20,000
    iterations`."""
    parts = [spec.get("model") or ""]
    parts.append(f"batches of {spec['batch_size']:,}" if spec.get("batch_size") else "")
    whole = spec.get("global_batch_size")
    parts.append(f"global batches of {whole:,}" if whole else "")
    parts += [spec.get("category") or "", *(trait.replace("_", " ") for trait in spec.get("traits") or ())]
    parts.append(f"{spec['iterations']:,} iterations" if spec.get("iterations") else "")
    parts.append("" if spec.get("target_loss") is None else f"until its loss is {spec['target_loss']:g}")
    return ", ".join(part for part in parts if part)


def _iteration(stages: dict[str, Any] | None) -> str:
    """What an iteration uses, measured on similar jobs: `220.0 ms: storage 20.0, CPU 100.0, GPU 90.0, network
    8.0, idle 2.0; of 40 iterations of jobs like it`."""
    if stages is None:
        return ""
    names = {"storage": "storage", "cpu": "CPU", "gpu": "GPU", "network": "network", "idle": "idle"}
    parts = ", ".join(f"{name} {stages[f'{key}_ms']:,.1f}" for key, name in names.items())
    return (
        f"{stages['iteration_ms']:,.1f} ms: {parts}; of {count(stages['iterations'], 'iteration')} of "
        "jobs like it"
    )


def _shapes(estimate: dict[str, Any]) -> str:
    """`an iteration takes 1 worker 100 ms (80 to 120), 2 workers 55 ms (50 to 60)`; empty for jobs that are
    not moldable."""
    parts = [
        (
            f"{count(option['workers'], 'worker')} {option['step_ms']:,.4g} ms ({option['low_ms']:,.4g} to "
            f"{option['high_ms']:,.4g})"
        )
        for option in estimate.get("options") or ()
    ]
    return f"an iteration takes {', '.join(parts)}" if parts else ""


def _gang(job: dict[str, Any]) -> str:
    """`2 workers, 1 parameter server`; of a moldable job `2 of 1 to 8 workers`, without the first number
    where it has no attempt."""
    servers, spec = job["parameter_servers"], job.get("spec") or {}
    if (fewest := spec.get("min_workers")) is not None:
        has = f"{job['workers']} of " if job.get("placed_ms") else ""
        return f"{has}{fewest} to {count(spec['workers'], 'worker')}"
    return count(job["workers"], "worker") + (f", {count(servers, 'parameter server')}" if servers else "")


def _facts(facts: dict[str, str]) -> Table:
    """Two columns; empty values are left out."""
    table = plain_table("", "")
    table.show_header = False
    table.columns[1].no_wrap = False
    for name, value in facts.items():
        if value:
            table.add_row(f"[bold]{name}[/]", value)
    return table


def describe_node(ctx: typer.Context, node: NodeArgument, output: Output = Format.TABLE) -> None:
    """Show one node: capacity, GPUs and the jobs on them."""
    client = gateway(ctx)
    nodes = [row for row in rows_of(client.get("/v1/nodes"), "nodes") if row["node_id"] == node]
    if not nodes:
        raise Stop(Exit.PROBLEM, f"node {node}: not found; `penstock get nodes` lists them")
    gpus = [row for row in rows_of(client.get("/v1/gpus"), "gpus") if row["node_id"] == node]
    found = nodes[0]
    facts = {
        "Node": escape(found["node_id"]),
        "State": node_state(found) + (" · leaving" if found["leaving"] else ""),
        "Suspect": escape(suspected_for(found)),
        "Cordoned by": escape(cordoned_by(found)),
        "Labels": escape(labels_of(found)),
        "Place": escape(f"{found['rack']} in {found['domain']}, address {found['address']}"),
        "Cores": f"{found['cores_free']} of {found['cores']} free",
        "Memory": f"{memory(found['host_memory_free_mib'])} of {memory(found['host_memory_mib'])} free",
        "Network": f"{found['bandwidth_free_mbps'] / 1_000:g} of {found['bandwidth_mbps'] / 1_000:g} Gbit/s "
        "free",
        "Isolation": escape(isolation(found)),
        "Measures": escape(measures(found)),
        "Boot": escape(found["boot_id"]),
    }
    whole = {**found, "gpu_list": gpus}
    present(whole, output, lambda: Group(_facts(facts), Text(), gpus_table(gpus)))


def why(ctx: typer.Context, job: JobArgument, at: At = None, output: Output = Format.TABLE) -> None:
    """Explain a job's placement, or why it still waits; now, or as of a past time or record."""
    client = gateway(ctx)
    found = find_job(client, job)
    past = {} if at is None else moment(at, found["now_ms"])
    _refuse_before(found, past)
    bound_s = WORKER_TIMEOUT_S if past else TIMEOUT_S
    answer = client.get(f"/v1/jobs/{found['job_id']}/why", patience_s=bound_s, **past)
    new = first_of_kind(found.get("estimate") or {})
    spec = found.get("spec") or {}
    tie = explain.tied(spec, answer.get("unfollowed_ms"))
    shown = {**answer, "retry_of": spec.get("retry_of"), "tied": "" if found["outcome"] else tie}
    present(answer, output, lambda: explain.show(shown, new, wide=output is Format.WIDE))


def _refuse_before(job: dict[str, Any], past: dict[str, int]) -> None:
    """Raises `Stop` for a moment before the job's submission."""
    if past.get("at_ms", job["submitted_ms"]) < job["submitted_ms"]:
        when = clock(past["at_ms"])
    elif past.get("at", job["submitted_seq"]) < job["submitted_seq"]:
        when = f"record {past['at']}"
    else:
        return
    submitted = f"{clock(job['submitted_ms'])}, with record {job['submitted_seq']}"
    raise Stop(
        Exit.PROBLEM, f"job {job['job_id']} was submitted at {submitted}; there is nothing of it as of {when}"
    )


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
