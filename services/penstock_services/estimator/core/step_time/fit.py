"""Finding the parameters and scales that explain what was measured: maximum a posteriori, by numpy alone."""

from collections.abc import Callable

import numpy as np

from penstock_services.estimator.core.step_time.physics import LEVEL, shape_of, slopes
from penstock_services.estimator.core.step_time.placements import Catalogue, Floats, Points, Table
from penstock_services.estimator.core.step_time.prior import Located, Prior, covariance, noise_variance

MAX_ROUNDS = 30  # of Gauss-Newton; it ends after about 10
ENOUGH = 1e-4  # nats: what one round must gain
MAX_HALVINGS = 8
SEARCH_STEP = 0.5  # in ln of a scale
BELIEF = 0.7  # standard deviation of ln of a scale around what other models teach
IMPOSSIBLE = 1e12


def parameters_of(table: Table, points: Points, prior: Prior) -> Floats:
    """The most likely parameters, shape (PARAMETERS,); the prior's mean without any cells.

    Gauss-Newton with step halving on ln p(parameters | measured), the residual being a Gaussian process.
    """
    mean, precision = np.array(prior.mean), np.diag(1.0 / np.array(prior.spread) ** 2)
    found = mean.copy()
    if not table.cells:
        return found
    found[LEVEL] += float(np.median(table.log_s - shape_of(found, points).log_s))
    worst = _doubt(found, table, points, prior)
    for _ in range(MAX_ROUNDS):
        slope = slopes(found, points)
        shape = shape_of(found, points)
        weighted = np.linalg.solve(
            spread_of(np.array(prior.residual), Located(points, shape.sync_share), table), slope
        ).T
        pull = weighted @ (table.log_s - shape.log_s) + precision @ (mean - found)
        move = np.linalg.solve(weighted @ slope + precision, pull)
        best = found
        for halving in range(MAX_HALVINGS):
            there = found + move / 2**halving
            doubt = _doubt(there, table, points, prior)
            if doubt < worst:
                best, gained, worst = there, worst - doubt, doubt
                break
        else:
            return found
        found = best
        if gained < ENOUGH:
            break
    return found


def spread_of(residual: Floats, at: Located, table: Table) -> Floats:
    """Covariance of what was measured around the shape of `physics`, shape (cells, cells)."""
    return covariance(residual, at, at) + np.diag(noise_variance(residual, at) / table.runs)


def _doubt(parameters: Floats, table: Table, points: Points, prior: Prior) -> float:
    """-ln p(measured, parameters) without constants."""
    shape = shape_of(parameters, points)
    spread = spread_of(np.array(prior.residual), Located(points, shape.sync_share), table)
    off = (parameters - np.array(prior.mean)) / np.array(prior.spread)
    return surprise(spread, table.log_s - shape.log_s) + 0.5 * float(off @ off)


def surprise(spread: Floats, off: Floats) -> float:
    """-ln of the normal density of `off`, shape (cells,), without its constant; IMPOSSIBLE where it has none."""
    try:
        lower = np.linalg.cholesky(spread)
    except np.linalg.LinAlgError:
        return IMPOSSIBLE
    unit = np.linalg.solve(lower, off)
    return float(0.5 * unit @ unit + np.log(np.diag(lower)).sum())


class Explained:
    """One model's cells with its parameters held: how well scales of the residual explain them."""

    def __init__(self, table: Table, reference_batch: float, prior: Prior) -> None:
        points = Catalogue(table.cells).points(table.cells, reference_batch)
        self.parameters = parameters_of(table, points, prior)
        shape = shape_of(self.parameters, points)
        slope = slopes(self.parameters, points)
        self._table = table
        self._at = Located(points, shape.sync_share)
        self._off = table.log_s - shape.log_s
        self._from_parameters = slope * np.array(prior.spread) ** 2 @ slope.T

    def surprise(self, residual: Floats) -> float:
        """`surprise` of the cells, the parameters being as uncertain as the prior says."""
        return surprise(spread_of(residual, self._at, self._table) + self._from_parameters, self._off)


def scales_of(
    explained: list[Explained], around: tuple[float, ...], belief: float, rounds: int
) -> tuple[float, ...]:
    """The scales of the residual, shape (RESIDUAL,), that surprise least; believed to lie near `around`.

    `belief`: standard deviation of ln of each scale. `rounds`: of coordinate search.
    """
    middle = np.log(np.array(around))

    def doubt(logs: Floats) -> float:
        off = (logs - middle) / belief
        return sum(model.surprise(np.exp(logs)) for model in explained) + 0.5 * float(off @ off)

    return tuple(np.exp(_descend(doubt, middle, rounds)).tolist())


def _descend(doubt: Callable[[Floats], float], start: Floats, rounds: int) -> Floats:
    """Coordinate search: a step that helps grows by half, one that helps in neither direction is halved."""
    found, least = start.copy(), doubt(start)
    steps = np.full(len(start), SEARCH_STEP)
    for _ in range(rounds):
        for index in range(len(start)):
            for direction in (1.0, -1.0):
                there = found.copy()
                there[index] += direction * steps[index]
                here = doubt(there)
                if here < least:
                    found, least = there, here
                    steps[index] *= 1.5
                    break
            else:
                steps[index] /= 2.0
    return found
