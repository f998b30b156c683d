"""Fitting of step models: maximum a posteriori by Gauss-Newton, and the prior from measured networks
(empirical Bayes)."""

from collections.abc import Callable, Sequence
from math import exp, inf, log

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import (
    Floats,
    Integers,
    negative_log_likelihood,
)
from penstock_services.estimator.core.learning.limits import MAX_SCALE, MAX_SPREADS
from penstock_services.estimator.core.records.placements import Table, points
from penstock_services.estimator.core.step_time.model import StepModel
from penstock_services.estimator.core.step_time.physics import LEVEL, shape_of, slopes
from penstock_services.estimator.core.step_time.prior import WIDE, Located, Prior, covariance, noise_variance

MAX_CELLS = 1_000  # a fit costs cells³, an answer cells²: about 0.3 ms with so many
MAX_ROUNDS = 30  # of Gauss-Newton; it ends after about 10
MIN_GAIN = 1e-4  # nats: minimum gain of a round
MAX_HALVINGS = 8  # 16 change nothing; with 4 p95 of 15 measured cells is 18.2 % instead of 17.2 %
SEARCH_STEP = 0.5  # in ln of a scale
SEARCH_ROUNDS = 6  # 3 are as good; with 12 that p95 is 19.3 %
CELLS_PER_PLACEMENT = 4  # in that sample, on average

TEACHING_CELLS = 250  # per network for its parameters
SCALE_CELLS = 150  # per network for the scales of the residual
SCALE_BELIEF = 1.0  # prior standard deviation of ln of a scale around the one set by hand
MEAN_MODELS = 1.0  # weight, in networks, of the means set by hand
SPREAD_MODELS = 2.0  # the same for spreads; with 1 or 4 that p95 is 18.0 or 18.6 %


def fit(table: Table, prior: Prior, reference_batch: float) -> StepModel:
    """The model of these cells (without any, the prior answers).

    Raises `ValueError` for more than MAX_CELLS or a reference batch that is not above 0.
    """
    if len(table.cells) > MAX_CELLS:
        raise ValueError(f"{len(table.cells)} cells: at most {MAX_CELLS}; give the most recent ones")
    if not 0 < reference_batch < inf:
        raise ValueError(f"reference batch {reference_batch} is not above 0")
    return StepModel(table, prior, reference_batch, _parameters_of(table, reference_batch, prior))


def learn_prior(tables: Sequence[Table], generator: np.random.Generator) -> Prior:
    """From widely measured networks (one table each); WIDE where there are none. `generator` samples the
    cells.

    The effect of one table is bounded, for any values: on a parameter by MAX_SPREADS of the spreads set by
    hand over the number of tables, on a scale by MAX_SCALE times the one set by hand.
    """
    wide = [table for table in tables if len(table.cells) > len(WIDE.mean)]
    if not wide:
        return WIDE
    models = []
    for table in wide:
        some = _part(table, np.sort(generator.permutation(len(table.cells))[:TEACHING_CELLS]))
        models.append(fit(some, WIDE, reference_batch(table)))
    explained = [
        _Explained(sample(table, SCALE_CELLS, generator), model.reference_batch)
        for table, model in zip(wide, models, strict=True)
    ]
    scales = np.array(_scales_of(explained)) / WIDE.residual
    residual = np.clip(scales, 1.0 / MAX_SCALE, MAX_SCALE) * WIDE.residual
    by_hand, spread = np.array(WIDE.mean), np.array(WIDE.spread)
    limit = MAX_SPREADS * spread
    found = np.array([np.clip(model.parameters, by_hand - limit, by_hand + limit) for model in models])
    mean = (MEAN_MODELS * by_hand + found.sum(0)) / (len(models) + MEAN_MODELS)
    left = np.array([model.parameter_variances() for model in models])
    square = SPREAD_MODELS * spread**2 + ((found - mean) ** 2 + left).sum(0)
    variance = square / (len(models) + SPREAD_MODELS)
    mean[LEVEL], variance[LEVEL] = by_hand[LEVEL], spread[LEVEL] ** 2  # each network's own
    return Prior(
        tuple(mean.tolist()), tuple(np.sqrt(variance).tolist()), tuple(residual.tolist()), len(models)
    )


def reference_batch(table: Table) -> float:
    """Geometric mean of the smallest and the largest local batch that was measured (at least one cell)."""
    batches = [cell.local_batch for cell in table.cells]
    return exp((log(min(batches)) + log(max(batches))) / 2.0)


def sample(whole: Table, at_most: int, generator: np.random.Generator) -> Table:
    """At most so many of its cells, from few placements: only several cells of a placement show its own
    residual.

    Cells on one node are always included: they are few and show the cost of computing.
    """
    placements = sorted({cell.placement for cell in whole.cells}, key=lambda shape: (len(shape), shape))
    some = generator.permutation(len(placements))[: at_most // CELLS_PER_PLACEMENT]
    chosen = {placements[index] for index in some} | {shape for shape in placements if len(shape) == 1}
    inside = np.array([index for index, cell in enumerate(whole.cells) if cell.placement in chosen])
    return _part(whole, np.sort(generator.permutation(inside)[:at_most]))


def _part(table: Table, rows: Integers) -> Table:
    return Table(tuple(table.cells[row] for row in rows), table.log_s[rows], table.runs[rows])


def _parameters_of(table: Table, reference_batch: float, prior: Prior) -> Floats:
    """The most likely parameters, shape (PARAMETERS,); the prior's mean without any cells.

    Gauss-Newton with step halving on ln p(parameters | measured), the residual being a Gaussian process.
    """
    mean, precision = np.array(prior.mean), np.diag(1.0 / np.array(prior.spread) ** 2)
    residual, at = np.array(prior.residual), points(table.cells, reference_batch)
    found = mean.copy()
    if not table.cells:
        return found

    def loss(parameters: Floats) -> float:
        """-ln p(measured, parameters) without constants."""
        shape, off = shape_of(parameters, at), (parameters - mean) / prior.spread
        spread = _spread_of(residual, Located(at, shape.sync_share), table)
        return negative_log_likelihood(spread, table.log_s - shape.log_s) + 0.5 * float(off @ off)

    found[LEVEL] += float(np.median(table.log_s - shape_of(found, at).log_s))
    least = loss(found)
    for _ in range(MAX_ROUNDS):
        slope, shape = slopes(found, at), shape_of(found, at)
        weighted = np.linalg.solve(_spread_of(residual, Located(at, shape.sync_share), table), slope).T
        pull = weighted @ (table.log_s - shape.log_s) + precision @ (mean - found)
        move = np.linalg.solve(weighted @ slope + precision, pull)
        steps = (found + move / 2**halving for halving in range(MAX_HALVINGS))
        better = next(((there, here) for there in steps if (here := loss(there)) < least), None)
        if better is None:
            break
        found, gained, least = better[0], least - better[1], better[1]
        if gained < MIN_GAIN:
            break
    return found


def _spread_of(residual: Floats, at: Located, table: Table) -> Floats:
    """Covariance of the measurements around the shape of `physics`, shape (cells, cells)."""
    return covariance(residual, at, at) + np.diag(noise_variance(residual, at) / table.runs)


class _Explained:
    """One network's cells with its parameters fixed: the likelihood of the residual's scales."""

    def __init__(self, table: Table, reference: float) -> None:
        model = fit(table, WIDE, reference)
        shape, slope, self._at = model.linearised(table.cells)
        self._table = table
        self._off = table.log_s - shape
        self._from_parameters = slope * np.array(WIDE.spread) ** 2 @ slope.T

    def negative_log_likelihood(self, residual: Floats) -> float:
        """Of the cells, with the parameters as uncertain as in the prior."""
        return negative_log_likelihood(
            _spread_of(residual, self._at, self._table) + self._from_parameters, self._off
        )


def _scales_of(explained: list[_Explained]) -> tuple[float, ...]:
    """The scales of the residual, shape (RESIDUAL,), of the greatest posterior, with a prior around the ones
    set by hand."""
    middle = np.log(np.array(WIDE.residual))

    def loss(logs: Floats) -> float:
        off = (logs - middle) / SCALE_BELIEF
        return sum(model.negative_log_likelihood(np.exp(logs)) for model in explained) + 0.5 * float(
            off @ off
        )

    return tuple(np.exp(_coordinate_search(loss, middle)).tolist())


def _coordinate_search(loss: Callable[[Floats], float], start: Floats) -> Floats:
    """Along one axis after the other; a step that helps grows by half, a step that helps in neither direction
    is halved.

    Ends early, which leaves the scales near the prior: L-BFGS to its end explains the measured cells better
    and others worse (p95 of 15 measured cells 18.7 % instead of 16.9 %).
    """
    found, least = start.copy(), loss(start)
    steps = np.full(len(start), SEARCH_STEP)
    for _ in range(SEARCH_ROUNDS):
        for index in range(len(start)):
            for direction in (1.0, -1.0):
                there = found.copy()
                there[index] += direction * steps[index]
                if (here := loss(there)) < least:
                    found, least = there, here
                    steps[index] *= 1.5
                    break
            else:
                steps[index] /= 2.0
    return found
