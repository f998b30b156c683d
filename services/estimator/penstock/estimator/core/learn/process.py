"""A Gaussian process over measured cells: a mean, how far it may be off, and how it does on what it is not shown.

Ideal: exact, n³. Departure: above MAX_CENTRES cells it is seen through the features φ(x) = F·k(centres, x) of that many
centres (Nyström), which is exact where all cells are centres; F keeps the directions that count. With features it is
a linear regression, so leaving out any block of cells has a closed form, and one estimate is two small products.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, eigh, solve_triangular

from penstock.estimator.core.learn.design import Inputs
from penstock.estimator.core.learn.kernel import Weights, learn
from penstock.estimator.core.learn.runs import Floats, Indexes

MAX_CENTRES = 512  # 1,000 estimates at once take half of their 50 ms with four labels
MAX_LEARNING = 400  # cells that weights are learned on; n³
LEAST_DIRECTION = 1e-9  # of the largest: below, a direction of k is rounding
UNTOLD = 0.1  # of the noise: by so much the variance may be too large, on average, for directions left out
DOUBTED = 3.0  # standard deviations from what all others say; beyond, a cell loses weight (Huber)


@dataclass(frozen=True, slots=True)
class Process:
    """What prediction needs. c centres, r directions."""

    weights: Weights
    centres: Inputs
    alpha: Floats
    """Shape (c,): mean = k·α."""
    known: NDArray[np.float32]
    """Shape (r, c): variance = k(x, x) − |known·k|². Half width: the deviation moves by less than 1 %, and this product
    is most of the work of an estimate."""

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """Mean and variance of what is measured without its noise, standardised. Shapes (n,)."""
        k = self.weights.between(inputs, self.centres)
        seen = k.astype(np.float32) @ self.known.T
        variance = self.weights.prior - np.einsum("ij,ij->i", seen, seen)
        return k @ self.alpha, np.maximum(variance, 1e-9).astype(np.float64)


class Fit:
    """A process fitted to cells, with what judging it needs."""

    def __init__(
        self,
        inputs: Inputs,
        y: Floats,
        repeats: Floats,
        columns: Sequence[int],
        seed: int,
    ) -> None:
        """`y`: shape (cells,), standardised; `repeats`: runs behind each; `seed`: which cells weights are learned on."""
        self._inputs, self._y = inputs, y
        some = _sample(len(y), MAX_LEARNING, seed)
        self.weights = learn(inputs.pick(some), y[some], repeats[some], columns)
        self._noise = self.weights.noise / repeats + 1e-6
        self._centres = inputs.pick(_sample(len(y), MAX_CENTRES, seed))
        self._features()
        self._solve()
        spread = (self._half**2).sum(0)
        left = 1 - spread / self._noise
        alone = (y - self._phi @ self._w) / left
        strange = np.abs(alone) / np.sqrt(spread / left + self._unseen + self._noise)
        self._noise = self._noise * np.maximum(1.0, strange / DOUBTED) ** 2
        self._solve()

    def _features(self) -> None:
        values, vectors = eigh(self.weights.between(self._centres, self._centres))
        kept = values > LEAST_DIRECTION * values[-1]
        self._f: Floats = vectors[:, kept].T / np.sqrt(values[kept])[:, None]
        self._phi: Floats = self.weights.between(self._inputs, self._centres) @ self._f.T
        """Shape (cells, directions)."""
        self._unseen: Floats = np.maximum(self.weights.prior - (self._phi**2).sum(1), 0.0)

    def _solve(self) -> None:
        scaled = self._phi / self._noise[:, None]
        self._precision: Floats = np.eye(self._phi.shape[1]) + self._phi.T @ scaled
        self._pull: Floats = scaled.T @ self._y
        self._factor = cho_factor(self._precision, lower=True)
        self._w: Floats = cho_solve(self._factor, self._pull)
        self._half: Floats = solve_triangular(self._factor[0], self._phi.T, lower=True)
        """Shape (directions, cells): half.T @ half is what the posterior leaves unknown between cells."""

    def without(self, blocks: Iterable[Indexes]) -> tuple[Floats, Floats]:
        """Mean and variance (without noise) of every cell as it is told when its block is left out. Shapes (cells,).

        The blocks must cover all cells, each once. Weights stay those of all cells: they are few against the cells.
        """
        mean, variance = np.empty(len(self._y)), np.empty(len(self._y))
        for rows in blocks:
            phi, noise = self._phi[rows], self._noise[rows]
            if len(rows) < phi.shape[1] // 2:
                spread = self._half[:, rows].T @ self._half[:, rows]
                left = np.eye(len(rows)) - spread / noise[None, :]
                mean[rows] = self._y[rows] - np.linalg.solve(left, self._y[rows] - phi @ self._w)
                inner = np.diag(np.linalg.solve(left, spread))
            else:
                mean[rows], inner = self._told_without(rows, phi)
            variance[rows] = np.maximum(inner, 0.0) + self._unseen[rows]
        return mean, variance

    def foretold(self, blocks: Iterable[Indexes], asked: Inputs) -> tuple[Floats, Floats]:
        """As `without`, but each cell is asked about as `asked` says: as one of a workload that nobody knows, say."""
        features = self.weights.between(asked, self._centres) @ self._f.T
        mean, variance = np.empty(len(self._y)), np.empty(len(self._y))
        for rows in blocks:
            mean[rows], variance[rows] = self._told_without(rows, features[rows])
        return mean, np.maximum(variance, 0.0) + np.maximum(self.weights.prior - (features**2).sum(1), 0.0)

    def _told_without(self, rows: Indexes, features: Floats) -> tuple[Floats, Floats]:
        """Mean and variance at these features by all cells but those rows."""
        scaled = self._phi[rows] / self._noise[rows, None]
        factor = cho_factor(self._precision - self._phi[rows].T @ scaled, lower=True)
        mean: Floats = features @ cho_solve(factor, self._pull - scaled.T @ self._y[rows])
        return mean, np.einsum("ij,ij->i", features, cho_solve(factor, features.T).T)

    def process(self) -> Process:
        """What prediction needs, and nothing else."""
        values, vectors = eigh(self._precision)
        turned = (vectors * np.sqrt(1 - 1 / values)).T
        told = ((self._phi @ turned.T) ** 2).mean(0)
        rising = np.argsort(told)
        left_out = rising[np.cumsum(told[rising]) < UNTOLD * self.weights.noise]
        known = np.delete(turned, left_out, axis=0) @ self._f
        return Process(self.weights, self._centres, self._f.T @ self._w, known.astype(np.float32))


def _sample(count: int, most: int, seed: int) -> Indexes:
    """At most that many rows, in order; all of them where they are fewer."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
