"""Accuracy of estimates against measured use: per tier, over time, by owner, and the worst of them. Pure."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from penstock_services.estimator.core.eta.quantiles import LEVEL, MAX_LEFT_MS
from penstock_services.estimator.core.records.conditions import comparable, reasons
from penstock_services.estimator.core.records.runs import EtaAtHalf, FinishedRun
from penstock_services.estimator.core.resources.memory_kills import REASON

ROWS = 10  # of a table: the worst estimates, the owners who ask for most
STRETCHES = 8  # over which drift is shown
MIN_RUNS = 3  # of an owner, to be named as over-asking
OVER_ASKED = 1.5  # times the measured use, by the median
USER = "user"
NORMAL_95 = 1.96  # standard deviations around the mean that hold 95 %


class Field(NamedTuple):
    """One field of an estimate. `measured`: field of `Run` to compare with;
    `bound`: an upper bound, not a mean."""

    measured: str
    bound: bool


FIELDS: Mapping[str, Field] = MappingProxyType(
    {
        "gpu_memory_mib": Field("gpu_memory_mib", bound=True),
        "host_memory_mib": Field("host_memory_mib", bound=True),
        "cores": Field("busy_cores", bound=True),
        "gpu_utilisation_percent": Field("gpu_utilisation_percent", bound=False),
        "run_ms": Field("run_ms", bound=False),
    }
)


class Pair(NamedTuple):
    """One field of a run: its estimate and its use; both > 0."""

    run: FinishedRun
    field: str
    tier: str
    """`USER` for the user's own request."""
    estimate: float
    used: float

    @property
    def ratio(self) -> float:
        """estimate / use."""
        return self.estimate / self.used

    @property
    def off(self) -> float:
        """|log(estimate / use)|."""
        return abs(math.log(self.ratio))


class Share(NamedTuple):
    """Of some runs, with the interval that holds the true share 95 times in 100 (Wilson)."""

    of: int
    value: float
    low: float
    high: float


class Score(NamedTuple):
    """Of one field over some runs. Ratios are estimate / use."""

    runs: int
    median_ratio: float
    p95_off: float
    """The 95th percentile of the error, as a factor ≥ 1."""
    broken: float
    """Share of runs that used more than the estimate; for bounds only, else NaN."""


class Remaining(NamedTuple):
    """How well the remaining time was predicted, at half of each run."""

    runs: int
    level: float
    """Share of the runs that the intervals are meant to cover."""
    held: Share
    early: float
    """Share of the runs that ended before the low end."""
    late: float
    """Share of the runs that ended after the high end."""
    median_off: float
    """The median error, as a factor ≥ 1."""
    p95_off: float


class OverAsking(NamedTuple):
    """An owner whose requests exceed the use of the jobs."""

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
    """Tier → field → score. Users' requests count as tier `user`."""
    drift: Mapping[str, Sequence[float]]
    """Field → median of |log(estimate / used)| in up to `STRETCHES` equal stretches of runs, oldest first;
    without users' requests."""
    over_asking: Sequence[OverAsking]
    worst: Sequence[Pair]
    remaining: Remaining | None = None
    """None: no run had its remaining time predicted."""
    killed: int = 0
    """Workers that were killed for exceeding their promised host memory; they are no runs."""
    disturbed: Mapping[str, int] = MappingProxyType({})
    """Kind of disturbance → sound runs. A run may count for several;
    the fields that it does not teach are in `conditions.EXCLUDED`."""
    corrected: Mapping[str, int] = MappingProxyType({})
    """Kind of correction of a run time → sound runs."""


def accuracy_of(runs: Sequence[FinishedRun]) -> Accuracy:
    """Runs in the order in which they ended."""
    ended = len(runs)
    runs = [run for run in runs if not run.rejected.startswith(REASON)]
    pairs = pairs_of(runs)
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.tier, pair.field].append(pair)
    estimated = [pair for pair in pairs if pair.tier != USER]
    return Accuracy(
        len(runs),
        _counted(run.rejected.partition(":")[0] for run in runs if run.rejected),
        {
            tier: {name: score(name, groups[tier, name]) for name in FIELDS if (tier, name) in groups}
            for tier in sorted({tier for tier, _ in groups})
        },
        {name: _drift([pair.off for pair in estimated if pair.field == name]) for name in FIELDS},
        _over_asking([pair for pair in pairs if pair.tier == USER]),
        _worst(estimated),
        remaining([run.eta for run in runs if run.eta is not None]),
        ended - len(runs),
        _counted(why for run in runs if not run.rejected for why in reasons(run.measured.disturbed)),
        _counted(run.corrected for run in runs if not run.rejected and run.corrected),
    )


def _counted(reasons: Iterable[str]) -> Mapping[str, int]:
    return dict(sorted(Counter(reasons).items()))


def _worst(pairs: Sequence[Pair]) -> list[Pair]:
    """Of each job's key and field only the worst,
    so that one command that ran often does not fill the list."""
    found: dict[tuple[bytes, str], Pair] = {}
    for pair in sorted(pairs, key=lambda pair: (-pair.off, pair.run.job_id, pair.field)):
        found.setdefault((pair.run.info.key, pair.field), pair)
    return list(found.values())[:ROWS]


def pairs_of(runs: Sequence[FinishedRun]) -> list[Pair]:
    """Of the sound runs, in their order,
    fields that were both estimated and measured; 0 counts as neither."""
    found = []
    for run in runs:
        if run.rejected or run.estimate is None:
            continue
        for name, field in FIELDS.items():
            estimate, used = getattr(run.estimate, name) or 0.0, getattr(run.measured, field.measured)
            if not comparable(field.measured, run.measured.disturbed):
                continue
            if 0 < estimate < math.inf and used > 0:
                tier = USER if name in run.info.asked else run.estimate.tier
                found.append(Pair(run, name, tier, float(estimate), float(used)))
    return found


def score(name: str, pairs: Sequence[Pair]) -> Score:
    """At least one pair is required."""
    broken = sum(pair.used > pair.estimate for pair in pairs) / len(pairs)
    return Score(
        len(pairs),
        median(pair.ratio for pair in pairs),
        math.exp(_p95([pair.off for pair in pairs])),
        broken if FIELDS[name].bound else math.nan,
    )


def share(count: int, of: int) -> Share:
    """`of` ≥ 1. Wilson's interval: valid for few runs and near 0 and 1, where the normal one is not."""
    value, weight = count / of, NORMAL_95**2 / of
    middle = (value + weight / 2) / (1 + weight)
    half = NORMAL_95 * math.sqrt(value * (1 - value) / of + weight / (4 * of)) / (1 + weight)
    return Share(of, value, max(0.0, middle - half), min(1.0, middle + half))


def bounded_eta(eta: EtaAtHalf) -> EtaAtHalf | None:
    """With times from a millisecond to a century, so that every ratio of them is finite; None where no time
    was left."""
    if not eta.actual_ms > 0:
        return None
    return EtaAtHalf(*(min(max(ms, 1.0), MAX_LEFT_MS) for ms in eta))


def remaining(etas: Sequence[EtaAtHalf]) -> Remaining | None:
    """Over runs whose remaining time was predicted; None if there are none."""
    usable = [one for one in map(bounded_eta, etas) if one is not None]
    if not usable:
        return None
    count = len(usable)
    early = sum(one.actual_ms < one.low_ms for one in usable)
    late = sum(one.actual_ms > one.high_ms for one in usable)
    off = [abs(math.log(one.left_ms / one.actual_ms)) for one in usable]
    return Remaining(
        count,
        LEVEL,
        share(count - early - late, count),
        early / count,
        late / count,
        math.exp(median(off)),
        math.exp(_p95(off)),
    )


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def stretches(values: Sequence[Pair] | Sequence[float], count: int) -> list[tuple[int, int]]:
    """(first, end) of `count` parts of about equal length."""
    return list(pairwise(len(values) * part // count for part in range(count + 1))) if count else []


def _drift(off: Sequence[float]) -> list[float]:
    return [median(off[low:high]) for low, high in stretches(off, min(STRETCHES, len(off)))]


def _over_asking(pairs: Sequence[Pair]) -> list[OverAsking]:
    by_owner: dict[tuple[str, str], list[float]] = defaultdict(list)
    for pair in pairs:
        by_owner[pair.run.info.owner, pair.field].append(pair.ratio)
    found = [
        OverAsking(owner, field, len(ratios), median(ratios))
        for (owner, field), ratios in by_owner.items()
        if len(ratios) >= MIN_RUNS and median(ratios) >= OVER_ASKED
    ]
    return sorted(found, key=lambda one: (-one.asked_to_used, one.owner, one.field))[:ROWS]
