"""Comparison of profiles over seeds: means, confidence intervals, differences to the first profile."""

from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import NamedTuple

from penstock.simulator.meter import Figures
from penstock.simulator.runs import Result
from penstock.simulator.statistics import Mean, mean_of, paired

CLOCKED = frozenset({"events_per_s", "cpu_s", "wall_s"})
"""Figures measured with a real clock, which vary with the same seed."""
COUNTED = tuple(name for name in Figures._fields if name != "ledger_hash")


class Standing(NamedTuple):
    """Figures of one variant. `exact`: it is deterministic, so that one run stands for every seed."""

    name: str
    exact: bool
    results: Sequence[Result]
    means: Mapping[str, Mean]
    differences: Mapping[str, Mean]
    """Differences to the first profile, seed by seed;
    empty for the first itself, and if no seed is common."""


def deterministic(result: Result, *, seeded: bool) -> bool:
    """Whether every seed would give the same run. `seeded`: the trace or the cluster depends on the seed."""
    return not seeded and not result.used_rng


def compare(names: Iterable[str], results: Sequence[Result], *, seeded: bool) -> Sequence[Standing]:
    """Figures of the variants with at least one complete run, in the order given.
    Aborted runs do not count."""
    found: list[Standing] = []
    for name in names:
        own = sorted((one for one in results if one.name == name and one.whole), key=lambda one: one.seed)
        if not own:
            continue
        exact = deterministic(own[0], seeded=seeded)
        means = {key: mean_of(_values(own, key), exact=exact and key not in CLOCKED) for key in COUNTED}
        standing = Standing(name, exact, own, means, {})
        found.append(
            standing if not found else standing._replace(differences=_differences(found[0], standing))
        )
    return found


def _values(results: Iterable[Result], name: str) -> list[float]:
    return [float(getattr(result.figures, name)) for result in results]


def _differences(first: Standing, other: Standing) -> Mapping[str, Mean]:
    found: dict[str, Mean] = {}
    for name in COUNTED:
        if name in CLOCKED:
            continue
        own, base = (
            dict(zip((result.seed for result in one.results), _values(one.results, name), strict=True))
            for one in (other, first)
        )
        difference = paired(own, base, exact=(other.exact, first.exact))
        if difference is not None:
            found[name] = difference
    return found


def best_of(standings: Sequence[Standing], name: str, better: str) -> Mean | None:
    """The best mean; None if the figure has no better direction, or all are equal."""
    means = [standing.means[name] for standing in standings]
    if not better or all(isclose(mean.mean, means[0].mean) for mean in means):
        return None
    return (min if better == "low" else max)(means, key=lambda mean: mean.mean)
