"""Our throughput model: the shape that physics gives, and a residual learned from what was measured.

Ideal: the posterior of every parameter and of the residual. Departure: parameters are linearised around the most
likely ones, so that mean and variance of ln t are those of one Gaussian process, in closed form.
"""

from math import ceil, exp, inf, log, sqrt
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.eta.quantiles import normal_quantile, student_quantile
from penstock_services.estimator.core.step_time.fit import (
    BELIEF,
    Explained,
    parameters_of,
    scales_of,
    spread_of,
)
from penstock_services.estimator.core.step_time.physics import shape_of, slopes
from penstock_services.estimator.core.step_time.placements import (
    Catalogue,
    Cell,
    Floats,
    Points,
    Table,
)
from penstock_services.estimator.core.step_time.prior import (
    Located,
    Prior,
    covariance,
    noise_variance,
    prior_variance,
)

MAX_CELLS = 1_000  # a fit costs cells³, an answer cells²: about 0.3 ms with so many
OWN_SCALES_FROM = 60  # cells; fewer say too little about twelve scales
OWN_SCALES_CELLS = 200  # the scales are sought on so many, drawn by the caller's generator
OWN_SCALES_ROUNDS = 6
CELLS_PER_PLACEMENT = 4  # in that sample, on average
SCALE_RUNS = 10.0  # weight, in cells, of the belief that the residual's scale is the one expected
HELD_OUT_FROM = 60  # cells; fewer leave-one-out errors make no quantile


class StepTimes(NamedTuple):
    """Of each cell: ln of the median step in seconds, and the standard deviation of one measurement's ln around it."""

    log_s: Floats
    spread: Floats


class StepModel:
    """Step times of one model on one kind of GPU. Built by `fit`; answers and never changes."""

    def __init__(self, table: Table, prior: Prior, reference_batch: float, parameters: Floats) -> None:
        self.table, self.prior, self.reference_batch = table, prior, reference_batch
        self.parameters = parameters
        self._residual = np.array(prior.residual)
        self._variances = np.array(prior.spread) ** 2
        self._off = np.array(prior.mean) - parameters
        self._catalogue = Catalogue(table.cells)
        shape, self._slopes, self._at = self._linearised(self._catalogue.points(table.cells, reference_batch))
        covered = spread_of(self._residual, self._at, table)
        covered += self._slopes * self._variances @ self._slopes.T
        self._whiten = np.linalg.inv(np.linalg.cholesky(covered))
        rest = table.log_s - shape - self._slopes @ self._off
        white = self._whiten @ rest
        self._weights = self._whiten.T @ white
        cells = len(table.cells)
        self._freedom = SCALE_RUNS + cells
        self.scale = sqrt((SCALE_RUNS + float(white @ white)) / self._freedom)
        """Of the residual, in units of what was expected."""
        precision = np.einsum("ij,ij->j", self._whiten, self._whiten)
        self._held_out = np.sort(np.abs(self._weights) / np.sqrt(precision)) if cells else np.zeros(0)
        """|error| / expected standard deviation of each cell, predicted from all others."""

    def steps(self, cells: list[Cell]) -> StepTimes:
        """Shape (cells,). Cost: cells measured² per cell asked."""
        points = self._catalogue.points(cells, self.reference_batch)
        shape, slope, at = self._linearised(points)
        together = self._together(slope, at)
        variance = prior_variance(self._residual, at) + slope**2 @ self._variances
        variance += noise_variance(self._residual, at)
        variance -= ((self._whiten @ together.T) ** 2).sum(axis=0)
        log_s = shape + slope @ self._off + together @ self._weights
        return StepTimes(log_s, np.sqrt(np.maximum(variance, 1e-12)))

    def doubt(self, cells: list[Cell]) -> tuple[Floats, Floats]:
        """(covariance of ln t over `cells`, shape (cells, cells); variance of one measurement, shape (cells,))."""
        points = self._catalogue.points(cells, self.reference_batch)
        _, slope, at = self._linearised(points)
        known = self._whiten @ self._together(slope, at).T
        before: Floats = covariance(self._residual, at, at) + slope * self._variances @ slope.T
        return np.asarray(before - known.T @ known), noise_variance(self._residual, at)

    def parameter_variances(self) -> Floats:
        """What is left of the prior's variances after measuring, shape (PARAMETERS,)."""
        known = self._whiten @ (self._slopes * self._variances)
        return np.asarray(self._variances - (known**2).sum(axis=0))

    def factor(self, level: float) -> float:
        """How many expected standard deviations hold a measurement with probability `level`, 0 < level < 1.

        With enough cells the quantile of their leave-one-out errors, with the correction of a finite sample
        (conformal); else Student's t, since the scale itself is known from few cells only. It is then never taken
        for less than expected: parameters were fitted to those very cells, and new ones lie further off.
        """
        cells = len(self._held_out)
        if cells < HELD_OUT_FROM:
            return max(self.scale, 1.0) * student_quantile((1.0 + level) / 2.0, self._freedom)
        rank = ceil((cells + 1) * level)
        if rank > cells:
            return max(float(self._held_out[-1]), normal_quantile((1.0 + level) / 2.0))
        return float(self._held_out[rank - 1])

    def _together(self, slope: Floats, at: Located) -> Floats:
        """Covariance of `at` (rows) with what was measured (columns)."""
        return np.asarray(covariance(self._residual, at, self._at) + slope * self._variances @ self._slopes.T)

    def _linearised(self, points: Points) -> tuple[Floats, Floats, Located]:
        shape = shape_of(self.parameters, points)
        return shape.log_s, slopes(self.parameters, points), Located(points, shape.sync_share)


def fit(table: Table, prior: Prior, reference_batch: float, chance: np.random.Generator) -> StepModel:
    """The model of these cells (none are allowed: then the prior speaks). `chance` picks cells for the scales.

    Raises `ValueError` for more than MAX_CELLS or a reference batch that is not above 0.
    """
    if len(table.cells) > MAX_CELLS:
        raise ValueError(f"{len(table.cells)} cells: at most {MAX_CELLS}; give the most recent ones")
    if not 0 < reference_batch < inf:
        raise ValueError(f"reference batch {reference_batch} is not above 0")
    if len(table.cells) >= OWN_SCALES_FROM:
        some = sample(table, OWN_SCALES_CELLS, chance)
        explained = [Explained(some, reference_batch, prior)]
        prior = prior._replace(residual=scales_of(explained, prior.residual, BELIEF, OWN_SCALES_ROUNDS))
    points = Catalogue(table.cells).points(table.cells, reference_batch)
    return StepModel(table, prior, reference_batch, parameters_of(table, points, prior))


def sample(whole: Table, most: int, chance: np.random.Generator) -> Table:
    """At most so many of its cells, from few placements: only several cells of one tell what it has of its own.

    Those on one node are always among them, for they are few and tell what computing costs.
    """
    placements = sorted({cell.placement for cell in whole.cells}, key=lambda shape: (len(shape), shape))
    drawn = chance.permutation(len(placements))[: most // CELLS_PER_PLACEMENT]
    kept = {placements[index] for index in drawn} | {shape for shape in placements if len(shape) == 1}
    inside = np.array([index for index, cell in enumerate(whole.cells) if cell.placement in kept])
    chosen = np.sort(chance.permutation(inside)[:most])
    return Table(tuple(whole.cells[index] for index in chosen), whole.log_s[chosen], whole.runs[chosen])


def reference_of(batches: tuple[float, float]) -> float:
    """The reference for local batches from `batches[0]` to `batches[1]`: their geometric mean."""
    return exp((log(batches[0]) + log(batches[1])) / 2.0)
