"""Step time model of one network on one kind of GPU: a parametric shape from physics, and a Gaussian process
for the residual.

Ideal: the posterior of every parameter and of the residual. Departure: parameters are linearised around the
most likely ones, so that mean and variance of ln t are those of one Gaussian process, in closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, sqrt
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from penstock_services.estimator.core.learning.gaussian_process import Floats, Posterior
from penstock_services.estimator.core.records.placements import Cell, Table, points
from penstock_services.estimator.core.step_time.physics import PARAMETERS, shape_of, slopes
from penstock_services.estimator.core.step_time.prior import (
    Located,
    Prior,
    covariance,
    noise_variance,
    prior_variance,
)

SCALE_RUNS = 10.0  # weight, in cells, of the prior that the residual's scale is the expected one
HELD_OUT_FROM = 60  # cells; fewer leave-one-out errors give no quantile


class StepTimes(NamedTuple):
    """Of each cell: ln of the median step in seconds, and the standard deviation of one measurement's ln
    around it."""

    log_s: Floats
    spread: Floats


@dataclass(frozen=True)
class StepModel:
    """Built by `fit`. Without cells it answers from the prior alone."""

    table: Table
    prior: Prior
    reference_batch: float
    parameters: Floats

    def steps(self, cells: Sequence[Cell]) -> StepTimes:
        """Shape (cells,). Cost: cells measured² per cell asked."""
        shape, slope, at = self.linearised(cells)
        before = prior_variance(self._residual, at) + slope**2 @ self._variances
        mean, variance = self.posterior.predict(self.together(slope, at), before)
        return StepTimes(
            shape + slope @ self._off + mean, np.sqrt(variance + noise_variance(self._residual, at))
        )

    def together(self, slope: Floats, at: Located) -> Floats:
        """Covariance of ln t at `at` (rows) with the measured cells (columns)."""
        _, slopes_, here = self._measured
        return np.asarray(covariance(self._residual, at, here) + slope * self._variances @ slopes_.T)

    @cached_property
    def posterior(self) -> Posterior:
        """Posterior of ln t less its shape, at the measured cells."""
        shape, slope, at = self._measured
        noise = noise_variance(self._residual, at) / self.table.runs
        return Posterior(self.together(slope, at), noise, self.table.log_s - shape - slope @ self._off)

    def parameter_variances(self) -> Floats:
        """Posterior variances of the parameters, shape (PARAMETERS,)."""
        known = self.posterior.root @ (self._measured[1] * self._variances)
        return np.asarray(self._variances - (known**2).sum(axis=0))

    @cached_property
    def scale(self) -> float:
        """Scale of the residual, in units of the expected scale."""
        fit = float(self.posterior.y @ self.posterior.alpha)
        return sqrt((SCALE_RUNS + fit) / (SCALE_RUNS + len(self.table.cells)))

    @cached_property
    def _held_out(self) -> Floats:
        """|error| / expected standard deviation of each cell when predicted from all others; rising."""
        error, variance = self.posterior.leave_one_out()
        return np.sort(np.abs(error) / np.sqrt(variance))

    def factor(self, level: float) -> float:
        """Number of expected standard deviations that covers a measurement with probability `level`, 0 <
        level < 1.

        The quantile of the cells' leave-one-out errors, with the correction of a finite sample (conformal);
        where the cells are too few for it, Student's t of their root mean square. With few cells at least
        Student's t of the scale of all of them, which is then never taken for less than expected. Wider by
        √(1 + PARAMETERS / cells): the parameters were fitted to these cells, and new ones lie further off.
        """
        cells, both = len(self.table.cells), (1.0 + level) / 2.0
        few = (
            max(self.scale, 1.0) * float(stdtrit(SCALE_RUNS + cells, both)) if cells < HELD_OUT_FROM else 0.0
        )
        if cells < 2:
            return few
        rank, errors = ceil((cells + 1) * level), self._held_out
        far = float(errors[min(rank, cells) - 1])
        if rank > cells:
            far = max(
                far, float(stdtrit(cells - 1, both)) * sqrt(float((errors**2).mean())), float(ndtri(both))
            )
        return max(few, far) * sqrt(1 + len(PARAMETERS) / cells)

    @cached_property
    def _residual(self) -> Floats:
        return np.array(self.prior.residual)

    @cached_property
    def _variances(self) -> Floats:
        return np.array(self.prior.spread) ** 2

    @cached_property
    def _off(self) -> Floats:
        return np.array(self.prior.mean) - self.parameters

    @cached_property
    def _measured(self) -> tuple[Floats, Floats, Located]:
        return self.linearised(self.table.cells)

    def linearised(self, cells: Sequence[Cell]) -> tuple[Floats, Floats, Located]:
        """Linearisation of ln t: its shape, the slopes by parameter, and where the cells lie."""
        at = points(cells, self.reference_batch)
        shape = shape_of(self.parameters, at)
        return shape.log_s, slopes(self.parameters, at), Located(at, shape.sync_share)
