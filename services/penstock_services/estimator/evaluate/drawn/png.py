"""The report's pictures as PNG files, by matplotlib: no browser is needed, and the numbers are those of the page."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, PercentFormatter

from penstock_services.estimator.evaluate.drawn import words
from penstock_services.estimator.evaluate.drawn.picture import (
    FINE_TIMES,
    WORDS,
    Drift,
    Panel,
    Picture,
    colour_of,
    limits,
    name_of,
    ratio_ticks,
    ticks_within,
)

INK, FAINT, RULE, BROKEN, MISSED = "#1d2733", "#5b6875", "#e4e9ed", "#fbeceb", "#D55E00"
LINE = "#0072B2"
DPI = 150
PANEL_IN = 3.5
COLUMNS = 3
LOOK: Any = {  # matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
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
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
}


def save_all(picture: Picture, folder: Path) -> Sequence[Path]:
    """One file per section that has something to show, named by it. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    with mpl.rc_context(LOOK):
        for key, draw in DRAW.items():
            figure = draw(picture)
            if figure is not None:
                path = folder / f"{key}.png"
                figure.savefig(path, dpi=DPI, metadata={"Software": None})
                saved.append(path)
    return saved


def _figure(key: str, picture: Picture, width_in: float, height_in: float) -> Figure:
    """With its title and what it says on top."""
    section = words.section(key, picture)
    says = words.wrapped(section.says, int(width_in * 14))
    head_in = 0.62 + 0.17 * (1 + says.count("\n"))
    whole_in = height_in + head_in
    figure = Figure(figsize=(width_in, whole_in), facecolor="white")
    figure.set_layout_engine("constrained", rect=(0.01, 0.01, 0.98, height_in / whole_in - 0.01))
    figure.text(0.016, 1 - 0.14 / whole_in, section.title, fontsize=14, fontweight="bold", va="top")
    figure.text(0.016, 1 - 0.46 / whole_in, says, fontsize=9, color=FAINT, va="top", linespacing=1.35)
    return figure


def _pairs(picture: Picture) -> Figure | None:
    panels = picture.panels
    if not panels:
        return None
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure("pairs", picture, max(7.0, PANEL_IN * columns + 0.2), PANEL_IN * rows + 0.55)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"hspace": 0.12})
    for axes, panel in zip(grid.flat, panels, strict=False):
        _pair(axes, panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    tiers = list(dict.fromkeys(group.tier for panel in panels for group in panel.groups))
    handles = [
        Line2D([], [], marker=_mark(tier), linestyle="", color=colour_of(tier), label=name_of(tier))
        for tier in tiers
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handletextpad=0.1)
    return figure


def _mark(tier: str) -> str:
    return "x" if tier == "user" else "o"


def _pair(axes: Axes, panel: Panel) -> None:
    ends = (panel.low, panel.high)
    axes.set_xscale("log")
    axes.set_yscale("log")
    if panel.bound:
        axes.fill_between(ends, ends, (panel.high, panel.high), color=BROKEN, linewidth=0, zorder=0)
        axes.text(0.04, 0.96, "used more than was promised", transform=axes.transAxes, fontsize=8, color="#a8524b", va="top")  # fmt: skip
    else:
        for factor in (0.5, 2.0):
            axes.plot(
                ends, [factor * end for end in ends], color=FAINT, linewidth=0.7, linestyle=":", zorder=1
            )
    axes.plot(ends, ends, color=FAINT, linewidth=1.1, zorder=1)
    for group in panel.groups:
        look: Any = {
            "s": 13 if group.tier != "user" else 16,
            "linewidths": 0.0 if group.tier != "user" else 0.8,
        }
        axes.scatter(
            group.said,
            group.used,
            color=colour_of(group.tier),
            marker=_mark(group.tier),
            alpha=0.55,
            zorder=2,
            **look,
        )
    values, labels = [value for value, _ in panel.ticks], [text for _, text in panel.ticks]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
        axis.set_ticks(values, labels)
        axis.set_ticks([], minor=True)
    axes.tick_params(labelsize=8)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_box_aspect(1)
    axes.set_xlabel("said")
    axes.set_ylabel("used")
    axes.set_title(panel.title, fontsize=11, fontweight="bold", loc="left", pad=30)
    note = axes.text(0, 1.02, words.of_panel(panel), transform=axes.transAxes, fontsize=8, color=FAINT)
    note.set_in_layout(False)  # else the panel shrinks until the line fits


def _drifts(picture: Picture) -> Figure | None:
    if not picture.drifts:
        return None
    count = len(picture.drifts)
    figure = _figure("drift", picture, 9.6, 1.45 * count + 0.5)
    grid = figure.subplots(count, 1, sharex=True, squeeze=False)
    for axes, drift in zip(grid.flat, picture.drifts, strict=True):
        _drift(axes, drift)
        for at_ms, _ in picture.versions:
            axes.axvline(_moment(at_ms), color=FAINT, linewidth=0.7, linestyle=":", zorder=0)
    return figure


def _moment(at_ms: float) -> datetime:
    return datetime.fromtimestamp(at_ms / 1_000, UTC)


def _drift(axes: Axes, drift: Drift) -> None:
    at: Any = [_moment(at_ms) for at_ms in drift.at_ms]
    axes.set_yscale("log")
    axes.axhline(1, color=FAINT, linewidth=1.0, zorder=1)
    axes.fill_between(at, drift.low, drift.high, color=LINE, alpha=0.15, linewidth=0, zorder=1)
    axes.plot(at, drift.middle, color=LINE, linewidth=1.6, marker="o", markersize=3, zorder=2)
    low, high = limits([*drift.low, *drift.high, 1.0])
    axes.set_ylim(low, high)
    ticks = ratio_ticks(low, high)
    axes.set_yticks([value for value, _ in ticks], [text for _, text in ticks])
    axes.set_yticks([], minor=True)
    locator = AutoDateLocator(tz=UTC, maxticks=9)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    axes.set_title(drift.title, fontsize=10, fontweight="bold", loc="left", pad=4)


def _promises(picture: Picture) -> Figure | None:
    if not picture.promises:
        return None
    rows = picture.promises
    figure = _figure("promises", picture, 9.6, 0.75 + 0.34 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        axes.plot(
            (row.kept.low, row.kept.high), (y, y), color=FAINT, linewidth=2, solid_capstyle="butt", zorder=1
        )
        axes.plot(row.kept.value, y, marker="o", color=colour_of(row.tier), markersize=8, zorder=2)
    axes.axvline(words.PROMISED, color=INK, linewidth=1, linestyle="--", zorder=1)
    _rows(axes, [f"{row.label} ({row.kept.of:,} runs)" for row in rows])
    axes.set_xlim(min(0.8, *(row.kept.low - 0.02 for row in rows)), 1.005)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("of the runs used no more than was promised")
    return figure


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(visible=False, axis="y")


def _owners(picture: Picture) -> Figure | None:
    if not picture.over_asking:
        return None
    rows = picture.over_asking
    figure = _figure("owners", picture, 9.6, 0.75 + 0.36 * len(rows))
    axes = figure.subplots()
    for y, row in enumerate(rows):
        axes.plot((1, row.asked_to_used), (y, y), color=RULE, linewidth=6, solid_capstyle="butt", zorder=1)
        axes.plot(row.asked_to_used, y, marker="o", color=colour_of("user"), markersize=8, zorder=2)
        axes.annotate(f"{row.asked_to_used:.1f} ×, {row.runs:,} runs", (row.asked_to_used, y), (9, 0), textcoords="offset points", fontsize=8.5, color=FAINT, va="center")  # fmt: skip
    _rows(axes, [f"{row.owner}: {WORDS[row.field].title.lower().replace('gpu', 'GPU')}" for row in rows])
    axes.set_xscale("log")
    low, high = 1.0, 1.9 * max(row.asked_to_used for row in rows)
    ticks = ratio_ticks(low, high)
    axes.set_xlim(low * 0.96, high)
    axes.set_xticks([value for value, _ in ticks], [text for _, text in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("asked for / used, by the median")
    return figure


def _remaining(picture: Picture) -> Figure | None:
    told = picture.remaining
    if not told:
        return None
    figure = _figure("remaining", picture, 9.6, 3.9)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    left, right = limits([one.left for one in told])
    low, high = limits([one.actual / one.left for one in told])
    axes.axhline(1, color=FAINT, linewidth=1.1, zorder=1)
    for held, colour, label in ((True, LINE, "inside its interval"), (False, MISSED, "outside")):
        some = [one for one in told if one.held == held]
        x = [one.left for one in some]
        below = [max(low, one.low / one.left) for one in some]
        above = [min(high, one.high / one.left) for one in some]
        axes.vlines(x, below, above, color=colour, alpha=0.25, linewidth=1)
        axes.scatter(
            x,
            [one.actual / one.left for one in some],
            s=16,
            color=colour,
            alpha=0.75,
            linewidths=0,
            label=f"{label}: {len(some):,}",
            zorder=2,
        )
    for axis, ticks in (
        (axes.xaxis, ticks_within(FINE_TIMES, left, right)),
        (axes.yaxis, ratio_ticks(low, high)),
    ):
        axis.set_minor_formatter(NullFormatter())
        axis.set_ticks([value for value, _ in ticks], [text for _, text in ticks])
        axis.set_ticks([], minor=True)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.set_xlabel("said to be left, at half of the run")
    axes.set_ylabel("was left / was said")
    figure.legend(loc="outside lower center", ncols=2, handletextpad=0.1)
    return figure


DRAW: Mapping[str, Callable[[Picture], Figure | None]] = MappingProxyType(
    {
        "pairs": _pairs,
        "promises": _promises,
        "drift": _drifts,
        "owners": _owners,
        "remaining": _remaining,
    }
)
