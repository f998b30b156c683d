"""Prediction intervals for a new group: the first question about a GPU model, a network or a kind of
training.

Measurements come in groups, and the runs of known groups do not show how a new group deviates. So the groups
are the sample, not their runs: each is left out once, which gives the end that its own errors need, and a
bound on the end of one more group.
"""

from collections.abc import Iterable, Sequence
from math import sqrt

import numpy as np
from scipy.special import stdtrit

from penstock_services.estimator.core.learning.gaussian_process import Floats

MIN_GROUPS = 3  # two are too few for a spread
MIN_ERRORS = 5  # of a group; fewer give no end


def ends_of_new_group(
    errors: Iterable[Floats], level: float, confidence: float, independent: int | None = None
) -> tuple[float, float] | None:
    """(below, above), both ≥ 0: bounds on the errors of one more group with probability `level` on either
    side, in `confidence` of the groups. None for fewer than MIN_GROUPS with MIN_ERRORS, or below two
    `independent` ones.

    `errors`: of each group, left out: truth − prediction, any unit. `independent`: how many the groups count
    as, where some have much in common, as the GPU models of a generation; by default all. Source: prediction
    sets for two-layer hierarchical models (Dunn, Wasserman & Ramdas 2022). Departure: with so few groups a
    quantile over them is their largest end, which a new group exceeds once in n + 1 times; instead their ends
    are taken to be normal, as in Student's prediction interval.
    """
    usable = [one for one in errors if len(one) >= MIN_ERRORS]
    count = len(usable) if independent is None else min(independent, len(usable))
    if len(usable) < MIN_GROUPS or count < 2:
        return None
    return _end([-one for one in usable], level, confidence, count), _end(usable, level, confidence, count)


def _end(errors: Sequence[Floats], level: float, confidence: float, count: int) -> float:
    ends = np.array([np.quantile(one, level, method="higher") for one in errors])
    factor = float(stdtrit(count - 1, confidence)) * sqrt(1 + 1 / count)
    return max(float(ends.mean()) + factor * float(ends.std(ddof=1)), 0.0)
