"""Gantt chart of a simulation: a bar per job and node, coloured by owner, model or job."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import altair as alt
import numpy as np
from numpy.typing import NDArray

from penstock.charts.plots import CATEGORICAL, LEGEND_CHARACTERS, WIDTH, duration_text, legend, table, zoom
from penstock.charts.report import Chart
from penstock.simulator.report.turns_chart import shares
from penstock.simulator.results.metrics import TimeUnit, duration, time_unit
from penstock.simulator.results.series import RunSeries
from penstock.simulator.results.timeline import EXITED, SHARED, STOPPED

PALETTE = (*CATEGORICAL[:6], "#B8A800", "#7A4B2B")
"""Colours of owners and jobs, without grey, which stands for all others."""
OTHERS = "#9A9A9A"
GAP = 0.6  # GPUs between the nodes of a Gantt chart
MAX_NODE_LABELS = 40
MAX_BAR_LABELS = 40
MAX_OUTLINED_BARS, MAX_OUTLINED_GPUS = 600, 100  # beyond these an outline would hide short or thin bars
PX_PER_GPU, GANTT_PX = 11.0, (110.0, 800.0)
ENDS = {EXITED: "done", STOPPED: "stopped", SHARED: "goes on, with others or without"}


class Groups(NamedTuple):
    """Meaning of the colours. `of_bar`: group of each bar. `legend`: whether the groups' names are
    informative."""

    meaning: str
    of_bar: Sequence[str]
    colours: Mapping[str, str]
    legend: bool = True


def groups_of(run: RunSeries) -> Groups:
    """Groups by owner if there are several, the most frequent ones in a colour of their own; else by job,
    with repeated colours if many."""
    notes = [run.jobs[int(job)] for job in run.gantt.job]
    owners = [note.owner for note in run.jobs.values()]
    if len(set(owners)) > 1:
        frequent = sorted(set(owners), key=lambda owner: (-owners.count(owner), owner))[: len(PALETTE)]
        short = _shortened(frequent)
        colours = {short[owner]: colour for owner, colour in zip(sorted(frequent), PALETTE, strict=False)}
        groups = [short.get(note.owner, "other") for note in notes]
        return Groups("owner", groups, {**colours, **({"other": OTHERS} if "other" in groups else {})})
    if len(run.jobs) <= len(PALETTE):
        labels = sorted(note.label for note in run.jobs.values())
        short = _shortened(labels)
        colours = {short[label]: colour for label, colour in zip(labels, PALETTE, strict=False)}
        return Groups("job", [short[note.label] for note in notes], colours)
    turns = {str(turn): colour for turn, colour in enumerate(PALETTE)}
    return Groups(
        "job, in turn", [str(int(job) % len(PALETTE)) for job in run.gantt.job], turns, legend=False
    )


def _shortened(names: Sequence[str]) -> Mapping[str, str]:
    """Long names without their middle; all names whole, if they would not stay distinct."""
    short = {name: name if len(name) <= LEGEND_CHARACTERS else f"{name[:20]}…{name[-12:]}" for name in names}
    return short if len(set(short.values())) == len(short) else {name: name for name in names}


def gantt_chart(run: RunSeries) -> Chart:
    """A row per GPU, in blocks of one node each."""
    gantt = run.gantt
    unit = time_unit(gantt.window_s[1] - gantt.window_s[0])
    heights = np.array([max(1, gpus) + GAP for _, gpus in gantt.rows])
    tops = np.concatenate(([0.0], np.cumsum(heights)))
    groups = groups_of(run)
    notes = [run.jobs[int(job)] for job in gantt.job]
    named = any(note.label != note.job_id for note in notes)
    bars = _bars(run, unit, groups, tops)
    scale = alt.Scale(domain=[value / unit.seconds for value in gantt.window_s], nice=False)
    x = alt.X("x:Q", title=f"time since the start ({unit.name})", scale=scale)
    y = alt.Y("y:Q", scale=alt.Scale(domain=[tops[-1] - GAP, 0], nice=False), axis=None)
    outlined = len(notes) <= MAX_OUTLINED_BARS and tops[-1] <= MAX_OUTLINED_GPUS
    begin, lasted = (
        duration_text(f"({span} * {unit.seconds:g})") for span in ("datum.x", "(datum.x2 - datum.x)")
    )
    base = (
        alt.Chart(bars)
        .transform_calculate(
            size="datum.gpus + ' GPUs in all, here ' + datum.here + ' on ' + datum.node",
            time=f"'from ' + {begin} + ', for ' + {lasted}",
        )
        .encode(x=x, y=y)
    )
    rects = base.mark_rect(style="bars", strokeWidth=0.6 if outlined else 0, clip=True).encode(
        x2="x2:Q",
        y2="y2:Q",
        color=alt.Color(
            "group:N",
            scale=alt.Scale(domain=list(groups.colours), range=list(groups.colours.values())),
            legend=legend(list(groups.colours)) if groups.legend else None,
        ),
        tooltip=[
            *(["name:N"] if named else []),
            "job:N",
            "owner:N",
            "model:N",
            "size:N",
            "time:N",
            "end:N",
            *(["turns:N"] if gantt.sharings else []),
        ],
    )
    edges, names = _nodes(run, heights, tops)
    layers = [
        edges.encode(y=y),
        rects.add_params(zoom()),
        names.encode(x=alt.value(0), y=y, text="name:N"),
    ]
    if len(notes) <= MAX_BAR_LABELS:
        width = alt.ExprRef("max(1, scale('x', datum.x2) - scale('x', datum.x) - 4)")
        texts = base.transform_calculate(x=MIDDLE_X, y=MIDDLE_Y)
        layers.append(
            texts.mark_text(fill="white", fontSize=10, limit=width, clip=True).encode(
                text="name:N" if named else "job:N"
            )
        )
    low, high = GANTT_PX
    return alt.layer(*layers).properties(width=WIDTH, height=min(high, max(low, PX_PER_GPU * tops[-1])))


def _bars(run: RunSeries, unit: TimeUnit, groups: Groups, tops: NDArray[np.float64]) -> alt.InlineData:
    """A row per bar of the Gantt chart. `tops`: upper edge of each node's block."""
    gantt = run.gantt
    part = gantt.height / gantt.parts
    top = tops[gantt.node] + gantt.y + part * gantt.place
    thickness = np.maximum(0.6 * part, part - 0.14)  # a little less, so that neighbours stay apart
    notes = [run.jobs[int(job)] for job in gantt.job]
    named = any(note.label != note.job_id for note in notes)
    return table(
        x=gantt.start_s / unit.seconds,
        x2=gantt.end_s / unit.seconds,
        y=top + (part - thickness) / 2,
        y2=top + (part + thickness) / 2,
        group=groups.of_bar,
        owner=[note.owner or "–" for note in notes],
        job=[note.job_id for note in notes],
        model=[note.model or "–" for note in notes],
        gpus=[note.gpus for note in notes],
        here=gantt.height,
        node=[gantt.rows[node][0] for node in gantt.node],
        end=[_end(run, bar) for bar in range(len(notes))],
        **({"name": [note.label for note in notes]} if named else {}),
        **({"turns": shared} if any(shared := shares(gantt, run.jobs)) else {}),
    )


def _nodes(
    run: RunSeries, heights: NDArray[np.float64], tops: NDArray[np.float64]
) -> tuple[alt.Chart, alt.Chart]:
    """Lines between the nodes' rows, and their names; of many nodes only every n-th."""
    rows = run.gantt.rows
    every = -(-len(rows) // MAX_NODE_LABELS)
    nodes = table(
        y=tops[:-1][::every] + (heights[::every] - GAP) / 2,
        name=[f"{node} ({gpus})" for node, gpus in rows[::every]],
    )
    names = alt.Chart(nodes).mark_text(align="right", dx=-8, limit=220, clip=False)
    return alt.Chart(table(y=tops[1:-1] - GAP / 2)).mark_rule(strokeWidth=0.6, strokeOpacity=0.4), names


MIDDLE_X, MIDDLE_Y = "(datum.x + datum.x2) / 2", "(datum.y + datum.y2) / 2"


def _end(run: RunSeries, bar: int) -> str:
    attempt = run.gantt.attempt[bar]
    return ENDS.get(int(run.gantt.how[bar]), "still running") + (
        f", attempt {attempt}" if attempt > 1 else ""
    )


def excerpt(run: RunSeries) -> str:
    """What the chart leaves out; empty: nothing."""
    gantt = run.gantt
    if not gantt.left_out:
        return ""
    first, last = gantt.window_s
    window = "" if last - first >= run.end_s else f", {duration(last - first)} around the busiest moment"
    return (
        f"An excerpt: {len(gantt.rows):,} of {run.nodes:,} nodes{window}. {len(gantt.job):,} bars are shown, "
        f"{gantt.left_out:,} are left out; the overview above has them all."
    )
