"""Altair charts that several reports use: line charts, logarithmic axes of time, light and dark theme.

A definition holds data and encodings only. Its colours of text, grid and auxiliary lines come from the theme,
which the renderer adds: the page follows the reader's colour scheme, a PNG file is always light.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
from altair.utils.schemapi import debug_mode

from penstock.charts.report import Chart

CATEGORICAL = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C")
"""Distinguishable by colour-blind people, on white and on black. Source: Okabe and Ito, Color Universal
Design, 2008."""
DASHES = ((1, 0), (7, 4), (2, 2), (8, 3, 2, 3))
"""Dash patterns once the colours are used up: solid, dashed, dotted, dash-dotted."""
WIDTH = 800  # px; a page stretches single charts to its own width
MAX_LEGEND_COLUMNS = 5
LEGEND_CHARACTERS, LEGEND_CHARACTER_PX, LEGEND_SYMBOL_PX = 34, 7, 34  # longest label, and its size
COARSE_FROM = 100.0  # ratio of the ends of a logarithmic axis of time from which on it has fewer ticks
MIN_TICKS = 3
MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400
COARSE_S = (
    0.001,
    0.01,
    0.1,
    1,
    10,
    MINUTE_S,
    600,
    HOUR_S,
    6 * HOUR_S,
    DAY_S,
    10 * DAY_S,
    100 * DAY_S,
    1_000 * DAY_S,
)
FINE_S = sorted(
    {
        *COARSE_S,
        2,
        5,
        20,
        30,
        120,
        300,
        1_200,
        1_800,
        2 * HOUR_S,
        12 * HOUR_S,
        *(n * DAY_S for n in (2, 5, 20, 50, 200)),
    }
)


def theme(*, dark: bool = False) -> dict[str, Any]:
    """Vega-Lite configuration: all colours that do not depend on the data. Style: `bars`."""
    ink, faint, rule, ground = (
        ("#e3e8ed", "#9aa7b4", "#2d353e", "#14181d") if dark else ("#1d2733", "#5b6875", "#e4e9ed", "#ffffff")
    )
    heat = ["#203241", "#3d85ad", "#b5def5"] if dark else ["#dce8f0", "#56a0c8", "#083b66"]
    axis = {
        "domainColor": rule,
        "gridColor": rule,
        "tickColor": rule,
        "labelColor": faint,
        "titleColor": faint,
    }
    return {
        "background": "transparent" if dark else ground,
        "font": "DejaVu Sans, Verdana, system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {
            **axis,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "titlePadding": 8,
        },
        "legend": {
            "orient": "top",
            "title": None,
            "labelColor": ink,
            "labelFontSize": 12,
            "labelLimit": 260,
            "columns": MAX_LEGEND_COLUMNS,
            "titleColor": faint,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "title": {
            "color": ink,
            "subtitleColor": faint,
            "fontSize": 15,
            "subtitleFontSize": 11,
            "subtitlePadding": 6,
            "anchor": "start",
            "frame": "bounds",
            "offset": 12,
            "subtitleLineHeight": 15,
        },
        "rule": {"color": faint},
        "text": {"color": faint, "fontSize": 11},
        "range": {"heatmap": heat, "ramp": heat},
        "style": {
            "bars": {"stroke": ground},
        },
    }


class Rows(alt.InlineData):
    """Immutable rows, which all copies of a chart share. Altair copies a chart at each method call, and every
    cell of its data with it: that took most of the time of a large page.
    """

    def __deepcopy__(self, memo: object = None) -> "Rows":
        return self


def table(**columns: Sequence[Any] | np.ndarray[Any, Any]) -> alt.InlineData:
    """Rows of columns of equal length; numbers with seven significant digits."""
    cells = [
        [
            float(f"{value:.7g}") if isinstance(value, float) else value
            for value in np.asarray(values).tolist()
        ]
        for values in columns.values()
    ]
    with debug_mode(False):  # else every row is validated against the schema: 3 s for 20,000
        return Rows(values=[dict(zip(columns, row, strict=True)) for row in zip(*cells, strict=True)])


def zoom(name: str = "zoom", *, y: bool = False) -> alt.Parameter:
    """Dragging moves the chart; the wheel zooms with Ctrl held, so that it scrolls the page otherwise."""
    return alt.selection_interval(
        name=name, bind="scales", encodings=["x", "y"] if y else ["x"], zoom="wheel![event.ctrlKey]"
    )


def duration_text(seconds: str) -> str:
    """Vega expression of a text such as `12 s`, `3.5 min`; `seconds` is an expression too."""
    units = [("d", DAY_S), ("h", HOUR_S), ("min", MINUTE_S), ("s", 1)]
    steps = "".join(
        f"{seconds} >= {size} ? format({seconds} / {size}, ',.3~g') + ' {unit}' : " for unit, size in units
    )
    return f"({steps}format({seconds} * 1000, '.3~g') + ' ms')"


def duration_domain(low_s: float, high_s: float) -> tuple[float, float]:
    """Domain of a logarithmic scale in seconds: as given, or widened to the next ticks if fewer than
    `MIN_TICKS` lie in it."""
    if sum(low_s <= tick <= high_s for tick in _ticks(low_s, high_s)) >= MIN_TICKS:
        return low_s, high_s
    below = [tick for tick in FINE_S if tick <= low_s]
    above = [tick for tick in FINE_S if tick >= high_s]
    return max(below, default=low_s), min(above, default=high_s)


def _ticks(low_s: float, high_s: float) -> Sequence[float]:
    return FINE_S if high_s < COARSE_FROM * low_s else COARSE_S


def duration_axis(title: str | None, low_s: float, high_s: float) -> alt.Axis:
    """Axis of a logarithmic scale in seconds; ticks outside its domain are not drawn."""
    return alt.Axis(title=title, values=list(_ticks(low_s, high_s)), labelExpr=duration_text("datum.value"))


def legend(names: Sequence[str], **more: Any) -> alt.Legend:
    """A legend above the chart, in as many columns as its width holds."""
    longest = min(LEGEND_CHARACTERS, max((len(name) for name in names), default=0))
    wide = LEGEND_SYMBOL_PX + LEGEND_CHARACTER_PX * longest
    return alt.Legend(columns=min(MAX_LEGEND_COLUMNS, max(1, WIDTH // wide)), **more)


class Series(NamedTuple):
    """One line. `x` ascending, same length as `y`."""

    name: str
    x: Sequence[float] | np.ndarray[Any, Any]
    y: Sequence[float] | np.ndarray[Any, Any]
    colour: str
    dash: Sequence[int] = DASHES[0]
    width: float = 2.0


def lines(series: Sequence[Series], x: alt.X, y: alt.Y, hover: str, *, height: int = 300) -> Chart:
    """A step chart: each value holds until the next x. `x`, `y` encode the fields of these names.

    `hover`: Vega expression of the tooltip's text, of `datum.x` and `datum.y`.
    """
    names = [one.name for one in series]
    data = table(
        series=[one.name for one in series for _ in one.x],
        x=np.concatenate([one.x for one in series]),
        y=np.concatenate([one.y for one in series]),
    )
    shown = legend(names, symbolType="stroke", symbolSize=300) if len(series) > 1 else None

    def scale(values: Sequence[Any]) -> alt.Scale:
        return alt.Scale(type="ordinal", domain=names, range=values)  # a width has a point scale otherwise

    base = alt.Chart(data).transform_calculate(text=hover).encode(x=x, y=y)
    curves = base.mark_line(interpolate="step-after", clip=True).encode(
        color=alt.Color("series:N", scale=scale([one.colour for one in series]), legend=shown),
        strokeDash=alt.StrokeDash("series:N", scale=scale([list(one.dash) for one in series]), legend=shown),
        strokeWidth=alt.StrokeWidth("series:N", scale=scale([one.width for one in series]), legend=shown),
    )
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", empty=False)
    points = base.mark_circle(size=60, clip=True, opacity=0).encode(
        color=alt.Color("series:N", scale=scale([one.colour for one in series]), legend=shown),
        opacity=alt.condition(nearest, alt.value(1), alt.value(0)),
        tooltip=[alt.Tooltip("series:N", title=" "), alt.Tooltip("text:N", title="  ")],
    )
    return alt.layer(curves.add_params(zoom()), points.add_params(nearest)).properties(
        width=WIDTH, height=height
    )
