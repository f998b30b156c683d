"""`penstock eta JOB`: remaining time of a job, its end, their interval and source."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from penstock.cli.common import JobArgument, Output, find_job, gateway
from penstock.cli.following import follow
from penstock.cli.output import Format, duration, present, present_one, state
from penstock.cli.queries import deadlines
from penstock.cli.queries.explain import expected_start, holder_lines, start_lines
from penstock.cli.queries.live import redraw
from penstock.cli.queries.tables import clock, counting_on
from penstock.client import Client
from penstock.exits import Exit, Stop
from penstock.screen import console

Answer = Mapping[str, Any]

WAKING = frozenset(
    {
        "penstock.job.eta_estimated",
        "penstock.task.started",
        "penstock.placement.decided",
        "penstock.job.queued",
        "penstock.job.estimated",
        follow.ENDED,
    }
)
OTHERS = frozenset({"penstock.task.started", follow.ENDED})


def eta(
    ctx: typer.Context,
    job: JobArgument,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Continue until the job ends.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Estimate a job's remaining time with its interval, end, share done, and source.

    Exit code 1 where no estimate exists; with --watch the job's own, as with `penstock watch JOB`.
    """
    client = gateway(ctx)
    found = find_job(client, job)
    if watch:
        raise typer.Exit(_watch(client, found, output))
    answer = client.get(f"/v1/jobs/{found['job_id']}/eta")
    present(answer, output, lambda: console().print(shown(answer, found), soft_wrap=True))
    if nothing_known(answer):
        raise typer.Exit(int(Exit.PROBLEM))


def nothing_known(answer: Answer) -> bool:
    if answer["answer"] == "waiting":
        return answer["run_ms"] is None and _starts_ms(answer) is None
    return bool(answer["answer"] == "unknown")


def _starts_ms(answer: Answer) -> int | None:
    """The expected start; None: not in the queue, or not known."""
    start = answer.get("start")
    return None if start is None else start["starts_ms"]


def of_job(client: Client, job_id: str) -> dict[str, Any] | None:
    """The gateway's answer; None from a gateway that is too old to have one."""
    try:
        found: dict[str, Any] = client.get(f"/v1/jobs/{job_id}/eta")
    except Stop as stop:
        if stop.code != Exit.PROBLEM:
            raise
        return None
    return found


# ------------------------------------------------------------------------------------------------ text


def in_short(answer: Answer | None) -> str:
    """Text for a column: `12m 40s`, `any moment`, `overdue`; `about` before an estimate without reported
    progress; `–`."""
    if answer is None or answer["due"] is None:
        return "–"
    if answer["due"] != "later":
        return str(answer["due"]).replace("_", " ")
    return ("" if answer["answer"] == "reported" else "about ") + duration(answer["left_ms"]["middle"])


def in_a_line(answer: Answer) -> str:
    """Text for `describe`: `12m 40s left (11m 02s to 15m 10s), ends 22:41:03 · 41% done · reported 9.1 s ago
    · iterations asked for`."""
    if answer["answer"] not in ("reported", "estimated"):
        return _headline(answer)
    parts = [_headline(answer) + (f", ends {clock(answer['ends_ms']['middle'])}" if _ahead(answer) else "")]
    if answer["share"] is not None:
        parts.append(f"{answer['share']:.0%} done")
    if answer["answer"] == "reported":
        parts.append(f"reported {duration(answer['age_ms'])} ago")
    return " · ".join([*parts, str(answer["source"])])


def shown(answer: Answer, job: Answer, now: int | None = None) -> RenderableType:
    """The whole answer as text. `now`, in ms: the answer is advanced to this time."""
    answer = later(answer, now)
    lines = [f"[bold]{answer['job_id']}[/]  {state(answer['status'])}  {escape(str(job['name']))}"]
    lines.append(f"[bold]{escape(_headline(answer))}[/]")
    lines += [escape(line) for line in _details(answer)]
    if answer.get("deadline"):
        lines.append(escape(deadlines.in_a_line(answer["deadline"])))
    lines += [
        f"[yellow]not proven:[/] {row['task_id']} on {row['node_id']}, which is {row['node']}"
        for row in answer.get("unproven") or []
    ]
    if answer["next_step"]:
        lines.append(f"[bold]Next:[/] {escape(answer['next_step'])}")
    return Group(*(Text.from_markup(line) for line in lines))


def _ahead(answer: Answer) -> bool:
    return answer["due"] in ("later", "any_moment")


def _headline(answer: Answer) -> str:
    kind, left = answer["answer"], answer["left_ms"]
    if kind == "ended":
        ago = "" if answer["ended_ms"] is None else f" {duration(answer['now_ms'] - answer['ended_ms'])} ago"
        return f"ended{ago}: {str(answer['outcome']).replace('_', ' ')}"
    if kind == "waiting":
        return "; ".join(["waits", *_expected(answer)])
    if kind == "unknown":
        ran = (
            "it has not started"
            if answer["ran_ms"] is None
            else f"it has run for {duration(answer['ran_ms'])}"
        )
        return f"not known: {ran}, and its training reports no progress"
    if answer["due"] == "overdue":
        return "overdue: it takes longer than estimated"
    if kind == "estimated":
        return f"about {duration(left['middle'])} left"
    if answer["due"] == "any_moment":
        return f"due any moment, within {duration(left['high'])}"
    return f"{duration(left['middle'])} left ({duration(left['low'])} to {duration(left['high'])})"


def _expected(answer: Answer) -> list[str]:
    """Expected start and run time of a job that waits, and its end where both are known."""
    starts_ms, run_ms = _starts_ms(answer), answer["run_ms"]
    start = [] if starts_ms is None else [expected_start(starts_ms, answer["now_ms"])]
    if run_ms is None:
        return [*start, "its run time is unknown"]
    run = f"once it starts it takes about {duration(run_ms)}"
    return [*start, run if starts_ms is None else f"{run}, to about {clock(starts_ms + run_ms)}"]


def _details(answer: Answer) -> list[str]:
    kind, ends = answer["answer"], answer["ends_ms"]
    if kind == "ended":
        return [f"at {clock(answer['ended_ms'])}"] if answer["ended_ms"] is not None else []
    if kind == "waiting":
        estimate = [f"by its estimate: {answer['source']}"] if answer["source"] else []
        if _starts_ms(answer) is None:
            return [*estimate, *start_lines(answer)]
        return [*estimate, f"the start holds if {answer['start']['assumes']}", *holder_lines(answer["start"])]
    if kind == "estimated":
        when = f"ends about {clock(ends['middle'])}; " if answer["due"] == "later" else ""
        return [f"{when}its training reports no progress, so this is the estimate: {answer['source']}"]
    if kind != "reported":
        return []
    lines = []
    if _ahead(answer):
        sure = f"{answer['level']:.0%} sure"
        lines.append(f"ends {_between(ends)}, {sure}")
    steps = answer["steps"]
    whole = f"{'' if steps['low'] == steps['high'] else 'about '}{answer['done'] + steps['middle']:,.0f}"
    progress = f"{answer['done']:,} of {whole} iterations"
    share = "" if answer["share"] is None else f"{answer['share']:.0%} done; "
    lines.append(
        f"{share}reported {duration(answer['age_ms'])} ago: {progress}, {answer['step_ms']['middle']:.4g} ms "
        "each"
    )
    model = f" · {answer['model_version']}" if answer["model_version"] else ""
    lines.append(f"known by: {answer['source']}{model}")
    return lines


def _between(ends: Answer) -> str:
    """`22:41:03 (22:39:25 to 22:43:33)`."""
    middle, low, high = (clock(ends[name]) for name in ("middle", "low", "high"))
    return middle if low == middle == high else f"{middle} ({low} to {high})"


def later(answer: Answer, now: int | None) -> Answer:
    """The answer some time later: the time passed since is taken off. None: unchanged."""
    passed = 0 if now is None else max(0, now - answer["now_ms"])
    if not passed:
        return answer
    moved = {**answer, "now_ms": answer["now_ms"] + passed}
    for name in ("age_ms", "ran_ms"):
        if moved[name] is not None:
            moved[name] += passed
    left = answer["left_ms"]
    if left is not None:
        moved["left_ms"] = {name: None if ms is None else max(0, ms - passed) for name, ms in left.items()}
        middle, high = moved["left_ms"]["middle"], moved["left_ms"]["high"]
        moved["due"] = "later" if middle else "any_moment" if high else "overdue"
    if answer["share"] is not None and answer["step_ms"]["middle"] > 0:
        whole_ms = (answer["done"] + answer["steps"]["middle"]) * answer["step_ms"]["middle"]
        moved["share"] = min(1.0, answer["share"] + passed / whole_ms)
    return moved


# ---------------------------------------------------------------------------------------------- watching


def _watch(client: Client, job: dict[str, Any], output: Format) -> int:
    """Follows the job to its end; returns its exit code. On a terminal the times tick, elsewhere each change
    is a line."""
    path = f"/v1/jobs/{job['job_id']}/eta"
    if output is Format.TABLE and sys.stdout.isatty():
        _draw(client, job)
    else:
        for _ in _changes(client, job) if job["outcome"] is None else ("",):
            answer = client.get(path)
            present_one(answer, output, partial(_print, answer))
    return follow.exit_code(client.get(f"/v1/jobs/{job['job_id']}"), propagate=False)


def _print(answer: Answer) -> None:
    print(f"{clock(answer['now_ms'])}  {in_a_line(answer)}", flush=True)


def _changes(client: Client, job: Answer, waits: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yields once at the start, then the type of each event that may change the answer; the last is the job's
    end.

    While `waits`, starts and ends of other jobs count too: its expected start depends on them. None: only its
    own events.
    """
    yield ""
    only = {} if waits is not None else {"job": job["job_id"]}
    for event in client.stream("/v1/stream", last_id=str(job["seq"]), **only):
        kind, own = event.data["type"], event.data["job_id"] == job["job_id"]
        if kind in (WAKING if own else OTHERS if waits is not None and waits() else ()):
            yield kind
        if own and kind == follow.ENDED:
            return


def _draw(client: Client, job: dict[str, Any]) -> None:
    """Redraws as time goes on; asks the gateway when an event may change the answer."""
    path = f"/v1/jobs/{job['job_id']}/eta"
    answer = client.get(path)
    now = counting_on(answer["now_ms"])

    def look() -> bool:
        nonlocal answer, now
        answer = client.get(path)
        now = counting_on(answer["now_ms"])
        return bool(answer["answer"] != "ended")

    redraw(
        lambda: shown(answer, job, now()),
        look,
        _changes(client, job, lambda: bool(answer["answer"] == "waiting")),
    )
