"""Prior distribution of a model's step times before any measurement, learned from other models."""

from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats
from penstock_services.estimator.core.records.placements import Points
from penstock_services.estimator.core.step_time.physics import PARAMETERS

RESIDUAL = (
    "shape",
    "nodes_reach",
    "gpus_reach",
    "batch_reach",
    "placement",
    "counts",
    "placement_batch_reach",
    "compute",
    "compute_batch_reach",
    "compute_widest_reach",
    "cell",
    "noise",
)
"""Parameters of the residual: standard deviations of ln t, and length scales in ln nodes, ln GPUs, ln batch
and GPUs."""

# Set by hand, wide on purpose: a step takes 1 ms to a day; a factor of 4 either way on its synchronisation.
_MEAN = (0.0, 0.0, -2.5, -0.5, -1.5, 0.3, 1.0, 0.5, 0.3, 0.0, 0.0)
_SPREAD = (5.0, 1.5, 1.0, 1.5, 1.0, 0.4, 0.5, 0.3, 0.2, 0.3, 1.0)  # likewise
_RESIDUAL = (0.15, 0.5, 0.7, 1.0, 0.06, 0.06, 1.0, 0.03, 0.7, 1.5, 0.06, 0.03)  # likewise


class Prior(NamedTuple):
    """`mean`, `spread`: of each of PARAMETERS, as normal distributions. `residual`: of each of RESIDUAL, > 0.

    Tuples of floats, so that it is stored and hashed as JSON.
    """

    mean: tuple[float, ...]
    spread: tuple[float, ...]
    residual: tuple[float, ...]
    models: int = 0
    """Number of measured models from which it was learned."""


WIDE = Prior(_MEAN, _SPREAD, _RESIDUAL)
"""The prior before any model was measured."""

assert len(_MEAN) == len(_SPREAD) == len(PARAMETERS), "one belief per parameter"
assert len(_RESIDUAL) == len(RESIDUAL), "one scale per part of the residual"


class Located(NamedTuple):
    """Points and the share of synchronisation in each step there, shape (cells,)."""

    points: Points
    sync_share: Floats


def covariance(residual: Floats, one: Located, other: Located) -> Floats:
    """Of the residuals of ln t at `one` (rows) and `other` (columns), without the noise of a measurement.

    Most of the deviation is in the time of synchronisation; it counts by its share in the step. It is
    correlated over placements of like size within one regime (one, two, more nodes), over the same GPU counts
    per node in any order, and over the same placement; always at like batches. The remainder is the deviation
    of computing.
    """
    shape, nodes_reach, gpus_reach, batch_reach, place, counts, place_reach, compute, c_batch, c_wide = (
        residual[:10]
    )
    a, b = one.points, other.points
    batches = _apart(np.log(a.batch), np.log(b.batch))
    regime = np.minimum(a.nodes, 3.0)[:, None] == np.minimum(b.nodes, 3.0)
    sizes = (_apart(np.log(a.nodes), np.log(b.nodes)) / nodes_reach) ** 2
    sizes += (_apart(np.log(a.gpus), np.log(b.gpus)) / gpus_reach) ** 2
    found = regime * np.exp(-0.5 * sizes) * (shape**2 / (1.0 + (batches / batch_reach) ** 2))
    same = counts**2 * (a.counts[:, None] == b.counts) + place**2 * (a.ring[:, None] == b.ring)
    found += same / (1.0 + (batches / place_reach) ** 2)
    found *= one.sync_share[:, None] * other.sync_share
    wide = (_apart(a.widest, b.widest) / c_wide) ** 2 + (batches / c_batch) ** 2
    return np.asarray(found + compute**2 * np.exp(-0.5 * wide))


def prior_variance(residual: Floats, at: Located) -> Floats:
    """The diagonal of `covariance(at, at)`, shape (cells,)."""
    shape, place, counts, compute = residual[[0, 4, 5, 7]]
    return np.asarray(at.sync_share**2 * (shape**2 + place**2 + counts**2) + compute**2)


def noise_variance(residual: Floats, at: Located) -> Floats:
    """Variance of one measurement of ln t, shape (cells,): from the clock and the network in that run."""
    cell, noise = residual[10], residual[11]
    return np.asarray(noise**2 + (cell * at.sync_share) ** 2)


def _apart(one: Floats, other: Floats) -> Floats:
    return np.asarray(one[:, None] - other[None, :])
