"""What the report draws, as data, the same for page and files: said against used, drift, promises, owners, remaining time."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from penstock_services.estimator.core.accuracy import (
    FIELDS,
    USER,
    OverAsking,
    Pair,
    Reckoning,
    Score,
    Share,
    pairs_of,
    reckonable,
    score,
    share,
)
from penstock_services.estimator.core.runs import FinishedRun

MOST_POINTS = (
    2_500  # of one tier and field: more hide each other, and make a page that no mail server lets through
)
STRETCH_RUNS = 12  # at least, of one point of the drift
MOST_STRETCHES = 24
MOST_VERSIONS = 12  # marked in the drift
MOST_TICKS = 7
ROOM = 1.25  # around the points, as a factor

TIERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "history": ("#0072B2", "runs of the same job"),
        "model": ("#D55E00", "learned model"),
        "nearest": ("#009E73", "nearest runs"),
        "default": ("#8C8C8C", "default"),
        USER: ("#CC79A7", "asked for by the user"),
    }
)
"""Tier → colour, name. Told apart by colour-blind people. Source: Okabe and Ito, Color Universal Design, 2008."""
OTHER_TIER = ("#56B4E9", "")


class Words(NamedTuple):
    """Of a field: what it is called, and where its axis has ticks."""

    title: str
    ticks: Sequence[tuple[float, str]]


def _memory(mib: float) -> str:
    return f"{mib:g} MiB" if mib < 1_024 else f"{mib / 1_024:g} GiB"


_MEMORY = [(2.0**power, _memory(2.0**power)) for power in range(4, 22)]
_CORES = [(2.0**power, f"{2.0**power:g}") for power in range(-7, 11)]
_PERCENT = [(value, f"{value:g}%") for value in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)]
_TIMES = [(1, "1 ms"), (10, "10 ms"), (100, "0.1 s"), (1_000, "1 s"), (10_000, "10 s"), (60_000, "1 min"), (600_000, "10 min"),
          (3_600_000, "1 h"), (21_600_000, "6 h"), (86_400_000, "1 d"), (864_000_000, "10 d"), (8_640_000_000, "100 d")]  # fmt: skip
FINE_TIMES = sorted(
    [*_TIMES, (2_000, "2 s"), (5_000, "5 s"), (20_000, "20 s"), (30_000, "30 s"), (120_000, "2 min"), (300_000, "5 min"),
     (1_200_000, "20 min"), (1_800_000, "30 min"), (7_200_000, "2 h"), (43_200_000, "12 h"), (172_800_000, "2 d")]
)  # fmt: skip

RATIOS = [
    (10.0**power * digit, f"{digit * 10**power:,}" if power >= 0 else f"1/{10**-power // digit}")
    for power in range(-3, 4)
    for digit in (1, 2, 5)
]
NEAR_ONE = [(value, f"{value:g}") for value in (0.25, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 4)]
NEAR_SPAN = 8.0

WORDS: Mapping[str, Words] = MappingProxyType(
    {
        "gpu_memory_mib": Words("GPU memory", _MEMORY),
        "host_memory_mib": Words("Host memory", _MEMORY),
        "cores": Words("Cores", _CORES),
        "gpu_utilisation_percent": Words("GPU utilisation", _PERCENT),
        "run_ms": Words("Run time", FINE_TIMES),
    }
)


class Points(NamedTuple):
    """Of one tier. Columns of equal length; `text` is shown on hovering."""

    tier: str
    said: Sequence[float]
    used: Sequence[float]
    text: Sequence[str]


class Panel(NamedTuple):
    """Said against used of one field; both axes are logarithmic and run from `low` to `high`."""

    field: str
    title: str
    bound: bool
    groups: Sequence[Points]
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    score: Score | None
    """Of the estimates; None: all of it was asked for by users."""
    left_out: int
    """Points that are not drawn."""


class Drift(NamedTuple):
    """said / used of one field over time. Columns of equal length."""

    field: str
    title: str
    bound: bool
    at_ms: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    """A tenth of the runs lies below."""
    high: Sequence[float]
    runs: Sequence[int]


class Promise(NamedTuple):
    """How often what was promised was enough, for one tier and field."""

    tier: str
    field: str
    label: str
    kept: Share


class Told(NamedTuple):
    """Remaining time of one run at its half. ms."""

    job_id: str
    left: float
    low: float
    high: float
    actual: float

    @property
    def held(self) -> bool:
        return self.low <= self.actual <= self.high


class Picture(NamedTuple):
    """All of it."""

    found: Reckoning
    panels: Sequence[Panel]
    drifts: Sequence[Drift]
    versions: Sequence[tuple[float, str]]
    """(moment, version) of the first run that a model version had answered for."""
    promises: Sequence[Promise]
    over_asking: Sequence[OverAsking]
    remaining: Sequence[Told]
    first_ms: float
    last_ms: float


def colour_of(tier: str) -> str:
    return TIERS.get(tier, OTHER_TIER)[0]


def place_of(tier: str) -> tuple[int, str]:
    """In the order of trust."""
    return (list(TIERS).index(tier) if tier in TIERS else len(TIERS), tier)


def name_of(tier: str) -> str:
    return TIERS.get(tier, OTHER_TIER)[1] or tier


def picture_of(runs: Sequence[FinishedRun], found: Reckoning) -> Picture:
    """`found`: of the same runs, which are in the order in which they ended."""
    pairs: dict[str, list[Pair]] = {name: [] for name in FIELDS}
    for pair in pairs_of(runs):
        pairs[pair.field].append(pair)
    told = [
        Told(run.job_id, eta.left_ms, eta.low_ms, eta.high_ms, eta.actual_ms)
        for run in runs
        if run.eta is not None and (eta := reckonable(run.eta)) is not None
    ]
    ended = [run.measured.ended_ms for run in runs]
    return Picture(
        found,
        [_panel(name, some) for name, some in pairs.items() if some],
        [drift for name, some in pairs.items() if (drift := _drift(name, some)) is not None],
        _versions(runs),
        _promises(pairs),
        found.over_asking,
        thinned(told, MOST_POINTS),
        min(ended, default=0.0),
        max(ended, default=0.0),
    )


def thinned(values: Sequence[Told], most: int) -> Sequence[Told]:
    """At most so many, evenly from first to last."""
    return values if len(values) <= most else [values[len(values) * n // most] for n in range(most)]


def _panel(name: str, pairs: Sequence[Pair]) -> Panel:
    words, groups, left_out = WORDS[name], [], 0
    for tier in sorted({pair.tier for pair in pairs}, key=place_of):
        mine = [pair for pair in pairs if pair.tier == tier]
        kept = (
            mine
            if len(mine) <= MOST_POINTS
            else [mine[len(mine) * n // MOST_POINTS] for n in range(MOST_POINTS)]
        )
        left_out += len(mine) - len(kept)
        said, used = [pair.said for pair in kept], [pair.used for pair in kept]
        groups.append(Points(tier, said, used, [_text(pair) for pair in kept]))
    values = [value for pair in pairs for value in (pair.said, pair.used)]
    low, high = limits(values)
    estimated = [pair for pair in pairs if pair.tier != USER]
    return Panel(
        name, words.title, FIELDS[name].bound, groups, low, high, ticks_within(words.ticks, low, high),
        score(name, estimated) if estimated else None, left_out,
    )  # fmt: skip


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Of a logarithmic axis that shows them all; at least one, all > 0. Never narrower than a factor of four."""
    low, high = min(values) / ROOM, max(values) * ROOM
    middle = math.sqrt(low * high)
    return min(low, middle / 2), max(high, middle * 2)


def ratio_ticks(low: float, high: float) -> Sequence[tuple[float, str]]:
    """Of an axis of said / used; 1 is among them if it is on the axis."""
    inside = [tick for tick in (NEAR_ONE if high < NEAR_SPAN * low else RATIOS) if low <= tick[0] <= high]
    if len(inside) <= MOST_TICKS + 2:
        return inside
    return [tick for tick in inside if math.isclose(math.log10(tick[0]) % 1, 0, abs_tol=1e-9)]


def ticks_within(ticks: Sequence[tuple[float, str]], low: float, high: float) -> Sequence[tuple[float, str]]:
    """Those on the logarithmic axis, in rising order, and so far apart that their labels have room."""
    found: list[tuple[float, str]] = []
    apart = (high / low) ** (1 / MOST_TICKS)
    for value, text in ticks:
        if low <= value <= high and (not found or value >= apart * found[-1][0]):
            found.append((value, text))
    return found


def _text(pair: Pair) -> str:
    return f"{pair.run.job_id} ({pair.run.about.owner}): {shown(pair.field, pair.said)} said, {shown(pair.field, pair.used)} used"


def shown(field: str, value: float) -> str:
    """With its unit, for people."""
    if field.endswith("_mib"):
        return f"{value:,.0f} MiB" if value < 10_240 else f"{value / 1_024:,.1f} GiB"
    if field.endswith("_ms"):
        return time_text(value)
    return f"{value:.1f}%" if field.endswith("_percent") else f"{value:.2g}"


def time_text(ms: float) -> str:
    """`420 ms`, `12 s`, `3.5 min`, `2.1 h`, `4.0 d`."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms >= 2 * size or (unit == "s" and ms >= size):
            return f"{ms / size:.1f} {unit}"
    return f"{ms:.0f} ms"


def _drift(name: str, pairs: Sequence[Pair]) -> Drift | None:
    """None where the runs are too few for two points."""
    told = sorted((pair for pair in pairs if pair.tier != USER), key=lambda pair: pair.run.measured.ended_ms)
    count = min(MOST_STRETCHES, len(told) // STRETCH_RUNS)
    if count < 2:
        return None
    rows = []
    for low, high in pairwise(len(told) * part // count for part in range(count + 1)):
        ratios = sorted(pair.ratio for pair in told[low:high])
        at = median(pair.run.measured.ended_ms for pair in told[low:high])
        tenth = (len(ratios) - 1) // 10
        rows.append((at, median(ratios), ratios[tenth], ratios[-1 - tenth], len(ratios)))
    at_ms, middle, below, above, runs = zip(*rows, strict=True)
    return Drift(name, WORDS[name].title, FIELDS[name].bound, at_ms, middle, below, above, runs)


def _versions(runs: Sequence[FinishedRun]) -> Sequence[tuple[float, str]]:
    first: dict[str, float] = {}
    for run in runs:
        if run.said is not None and run.said.model_version is not None:
            first.setdefault(run.said.model_version, run.measured.ended_ms)
    return [(at, version) for version, at in first.items()][-MOST_VERSIONS:]


def _promises(pairs: Mapping[str, Sequence[Pair]]) -> Sequence[Promise]:
    """Of the fields that are bounds; users' own words are no promise of ours."""
    found = []
    for name, some in pairs.items():
        if not FIELDS[name].bound:
            continue
        for tier in TIERS:
            mine = [pair for pair in some if pair.tier == tier]
            if mine and tier != USER:
                kept = share(sum(pair.used <= pair.said for pair in mine), len(mine))
                found.append(Promise(tier, name, f"{WORDS[name].title}, {name_of(tier)}", kept))
    return found
