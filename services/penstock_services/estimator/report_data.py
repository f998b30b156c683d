"""Data of the estimator's report, bounded in size: estimate against use, drift, held bounds, remaining time."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from penstock_services.estimator.core.accuracy import (
    FIELDS,
    USER,
    Accuracy,
    Pair,
    Score,
    Share,
    bounded_eta,
    pairs_of,
    score,
    share,
)
from penstock_services.estimator.core.runs import FinishedRun

T = TypeVar("T")

MAX_POINTS = 2_500  # of one tier and field: more hide each other, and make the page too large for a mail
STRETCH_RUNS = 12  # at least, of one point of the drift
MAX_STRETCHES = 24
MAX_VERSIONS = 12  # marked in the drift
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
"""Tier → colour, name. Distinguishable by colour-blind people. Source: Okabe and Ito, Color Universal Design, 2008."""
OTHER_TIER = ("#56B4E9", "")


TITLES: Mapping[str, str] = MappingProxyType(
    {
        "gpu_memory_mib": "GPU memory",
        "host_memory_mib": "Host memory",
        "cores": "Cores",
        "gpu_utilisation_percent": "GPU utilisation",
        "run_ms": "Run time",
    }
)


class Points(NamedTuple):
    """Of one tier. Columns of equal length; `text` is shown on hovering."""

    tier: str
    estimate: Sequence[float]
    used: Sequence[float]
    text: Sequence[str]


class FieldPoints(NamedTuple):
    """Estimate against use of one field. `low`, `high`: of both logarithmic axes."""

    field: str
    groups: Sequence[Points]
    low: float
    high: float
    score: Score | None
    """Of the estimates; None: all of it was asked for by users."""
    left_out: int
    """Points that are not in the groups."""


class Drift(NamedTuple):
    """Estimate / use of one field over time. Columns of equal length."""

    field: str
    at_ms: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    """A tenth of the runs lies below."""
    high: Sequence[float]
    runs: Sequence[int]


class Bound(NamedTuple):
    """Share of the runs that used no more than the estimate, for one tier and a field whose estimate is a bound."""

    tier: str
    field: str
    held: Share


class EtaPoint(NamedTuple):
    """Remaining time of one run at its half, ms: estimate, its interval, and what it was."""

    job_id: str
    left: float
    low: float
    high: float
    actual: float

    @property
    def held(self) -> bool:
        return self.low <= self.actual <= self.high


class ReportData(NamedTuple):
    """Everything that the report shows."""

    found: Accuracy
    fields: Sequence[FieldPoints]
    drifts: Sequence[Drift]
    versions: Sequence[tuple[float, str]]
    """(moment, version) of the first run that a model version had answered for."""
    bounds: Sequence[Bound]
    remaining: Sequence[EtaPoint]
    first_ms: float
    last_ms: float


def colour_of(tier: str) -> str:
    return TIERS.get(tier, OTHER_TIER)[0]


def place_of(tier: str) -> tuple[int, str]:
    """In the order of trust."""
    return (list(TIERS).index(tier) if tier in TIERS else len(TIERS), tier)


def name_of(tier: str) -> str:
    return TIERS.get(tier, OTHER_TIER)[1] or tier


def report_data(runs: Sequence[FinishedRun], found: Accuracy) -> ReportData:
    """`found`: of the same runs, which are in the order in which they ended."""
    pairs: dict[str, list[Pair]] = {name: [] for name in FIELDS}
    for pair in pairs_of(runs):
        pairs[pair.field].append(pair)
    etas = [
        EtaPoint(run.job_id, eta.left_ms, eta.low_ms, eta.high_ms, eta.actual_ms)
        for run in runs
        if run.eta is not None and (eta := bounded_eta(run.eta)) is not None
    ]
    ended = [run.measured.ended_ms for run in runs]
    return ReportData(
        found,
        [_points(name, some) for name, some in pairs.items() if some],
        [drift for name, some in pairs.items() if (drift := _drift(name, some)) is not None],
        _versions(runs),
        _bounds(pairs),
        thinned(etas),
        min(ended, default=0.0),
        max(ended, default=0.0),
    )


def thinned(values: Sequence[T]) -> Sequence[T]:
    """At most `MAX_POINTS`, evenly from first to last."""
    count = len(values)
    return values if count <= MAX_POINTS else [values[count * n // MAX_POINTS] for n in range(MAX_POINTS)]


def _points(name: str, pairs: Sequence[Pair]) -> FieldPoints:
    groups, left_out = [], 0
    for tier in sorted({pair.tier for pair in pairs}, key=place_of):
        own = [pair for pair in pairs if pair.tier == tier]
        some = thinned(own)
        left_out += len(own) - len(some)
        said, used = [pair.estimate for pair in some], [pair.used for pair in some]
        groups.append(
            Points(tier, said, used, [f"{pair.run.job_id} ({pair.run.info.owner})" for pair in some])
        )
    low, high = limits([value for pair in pairs for value in (pair.estimate, pair.used)])
    estimated = [pair for pair in pairs if pair.tier != USER]
    return FieldPoints(name, groups, low, high, score(name, estimated) if estimated else None, left_out)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Of a logarithmic axis that shows them all; at least one, all > 0. Never narrower than a factor of four."""
    low, high = min(values) / ROOM, max(values) * ROOM
    middle = math.sqrt(low * high)
    return min(low, middle / 2), max(high, middle * 2)


def shown(field: str, value: float) -> str:
    """With its unit, for people."""
    if field.endswith("_mib"):
        return f"{value:,.0f} MiB" if value < 10_240 else f"{value / 1_024:,.1f} GiB"
    if field.endswith("_ms"):
        return time_text(value)
    return f"{value:.1f}%" if field.endswith("_percent") else f"{value:.2g}"


def field_text(field: str) -> str:
    """`GPU memory`, `cores`, `run time`."""
    plain = field.removesuffix("_mib").removesuffix("_percent").removesuffix("_ms")
    return plain.replace("_", " ").replace("gpu", "GPU")


def time_text(ms: float) -> str:
    """`420 ms`, `12 s`, `3.5 min`, `2.1 h`, `4.0 d`."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if ms >= 2 * size or (unit == "s" and ms >= size):
            return f"{ms / size:.1f} {unit}"
    return f"{ms:.0f} ms"


def _drift(name: str, pairs: Sequence[Pair]) -> Drift | None:
    """None where the runs are too few for two points."""
    estimated = sorted(
        (pair for pair in pairs if pair.tier != USER), key=lambda pair: pair.run.measured.ended_ms
    )
    count = min(MAX_STRETCHES, len(estimated) // STRETCH_RUNS)
    if count < 2:
        return None
    rows = []
    for low, high in pairwise(len(estimated) * part // count for part in range(count + 1)):
        ratios = sorted(pair.ratio for pair in estimated[low:high])
        at = median(pair.run.measured.ended_ms for pair in estimated[low:high])
        tenth = (len(ratios) - 1) // 10
        rows.append((at, median(ratios), ratios[tenth], ratios[-1 - tenth], len(ratios)))
    at_ms, middle, below, above, runs = zip(*rows, strict=True)
    return Drift(name, at_ms, middle, below, above, runs)


def _versions(runs: Sequence[FinishedRun]) -> Sequence[tuple[float, str]]:
    first: dict[str, float] = {}
    for run in runs:
        if run.estimate is not None and run.estimate.model_version is not None:
            first.setdefault(run.estimate.model_version, run.measured.ended_ms)
    return [(at, version) for version, at in first.items()][-MAX_VERSIONS:]


def _bounds(pairs: Mapping[str, Sequence[Pair]]) -> Sequence[Bound]:
    """Of the estimator's tiers; what users ask for themselves is no estimate."""
    found = []
    for name, some in pairs.items():
        for tier in (tier for tier in TIERS if tier != USER and FIELDS[name].bound):
            own = [pair for pair in some if pair.tier == tier]
            if own:
                found.append(
                    Bound(tier, name, share(sum(pair.used <= pair.estimate for pair in own), len(own)))
                )
    return found
