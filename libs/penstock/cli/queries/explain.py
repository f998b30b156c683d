"""`penstock why`: why a job waits, or why it was placed where it is."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from penstock.cli.common import JobArgument, Output, find_job, gateway
from penstock.cli.following.event_text import adjustment, checkpoint, first_of_kind, move, moved, reason_of
from penstock.cli.moments import moment
from penstock.cli.output import Format, duration, present, short_id, state, with_short_ids
from penstock.cli.queries import deadlines
from penstock.cli.queries.tables import as_of, clock, gpu_names
from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S
from penstock.exits import Exit, Stop
from penstock.screen import console, plain_table
from penstock.text.counting import count

if TYPE_CHECKING:
    from rich.console import Console

MAX_NODES_SHOWN = 4
MAX_TASKS_SHOWN = 8

At = Annotated[
    str | None,
    typer.Option(metavar="10:42|5m|SEQ", help="As of this time, this long ago, or this record."),
]


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
    tie = tied(spec, answer.get("unfollowed_ms"))
    shown = {**answer, "retry_of": spec.get("retry_of"), "tied": "" if found["outcome"] else tie}
    present(answer, output, lambda: show(shown, new, wide=output is Format.WIDE))


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
        Exit.PROBLEM,
        f"job {short_id(job['job_id'])} was submitted at {submitted}; there is nothing of it as of {when}",
    )


def show(answer: Mapping[str, Any], first_of_kind: str = "", *, wide: bool = False) -> None:
    """Prints either of the two kinds of answer: a placement's record, or what keeps a job waiting. `wide`:
    with all tasks, and whole UUIDs."""
    screen = console()
    screen.print(f"[bold]{answer['job_id']}[/]  {state(answer['status'])}  [dim]{as_of(answer)}[/]")
    _show_job(answer, screen)
    if answer.get("move"):
        _say(screen, f"Move: {move(answer['move'])}")
        if answer["move"]["outcome"] == "under_way" and answer["move"].get("target"):
            _placement({**answer["move"]["target"], "moved": None}, wide=wide)
            screen.print("[dim]until then:[/]")
    if answer.get("now_or_never") == "never":
        screen.print("[red]Never:[/] not even an empty cluster could hold it.")
    if answer.get("histogram"):
        _histogram("Not possible", answer["histogram"])
    placement = answer.get("placement")
    if placement:
        _placement({**placement, "moved": None} if answer.get("move") else placement, wide=wide)
    if first_of_kind:
        screen.print(
            f"[bold]Its estimate:[/] {first_of_kind}; no similar run is known, so its interval is wide"
        )
    if answer.get("next_step"):
        screen.print(f"[bold]Next:[/] {escape(answer['next_step'])}", soft_wrap=True)


def _show_job(answer: Mapping[str, Any], screen: "Console") -> None:
    """What is known of the job, whether it waits or runs."""
    for part in ("text", "detail"):
        if answer.get(part):
            _say(screen, answer[part])
    if answer.get("retry_of"):
        screen.print(f"a further try of {escape(answer['retry_of'])}", soft_wrap=True)
    if answer.get("tied"):
        screen.print(f"tied to {answer['tied']}", soft_wrap=True)
    if answer.get("position"):
        screen.print(
            f"number {answer['position']} in the queue, waiting for {duration(answer.get('waited_ms'))}"
        )
    if answer.get("claim"):
        _say(screen, f"in the order of the profile: {answer['claim']}")
    for line in start_lines(answer):
        _say(screen, line)
    if answer.get("deadline"):
        _say(screen, deadlines.in_a_line(answer["deadline"]))
    for row in answer.get("adjustments") or ():
        _say(screen, adjustment(row))
    if answer.get("checkpoint"):
        _say(screen, f"Checkpoint: {checkpoint(answer['checkpoint'])}")
    if answer.get("unsaved"):
        _say(screen, f"Not saved: {answer['unsaved']['reason']}")


def _say(screen: "Console", text: str) -> None:
    screen.print(escape(with_short_ids(text)), soft_wrap=True)


def tied(spec: Mapping[str, Any], unfollowed_ms: int | None) -> str:
    """`its follower, gone since 10:42:03: cancelled after 5m 00s without one`; empty for a job that is not
    tied."""
    if not spec.get("tied_to"):
        return ""
    gone = "" if unfollowed_ms is None else f", gone since {clock(unfollowed_ms)}"
    return f"its follower{gone}: cancelled after {duration(spec['tied_grace_ms'])} without one"


def start_lines(answer: Mapping[str, Any]) -> list[str]:
    """The expected start of a queued job, its assumptions, and the jobs that hold what it needs."""
    start = answer.get("start")
    if not start:
        return []
    if start["starts_ms"] is None:
        lines = [f"expected start: not known: {start['unknown']}"]
    else:
        lines = [f"{expected_start(start['starts_ms'], answer['now_ms'])}, if {start['assumes']}"]
    return [*lines, *holder_lines(start)]


def holder_lines(start: Mapping[str, Any]) -> list[str]:
    """The jobs that hold what it needs."""
    lines = []
    for holder in start["holders"]:
        ends = (
            "not known when it ends"
            if holder["ends_ms"] is None
            else f"ends about {clock(holder['ends_ms'])}"
        )
        what = count(holder["gpus"], "GPU") if holder["gpus"] else "cores and memory"
        lines.append(f"  {short_id(holder['job_id'])} of {holder['owner']} holds {what}, {ends}")
    return lines


def expected_start(starts_ms: int, now_ms: int) -> str:
    """`expected start: 10:42:03, in 5m 20s`; `expected start: any moment` once it has passed."""
    if starts_ms <= now_ms:
        return "expected start: any moment"
    return f"expected start: {clock(starts_ms)}, in {duration(starts_ms - now_ms)}"


def in_short(answer: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """The answer to `why` in one line, for a table."""
    placement = answer.get("placement")
    if not placement or not placement.get("candidates"):
        return reason_of(job) or str(answer.get("text") or "")
    if text := asked(placement):
        return "; ".join(filter(None, (text, moved(placement.get("moved")))))
    value, feasible = placement.get("margin"), placement["feasible"]
    if value is None or feasible == 1:
        text = "the only node that fits" if feasible == 1 else "the only choice"
    elif value == 0:
        text = f"first of equals among {feasible} nodes"
    else:
        text = f"best of {feasible} nodes, {value:.2f} ahead of the next"
    if placement.get("rejected"):
        text += f"; {_counts(placement['rejected'])}"
    return text


def _placement(found: Mapping[str, Any], *, wide: bool) -> None:
    """The candidate placements with their scores, the winner first, then the GPUs of each task."""
    screen = console()
    screen.print()
    table = plain_table("", "NODES", "SCORE", right=("SCORE",))
    for number, candidate in enumerate(found["candidates"]):
        mark = "[green]●[/]" if number == 0 else "[dim]○[/]"
        table.add_row(mark, escape(node_names(candidate["nodes"])), f"{candidate['score']:.4f}")
    screen.print(table)
    if text := asked(found):
        screen.print(f"[dim]{escape(text)}[/]", soft_wrap=True)
    else:
        screen.print(f"[dim]the smaller the better; chosen by {found['profile']}{margin(found)}[/]")
    if found.get("moved"):
        screen.print(f"[dim]{escape(moved(found['moved']))}[/]", soft_wrap=True)
    if found.get("shape"):
        screen.print(f"[dim]{escape(found['shape'])}[/]")
    if found.get("rejected"):
        _histogram("Not possible", found["rejected"])
    tasks = [task for task in found.get("tasks") or () if task["gpus"]]
    if tasks:
        _gpus(tasks, len(tasks) if wide else MAX_TASKS_SHOWN, wide=wide)


def _gpus(tasks: list[Mapping[str, Any]], limit: int, *, wide: bool) -> None:
    screen = console()
    screen.print()
    table = plain_table("TASK", "NODE", "GPUS", wrap=("GPUS",))
    for task in tasks[:limit]:
        name = task["task_id"].rpartition(".")[2]
        table.add_row(name, escape(task["node_id"]), escape(gpu_names(task, wide=wide)))
    screen.print(table)
    if len(tasks) > limit:
        screen.print(f"[dim]and {len(tasks) - limit} more tasks; `-o wide` lists all[/]")


def asked(found: Mapping[str, Any]) -> str:
    """`proposed by batcher: shares no link`, `chosen by srtf: starts when it has ended there: night`; empty
    where the scores explain it."""
    why = f": {found['reason']}" if found.get("reason") else ""
    if found.get("proposer"):
        return f"proposed by {found['proposer']}{why}"
    return why and f"chosen by {found['profile']}{why}"


def margin(found: Mapping[str, Any]) -> str:
    """`, 0.0120 ahead of the next`."""
    value = found.get("margin")
    return "" if value is None else f", {value:.4f} ahead of the next"


def node_names(nodes: list[str]) -> str:
    """`node-0 ×2, node-1`."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    names = [node if number == 1 else f"{node} ×{number}" for node, number in counts.items()]
    more = len(names) - MAX_NODES_SHOWN
    return ", ".join(names[:MAX_NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _histogram(title: str, counts: Mapping[str, int]) -> None:
    console().print(f"[bold]{title}:[/] {escape(_counts(counts))}", soft_wrap=True)


def _counts(counts: Mapping[str, int]) -> str:
    """`GPUs busy on 2 nodes, cores on 1`."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(
        f"{reason_words(reason)} on {number}" + ((" node" if number == 1 else " nodes") if not place else "")
        for place, (reason, number) in enumerate(ranked)
    )


def reason_words(reason: str) -> str:
    """A reason of the closed list as text: `gpus_busy` → `GPUs busy`."""
    return reason.replace("_", " ").replace("gpus", "GPUs").replace("gpu", "GPU")
