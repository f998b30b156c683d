"""Charts as Plotly figures: plain JSON for the script of the page, which adds the colours of day or night."""

import base64
import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.simulator.report.charts import (
    Chart,
    Dot,
    DotChart,
    GanttChart,
    HeatChart,
    LineChart,
    bar_height,
)

Json = dict[str, Any]
LINE_SHAPE = {"shape": "hv"}
GANTT_PX_PER_GPU = 11.0
GANTT_PX = (220.0, 900.0)
HEAT_COLOURS = ((0.0, "#F1F5F8"), (0.01, "#DCE8F0"), (0.5, "#56A0C8"), (1.0, "#083B66"))
MAX_WRITTEN = 200  # numbers that stand in the page as text
MANY_BARS, MANY_ROWS = 600, 100  # beyond it an outline would hide short or thin bars


def figure(chart: Chart) -> Json:
    """`data`, `layout` and `height` (px) of one chart."""
    if isinstance(chart, LineChart):
        return _lines(chart)
    if isinstance(chart, GanttChart):
        return _gantt(chart)
    if isinstance(chart, HeatChart):
        return _heat(chart)
    return _dots(chart)


def _numbers(values: NDArray[Any] | Sequence[float]) -> list[float | int] | Json:
    """Seven significant digits: more than a screen can show. Many go as bytes, which take half the room."""
    if len(values) <= MAX_WRITTEN:
        return [int(value) if float(value).is_integer() else float(f"{value:.7g}") for value in values]
    return _packed(np.asarray(values, dtype="<f4"), "f4")


def _packed(values: NDArray[Any], kind: str) -> Json:
    """As Plotly takes arrays of bytes."""
    packed = {"dtype": kind, "bdata": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()}
    return packed | ({"shape": ", ".join(map(str, values.shape))} if values.ndim > 1 else {})


def _axis(label: str, **more: Any) -> Json:
    return {"title": {"text": label, "standoff": 8}, "automargin": True, "zeroline": False, **more}


def _ticks(ticks: Sequence[tuple[float, str]]) -> Json:
    return {"tickvals": [value for value, _ in ticks], "ticktext": [text for _, text in ticks]}


def _lines(chart: LineChart) -> Json:
    data = []
    y_form = "%{y:.1%}" if chart.percent else "%{y:,.4~g}"
    for line in chart.lines:
        trace: Json = {
            "type": "scatter",
            "mode": "lines",
            "name": escape(line.name),
            "x": _numbers(line.x),
            "y": _numbers(line.y),
            "line": {
                "color": line.colour,
                "dash": line.dash,
                "width": line.width,
                **(LINE_SHAPE if chart.steps else {}),
            },
            "hovertemplate": f"{y_form}<extra>{escape(line.name)}</extra>",
        }
        if line.of:
            trace["hovertemplate"] = f"{y_form} of {escape(line.of)}<extra>{escape(line.name)}</extra>"
        if line.hover is not None:
            trace["text"] = list(line.hover)
            trace["hovertemplate"] = f"{y_form}: %{{text}}<extra>{escape(line.name)}</extra>"
        data.append(trace)
    x_axis = _axis(chart.x_label, type="log" if chart.log_x else "linear", hoverformat=",.4~g")
    if chart.log_x:
        x_axis |= _ticks(chart.x_ticks)
    y_axis = _axis(chart.y_label, rangemode="tozero", **({"tickformat": ".0%"} if chart.percent else {}))
    if chart.y_step is not None:
        y_axis["dtick"] = chart.y_step
    if chart.y_top is not None:
        y_axis["range"] = [0, 1.03 * chart.y_top]
    hover = "closest" if chart.log_x else "x unified"
    return _with_layout(data, {"xaxis": x_axis, "yaxis": y_axis, "hovermode": hover}, 340, len(data) > 1)


def _gantt(chart: GanttChart) -> Json:
    bars = sum(len(group.x) for group in chart.groups)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escape(group.name),
            "base": _numbers(group.x),
            "x": _numbers(group.length),
            "y": _numbers(group.y),
            "width": _numbers([bar_height(height) for height in group.height]),
            "customdata": list(group.text),
            "hovertemplate": "%{customdata}<extra></extra>",
            **(
                {
                    "text": [escape(label) for label in group.labels],
                    "textposition": "inside",
                    "insidetextanchor": "middle",
                }
                if group.labels
                else {}
            ),
            "marker": {
                "color": group.colour,
                "line": {"width": 0 if bars > MANY_BARS or chart.rows > MANY_ROWS else 0.6},
            },
        }
        for group in chart.groups
    ]
    lines = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"width": 0.5}}
        for y in chart.edges
    ]
    layout = {
        "barmode": "overlay",
        "hovermode": "closest",
        "shapes": lines if len(lines) <= 100 else [],
        "xaxis": _axis(chart.x_label, range=list(chart.x_range)),
        "yaxis": _axis(
            "",
            range=[chart.rows, 0],
            tickvals=[y for y, _ in chart.ticks],
            ticktext=[escape(label) for _, label in chart.ticks],
            showgrid=False,
        ),
    }
    height = min(GANTT_PX[1], max(GANTT_PX[0], 110 + GANTT_PX_PER_GPU * chart.rows))
    return _with_layout(data, layout, height, True)


def _heat(chart: HeatChart) -> Json:
    rows = len(chart.percent)
    middle = (chart.x[1:] + chart.x[:-1]) / 2
    data = [
        {
            "type": "heatmap",
            "x": _numbers(middle),
            "y": list(range(rows)),
            "z": _packed(chart.percent, "u1"),
            "zmin": 0,
            "zmax": 100,
            "colorscale": [list(stop) for stop in HEAT_COLOURS],
            "colorbar": {
                "title": {"text": chart.colour_label, "side": "right", "font": {"size": 12}},
                "tickfont": {"size": 12},
                "thickness": 12,
                "outlinewidth": 0,
            },
            "hovertemplate": "%{z} % held at %{x:.4~g}<br>row %{y}<extra></extra>",
        }
    ]
    every = -(-rows // 12)
    ticks = list(range(0, rows, every))
    layout = {
        "hovermode": "closest",
        "xaxis": _axis(chart.x_label, showgrid=False),
        "yaxis": _axis(
            chart.y_label,
            autorange="reversed",
            tickvals=ticks,
            ticktext=[escape(chart.labels[row]) for row in ticks],
            showgrid=False,
        ),
    }
    return _with_layout(data, layout, min(640, max(240, 110 + 2 * rows)), False)


def _dots(chart: DotChart) -> Json:
    data = []
    rows = list(dict.fromkeys(escape(dot.row) for dot in chart.dots))
    series = list(dict.fromkeys(dot.series for dot in chart.dots))
    for name in series:
        dots = [dot for dot in chart.dots if dot.series == name]
        trace: Json = {
            "type": "scatter",
            "mode": "markers" if name else "markers+text",
            "textposition": _beside(dots),
            "name": name,
            "x": _numbers([dot.value for dot in dots]),
            "y": [escape(dot.row) for dot in dots],
            "text": [dot.text for dot in dots],
            "hovertemplate": "%{y}<br>%{text}<extra></extra>",
            "marker": {
                "color": [dot.colour for dot in dots],
                "size": 11,
                "symbol": ["x" if dot.mark == "x" else "circle" for dot in dots],
            },
        }
        if any(dot.low is not None for dot in dots):
            halves = [dot.high - dot.value if dot.high is not None else 0.0 for dot in dots]
            trace["error_x"] = {"type": "data", "array": _numbers(halves), "thickness": 2, "width": 5}
        data.append(trace)
    x_axis = _axis(chart.x_label, type="log" if chart.log_x else "linear")
    if chart.log_x:
        x_axis |= _ticks(chart.x_ticks)
    else:
        x_axis["rangemode"] = "tozero"
    y_axis = _axis(
        "", categoryorder="array", categoryarray=rows[::-1], range=[-0.6, len(rows) - 0.2], showgrid=True
    )
    if chart.legend:  # the marker of a legend takes the trace's first colour
        for trace, (_, colour) in zip(data, chart.legend, strict=True):
            trace["marker"]["color"] = colour
    layout = {"hovermode": "closest", "xaxis": x_axis, "yaxis": y_axis}
    return _with_layout(data, layout, 130 + 34 * len(rows), bool(chart.legend))


def _beside(dots: Sequence[Dot]) -> list[str]:
    """Labels on the side with more room."""
    most = max((dot.value for dot in dots), default=0.0)
    return ["top right" if dot.value < most / 2 else "top left" for dot in dots]


def _with_layout(data: list[Json], layout: Json, height: float, legend: bool) -> Json:
    return {
        "data": data,
        "layout": {
            "height": math.ceil(height),
            "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
            "showlegend": legend,
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "dragmode": "zoom",
            **layout,
        },
    }
