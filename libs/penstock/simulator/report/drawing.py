"""Which charts a report has, made from the pictures of its runs."""

from collections.abc import Sequence
from html import escape
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.simulator.report.charts import (
    MODELS,
    OTHERS,
    SIZES,
    Chart,
    Dot,
    DotChart,
    GanttChart,
    Group,
    HeatChart,
    Line,
    LineChart,
    TimeUnit,
    Words,
    colour_of,
    moments,
    powers,
    time_unit,
)
from penstock.simulator.report.metrics import METRICS, duration, headline, shown
from penstock.simulator.report.picture import Curve, Heat, Picture, cdf_of, smooth
from penstock.simulator.report.timeline import EXITED, STOPPED
from penstock.simulator.statistics import Mean

GAP = 0.6  # GPUs between the nodes of a Gantt chart
MAX_NODE_LABELS = 40
MAX_DETAILED = 6  # policies with charts of their own: a page of them stays below its bound
MAX_COLOURS = len(MODELS)
MAX_LABELS = 40  # bars with the names of their jobs on them
FEW = 5  # jobs: ticks between whole numbers would make no sense
LEAST_S = 1.0  # where logarithmic axes of time begin
SMOOTH_BINS = 160  # of a busy line, where several cross
LEAST_GAP = 0.01  # between two lines, to draw both
HOW = {EXITED: "done", STOPPED: "stopped"}


class Section(NamedTuple):
    """Charts that belong together; several with one title are drawn one at a time."""

    key: str
    charts: Sequence[Chart]


def sections(pictures: Sequence[Picture], means: dict[str, dict[str, Mean]] | None = None) -> list[Section]:
    """All charts in the order of the page. `means`: profile → metric, of a comparison with repeated runs."""
    unit, several = time_unit(max(picture.end_s for picture in pictures)), len(pictures) > 1
    detailed = pictures[:MAX_DETAILED]
    finished = any(len(picture.jct_s) for picture in pictures)
    waited = finished and any(picture.waited for picture in pictures)
    found = [
        Section("means", [_means(means, headline(finished=finished))] if means and len(means) > 1 else []),
        Section("load", [_load(pictures, unit)]),
        Section("queue", [_queue(pictures, unit)] if waited else []),
        Section("completion", [_completion(pictures)] if finished else []),
        Section("waiting", [_waiting(pictures)] if waited else []),
        Section("startable", [_startable(picture, unit, several) for picture in detailed]),
        Section("overview", [_overview(one, one.heat, unit, several) for one in detailed if one.heat]),
        Section("gantt", [_gantt(picture, several) for picture in detailed]),
        Section("latency", [_latency(picture, several) for picture in detailed if picture.latencies]),
    ]
    return [section for section in found if section.charts]


# ---------------------------------------------------------------------------------------------- curves


def _averaged(pictures: Sequence[Picture]) -> str:
    longest_s = max(picture.averaged_s for picture in pictures)
    return f"Each point is the mean of {duration(longest_s)}." if longest_s else ""


def _scaled(curve: Curve, unit: TimeUnit) -> tuple[np.ndarray, np.ndarray]:
    return curve.at_s / unit.seconds, curve.value


def _load(pictures: Sequence[Picture], unit: TimeUnit) -> LineChart:
    several = len(pictures) > 1
    says = "The higher the line, the fewer GPUs stand idle."
    note = f"Each point is the mean of a {SMOOTH_BINS}th of the time." if several else _averaged(pictures)
    lines = []
    for index, picture in enumerate(pictures):
        colour, dash = colour_of(index)
        held, working = picture.held, picture.working
        if several:
            held, working = smooth(held, SMOOTH_BINS), smooth(working, SMOOTH_BINS)
        lines.append(Line(picture.profile if several else "held by jobs", *_scaled(held, unit), colour, dash))
        if np.abs(held.value - working.value).max(initial=0.0) > LEAST_GAP:
            label = f"{picture.profile}, making progress" if several else "making progress"
            lines.append(Line(label, *_scaled(working, unit), colour, "dot", width=1.4))
    if any(line.dash == "dot" for line in lines):
        says += (
            " The dotted line counts only GPUs whose job makes progress: the gap is starting and stopping."
        )
    return LineChart(
        Words(
            "load",
            "How busy the GPUs are",
            says,
            note,
        ),
        lines,
        f"time since the start ({unit.name})",
        "share of all GPUs",
        steps=True,
        y_top=1.0,
        percent=True,
    )


def _queue(pictures: Sequence[Picture], unit: TimeUnit) -> LineChart:
    lines = [
        Line(picture.profile, *_scaled(picture.waiting, unit), *colour_of(index))
        for index, picture in enumerate(pictures)
    ]
    most = max(float(picture.waiting.value.max(initial=0.0)) for picture in pictures)
    says = "How many jobs stand in the queue: where the line lies at the bottom, nobody waits."
    return LineChart(
        Words("queue", "How many jobs wait", says, _averaged(pictures)),
        lines,
        f"time since the start ({unit.name})",
        "jobs that wait",
        steps=True,
        y_step=1.0 if most <= FEW else None,
    )


def _startable(picture: Picture, unit: TimeUnit, several: bool) -> LineChart:
    """Each size as a share of what the empty cell could take: the counts themselves differ by their size alone."""
    biggest = max(8.0, picture.largest_job)
    sizes = [size for size in picture.startable if size <= biggest and picture.room[size]]
    lines = []
    for place, size in enumerate(sizes):
        curve, room = picture.startable[size], picture.room[size]
        colour = SIZES[round(place * (len(SIZES) - 1) / max(1, len(sizes) - 1))]
        x, y = _scaled(curve, unit)
        width = 4.0 - 3.0 * place / max(1, len(sizes) - 1)  # where lines lie on one another, all are seen
        name = f"{size} GPU{'s' if size > 1 else ''}"
        lines.append(Line(name, x, y / room, colour, width=width, of=f"{room:,} jobs"))
    return LineChart(
        Words(
            "startable",
            "How many more jobs could start",
            "For each size, how many jobs of it would find room at this moment, out of those that the empty cluster "
            "could take. Where large sizes lie below small ones, free GPUs are scattered over nodes: fragmentation.",
            _averaged([picture]),
            picture.profile if several else "",
        ),
        lines,
        f"time since the start ({unit.name})",
        "startable, of an empty cluster",
        steps=True,
        y_top=1.0,
        percent=True,
    )


# ---------------------------------------------------------------------------------------- distributions


def _distribution(pictures: Sequence[Picture], which: str, words: Words, label: str) -> LineChart:
    lines, low_s, high_s = [], inf, LEAST_S
    for index, picture in enumerate(pictures):
        values = picture.jct_s if which == "jct" else picture.queue_s
        if not len(values) or values[-1] < LEAST_S:
            continue
        curve = cdf_of(values)
        hover = [duration(value) for value in curve.at_s]
        low_s, high_s = min(low_s, max(LEAST_S, curve.at_s[0])), max(high_s, curve.at_s[-1])
        lines.append(
            Line(
                picture.profile, np.maximum(curve.at_s, LEAST_S), curve.value, *colour_of(index), hover=hover
            )
        )
    return LineChart(
        words,
        lines,
        label,
        "share of finished jobs",
        steps=True,
        log_x=True,
        y_top=1.0,
        percent=True,
        x_ticks=moments(low_s, high_s),
    )


def _completion(pictures: Sequence[Picture]) -> LineChart:
    words = Words(
        "completion",
        "How long jobs take from submission to end",
        "The line at a time tells which share of the jobs was done within it: further left is better.",
    )
    return _distribution(pictures, "jct", words, "completion time (logarithmic)")


def _waiting(pictures: Sequence[Picture]) -> LineChart:
    still = [float(np.mean(picture.queue_s < LEAST_S)) for picture in pictures if len(picture.queue_s)]
    note = ""
    if still:
        low, high = min(still), max(still)
        share = f"{100 * low:.0f}" + (f" – {100 * high:.0f}" if high - low >= 0.005 else "") + " %"
        note = f"The line begins at 1 s; {share} of the jobs waited less." if high >= 0.005 else ""
    words = Words(
        "waiting",
        "How long jobs wait",
        "Completion time less the time in which the job ran, so a second wait after a preemption counts too. "
        "Further left is better.",
        note,
    )
    return _distribution(pictures, "queue", words, "waiting time (logarithmic)")


# ------------------------------------------------------------------------------------------------- bars


def _colours(picture: Picture) -> tuple[str, list[str], dict[str, str]]:
    """What colours mean; per bar its group; group → colour. Models, else single jobs, else sizes."""
    notes = [picture.jobs[int(job)] for job in picture.gantt.job]
    models = sorted({note.model for note in picture.jobs.values() if note.model})
    if models:
        count = dict.fromkeys(models, 0)
        for note in picture.jobs.values():
            if note.model:
                count[note.model] += 1
        shown_models = sorted(count, key=lambda model: (-count[model], model))[:MAX_COLOURS]
        colours = dict(zip(sorted(shown_models), MODELS, strict=False))
        groups = [note.model if note.model in colours else "other" for note in notes]
        return "model", groups, {**colours, **({"other": OTHERS} if "other" in groups else {})}
    if len(picture.jobs) <= MAX_COLOURS:
        ids = sorted(note.job_id for note in picture.jobs.values())
        return "job", [note.job_id for note in notes], dict(zip(ids, MODELS, strict=False))
    sizes = ((1, "1 GPU"), (2, "2 GPUs"), (4, "3 – 4 GPUs"), (8, "5 – 8 GPUs"), (16, "9 – 16 GPUs"))
    groups = [next((name for most, name in sizes if note.gpus <= most), "more") for note in notes]
    names = [name for _, name in sizes] + ["more"]
    present = [name for name in names if name in set(groups)]
    return "size of the job", groups, {name: SIZES[names.index(name)] for name in present}


def _gantt(picture: Picture, several: bool) -> GanttChart:
    gantt = picture.gantt
    unit = time_unit(gantt.window_s[1] - gantt.window_s[0])
    tops, edges, top = [], [], 0.0
    for _, gpus in gantt.rows:
        tops.append(top)
        top += max(1, gpus) + GAP
        edges.append(top - GAP / 2)
    meaning, names, colours = _colours(picture)
    x, length = gantt.start_s / unit.seconds, (gantt.end_s - gantt.start_s) / unit.seconds
    y = np.array(tops)[gantt.node] + gantt.y + gantt.height / 2 if len(gantt.job) else np.zeros(0)
    text = [_hover(picture, bar) for bar in range(len(gantt.job))]
    ids = [picture.jobs[int(job)].job_id for job in gantt.job] if len(gantt.job) <= MAX_LABELS else []
    groups = []
    for name, colour in colours.items():
        own = [bar for bar, group in enumerate(names) if group == name]
        labels = [ids[bar] for bar in own] if ids else []
        groups.append(
            Group(
                name,
                colour,
                x[own],
                length[own],
                y[own],
                gantt.height[own],
                [text[bar] for bar in own],
                labels,
            )
        )
    every = -(-len(gantt.rows) // MAX_NODE_LABELS)
    ticks = [
        (tops[row] + max(1, gpus) / 2, f"{node} ({gpus})")
        for row, (node, gpus) in enumerate(gantt.rows)
        if row % every == 0
    ]
    return GanttChart(
        Words(
            "gantt",
            "Who runs where and when",
            f"A row per GPU, in blocks of one node each (its GPUs in brackets); a bar is a job from its placement to its proven end. Colour: {meaning}. "
            "What is blank is idle.",
            _left_out(picture),
            picture.profile if several else "",
        ),
        groups,
        f"time since the start ({unit.name})",
        (gantt.window_s[0] / unit.seconds, gantt.window_s[1] / unit.seconds),
        ticks,
        edges[:-1],
        top - GAP,
    )


def _hover(picture: Picture, bar: int) -> str:
    gantt = picture.gantt
    note = picture.jobs[int(gantt.job[bar])]
    lines = [
        f"<b>{escape(note.job_id)}</b>" + (f" · {escape(note.model)}" if note.model else ""),
        f"{note.gpus:g} GPU{'s' if note.gpus != 1 else ''} in all, here {gantt.height[bar]:g} on "
        f"{escape(gantt.rows[gantt.node[bar]][0])}",
        f"from {duration(gantt.start_s[bar])}, for {duration(gantt.end_s[bar] - gantt.start_s[bar])}",
        HOW.get(int(gantt.how[bar]), "still running")
        + (f", attempt {gantt.attempt[bar]}" if gantt.attempt[bar] > 1 else ""),
    ]
    return "<br>".join(lines)


def _left_out(picture: Picture) -> str:
    gantt = picture.gantt
    if not gantt.left_out:
        return ""
    of = f"{len(gantt.rows):,} of {picture.nodes:,} nodes"
    first, last = gantt.window_s
    window = "" if last - first >= picture.end_s else f", {duration(last - first)} around the busiest moment"
    return (
        f"An excerpt: {of}{window}. {len(gantt.job):,} bars are drawn, {gantt.left_out:,} are left out; the overview "
        "above has them all."
    )


def _overview(picture: Picture, heat: Heat, unit: TimeUnit, several: bool) -> HeatChart:
    per_row = f"mean of {heat.per_row} nodes" if heat.per_row > 1 else "node"
    width_s = float(heat.edges_s[1] - heat.edges_s[0])
    return HeatChart(
        Words(
            "overview",
            "How full each node is",
            "A row per node, from empty (light) to full (dark). Pale stripes are nodes that stand idle.",
            f"Row: {per_row}. Column: mean of {duration(width_s)}.",
            picture.profile if several else "",
        ),
        heat.edges_s / unit.seconds,
        heat.labels,
        heat.percent,
        f"time since the start ({unit.name})",
        "nodes",
        "GPUs held, %",
    )


# ------------------------------------------------------------------------------------------------- dots


def _latency(picture: Picture, several: bool) -> DotChart:
    """p50, p99 and the longest per type of input."""
    colours = (
        ("median", "#0072B2"),
        ("90th percentile", "#009E73"),
        ("99th percentile", "#E69F00"),
        ("longest", "#D55E00"),
    )
    dots = [
        Dot(
            _input(latency.kind),
            micros,
            None,
            None,
            colour,
            f"{name} of {latency.inputs:,}: {_micros(micros)}",
            series=name,
        )
        for latency in picture.latencies
        for (name, colour), micros in zip(colours, latency.micros, strict=True)
    ]
    return DotChart(
        Words(
            "latency",
            "How long the placer thinks",
            "Real time from an input to its decisions, on this machine, by kind of input.",
            "Measured with a clock: it differs from run to run, and contains what other programs took of the processor.",
            picture.profile if several else "",
        ),
        dots,
        "time per input (µs, logarithmic)",
        x_ticks=powers(min(dot.value for dot in dots), max(dot.value for dot in dots)),
        log_x=True,
        legend=colours,
    )


def _input(kind: str) -> str:
    """`penstock.job.submitted` → `job submitted`."""
    return kind.removeprefix("penstock.").replace(".", " ").replace("_", " ")


def _micros(micros: float) -> str:
    return f"{micros:,.0f} µs" if micros < 10_000 else f"{micros / 1_000:,.1f} ms"


def _means(means: dict[str, dict[str, Mean]], key: str) -> DotChart:
    """The figure that policies are judged by, each with its interval."""
    metric = METRICS[key]
    rows = [(profile, metrics[key]) for profile, metrics in means.items()]
    low = metric.better == "low"
    best = (min if low else max)((mean for _, mean in rows), key=lambda mean: mean.mean)
    unit = (
        time_unit(max(mean.high for _, mean in rows))
        if metric.unit == "s"
        else TimeUnit("% of all GPUs", 0.01)
    )
    dots = []
    for index, (profile, mean) in enumerate(rows):
        told = [
            duration(value) if low else shown(key, value) for value in (mean.mean, mean.half_width) if value
        ]
        low_end, high_end = (
            (mean.low / unit.seconds, mean.high / unit.seconds) if mean.half_width else (None, None)
        )
        mark = "o" if mean.meets(best) else "x"
        colour, _ = colour_of(index)
        dots.append(Dot(profile, mean.mean / unit.seconds, low_end, high_end, colour, " ± ".join(told), mark))
    return DotChart(
        Words(
            "means",
            metric.label,
            f"Further {'left' if low else 'right'} is better. The line is the 95 % confidence interval; a cross is a "
            "policy whose interval does not meet that of the best.",
        ),
        dots,
        f"{metric.label.lower()} ({unit.name})",
    )
