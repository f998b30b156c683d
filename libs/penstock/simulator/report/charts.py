"""Chart definitions of a simulator's report: load, queue, distributions, Gantt chart, utilisation per node,
latencies."""

from collections.abc import Callable, Sequence
from math import ceil, inf

import altair as alt
import numpy as np

from penstock.charts.plots import (
    CATEGORICAL,
    DASHES,
    WIDTH,
    Series,
    duration_axis,
    duration_domain,
    duration_text,
    lines,
    table,
    zoom,
)
from penstock.charts.report import Chart, Drawing, Panel, Section
from penstock.simulator.report.gantt_chart import excerpt, gantt_chart, groups_of
from penstock.simulator.report.turns_chart import turns_section
from penstock.simulator.results.metrics import TimeUnit, duration, time_unit
from penstock.simulator.results.series import MAX_DETAILED, RunSeries, cdf_of, smooth
from penstock.text.counting import count

SIZES = ("#443983", "#31688E", "#21918C", "#35B779", "#7AD151", "#B8C41F", "#E0A100")
"""Colours of sizes, in rising order."""
FEW_JOBS = 5  # up to here a queue's axis has whole numbers only
MIN_S = 1.0  # lower end of logarithmic axes of time
SMOOTH_BINS = 160  # of a line with many steps, if several lines cross
MIN_DIFFERENCE = 0.01  # between two curves, for both to be shown


def colour_of(index: int) -> tuple[str, Sequence[int]]:
    """Colour and dash of the policy with this index."""
    return CATEGORICAL[index % len(CATEGORICAL)], DASHES[index // len(CATEGORICAL) % len(DASHES)]


def sections(runs: Sequence[RunSeries], assumed: str = "") -> list[Section]:
    """All charts in the order of the page. `assumed`: text below completion times, whose picture is shown
    alone."""
    unit = time_unit(max(run.end_s for run in runs))
    waited = any(run.waited for run in runs) and any(
        len(run.jct_s) or _waiting_s(run) >= MIN_S for run in runs
    )
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
        *_sections_per_run(runs, unit),
        turns_section(runs[:MAX_DETAILED]),
    ]
    return [section for section in found if section is not None]


def _sections_per_run(runs: Sequence[RunSeries], unit: TimeUnit) -> list[Section | None]:
    """Charts of single runs, the first `MAX_DETAILED`; None where none has data for a chart."""
    detailed = runs[:MAX_DETAILED]

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
    meanings = dict.fromkeys(groups_of(run).meaning for run in detailed if len(run.gantt.job))
    return [
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
            gantt_chart,
            excerpt,
        ),
    ]


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
