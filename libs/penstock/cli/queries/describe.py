"""One job or one node in detail: describe."""

from functools import partial
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.cli.common import JobArgument, NodeArgument, Output, find_job, gateway, rows_of
from penstock.cli.following.event_text import adjustment, checkpoint, move, needs, reason_of
from penstock.cli.following.follow import phases_ms
from penstock.cli.output import Format, duration, memory, present, short_id
from penstock.cli.queries import eta
from penstock.cli.queries.explain import tied
from penstock.cli.queries.groups import turns_of
from penstock.cli.queries.tables import (
    clock,
    cordoned_by,
    gpus_table,
    isolation,
    labels_of,
    measures,
    node_state,
    status_of,
    suspected_for,
    tasks_table,
)
from penstock.exits import Exit, Stop
from penstock.screen import plain_table
from penstock.text.counting import count


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
    queue_ms, launch_ms, run_ms = phases_ms(found, found["now_ms"])
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
    queue_ms, launch_ms, run_ms = phases_ms(found, found["now_ms"])
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
        "Tied to": tied(spec, found.get("unfollowed_ms")),
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
