"""Means of repeated runs with Student's confidence intervals, and paired differences."""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.special import stdtrit

CONFIDENCE = 0.95
SLACK = 1e-9  # relative to a mean: the error of summing in another order


class Mean(NamedTuple):
    """Mean of `n` runs. `half_width`: of the confidence interval; None with one run of a varying figure."""

    mean: float
    half_width: float | None
    n: int

    @property
    def low(self) -> float:
        return self.mean - (self.half_width or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half_width or 0.0)

    def meets(self, other: "Mean") -> bool:
        """Whether the intervals overlap; an unknown interval overlaps every other."""
        if self.half_width is None or other.half_width is None:
            return True
        slack = SLACK * max(abs(self.mean), abs(other.mean))
        return self.low <= other.high + slack and other.low <= self.high + slack


def mean_of(values: Sequence[float], *, exact: bool = False) -> Mean:
    """The mean with Student's interval at 95 %: `t(0.975, n−1) · s / √n`. At least one value.

    `exact`: the values are deterministic; then one is enough, and the interval is 0.
    """
    count = len(values)
    if exact:
        return Mean(values[0], 0.0, count)
    if count == 1:
        return Mean(values[0], None, 1)
    half_width = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / sqrt(count)
    return Mean(fmean(values), half_width, count)


def paired(
    values: Mapping[int, float], base: Mapping[int, float], *, exact: tuple[bool, bool]
) -> Mean | None:
    """Mean of the differences to `base`, seed by seed; None if they have no seed in common.

    `exact`: whether either is deterministic: its one value then stands for every seed.
    """
    own = dict.fromkeys(base, next(iter(values.values()))) if exact[0] and not exact[1] and values else values
    other = dict.fromkeys(values, next(iter(base.values()))) if exact[1] and not exact[0] and base else base
    seeds = sorted(own.keys() & other.keys())
    if not seeds:
        return None
    return mean_of([own[seed] - other[seed] for seed in seeds], exact=all(exact))
