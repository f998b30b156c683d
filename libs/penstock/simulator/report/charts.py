"""Charts as data, the same for every way of drawing them; what they say in words stands beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.simulator.report.picture import Reals

POLICIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C")
"""Told apart by colour-blind people, on white and on black. Source: Okabe and Ito, Color Universal Design, 2008."""
DASHES = ("solid", "dash", "dot", "dashdot")  # once the colours are used up
MODELS = (*POLICIES[:6], "#B8A800", "#7A4B2B")
"""For kinds of jobs: no grey, which is left for all others."""
OTHERS = "#9A9A9A"
SIZES = ("#443983", "#31688E", "#21918C", "#35B779", "#7AD151", "#B8C41F", "#E0A100")
"""Rising, for sizes."""


class Line(NamedTuple):
    """`hover`: per point, beside x and y. `of`: what y is a share of."""

    name: str
    x: Reals
    y: Reals
    colour: str
    dash: str = "solid"
    hover: Sequence[str] | None = None
    width: float = 2.0
    of: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """`key`: of the file and the anchor. `title`: what is shown. `says`: what to look for. `note`: what is left out."""

    key: str
    title: str
    says: str
    note: str = ""
    part: str = ""
    """Of several charts with one title, which: the policy."""


@dataclass(frozen=True, slots=True)
class LineChart:
    words: Words
    lines: Sequence[Line]
    x_label: str
    y_label: str
    steps: bool = False
    """Whether a value holds until the next point."""
    log_x: bool = False
    y_top: float | None = None
    y_step: float | None = None
    """Between ticks, where those that anybody would draw do not fit."""
    percent: bool = False
    """`y` is a share of one."""
    x_ticks: Sequence[tuple[float, str]] = ()
    """Where they are not those that anybody would draw."""


class Group(NamedTuple):
    """Bars of one colour. Columns of equal length; `x` and `length` in the chart's unit of time."""

    name: str
    colour: str
    x: Reals
    length: Reals
    y: Reals
    """Middle of the bar, in GPUs from the top."""
    height: Reals
    text: Sequence[str]
    """On hovering."""
    labels: Sequence[str]
    """Written on the bars; empty where there are too many."""


@dataclass(frozen=True, slots=True)
class GanttChart:
    words: Words
    groups: Sequence[Group]
    x_label: str
    x_range: tuple[float, float]
    ticks: Sequence[tuple[float, str]]
    """(y, label) of the nodes."""
    edges: Sequence[float]
    """y of the lines between nodes."""
    rows: float
    """Height of it all, in GPUs."""


@dataclass(frozen=True, slots=True)
class HeatChart:
    words: Words
    x: Reals
    """Edges of the columns."""
    labels: Sequence[str]
    """Of the rows, first on top."""
    percent: NDArray[np.uint8]
    x_label: str
    y_label: str
    colour_label: str


class Dot(NamedTuple):
    """A point with an interval around it; None where there is none."""

    row: str
    value: float
    low: float | None
    high: float | None
    colour: str
    text: str
    mark: str = "o"
    """`o`, or `x` for what is clearly worse than the best."""
    series: str = ""


@dataclass(frozen=True, slots=True)
class DotChart:
    words: Words
    dots: Sequence[Dot]
    """Rows in their order, first on top."""
    x_label: str
    x_ticks: Sequence[tuple[float, str]] = ()
    log_x: bool = False
    legend: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """(name, colour) of the series."""


Chart = LineChart | GanttChart | HeatChart | DotChart


def colour_of(index: int) -> tuple[str, str]:
    """Colour and dash of the policy at this place."""
    return POLICIES[index % len(POLICIES)], DASHES[index // len(POLICIES) % len(DASHES)]


class TimeUnit(NamedTuple):
    name: str
    seconds: float


SECOND_S, MINUTE_S, HOUR_S, DAY_S = 1.0, 60.0, 3_600.0, 86_400.0
COARSE = (
    (SECOND_S, "s", (1, 10)),
    (MINUTE_S, "min", (1, 10)),
    (HOUR_S, "h", (1, 6)),
    (DAY_S, "d", (1, 10, 100, 1_000)),
)
FINE = (
    (SECOND_S, "s", (1, 2, 5, 10, 20, 30)),
    (MINUTE_S, "min", (1, 2, 5, 10, 20, 30)),
    (HOUR_S, "h", (1, 2, 5, 12)),
    (DAY_S, "d", (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)),
)
WIDE = 100.0  # between the ends of a logarithmic axis: from here on fewer ticks


def moments(low_s: float, high_s: float) -> Sequence[tuple[float, str]]:
    """Ticks of a logarithmic axis of time."""
    units = FINE if high_s < WIDE * low_s else COARSE
    return [(seconds * count, f"{count:,} {unit}") for seconds, unit, counts in units for count in counts]


def powers(low: float, high: float) -> Sequence[tuple[float, str]]:
    """Ticks of any other logarithmic axis: 1, 2, 5, 10 or only 1, 10, 100."""
    digits = (1, 2, 5) if high < WIDE * low else (1,)
    decades = range(floor(log10(max(low, 1e-9))), ceil(log10(max(high, 1e-9))) + 1)
    return [(digit * 10.0**decade, f"{digit * 10.0**decade:,g}") for decade in decades for digit in digits]


def bar_height(gpus: float) -> float:
    """What is drawn of a bar on so many GPUs: a little less, so that neighbours stay apart."""
    return max(0.6 * gpus, gpus - 0.14)


def time_unit(span_s: float) -> TimeUnit:
    """In which a span reads well."""
    for name, seconds, least in (("days", 86_400.0, 3.0), ("hours", 3_600.0, 3.0), ("minutes", 60.0, 3.0)):
        if span_s >= least * seconds:
            return TimeUnit(name, seconds)
    return TimeUnit("seconds", 1.0)
