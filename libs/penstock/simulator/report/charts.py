"""Chart definitions of a simulator's report: load, queue, distributions, Gantt chart, utilisation per node,
latencies."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from typing import NamedTuple

import altair as alt
import numpy as np
from numpy.typing import NDArray

from penstock.charts.plots import (
    CATEGORICAL,
    DASHES,
    LEGEND_CHARACTERS,
    WIDTH,
    Series,
    duration_axis,
    duration_domain,
    duration_text,
    legend,
    lines,
    table,
    zoom,
)
from penstock.charts.report import Chart, Drawing, Panel, Section
from penstock.simulator.report.turns_chart import shares, turns_section
from penstock.simulator.results.metrics import duration
from penstock.simulator.results.series import MAX_DETAILED, RunSeries, cdf_of, smooth
from penstock.simulator.results.timeline import EXITED, SHARED, STOPPED
from penstock.text.counting import count

PALETTE = (*CATEGORICAL[:6], "#B8A800", "#7A4B2B")
"""Colours of owners and jobs, without grey, which stands for all others."""
OTHERS = "#9A9A9A"
SIZES = ("#443983", "#31688E", "#21918C", "#35B779", "#7AD151", "#B8C41F", "#E0A100")
"""Colours of sizes, in rising order."""
GAP = 0.6  # GPUs between the nodes of a Gantt chart
MAX_NODE_LABELS = 40
MAX_BAR_LABELS = 40
MAX_OUTLINED_BARS, MAX_OUTLINED_GPUS = 600, 100  # beyond these an outline would hide short or thin bars
PX_PER_GPU, GANTT_PX = 11.0, (110.0, 800.0)
FEW_JOBS = 5  # up to here a queue's axis has whole numbers only
MIN_S = 1.0  # lower end of logarithmic axes of time
SMOOTH_BINS = 160  # of a line with many steps, if several lines cross
MIN_DIFFERENCE = 0.01  # between two curves, for both to be shown
ENDS = {EXITED: "done", STOPPED: "stopped", SHARED: "goes on, with others or without"}


class TimeUnit(NamedTuple):
    name: str
    seconds: float


def time_unit(span_s: float) -> TimeUnit:
    """The largest unit of which a span has at least three."""
    for name, seconds in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if span_s >= 3 * seconds:
            return TimeUnit(name, seconds)
    return TimeUnit("seconds", 1.0)


def colour_of(index: int) -> tuple[str, Sequence[int]]:
    """Colour and dash of the policy with this index."""
    return CATEGORICAL[index % len(CATEGORICAL)], DASHES[index // len(CATEGORICAL) % len(DASHES)]


def sections(runs: Sequence[RunSeries], assumed: str = "") -> list[Section]:
    """All charts in the order of the page. `assumed`: text below completion times, whose picture is shown
    alone."""
    unit = time_unit(max(run.end_s for run in runs))
    detailed = runs[:MAX_DETAILED]
    waited = any(run.waited for run in runs) and any(
        len(run.jct_s) or _waiting_s(run) >= MIN_S for run in runs
    )

    def each(
        key: str,
        title: str,
        caption: str,
        chosen: Callable[[RunSeries], object],
        draw: Callable[[RunSeries], Chart],
        note: Callable[[RunSeries], str],
    ) -> Section | None:
        """A chart for each run with data for it."""
        drawings = [
            Drawing([Panel(draw(run))], note(run), run.name if len(runs) > 1 else "")
            for run in detailed
            if chosen(run)
        ]
        return Section(key, title, caption, drawings) if drawings else None

    shared = any(run.gantt.sharings for run in detailed)
    meanings = dict.fromkeys(_groups(run).meaning for run in detailed if len(run.gantt.job))
    found = [
        _load(runs, unit),
        _queue(runs, unit) if waited else None,
        _distribution(
            runs,
            "jct_s",
            "completion",
            "How long jobs take from submission to end",
            "completion time",
            "Share of the jobs that were done within a time: further left is better.",
            assumed,
        ),
        _distribution(
            runs,
            "queue_s",
            "waiting",
            "How long jobs wait",
            "waiting time",
            "Completion time less the time in which the job ran, so another wait after a preemption counts "
            "too. Further left is better.",
            _waited_less(runs),
        )
        if waited
        else None,
        each(
            "startable",
            "How many more jobs could start",
            "For each size, how many jobs of it would fit at this moment, out of those that the empty "
            "cluster could take. Where large sizes lie below small ones, free GPUs are scattered over "
            "nodes: fragmentation.",
            lambda run: any(run.room.values()),
            lambda run: _startable(run, unit),
            lambda run: _averaged([run]),
        ),
        each(
            "overview",
            "How full each node is",
            "A row per node, from empty (light) to full (dark). Pale stripes are idle nodes.",
            lambda run: run.heat,
            lambda run: _heat(run, unit),
            _resolution,
        ),
        each(
            "gantt",
            "Jobs by node and time",
            "A row per GPU, in blocks of one node each (its GPUs in brackets); a bar is a job from its "
            f"placement to its proven end. Colour: {' or '.join(meanings)}. What is blank is idle."
            + (" Jobs that share GPUs lie beside each other in their rows." if shared else ""),
            lambda run: len(run.gantt.job),
            _gantt,
            _excerpt,
        ),
        turns_section(detailed),
    ]
    return [section for section in found if section is not None]


# ---------------------------------------------------------------------------------------------- curves


def _averaged(runs: Sequence[RunSeries]) -> str:
    longest_s = max(run.averaged_s for run in runs)
    return f"Each point is the mean of {duration(longest_s)}." if longest_s else ""


def _time_axis(unit: TimeUnit) -> alt.X:
    return alt.X("x:Q", title=f"time since the start ({unit.name})", scale=alt.Scale(nice=False))


def _share_axis(title: str) -> alt.Y:
    return alt.Y(
        "y:Q", title=title, axis=alt.Axis(format=".0%"), scale=alt.Scale(domain=[0, 1.03], nice=False)
    )


def _at(unit: TimeUnit) -> str:
    return f" + ' at ' + {duration_text(f'(datum.x * {unit.seconds:g})')}"


def _load(runs: Sequence[RunSeries], unit: TimeUnit) -> Section:
    several = len(runs) > 1
    caption = "The higher the line, the fewer GPUs are idle."
    series = []
    for index, run in enumerate(runs):
        colour, dash = colour_of(index)
        held, working = run.held, run.working
        if several:
            held, working = smooth(held, SMOOTH_BINS), smooth(working, SMOOTH_BINS)
        series.append(
            Series(
                run.name if several else "held by jobs", held.at_s / unit.seconds, held.value, colour, dash
            )
        )
        if np.abs(held.value - working.value).max(initial=0.0) > MIN_DIFFERENCE:
            name = f"{run.name}, making progress" if several else "making progress"
            series.append(Series(name, working.at_s / unit.seconds, working.value, colour, DASHES[2], 1.4))
    if any(one.name.endswith("making progress") for one in series):
        caption += (
            " The dotted line counts only GPUs whose job makes progress: the gap is starting and stopping."
        )
    chart = lines(
        series, _time_axis(unit), _share_axis("share of all GPUs"), f"format(datum.y, '.1%'){_at(unit)}"
    )
    note = f"Each point is the mean of a {SMOOTH_BINS}th of the time." if several else _averaged(runs)
    return Section("load", "How busy the GPUs are", caption, [Drawing([Panel(chart)], note)])


def _waiting_s(run: RunSeries) -> float:
    """Sum of all jobs' waiting times in seconds."""
    return float(run.waiting.value[:-1] @ np.diff(run.waiting.at_s))


def _queue(runs: Sequence[RunSeries], unit: TimeUnit) -> Section:
    series = [
        Series(run.name, run.waiting.at_s / unit.seconds, run.waiting.value, *colour_of(index))
        for index, run in enumerate(runs)
    ]
    largest = max(float(run.waiting.value.max(initial=0.0)) for run in runs)
    y = alt.Y("y:Q", title="waiting jobs")
    if largest <= FEW_JOBS:
        most = max(1, ceil(largest))
        y = y.axis(values=list(range(most + 1)), format="d").scale(domain=[0, most], nice=False)
    caption = "Length of the queue: where the line is at zero, no job waits."
    chart = lines(series, _time_axis(unit), y, f"format(datum.y, ',.3~r') + ' waiting'{_at(unit)}")
    return Section("queue", "How many jobs wait", caption, [Drawing([Panel(chart)], _averaged(runs))])


def _startable(run: RunSeries, unit: TimeUnit) -> Chart:
    """Each size as a share of the count in an empty cell: the counts themselves differ by their size
    alone."""
    biggest = max(8.0, run.largest_job)
    sizes = [size for size in run.startable if size <= biggest and run.room[size]]
    series = []
    for place, size in enumerate(sizes):
        rank = place / max(1, len(sizes) - 1)
        curve, room = run.startable[size], run.room[size]
        colour = SIZES[round(rank * (len(SIZES) - 1))]
        shape = run.shapes.get(size)
        gang = (
            f" as {shape.workers} × {shape.gpus_per_worker}"
            if shape is not None and shape.workers > 1
            else ""
        )
        name = f"{count(size, 'GPU')}{gang} (of {room:,})"
        width = 4.0 - 3.0 * rank  # where lines coincide, all are visible
        x, y = curve.at_s / unit.seconds, curve.value / room
        series.append(Series(name, x, y, colour, width=width))
    hover = f"format(datum.y, '.1%'){_at(unit)}"
    return lines(series, _time_axis(unit), _share_axis("startable, of an empty cluster"), hover)


# ---------------------------------------------------------------------------------------- distributions


def _distribution(
    runs: Sequence[RunSeries], field: str, key: str, title: str, axis: str, caption: str, note: str = ""
) -> Section | None:
    """Cumulative distribution; None if no value lies on the logarithmic axis of time."""
    series, low_s, high_s = [], inf, MIN_S
    for index, run in enumerate(runs):
        values = getattr(run, field)
        if not len(values) or values[-1] < MIN_S:
            continue
        curve = cdf_of(values)
        low_s, high_s = min(low_s, max(MIN_S, curve.at_s[0])), max(high_s, curve.at_s[-1])
        series.append(Series(run.name, np.maximum(curve.at_s, MIN_S), curve.value, *colour_of(index)))
    if not series:
        return None
    low_s, high_s = duration_domain(min(low_s, high_s / 2), high_s)
    scale = alt.Scale(type="log", nice=False, domain=[low_s, high_s])
    x = alt.X("x:Q", scale=scale, axis=duration_axis(f"{axis} (logarithmic)", low_s, high_s))
    hover = f"format(datum.y, '.1%') + ' within ' + {duration_text('datum.x')}"
    chart = lines(series, x, _share_axis("share of finished jobs"), hover)
    return Section(key, title, caption, [Drawing([Panel(chart)], note)])


def _waited_less(runs: Sequence[RunSeries]) -> str:
    """Note about the values that a logarithmic axis of waiting times leaves out."""
    shorter = [float(np.mean(run.queue_s < MIN_S)) for run in runs if len(run.queue_s)]
    low, high = min(shorter, default=0.0), max(shorter, default=0.0)
    share = f"{100 * low:.0f}" + (f" – {100 * high:.0f}" if high - low >= 0.005 else "") + " %"
    return f"The axis begins at 1 s; {share} of the jobs waited less." if high >= 0.005 else ""


# ------------------------------------------------------------------------------------------------- bars


class Groups(NamedTuple):
    """Meaning of the colours. `of_bar`: group of each bar. `legend`: whether the groups' names are
    informative."""

    meaning: str
    of_bar: Sequence[str]
    colours: Mapping[str, str]
    legend: bool = True


def _groups(run: RunSeries) -> Groups:
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


def _gantt(run: RunSeries) -> Chart:
    gantt = run.gantt
    unit = time_unit(gantt.window_s[1] - gantt.window_s[0])
    heights = np.array([max(1, gpus) + GAP for _, gpus in gantt.rows])
    tops = np.concatenate(([0.0], np.cumsum(heights)))
    groups = _groups(run)
    part = gantt.height / gantt.parts
    top = tops[gantt.node] + gantt.y + part * gantt.place
    thickness = np.maximum(0.6 * part, part - 0.14)  # a little less, so that neighbours stay apart
    notes = [run.jobs[int(job)] for job in gantt.job]
    named = any(note.label != note.job_id for note in notes)
    bars = table(
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


def _excerpt(run: RunSeries) -> str:
    gantt = run.gantt
    if not gantt.left_out:
        return ""
    first, last = gantt.window_s
    window = "" if last - first >= run.end_s else f", {duration(last - first)} around the busiest moment"
    return (
        f"An excerpt: {len(gantt.rows):,} of {run.nodes:,} nodes{window}. {len(gantt.job):,} bars are shown, "
        f"{gantt.left_out:,} are left out; the overview above has them all."
    )


def _resolution(run: RunSeries) -> str:
    heat = run.heat
    assert heat is not None, run.name
    row = f"mean of {heat.per_row} nodes" if heat.per_row > 1 else "node"
    return f"Row: {row}. Column: mean of {duration(heat.edges_s[1] - heat.edges_s[0])}."


def _heat(run: RunSeries, unit: TimeUnit) -> Chart:
    """Heat map of nodes over time. Neighbouring columns of one value are one rectangle; empty ones are not
    shown."""
    heat = run.heat
    assert heat is not None, run.name
    new = np.ones(heat.percent.shape, dtype=bool)
    new[:, 1:] = heat.percent[:, 1:] != heat.percent[:, :-1]
    row, first = np.nonzero(new)
    after = np.append(first[1:], 0)
    after[after == 0] = heat.percent.shape[1]
    value = heat.percent[row, first]
    held, start, width = (
        value > 0,
        heat.edges_s[0] / unit.seconds,
        (heat.edges_s[1] - heat.edges_s[0]) / unit.seconds,
    )
    data = table(first=first[held], after=after[held], y=row[held], percent=value[held])
    rows = len(heat.percent)
    colour = alt.Color(
        "percent:Q",
        title="GPUs held, %",
        scale=alt.Scale(domain=[0, 100]),
        legend=alt.Legend(gradientLength=180),
    )
    y = alt.Y("y:Q", scale=alt.Scale(domain=[rows, 0], nice=False), axis=None)
    scale = alt.Scale(domain=[start, heat.edges_s[-1] / unit.seconds], nice=False)
    x = alt.X("x:Q", title=f"time since the start ({unit.name})", axis=alt.Axis(grid=False), scale=scale)
    rects = (
        alt.Chart(data)
        .transform_calculate(
            x=f"{start} + {width} * datum.first", x2=f"{start} + {width} * datum.after", y2="datum.y + 1"
        )
        .mark_rect(clip=True)
        .encode(
            x=x,
            x2="x2:Q",
            y=y,
            y2="y2:Q",
            color=colour,
            tooltip=[
                alt.Tooltip("percent:Q", title="GPUs held, %"),
                alt.Tooltip("x:Q", title=unit.name, format=",.4~g"),
            ],
        )
    )
    every = -(-rows // 12)
    nodes = table(y=np.arange(0, rows, every) + 0.5, name=heat.labels[::every])
    names = alt.Chart(nodes).mark_text(align="right", dx=-8, limit=220, clip=False)
    labels = names.encode(x=alt.value(0), y=y, text="name:N")
    return alt.layer(rects.add_params(zoom()), labels).properties(
        width=WIDTH, height=min(520, max(150, 2 * rows))
    )
