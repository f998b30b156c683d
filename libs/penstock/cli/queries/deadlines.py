"""Deadlines as text: the odds of one job in a line, and `penstock get jobs --deadline`."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from penstock.cli.common import rows_of
from penstock.cli.output import Format, duration, present, remark, short_id, state
from penstock.cli.queries.tables import as_of, clock, shortened
from penstock.client import Client
from penstock.screen import plain_table
from penstock.text.counting import count

MAX_LISTED = 1_000  # the gateway's bound
Row = Mapping[str, Any]


def in_a_line(found: Row) -> str:
    """`due 14:00:00, in 2h 00m: in time with a probability of 93 %; expected end 13:20:10 with 4 workers`."""
    parts = []
    if found["due_ms"] is not None:
        left_ms = found["due_ms"] - found["now_ms"]
        when = f"in {duration(left_ms)}" if left_ms >= 0 else f"{duration(-left_ms)} ago"
        parts.append(f"due {clock(found['due_ms'])}, {when}")
    elif found["qos"] == "urgent":
        parts.append("as soon as can be")
    else:
        parts.append(f"class {found['qos']}" if found["qos"] else "its deadline")
    if found["odds"] is not None:
        parts[0] += f": in time with a probability of {percent(found['odds'])}"
    elif found["unknown"]:
        what = "when it will end" if found["qos"] == "urgent" else "whether it will be in time"
        parts[0] += f": not known {what}, {found['unknown']}"
    if found["ends_ms"] is not None:
        with_ = "" if found["workers"] is None else f" with {count(found['workers'], 'worker')}"
        parts.append(f"expected end {clock(found['ends_ms'])}{with_}")
    return "; ".join(parts)


def percent(odds: float | None) -> str:
    """`93 %`, `< 1 %`, `> 99 %`: never shown as certain; `–` for None."""
    if odds is None:
        return "–"
    if 0.01 <= odds <= 0.99:
        return f"{100 * odds:.0f} %"
    return "< 1 %" if odds < 0.01 else "> 99 %"


def list_jobs(client: Client, filters: Mapping[str, Any], limit: int, output: Format) -> None:
    """Jobs with a deadline, least odds first."""
    answer = client.get("/v1/deadlines", limit=limit, **filters)
    jobs = rows_of(answer, "jobs")

    def draw() -> RenderableType:
        if not jobs:
            return Text("No unfinished job has a deadline or a service class.")
        return Group(_table(jobs, wide=output is Format.WIDE), Text(as_of(answer), style="dim"))

    present(answer, output, draw)
    if answer["timed"] > len(jobs):
        remark(f"{len(jobs)} of {answer['timed']:,}; --limit {min(answer['timed'], MAX_LISTED)} lists more")


def _table(jobs: list[dict[str, Any]], *, wide: bool) -> RenderableType:
    """A line per job. HOLDS: the deadline, from its submission, that it would meet with the odds that count
    as certain."""
    columns = [
        "JOB",
        "NAME",
        "STATE",
        "CLASS",
        "DUE",
        "IN",
        "ENDS",
        "ODDS",
        *(["OWNER", "STARTS", "WORKERS", "HOLDS", "UNKNOWN"] if wide else []),
    ]
    table = plain_table(*columns, right=("IN", "ODDS", "WORKERS", "HOLDS"))
    for job in jobs:
        due_ms = job["due_ms"]
        left_ms = None if due_ms is None else due_ms - job["now_ms"]
        late = left_ms is not None and left_ms < 0
        cells = [
            short_id(job["job_id"]),
            escape(job["name"] or "–"),
            state(job["status"]),
            job["qos"] or "own",
            clock(due_ms),
            "[red]over[/]" if late else duration(left_ms),
            clock(job["ends_ms"]),
            _coloured(job),
        ]
        if wide:
            cells += [
                escape(job["owner"]),
                clock(job["starts_ms"]),
                str(job["workers"] or "–"),
                duration(job["deadline_ms"]),
                escape(shortened(job["unknown"])),
            ]
        table.add_row(*cells)
    return table


def _coloured(job: Row) -> str:
    odds, text = job["odds"], percent(job["odds"])
    if odds is None:
        return text
    return f"[{'green' if odds >= job['level'] else 'yellow' if odds >= 0.5 else 'red'}]{text}[/]"
