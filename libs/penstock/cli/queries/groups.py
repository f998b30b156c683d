"""`penstock get groups`: jobs that take turns on the same GPUs,
and how a job's group reads in `describe job`."""

from typing import Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.cli.common import Output, gateway, rows_of
from penstock.cli.output import Format, duration, present, short_id
from penstock.screen import plain_table
from penstock.text.counting import count

Row = dict[str, Any]


def get_groups(ctx: typer.Context, output: Output = Format.TABLE) -> None:
    """List groups: jobs that take turns on the same GPUs."""
    answer = gateway(ctx).get("/v1/groups")
    found = rows_of(answer, "groups")

    def draw() -> RenderableType:
        if not found:
            return Text("No jobs share whole GPUs.")
        return groups_table(found, answer["now_ms"], wide=output is Format.WIDE)

    present(answer, output, draw)


def groups_table(groups: list[Row], now_ms: int, *, wide: bool = False) -> Table:
    """A line per group and member, members in the order of their rotation. SPEED: predicted, relative to the
    job alone; USED: share of the four resources (γ)."""
    columns = ["GROUP", "NODES", "GPUS", "SINCE", "PERIOD", "USED", "JOB", "SPEED"]
    table = plain_table(
        *columns, *(["BY", "REASON"] if wide else []), right=("GPUS", "SINCE", "PERIOD", "USED", "SPEED")
    )
    for group in groups:
        turns = group["turns"] or {}
        cells = [
            escape(short_id(group["group_id"])),
            escape(", ".join(group["nodes"])),
            str(group["gpus"]),
            "–" if group["since_ms"] is None else duration(max(0, now_ms - group["since_ms"])),
            f"{turns['period_ms']:,.4g} ms" if turns else "–",
            f"{turns['efficiency']:.0%}" if turns else "–",
        ]
        more = [escape(group["by"] or "–"), escape(group["reason"] or "–")] if wide else []
        for job_id in in_rotation(group):
            speed = speed_of(group, job_id)
            table.add_row(*cells, short_id(job_id), "–" if speed is None else f"{speed:.2f}", *more)
            cells, more = [""] * len(cells), [""] * len(more)
    return table


def in_rotation(group: Row) -> list[str]:
    """The group's present members in the order of the rotation: while the first uses storage the second uses
    the CPU, and so on.

    Members without a prediction follow, oldest first.
    """
    order: list[str] = (group["turns"] or {}).get("job_ids", [])
    present_now: list[str] = group["job_ids"]
    return [job_id for job_id in order if job_id in present_now] + [
        job_id for job_id in present_now if job_id not in order
    ]


def speed_of(group: Row, job_id: str) -> float | None:
    """The predicted speed, relative to the job alone."""
    turns = group["turns"] or {"job_ids": [], "speeds": []}
    return dict(zip(turns["job_ids"], turns["speeds"], strict=True)).get(job_id)


def turns_of(job: Row) -> str:
    """`in turns with b and c since 4m, asked for by batcher: …; predicted: 120 ms for one iteration of each,
    85% of the resources used, 0.76 of its speed alone; of its last iterations 24 of 188 ms were waiting`.
    Empty for a job in no group."""
    group, steps = job.get("group"), job.get("waits")
    if not group:
        return ""
    others = [short_id(other) for other in in_rotation(group) if other != job["job_id"]]
    since = (
        "" if group["since_ms"] is None else f" since {duration(max(0, job['now_ms'] - group['since_ms']))}"
    )
    parts = [
        f"with {' and '.join(others)}{since}"
        + (f", asked for by {group['by']}: {group['reason']}" if group["by"] else "")
    ]
    if turns := group["turns"]:
        speed = speed_of(group, job["job_id"])
        own = "" if speed is None else f", {speed:.2f} of its speed alone"
        used = f"{turns['efficiency']:.0%} of the resources used"
        parts.append(f"predicted: {turns['period_ms']:,.4g} ms for one iteration of each, {used}{own}")
        parts += [f"instead of: {turns['alternative']}"] if turns.get("alternative") else []
    if steps:
        missed = f", {count(steps['missed_turns'], 'stage')} without a turn" if steps["missed_turns"] else ""
        parts.append(
            f"{steps['waited_ms']:,.4g} of {steps['step_ms']:,.4g} ms an iteration are waiting{missed}"
        )
    return "; ".join(parts)
