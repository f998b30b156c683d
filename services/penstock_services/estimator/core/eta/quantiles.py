"""Quantiles of the normal distribution, and of observed errors (conformal prediction)."""

from collections.abc import Sequence
from math import ceil, floor, isfinite
from statistics import NormalDist

NORMAL = NormalDist()
LEVEL = 0.9  # of every interval of remaining time
MAX_LEFT_MS = 3.2e12  # a hundred years
ENOUGH_ERRORS = 40  # fewer give no quantile of 90 %
MAX_ERRORS = 10_000  # of each kind


def normal_quantile(level: float) -> float:
    """0 < level < 1. Raises `StatisticsError` otherwise."""
    return NORMAL.inv_cdf(level)


def edges(errors: Sequence[float], level: float, spread: float) -> tuple[float, float]:
    """The interval that holds a new error with probability `level`. `errors`: signed, rising, of held-out
    cases.

    Their quantiles with the correction of a finite sample; by a normal of `spread` while fewer than
    ENOUGH_ERRORS are known.
    """
    count = len(errors)
    if count < ENOUGH_ERRORS:
        wide = normal_quantile((1.0 + level) / 2.0) * spread
        return -wide, wide
    low = floor((count + 1) * (1.0 - level) / 2.0)
    high = ceil((count + 1) * (1.0 + level) / 2.0)
    return errors[max(low, 1) - 1], errors[min(high, count) - 1]


def reach(errors: Sequence[float], level: float) -> float:
    """As `edges`, of unsigned errors in units of the expected error: the factor that covers a new one."""
    count = len(errors)
    if count < ENOUGH_ERRORS:
        return normal_quantile((1.0 + level) / 2.0)
    return errors[min(ceil((count + 1) * level), count) - 1]


def thinned(errors: Sequence[float]) -> tuple[float, ...]:
    """Rising, without values that are not finite, at most MAX_ERRORS at even ranks."""
    known = sorted(error for error in errors if isfinite(error))
    if len(known) <= MAX_ERRORS:
        return tuple(known)
    return tuple(known[round(place * (len(known) - 1) / (MAX_ERRORS - 1))] for place in range(MAX_ERRORS))
