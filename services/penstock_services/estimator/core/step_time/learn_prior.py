"""What measured models teach about the next one (empirical Bayes)."""

from collections.abc import Sequence

import numpy as np

from penstock_services.estimator.core.step_time.fit import Explained, parameters_of, scales_of
from penstock_services.estimator.core.step_time.model import StepModel, reference_of, sample
from penstock_services.estimator.core.step_time.physics import LEVEL
from penstock_services.estimator.core.step_time.placements import Catalogue, Integers, Table
from penstock_services.estimator.core.step_time.prior import WIDE, Prior

TEACHING_CELLS = 250  # per model for its parameters
SCALE_CELLS = 150  # per model for the scales of the residual
SCALE_ROUNDS = 6
SCALE_BELIEF = 1.0  # standard deviation of ln of a scale around the one set by hand
MEAN_MODELS = 1.0  # weight, in models, of the beliefs set by hand
SPREAD_MODELS = 2.0
MAX_SPREADS = 3.0
MAX_SCALE = 8.0


def learn_prior(tables: Sequence[Table], chance: np.random.Generator) -> Prior:
    """From models measured widely (one table each); WIDE where there are none. `chance` picks the cells.

    What one table can move is bounded, whatever it holds: a parameter by MAX_SPREADS of the spreads set by hand over
    the number of tables, a scale to MAX_SCALE times the one set by hand.
    """
    taught = [table for table in tables if len(table.cells) > len(WIDE.mean)]
    if not taught:
        return WIDE
    models = [_own(table, chance) for table in taught]
    explained = [
        Explained(sample(table, SCALE_CELLS, chance), model.reference_batch, WIDE)
        for table, model in zip(taught, models, strict=True)
    ]
    scales = np.array(scales_of(explained, WIDE.residual, SCALE_BELIEF, SCALE_ROUNDS)) / WIDE.residual
    residual = np.clip(scales, 1.0 / MAX_SCALE, MAX_SCALE) * WIDE.residual
    by_hand, spread = np.array(WIDE.mean), np.array(WIDE.spread)
    found = [
        np.clip(model.parameters, by_hand - MAX_SPREADS * spread, by_hand + MAX_SPREADS * spread)
        for model in models
    ]
    mean, square = MEAN_MODELS * by_hand, SPREAD_MODELS * spread**2
    mean = (mean + sum(found)) / (len(models) + MEAN_MODELS)
    for parameters, model in zip(found, models, strict=True):
        square = square + (parameters - mean) ** 2 + model.parameter_variances()
    variance = square / (len(models) + SPREAD_MODELS)
    mean[LEVEL], variance[LEVEL] = by_hand[LEVEL], spread[LEVEL] ** 2  # each model's own
    return Prior(
        tuple(mean.tolist()), tuple(np.sqrt(variance).tolist()), tuple(residual.tolist()), len(models)
    )


def reference_batch(table: Table) -> float:
    """From the smallest to the largest local batch that was measured (at least one cell)."""
    batches = [cell.local_batch for cell in table.cells]
    return reference_of((min(batches), max(batches)))


def _own(table: Table, chance: np.random.Generator) -> StepModel:
    some, reference = _draw(table, TEACHING_CELLS, chance), reference_batch(table)
    points = Catalogue(some.cells).points(some.cells, reference)
    return StepModel(some, WIDE, reference, parameters_of(some, points, WIDE))


def _draw(table: Table, most: int, chance: np.random.Generator) -> Table:
    return _part(table, np.sort(chance.permutation(len(table.cells))[:most]))


def _part(table: Table, kept: Integers) -> Table:
    return Table(tuple(table.cells[index] for index in kept), table.log_s[kept], table.runs[kept])
