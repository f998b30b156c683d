"""Accuracy of estimates against what jobs used: per tier, over time, by owner, and the worst of them. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from penstock_services.estimator.core.eta.remaining import LEVEL
from penstock_services.estimator.core.resources.memory_kills import REASON
from penstock_services.estimator.core.runs import EtaAtHalf, FinishedRun

WORST = 10
OWNERS = 10
STRETCHES = 8  # over which drift is shown
FEWEST_RUNS = 3  # of an owner, to be named as one who over-asks
OVER_ASKED = 1.5  # times what was used, by the median
USER = "user"
MOST_LEFT_MS = 100 * 366 * 86_400_000.0
NORMAL_95 = 1.96  # standard deviations around the mean that hold 95 %


class Field(NamedTuple):
    """One thing that an estimate says. `bound`: it is a promise that must hold, not a mean."""

    estimate: Callable[[FinishedRun], float]
    measured: Callable[[FinishedRun], float]
    bound: bool


def _said(name: str) -> Callable[[FinishedRun], float]:
    def of(run: FinishedRun) -> float:
        value = None if run.estimate is None else getattr(run.estimate, name)
        return math.nan if value is None else float(value)

    return of


def _measured(name: str) -> Callable[[FinishedRun], float]:
    return lambda run: float(getattr(run.measured, name))


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "gpu_memory_mib": Field(_said("gpu_memory_mib"), _measured("gpu_memory_mib"), bound=True),
        "host_memory_mib": Field(_said("host_memory_mib"), _measured("host_memory_mib"), bound=True),
        "cores": Field(_said("cores"), _measured("busy_cores"), bound=True),
        "gpu_utilisation_percent": Field(
            _said("gpu_utilisation_percent"), _measured("gpu_utilisation_percent"), bound=False
        ),
        "run_ms": Field(_said("run_ms"), _measured("run_ms"), bound=False),
    }
)


class Score(NamedTuple):
    """Of one field over some runs. Ratios are said / used."""

    runs: int
    median_ratio: float
    p95_off: float
    """The 95th percentile of how far off, as a factor ≥ 1."""
    broken: float
    """Share of runs that used more than was said; for bounds only, else NaN."""


class Share(NamedTuple):
    """Of some runs, with the interval that holds the true share 95 times in 100 (Wilson)."""

    of: int
    value: float
    low: float
    high: float


class Remaining(NamedTuple):
    """How well the remaining time was predicted, at half of each run."""

    runs: int
    level: float
    """What share the intervals promise to hold."""
    held: Share
    early: float
    """Share of the runs that ended before the low end."""
    late: float
    """After the high end."""
    median_off: float
    """By the median, as a factor ≥ 1."""
    p95_off: float


class Worst(NamedTuple):
    """One job whose estimate was far off."""

    job_id: str
    owner: str
    tier: str
    field: str
    estimate: float
    used: float


class OverAsking(NamedTuple):
    """An owner who asks for more than his jobs use."""

    owner: str
    field: str
    runs: int
    asked_to_used: float
    """Median ratio."""


class Accuracy(NamedTuple):
    """The whole report. `rejected`: reason (without numbers) → runs."""

    runs: int
    rejected: Mapping[str, int]
    tiers: Mapping[str, Mapping[str, Score]]
    """Tier → field → score. What the user asked for counts as tier `user`."""
    drift: Mapping[str, Sequence[float]]
    """Field → median of |log(said / used)| in up to `STRETCHES` equal stretches of runs, oldest first; users' left out."""
    over_asking: Sequence[OverAsking]
    worst: Sequence[Worst]
    remaining: Remaining | None = None
    """None: no run had its remaining time predicted."""
    killed: int = 0
    """Workers that took more host memory than they were promised and were killed for it; no runs."""


class Pair(NamedTuple):
    """What was said of one field of a run, and what it used; both > 0."""

    run: FinishedRun
    field: str
    tier: str
    """`USER` for what he asked for himself."""
    estimate: float
    used: float

    @property
    def ratio(self) -> float:
        """said / used."""
        return self.estimate / self.used

    @property
    def off(self) -> float:
        """|log(said / used)|."""
        return abs(math.log(self.estimate / self.used))


def accuracy_of(runs: Sequence[FinishedRun]) -> Accuracy:
    """Runs in the order in which they ended."""
    ended = len(runs)
    runs = [run for run in runs if not run.rejected.startswith(REASON)]
    aside: dict[str, int] = {}
    for run in runs:
        if run.rejected:
            reason = run.rejected.partition(":")[0]
            aside[reason] = aside.get(reason, 0) + 1
    pairs = pairs_of(runs)
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.tier, pair.field), []).append(pair)
    tiers: dict[str, dict[str, Score]] = {}
    for tier, name in sorted(groups, key=lambda group: (group[0], list(FIELDS).index(group[1]))):
        tiers.setdefault(tier, {})[name] = score(name, groups[tier, name])
    estimated = [pair for pair in pairs if pair.tier != USER]
    worst = _worst(estimated)
    return Accuracy(
        len(runs),
        dict(sorted(aside.items())),
        tiers,
        {name: _drift([pair for pair in estimated if pair.field == name]) for name in FIELDS},
        _over_asking([pair for pair in pairs if pair.tier == USER]),
        [
            Worst(pair.run.job_id, pair.run.info.owner, pair.tier, pair.field, pair.estimate, pair.used)
            for pair in worst
        ],
        remaining([run.eta for run in runs if run.eta is not None]),
        ended - len(runs),
    )


def _worst(pairs: Sequence[Pair]) -> list[Pair]:
    """Of each job's kind and field only the worst, so that one command that ran often leaves room for others."""
    found: dict[tuple[bytes, str], Pair] = {}
    for pair in sorted(pairs, key=lambda pair: (-pair.off, pair.run.job_id, pair.field)):
        found.setdefault((pair.run.info.key, pair.field), pair)
    return list(found.values())[:WORST]


def pairs_of(runs: Sequence[FinishedRun]) -> list[Pair]:
    """Of the sound ones, in their order."""
    return [pair for run in runs if not run.rejected for pair in _pairs(run)]


def _pairs(run: FinishedRun) -> list[Pair]:
    """Fields that were both said and measured; 0 says nothing (no demand on the card's size, nothing seen)."""
    if run.estimate is None:
        return []
    found = []
    for name, field in FIELDS.items():
        said, used = field.estimate(run), field.measured(run)
        if said > 0 and used > 0 and not math.isinf(said):
            found.append(Pair(run, name, USER if name in run.info.asked else run.estimate.tier, said, used))
    return found


def score(name: str, pairs: Sequence[Pair]) -> Score:
    """At least one pair."""
    ratios = sorted(pair.ratio for pair in pairs)
    broken = sum(pair.used > pair.estimate for pair in pairs) / len(pairs) if FIELDS[name].bound else math.nan
    return Score(len(pairs), median(ratios), math.exp(_p95([pair.off for pair in pairs])), broken)


def share(count: int, of: int) -> Share:
    """`of` ≥ 1. Wilson's interval: honest for few runs and near 0 and 1, where the normal one is not."""
    value, weight = count / of, NORMAL_95**2 / of
    middle = (value + weight / 2) / (1 + weight)
    half = NORMAL_95 * math.sqrt(value * (1 - value) / of + weight / (4 * of)) / (1 + weight)
    return Share(of, value, max(0.0, middle - half), min(1.0, middle + half))


def bounded_eta(eta: EtaAtHalf) -> EtaAtHalf | None:
    """With times from a millisecond to a century, so that every ratio of them is a number; None where nothing was left."""
    if not eta.actual_ms > 0:
        return None
    return EtaAtHalf(*(min(max(ms, 1.0), MOST_LEFT_MS) for ms in eta))


def remaining(etas: Sequence[EtaAtHalf]) -> Remaining | None:
    """Of runs whose remaining time was predicted, in `bounded_eta` numbers; None for none."""
    usable = [one for one in map(bounded_eta, etas) if one is not None]
    if not usable:
        return None
    early = sum(one.actual_ms < one.low_ms for one in usable)
    late = sum(one.actual_ms > one.high_ms for one in usable)
    off = [abs(math.log(one.left_ms / one.actual_ms)) for one in usable]
    held = share(len(usable) - early - late, len(usable))
    early_share, late_share = early / len(usable), late / len(usable)
    return Remaining(
        len(usable), LEVEL, held, early_share, late_share, math.exp(median(off)), math.exp(_p95(off))
    )


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)]


def _drift(pairs: Sequence[Pair]) -> list[float]:
    count = min(STRETCHES, len(pairs))
    edges = [len(pairs) * part // count for part in range(count + 1)] if count else []
    return [median(pair.off for pair in pairs[low:high]) for low, high in pairwise(edges)]


def _over_asking(pairs: Sequence[Pair]) -> list[OverAsking]:
    by_owner: dict[tuple[str, str], list[float]] = {}
    for pair in pairs:
        by_owner.setdefault((pair.run.info.owner, pair.field), []).append(pair.ratio)
    found = [
        OverAsking(owner, field, len(ratios), median(ratios))
        for (owner, field), ratios in by_owner.items()
        if len(ratios) >= FEWEST_RUNS and median(ratios) >= OVER_ASKED
    ]
    return sorted(found, key=lambda one: (-one.asked_to_used, one.owner, one.field))[:OWNERS]
