"""Charts as PNG files, by matplotlib: no browser is needed, and the numbers are those of the page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter

from penstock.simulator.report.charts import (
    Chart,
    DotChart,
    GanttChart,
    HeatChart,
    LineChart,
    bar_height,
)
from penstock.simulator.report.drawing import Section
from penstock.simulator.report.plotly_form import HEAT_COLOURS, MANY_BARS, MANY_ROWS

INK, FAINT, RULE = "#1d2733", "#5b6875", "#e4e9ed"
WIDTH_IN, HEIGHT_IN, DPI = 10.0, 4.6, 160
IN_PER_GPU = 0.1
SAYS_WIDTH = 130  # characters
MAX_HEIGHT_IN = 12.0
STYLE = MappingProxyType({"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."})
LOOK: Any = {  # matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
}


def save_all(sections: Sequence[Section], folder: Path) -> Sequence[Path]:
    """One file per chart, named by what it shows. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    with mpl.rc_context(LOOK):
        for section in sections:
            for chart in section.charts:
                part = f"-{chart.words.part}" if len(section.charts) > 1 else ""
                path = folder / f"{section.key}{part}.png"
                _save(chart, path)
                saved.append(path)
    return saved


def _save(chart: Chart, path: Path) -> None:
    words, height_in = chart.words, _height_in(chart)
    says = fill(words.says, SAYS_WIDTH)
    head_in, foot_in = 0.55 + 0.17 * (1 + says.count("\n")), 0.3 if words.note else 0.1
    whole_in = height_in + head_in + foot_in
    figure = Figure(figsize=(WIDTH_IN, whole_in), dpi=DPI, facecolor="white")
    figure.set_layout_engine("constrained", rect=(0.01, foot_in / whole_in, 0.98, height_in / whole_in))
    axes = figure.add_subplot()
    DRAW[type(chart)](axes, chart)
    title = words.title + (f": {words.part}" if words.part else "")
    figure.text(0.02, 1 - 0.16 / whole_in, title, fontsize=14, fontweight="bold", ha="left", va="top")
    figure.text(0.02, 1 - 0.46 / whole_in, says, fontsize=9, color=FAINT, ha="left", va="top")
    figure.text(0.02, 0.12 / whole_in, words.note, fontsize=8, color=FAINT, ha="left", va="bottom")
    figure.savefig(path, metadata={"Software": None})


def _height_in(chart: Chart) -> float:
    if isinstance(chart, GanttChart):
        return min(MAX_HEIGHT_IN, max(2.4, 1.0 + IN_PER_GPU * chart.rows))
    if isinstance(chart, DotChart):
        return 1.0 + 0.42 * len({dot.row for dot in chart.dots})
    return HEIGHT_IN


def _number(value: float, _: int = 0) -> str:
    return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"


def _ticks(axes: Axes, ticks: Sequence[tuple[float, str]]) -> None:
    if ticks:
        limits = axes.get_xlim()
        axes.set_xticks([value for value, _ in ticks], [text for _, text in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(limits)


def _lines(axes: Axes, chart: LineChart) -> None:
    for line in chart.lines:
        style = {
            "color": line.colour,
            "linestyle": STYLE[line.dash],
            "linewidth": 0.8 * line.width,
            "label": line.name,
        }
        axes.plot(line.x, line.y, drawstyle="steps-post" if chart.steps else "default", **style)  # type: ignore[arg-type]
    if chart.log_x:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    _ticks(axes, chart.x_ticks)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.y_step is not None:
        axes.yaxis.set_major_locator(MultipleLocator(chart.y_step))
    axes.set_ylim(0, None if chart.y_top is None else 1.03 * chart.y_top)
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.margins(x=0.01)
    if len(chart.lines) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3)


def _gantt(axes: Axes, chart: GanttChart) -> None:
    many = sum(len(group.x) for group in chart.groups) > MANY_BARS or chart.rows > MANY_ROWS
    outline = 0.0 if many else 0.5
    for group in chart.groups:
        columns = zip(group.x, group.length, group.y, group.height, strict=True)
        bars = [
            Rectangle((x, y - bar_height(height) / 2), length, bar_height(height))
            for x, length, y, height in columns
        ]
        axes.add_collection(
            PatchCollection(bars, facecolor=group.colour, edgecolor="white", linewidth=outline)
        )
        for label, x, length, y in zip(
            group.labels, group.x, group.length, group.y, strict=bool(group.labels)
        ):
            axes.text(
                x + length / 2, y, label, color="white", fontsize=8, ha="center", va="center", clip_on=True
            )
    for y in chart.edges:
        axes.axhline(y, color=RULE, linewidth=0.6)
    axes.set_xlim(*chart.x_range)
    axes.set_ylim(chart.rows, 0)
    axes.grid(visible=False, axis="y")
    axes.set_yticks([y for y, _ in chart.ticks], [label for _, label in chart.ticks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(chart.x_label)
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    handles = [Patch(facecolor=group.colour, label=group.name) for group in chart.groups]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3)


def _heat(axes: Axes, chart: HeatChart) -> None:
    colours = LinearSegmentedColormap.from_list("held", [(at, colour) for at, colour in HEAT_COLOURS])
    rows = chart.percent.shape[0]
    mesh = axes.pcolormesh(
        chart.x, np.arange(rows + 1) - 0.5, chart.percent, cmap=colours, vmin=0, vmax=100, rasterized=True
    )
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(visible=False)
    every = -(-rows // 12)
    axes.set_yticks(range(0, rows, every), [chart.labels[row] for row in range(0, rows, every)], fontsize=8)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.figure.colorbar(mesh, ax=axes, label=chart.colour_label, pad=0.01)


def _dots(axes: Axes, chart: DotChart) -> None:
    rows = list(dict.fromkeys(dot.row for dot in chart.dots))
    for dot in chart.dots:
        y = rows.index(dot.row)
        if dot.low is not None and dot.high is not None:
            axes.plot((dot.low, dot.high), (y, y), color=FAINT, linewidth=2, solid_capstyle="butt", zorder=1)
        axes.plot(
            dot.value, y, marker="X" if dot.mark == "x" else "o", color=dot.colour, markersize=9, zorder=2
        )
        if not dot.series:
            left = dot.value < 0.5 * max(other.value for other in chart.dots)
            look: Any = {"fontsize": 8, "color": FAINT, "ha": "left" if left else "right"}
            axes.annotate(dot.text, (dot.value, y), (0, 9), textcoords="offset points", **look)
    if chart.log_x:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.12 * max(dot.high or dot.value for dot in chart.dots))
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    _ticks(axes, chart.x_ticks)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(chart.x_label)
    if chart.legend:
        handles = [
            axes.plot([], [], marker="o", linestyle="", color=colour, label=name)[0]
            for name, colour in chart.legend
        ]
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3)


DRAW: Mapping[type, Callable[[Axes, Any], None]] = MappingProxyType(
    {LineChart: _lines, GanttChart: _gantt, HeatChart: _heat, DotChart: _dots}
)
