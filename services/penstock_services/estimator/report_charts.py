"""Page of the estimator's report: charts of estimate against use, of its drift and of remaining times, with
the tables."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, TypeVar

import altair as alt

from penstock.charts.plots import WIDTH, duration_axis, duration_text, table, zoom
from penstock.charts.report import Chart, Drawing, Page, Panel, Section
from penstock_services.estimator import report_tables
from penstock_services.estimator.core.accuracy import (
    FIELDS,
    USER,
    Accuracy,
    Pair,
    bounded_eta,
    pairs_of,
    stretches,
)
from penstock_services.estimator.core.records.runs import EtaAtHalf, FinishedRun
from penstock_services.estimator.report_tables import TITLES, colour_of, in_order, name_of, shown

T = TypeVar("T")

MAX_POINTS = 2_500  # of one tier and field: more hide each other, and make the page too large for a mail
STRETCH_RUNS = 12  # minimum runs per point of the drift
MAX_STRETCHES = 24
MAX_VERSIONS = 12  # marked in the drift
MARGIN = 1.25  # around the points, as a factor
LINE, OUTSIDE, GREY = "#0072B2", "#D55E00", "#8C8C8C"
PANEL_PX, DRIFT_PX, ETA_PX, COLUMNS = 250, 110, 320, 3
POWERS_OF_TWO = [2.0**power for power in range(22)]  # MiB
PERCENTS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
RATIOS = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
DECIMALS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000]
RATIO_TEXT = "datum.value < 1 ? '1/' + format(1 / datum.value, ',.0f') : format(datum.value, ',~g')"


def page_of(runs: Sequence[FinishedRun], found: Accuracy, command: str) -> Page:
    """`found`: of the same runs, which are in the order in which they ended."""
    pairs = pairs_of(runs)
    worst = "The estimates to look at first; what users asked for themselves is not among them."
    over_asking = "Left to the estimator, most of it could run other jobs."
    bounds = (
        "A model's bound of GPU memory is the upper end of a 90% interval: it should hold in 95% of its runs."
    )
    sections = [
        _pairs(pairs),
        Section("figures", "Figures", bounds, table=report_tables.scores(found)),
        _drifts(runs, [pair for pair in pairs if pair.tier != USER]),
        Section(
            "owners",
            "Owners whose jobs request more than they use",
            over_asking,
            table=report_tables.owners(found),
        ),
        _remaining(runs),
        Section("worst", "Farthest off", worst, table=report_tables.worst(found)),
    ]
    return Page(
        title="Estimates against what jobs used",
        lead=report_tables.summary(found),
        command=command,
        sections=[section for section in sections if section.table or section.drawings],
    )


def thinned(values: Sequence[T]) -> Sequence[T]:
    """At most `MAX_POINTS`, evenly from first to last."""
    count = len(values)
    return values if count <= MAX_POINTS else [values[count * n // MAX_POINTS] for n in range(MAX_POINTS)]


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis that shows them all; at least one, all > 0. Never narrower than a factor
    of four."""
    low, high = min(values) / MARGIN, max(values) * MARGIN
    middle = math.sqrt(low * high)
    return min(low, middle / 2), max(high, middle * 2)


def _log(low: float, high: float) -> alt.Scale:
    return alt.Scale(type="log", domain=[low, high], nice=False)


def _ratio(field: str, title: str | None, low: float, high: float) -> alt.Y:
    """A logarithmic axis with 1 among its ticks."""
    axis = alt.Axis(title=title, values=RATIOS, labelExpr=RATIO_TEXT, labelOverlap=True)
    return alt.Y(field, scale=_log(low, high), axis=axis)


def _value_text(field: str, value: str) -> str:
    """Vega expression of a value with its unit; times are in seconds."""
    if field.endswith("_mib"):
        return (
            f"({value} < 1024 ? format({value}, ',.3~r') + ' MiB' : format({value} / 1024, ',.3~r') + ' GiB')"
        )
    if field.endswith("_ms"):
        return duration_text(value)
    return f"format({value}, '.4~r') + '{'%' if field.endswith('_percent') else ''}'"


def _axis(field: str, title: str, low: float, high: float) -> alt.Axis:
    if field.endswith("_ms"):
        return duration_axis(title, low, high)
    values = PERCENTS if field.endswith("_percent") else POWERS_OF_TWO if field.endswith("_mib") else DECIMALS
    return alt.Axis(title=title, values=values, labelExpr=_value_text(field, "datum.value"))


def _pairs(pairs: Sequence[Pair]) -> Section:
    tiers, panels, count = in_order({pair.tier for pair in pairs}), [], 0
    for name in FIELDS:
        own = ([pair for pair in pairs if (pair.field, pair.tier) == (name, tier)] for tier in tiers)
        points = [pair for some in own for pair in thinned(some)]
        count += len(points)
        if points:
            panels.append(Panel(_pair(name, points, tiers), TITLES[name]))
    left_out = len(pairs) - count
    rest = f" {left_out:,} points are left out, evenly over time." if left_out else ""
    return Section(
        "pairs",
        "Estimate against use",
        "Each point is a run. On the diagonal an estimate was exactly right; right of it, it was too high. "
        "The estimates of GPU memory, host memory and cores are bounds: a run above the diagonal exceeded "
        f"its bound. The others are means, and dotted lines mark twice and half.{rest}",
        [Drawing(panels, columns=COLUMNS)] if panels else (),
        legend=[(name_of(tier), colour_of(tier)) for tier in tiers],
    )


def _pair(field: str, pairs: Sequence[Pair], tiers: Sequence[str]) -> Chart:
    unit = 0.001 if field.endswith("_ms") else 1.0
    low, high = (
        unit * end for end in limits([value for pair in pairs for value in (pair.estimate, pair.used)])
    )
    x = alt.X("x:Q", scale=_log(low, high), axis=_axis(field, "estimate", low, high))
    y = alt.Y("y:Q", scale=_log(low, high), axis=_axis(field, "used", low, high))

    def diagonal(factor: float) -> alt.Chart:
        ends = table(x=[low, high], y=[factor * low, factor * high], y2=[high, high])
        return alt.Chart(ends).encode(x=x, y=y)

    layers = [diagonal(1).mark_line(color=GREY, clip=True)]
    if FIELDS[field].bound:
        layers.insert(0, diagonal(1).mark_area(color=OUTSIDE, opacity=0.12, clip=True).encode(y2="y2:Q"))
    else:
        style: dict[str, Any] = {"color": GREY, "clip": True, "strokeWidth": 1, "strokeDash": [2, 3]}
        layers += [diagonal(factor).mark_line(**style) for factor in (0.5, 2)]
    rows = table(
        x=[pair.estimate * unit for pair in pairs],
        y=[pair.used * unit for pair in pairs],
        tier=[name_of(pair.tier) for pair in pairs],
        job=[f"{pair.run.job_id} ({pair.run.info.owner})" for pair in pairs],
    )
    names = [name_of(tier) for tier in tiers]
    colours = alt.Scale(domain=names, range=[colour_of(tier) for tier in tiers])
    shapes = alt.Scale(domain=names, range=["cross" if tier == USER else "circle" for tier in tiers])
    marks = (
        alt.Chart(rows)
        .transform_calculate(estimate=_value_text(field, "datum.x"), used=_value_text(field, "datum.y"))
        .mark_point(filled=True, size=22, opacity=0.6, clip=True)
        .encode(
            x=x,
            y=y,
            color=alt.Color("tier:N", scale=colours),
            shape=alt.Shape("tier:N", scale=shapes),
            tooltip=["job:N", "estimate:N", "used:N", "tier:N"],
        )
    )
    chart = alt.layer(*layers, marks.add_params(zoom(f"zoom_{field}", y=True)))
    return chart.properties(width=PANEL_PX, height=PANEL_PX)


def _drifts(runs: Sequence[FinishedRun], pairs: Sequence[Pair]) -> Section:
    versions: dict[str, float] = {}
    for run in runs:
        if run.estimate is not None and run.estimate.model_version is not None:
            versions.setdefault(run.estimate.model_version, run.measured.ended_ms)
    ended = [run.measured.ended_ms for run in runs]
    span = (min(ended, default=0.0), max(ended, default=0.0))
    panels = []
    for name in FIELDS:
        some = sorted(
            (pair for pair in pairs if pair.field == name), key=lambda pair: pair.run.measured.ended_ms
        )
        if len(some) >= 2 * STRETCH_RUNS:
            panels.append(Panel(_drift(name, some, span, versions), TITLES[name]))
    marks = " Dotted lines: a new model version answers." if versions else ""
    return Section(
        "drift",
        "Drift",
        "Estimate / use over time, by when the runs ended (UTC): the median, and the band that contains "
        "eight of ten runs. At 1 the estimate is right; a step away from it is a change in code, data or "
        f"library.{marks}",
        [Drawing(panels)] if panels else (),
    )


def _drift(name: str, pairs: Sequence[Pair], span: tuple[float, float], versions: dict[str, float]) -> Chart:
    """`pairs`: in the order in which the runs ended; `versions`: of models, and when the first run ended that
    used each."""
    parts = [
        pairs[low:high] for low, high in stretches(pairs, min(MAX_STRETCHES, len(pairs) // STRETCH_RUNS))
    ]
    ratios = [sorted(pair.ratio for pair in part) for part in parts]
    columns: dict[str, list[float]] = {
        "at": [median(pair.run.measured.ended_ms for pair in part) for part in parts],
        "middle": [median(part) for part in ratios],
        "low": [part[(len(part) - 1) // 10] for part in ratios],
        "high": [part[-1 - (len(part) - 1) // 10] for part in ratios],
        "runs": [len(part) for part in parts],
    }
    low, high = limits([*columns["low"], *columns["high"], 1.0])
    # An expression: Vega's interpreter cannot parse the form in which Vega-Lite writes the numbers of a time
    # axis.
    domain = alt.ExprRef(f"[{span[0]:.0f}, {span[1]:.0f}]")
    axis = alt.Axis(title=None, tickCount=8, labelOverlap=True)
    x = alt.X("at:T", axis=axis, scale=alt.Scale(type="utc", domain=domain, nice=False))
    y = _ratio("middle:Q", None, low, high)
    band = "format(datum.low, '.2f') + ' to ' + format(datum.high, '.2f')"
    base = alt.Chart(table(**columns)).transform_calculate(band=band).encode(x=x)
    middle, eight = (
        alt.Tooltip("middle:Q", title="median", format=".2f"),
        alt.Tooltip("band:N", title="eight of ten"),
    )
    area = base.mark_area(color=LINE, opacity=0.16, clip=True)
    line = base.mark_line(color=LINE, point=alt.OverlayMarkDef(color=LINE), clip=True)
    layers = [
        alt.Chart(table(middle=[1.0])).mark_rule().encode(y=y),
        area.encode(y=alt.Y("low:Q", scale=_log(low, high)), y2="high:Q").add_params(zoom(f"zoom_{name}")),
        line.encode(y=y, tooltip=[middle, eight, "runs:Q"]),
    ]
    if versions:
        newest = list(versions.items())[-MAX_VERSIONS:]
        moments = table(at=[at for _, at in newest], version=[version for version, _ in newest])
        mark = alt.Chart(moments).mark_rule(strokeDash=[2, 3], clip=True)
        layers.append(mark.encode(x=x, tooltip="version:N"))
    return alt.layer(*layers).properties(width=WIDTH, height=DRIFT_PX)


def _remaining(runs: Sequence[FinishedRun]) -> Section:
    found = [
        (run.job_id, eta) for run in runs if run.eta is not None and (eta := bounded_eta(run.eta)) is not None
    ]
    return Section(
        "remaining",
        "Remaining time",
        "Each point is a run at half of its time: what was really left, as a multiple of the estimate. Its "
        "bar is the interval.",
        [Drawing([Panel(_etas(thinned(found)))])] if found else (),
    )


def _etas(etas: Sequence[tuple[str, EtaAtHalf]]) -> Chart:
    held = [one.low_ms <= one.actual_ms <= one.high_ms for _, one in etas]
    names = [f"inside its interval: {sum(held):,}", f"outside: {len(etas) - sum(held):,}"]
    left, right = limits([one.left_ms / 1_000 for _, one in etas])
    low, high = limits([one.actual_ms / one.left_ms for _, one in etas])
    rows = table(
        x=[one.left_ms / 1_000 for _, one in etas],
        y=[one.actual_ms / one.left_ms for _, one in etas],
        low=[max(low, one.low_ms / one.left_ms) for _, one in etas],
        high=[min(high, one.high_ms / one.left_ms) for _, one in etas],
        held=[names[not inside] for inside in held],
        job=[job_id for job_id, _ in etas],
        interval=[f"{shown('run_ms', one.low_ms)} to {shown('run_ms', one.high_ms)}" for _, one in etas],
    )
    axis = duration_axis("estimate of what is left, at half of the run", left, right)
    x, y = alt.X("x:Q", scale=_log(left, right), axis=axis), _ratio("y:Q", "was left / estimate", low, high)
    scale, legend = alt.Scale(domain=names, range=[LINE, OUTSIDE]), alt.Legend(symbolOpacity=1)
    base = (
        alt.Chart(rows)
        .transform_calculate(estimate=duration_text("datum.x"), actual=duration_text("(datum.x * datum.y)"))
        .encode(x=x, color=alt.Color("held:N", scale=scale, legend=legend))
    )
    interval = base.mark_rule(opacity=0.25, clip=True)
    points = base.mark_circle(size=40, opacity=0.75, clip=True).add_params(zoom(y=True))
    return alt.layer(
        alt.Chart(table(y=[1.0])).mark_rule().encode(y=y),
        interval.encode(y=alt.Y("low:Q", scale=_log(low, high)), y2="high:Q"),
        points.encode(y=y, tooltip=["job:N", "estimate:N", "interval:N", "actual:N"]),
    ).properties(width=WIDTH, height=ETA_PX)
