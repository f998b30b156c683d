"""Charts, tables and texts of the estimator's report: estimate against use, drift, held bounds, remaining time."""

from collections.abc import Sequence

import altair as alt

from penstock.charts.plots import WIDTH, Dot, dots, duration_axis, duration_text, table, zoom
from penstock.charts.report import Cell, Chart, Drawing, Page, Panel, Section, Table
from penstock_services.estimator.core.accuracy import FIELDS, USER, Accuracy
from penstock_services.estimator.report_data import (
    TITLES,
    Drift,
    EtaPoint,
    FieldPoints,
    ReportData,
    colour_of,
    field_text,
    limits,
    name_of,
    place_of,
    shown,
)

SOLID = alt.Legend(symbolOpacity=1)
INTENDED = 0.95  # a model's bound is the upper end of a 90 % interval: one run in twenty lies above
LINE, OUTSIDE, GREY = "#0072B2", "#D55E00", "#8C8C8C"
NEAR_ONE = (0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4)
NEAR_SPAN, WIDE_SPAN = 8.0, 1_000.0  # ratio of an axis' ends: below it fine ticks, above it only decades
PANEL_PX, DRIFT_PX, COLUMNS = 250, 110, 3
POWERS_OF_TWO = [2.0**power for power in range(-7, 22)]
PERCENTS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]


def page_of(data: ReportData, command: str) -> Page:
    found = data.found
    sections = [
        _pairs(data),
        _figures(found),
        _bounds(data),
        _drifts(data),
        _owners(found),
        _remaining(data),
        _worst(found),
    ]
    return Page(
        title="Estimates against what jobs used",
        lead=_lead(found),
        command=command,
        sections=[section for section in sections if section is not None],
        remarks=[
            f"{count:,} × {field_text(reason)} that cannot be true"
            for reason, count in found.rejected.items()
        ],
    )


def _lead(found: Accuracy) -> list[str]:
    rejected = sum(found.rejected.values())
    lines = [f"{found.runs:,} finished runs" + (f", {rejected:,} of them rejected." if rejected else ".")]
    if found.killed:
        lines.append(
            f"{found.killed:,} workers were killed because they exceeded the estimate of host memory."
        )
    score = found.tiers.get("model", {}).get("gpu_memory_mib")
    if score is not None:
        lines.append(
            f"The learned model's bound of GPU memory held in {1 - score.broken:.1%} of {score.runs:,} runs; its median "
            f"is {score.median_ratio:.2f} times the use."
        )
    if found.remaining is not None:
        eta = found.remaining
        lines.append(
            f"Remaining time was estimated in {eta.runs:,} runs; the {eta.level:.0%} interval held in {eta.held.value:.1%} of them."
        )
    if found.over_asking:
        one = found.over_asking[0]
        lines.append(
            f"{one.owner} asks for the most that is not used: {one.asked_to_used:.1f} times the {field_text(one.field)}."
        )
    return lines


# ----------------------------------------------------------------------------------------------- tables


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _figures(found: Accuracy) -> Section | None:
    rows = [
        [
            Cell(name_of(tier), colour=colour_of(tier)),
            Cell(TITLES[name]),
            Cell(f"{score.runs:,}"),
            Cell(f"{score.median_ratio:.2f}"),
            Cell(_factor(score.p95_off)),
            Cell("" if score.broken != score.broken else f"{score.broken:.1%}"),
        ]
        for tier in sorted(found.tiers, key=place_of)
        for name, score in found.tiers[tier].items()
    ]
    heads = ("From", "Field", "Runs", "Estimate / use, median", "95% within a factor of", "Bound exceeded")
    return Section("figures", "Figures", table=Table(heads, rows, 2)) if rows else None


def _worst(found: Accuracy) -> Section | None:
    rows = [
        [
            Cell(text)
            for text in (
                job.job_id, job.owner, name_of(job.tier), TITLES[job.field], shown(job.field, job.estimate),
                shown(job.field, job.used), f"{job.estimate / job.used:.2g}",
            )
        ]
        for job in found.worst
    ]  # fmt: skip
    heads = ("Job", "Owner", "From", "Field", "Estimate", "Used", "Estimate / use")
    caption = "The estimates to look at first; what users asked for themselves is not among them."
    return Section("worst", "Farthest off", caption, table=Table(heads, rows, 4)) if rows else None


# ------------------------------------------------------------------------------------------------- axes


def _value_text(field: str, value: str) -> str:
    """Vega expression of a value with its unit; times are in seconds."""
    if field.endswith("_mib"):
        return (
            f"({value} < 1024 ? format({value}, ',.3~r') + ' MiB' : format({value} / 1024, ',.3~r') + ' GiB')"
        )
    if field.endswith("_ms"):
        return duration_text(value)
    return f"format({value}, '.4~r') + '{'%' if field.endswith('_percent') else ''}'"


def _unit(field: str) -> float:
    return 0.001 if field.endswith("_ms") else 1.0


def _axis(field: str, title: str, low: float, high: float) -> alt.Axis:
    if field.endswith("_ms"):
        return duration_axis(title, low, high)
    values = PERCENTS if field.endswith("_percent") else POWERS_OF_TWO
    return alt.Axis(title=title, values=values, labelExpr=_value_text(field, "datum.value"))


def _ratio_axis(title: str | None, low: float, high: float) -> alt.Axis:
    """Of estimate / use: 1 is in the middle of its ticks."""
    if high < NEAR_SPAN * low:
        return alt.Axis(title=title, values=list(NEAR_ONE), format="~g")
    digits = (1,) if high > WIDE_SPAN * low else (1, 2, 5)
    text = "datum.value < 1 ? '1/' + format(1 / datum.value, ',.0f') : format(datum.value, ',~g')"
    return alt.Axis(
        title=title,
        values=[digit * 10.0**power for power in range(-3, 4) for digit in digits],
        labelExpr=text,
    )


def _log(low: float, high: float) -> alt.Scale:
    return alt.Scale(type="log", domain=[low, high], nice=False)


# ----------------------------------------------------------------------------------------------- charts


def _pairs(data: ReportData) -> Section | None:
    if not data.fields:
        return None
    tiers = sorted({group.tier for points in data.fields for group in points.groups}, key=place_of)
    left_out = sum(points.left_out for points in data.fields)
    rest = f" {left_out:,} points are left out, evenly over time." if left_out else ""
    return Section(
        "pairs",
        "Estimate against use",
        "Each point is a run. On the diagonal an estimate was exactly right; right of it, it was too high. The estimates of "
        "GPU memory, host memory and cores are bounds: a run above the diagonal exceeded its bound. The others are means, "
        f"and dotted lines mark twice and half.{rest}",
        [Drawing([_pair(points, tiers) for points in data.fields], columns=COLUMNS)],
        legend=[(name_of(tier), colour_of(tier)) for tier in tiers],
    )


def _pair(points: FieldPoints, tiers: Sequence[str]) -> Panel:
    field, unit, score = points.field, _unit(points.field), points.score
    low, high = points.low * unit, points.high * unit
    bound = FIELDS[field].bound
    x = alt.X("x:Q", scale=_log(low, high), axis=_axis(field, "estimate", low, high))
    y = alt.Y("y:Q", scale=_log(low, high), axis=_axis(field, "used", low, high))

    def diagonal(factor: float) -> alt.Chart:
        return alt.Chart(table(x=[low, high], y=[factor * low, factor * high], y2=[high, high])).encode(
            x=x, y=y
        )

    layers = [diagonal(1).mark_line(color=GREY, clip=True)]
    if bound:
        layers.insert(0, diagonal(1).mark_area(color=OUTSIDE, opacity=0.12, clip=True).encode(y2="y2:Q"))
    else:
        layers += [
            diagonal(f).mark_line(color=GREY, clip=True, strokeWidth=1, strokeDash=[2, 3]) for f in (0.5, 2)
        ]
    rows = table(
        x=[value * unit for group in points.groups for value in group.estimate],
        y=[value * unit for group in points.groups for value in group.used],
        tier=[name_of(group.tier) for group in points.groups for _ in group.estimate],
        job=[text for group in points.groups for text in group.text],
    )
    names = [name_of(tier) for tier in tiers]
    shapes = ["cross" if tier == USER else "circle" for tier in tiers]
    marks = (
        alt.Chart(rows)
        .transform_calculate(estimate=_value_text(field, "datum.x"), used=_value_text(field, "datum.y"))
        .mark_point(filled=True, size=22, opacity=0.6, clip=True)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "tier:N", scale=alt.Scale(domain=names, range=[colour_of(tier) for tier in tiers])
            ),
            shape=alt.Shape("tier:N", scale=alt.Scale(domain=names, range=shapes)),
            tooltip=["job:N", "estimate:N", "used:N", "tier:N"],
        )
    )
    caption = "only asked for by users"
    if score is not None:
        caption = (
            f"{score.runs:,} runs: median {score.median_ratio:.2f} times the use,\n"
            f"95% within a factor of {_factor(score.p95_off)}"
            + (f"; exceeded by {score.broken:.1%}" if bound else "")
        )
    chart = alt.layer(*layers, marks.add_params(zoom(f"zoom_{field}", y=True))).properties(
        width=PANEL_PX, height=PANEL_PX
    )
    return Panel(chart, TITLES[field], caption)


def _drifts(data: ReportData) -> Section | None:
    if not data.drifts:
        return None
    marks = " Dotted lines: a new model version answers." if data.versions else ""
    return Section(
        "drift",
        "Drift",
        "Estimate / use over time, by when the runs ended (UTC): the median, and the band that contains eight of ten runs. "
        f"At 1 the estimate is right; a step away from it is a change in code, data or library.{marks}",
        [Drawing([Panel(_drift(drift, data), TITLES[drift.field]) for drift in data.drifts])],
    )


def _drift(drift: Drift, data: ReportData) -> Chart:
    low, high = limits([*drift.low, *drift.high, 1.0])
    # An expression: Vega's interpreter cannot read the form in which Vega-Lite writes the numbers of a time axis.
    span = alt.ExprRef(f"[{data.first_ms:.0f}, {data.last_ms:.0f}]")
    axis = alt.Axis(title=None, tickCount=8, labelOverlap=True)
    x = alt.X("at:T", axis=axis, scale=alt.Scale(type="utc", domain=span, nice=False))
    y = alt.Y("middle:Q", scale=_log(low, high), axis=_ratio_axis(None, low, high))
    rows = table(at=drift.at_ms, middle=drift.middle, low=drift.low, high=drift.high, runs=drift.runs)
    text = "format(datum.low, '.2f') + ' to ' + format(datum.high, '.2f')"
    base = alt.Chart(rows).transform_calculate(band=text).encode(x=x)
    tooltip = [
        alt.Tooltip("middle:Q", title="median", format=".2f"), alt.Tooltip("band:N", title="eight of ten"), "runs:Q",
    ]  # fmt: skip
    layers = [
        alt.Chart(table(middle=[1.0])).mark_rule().encode(y=y),
        base.mark_area(color=LINE, opacity=0.16, clip=True).encode(
            y=alt.Y("low:Q", scale=_log(low, high)), y2="high:Q"
        ),
        base.mark_line(color=LINE, point=alt.OverlayMarkDef(color=LINE), clip=True).encode(
            y=y, tooltip=tooltip
        ),
    ]
    if data.versions:
        moments = table(at=[at for at, _ in data.versions], version=[version for _, version in data.versions])
        layers.append(
            alt.Chart(moments).mark_rule(strokeDash=[2, 3], clip=True).encode(x=x, tooltip="version:N")
        )
    layers[1] = layers[1].add_params(zoom(f"zoom_{drift.field}"))
    return alt.layer(*layers).properties(width=WIDTH, height=DRIFT_PX)


def _bounds(data: ReportData) -> Section | None:
    if not data.bounds:
        return None
    rows = [
        Dot(
            f"{TITLES[row.field]}, {name_of(row.tier)} ({row.held.of:,} runs)",
            row.held.value,
            f"{row.held.value:.1%} ({row.held.low:.1%} to {row.held.high:.1%})",
            name_of(row.tier),
            row.held.low,
            row.held.high,
        )
        for row in data.bounds
    ]
    low = min(0.8, *(row.held.low - 0.02 for row in data.bounds), 0.8)
    axis = alt.Axis(title="of the runs used no more than the bound", format=".0%", tickCount=10)
    x = alt.X("x:Q", scale=alt.Scale(domain=[low, 1.005], nice=False), axis=axis)
    colours = {name_of(row.tier): colour_of(row.tier) for row in data.bounds}
    intended = alt.Chart(table(x=[INTENDED])).mark_rule(strokeDash=[6, 4]).encode(x=x)
    return Section(
        "promises",
        "How often bounds held",
        "Share of the runs that used no more than the estimate, with its 95% confidence interval. A model's bound of GPU "
        f"memory is the upper end of a 90% interval, so {INTENDED:.0%} of its runs should stay below it (dashed). The tier is "
        "the one that led the estimate; what it left open came from those after it.",
        [Drawing([Panel(alt.layer(dots(rows, x, colours), intended))])],
    )


def _owners(found: Accuracy) -> Section | None:
    if not found.over_asking:
        return None
    rows = [
        Dot(
            f"{one.owner}: {field_text(one.field)}",
            one.asked_to_used,
            f"{one.asked_to_used:.1f} ×, {one.runs:,} runs",
            USER,
            1.0,
            one.asked_to_used,
        )
        for one in found.over_asking
    ]
    high = 1.9 * max(one.asked_to_used for one in found.over_asking)
    x = alt.X("x:Q", scale=_log(0.95, high), axis=_ratio_axis("asked for / used, median", 0.95, high))
    return Section(
        "owners",
        "Who asks for more than is used",
        "What owners asked for themselves against what their jobs used, by the median of their runs. Left to the estimator, "
        "most of it could run other jobs.",
        [Drawing([Panel(dots(rows, x, {USER: colour_of(USER)}, labels=True))])],
    )


def _remaining(data: ReportData) -> Section | None:
    if not data.remaining:
        return None
    caption = "Each point is a run at half of its time: what was really left, as a multiple of the estimate. Its bar is the interval."
    eta = data.found.remaining
    if eta is not None:
        caption += (
            f" {eta.held.value:.1%} of {eta.runs:,} intervals held ({eta.held.low:.1%} to {eta.held.high:.1%} with 95% "
            f"confidence; intended: {eta.level:.0%}); {eta.early:.1%} ended sooner, {eta.late:.1%} later. Median error "
            f"{eta.median_off - 1:.1%}."
        )
    return Section("remaining", "Remaining time", caption, [Drawing([Panel(_etas(data.remaining))])])


def _etas(etas: Sequence[EtaPoint]) -> Chart:
    held = sum(one.held for one in etas)
    names = [f"inside its interval: {held:,}", f"outside: {len(etas) - held:,}"]
    left, right = (value / 1_000 for value in limits([one.left for one in etas]))
    low, high = limits([one.actual / one.left for one in etas])
    rows = table(
        x=[one.left / 1_000 for one in etas],
        y=[one.actual / one.left for one in etas],
        low=[max(low, one.low / one.left) for one in etas],
        high=[min(high, one.high / one.left) for one in etas],
        held=[names[not one.held] for one in etas],
        job=[one.job_id for one in etas],
        interval=[f"{shown('run_ms', one.low)} to {shown('run_ms', one.high)}" for one in etas],
    )
    y = alt.Y("y:Q", scale=_log(low, high), axis=_ratio_axis("was left / estimate", low, high))
    base = (
        alt.Chart(rows)
        .transform_calculate(estimate=duration_text("datum.x"), actual=duration_text("(datum.x * datum.y)"))
        .encode(
            x=alt.X(
                "x:Q",
                scale=_log(left, right),
                axis=duration_axis("estimate of what is left, at half of the run", left, right),
            ),
            color=alt.Color("held:N", scale=alt.Scale(domain=names, range=[LINE, OUTSIDE]), legend=SOLID),
        )
    )
    return alt.layer(
        alt.Chart(table(y=[1.0])).mark_rule().encode(y=y),
        base.mark_rule(opacity=0.25, clip=True).encode(y=alt.Y("low:Q", scale=_log(low, high)), y2="high:Q"),
        base.mark_circle(size=40, opacity=0.75, clip=True)
        .encode(y=y, tooltip=["job:N", "estimate:N", "interval:N", "actual:N"])
        .add_params(zoom(y=True)),
    ).properties(width=WIDTH, height=320)
