"""Means and ratios over seeds with their 95 % intervals, by the bootstrap: seeds are resampled, those of two
policies in pairs."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

RESAMPLES = 2_000
Floats = NDArray[np.float64]
Interval = tuple[float, float] | None
"""None: of a single seed."""


def mean(values: Sequence[float]) -> tuple[float, Interval]:
    """Mean, and its interval over seeds."""
    return ratio(values, [1.0] * len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """Sum over sum, and its interval over seeds."""
    whole = sum(ours) / sum(theirs)
    if len(ours) == 1:
        return whole, None
    low, high = bootstrap(
        (ours, theirs), _quotient, paired=True, n_resamples=RESAMPLES, method="percentile", rng=0
    ).confidence_interval
    return whole, (float(low), float(high))


def less(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """By how many percent the sum is below theirs, and its interval over seeds."""
    whole, interval = ratio(ours, theirs)
    below = None if interval is None else (100 * (1 - interval[1]), 100 * (1 - interval[0]))
    return 100 * (1 - whole), below


def more(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval]:
    """By how many percent the sum is above theirs, and its interval over seeds."""
    whole, interval = ratio(ours, theirs)
    above = None if interval is None else (100 * (interval[0] - 1), 100 * (interval[1] - 1))
    return 100 * (whole - 1), above


def _quotient(over: Floats, under: Floats, axis: int = -1) -> Floats:
    quotient: Floats = over.sum(axis=axis) / under.sum(axis=axis)
    return quotient
