"""A Gaussian process over measured cells: a mean, how far it may be off, and how it does on what it is not shown.

Ideal: exact, n³. Departure: above MAX_CENTRES cells it is seen through the features φ(x) = F·k(centres, x) of that many
centres (Nyström), which is exact where all cells are centres; F keeps the directions that count. With features it is
a linear regression, so leaving out any block of cells has a closed form, and one estimate is two small products.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, lapack
from scipy.linalg.blas import dsyrk

from penstock_services.estimator.core.resource_model.covariance import Side, Weights, learn
from penstock_services.estimator.core.resource_model.features import Inputs
from penstock_services.estimator.core.resource_model.measurements import Floats, Indexes

MAX_CENTRES = 512  # 1,000 estimates at once take half of their 50 ms with four labels
MAX_LEARNING = 400  # cells that weights are learned on; n³
MAX_REMEMBERED = 50_000  # answers of one process; 10 MB
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
    _side: Side = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_side", self.weights.side(self.centres))  # as frozen dataclasses have it

    def mean(self, inputs: Inputs) -> Floats:
        """As `predict`, without the variance, which is most of its work. Shape (n,)."""
        mean = np.empty(len(inputs.gpu))
        for rows, k in self.weights.parts(inputs, self._side):
            mean[rows] = k @ self.alpha
        return mean

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """Mean and variance of what is measured without its noise, standardised. Shapes (n,)."""
        mean, variance = np.empty((2, len(inputs.gpu)))
        for rows, k in self.weights.parts(inputs, self._side):
            mean[rows] = k @ self.alpha
            seen = k.astype(np.float32) @ self.known.T
            variance[rows] = self.weights.prior - np.einsum("ij,ij->i", seen, seen)
        return mean, np.maximum(variance, 1e-9)


class Remembering:
    """A process that computes jobs which are alike in what it looks at once, and remembers the answer.

    For memory, which does not look at the batch, these are few. An answer may differ in its last bits from that in other
    company, as sums of products do.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._told: dict[bytes, tuple[float, float]] = {}

    def predict(self, inputs: Inputs) -> tuple[Floats, Floats]:
        """As `Process.predict`."""
        keys, told = self._process.weights.keys(inputs), self._told
        first = {key: row for row, key in enumerate(keys) if key not in told}
        if len(told) + len(first) > MAX_REMEMBERED:
            told.clear()
            first = {key: row for row, key in enumerate(keys)}
        if first:
            rows = np.fromiter(first.values(), np.intp, len(first))
            mean, variance = self._process.predict(inputs.pick(rows))
            told.update(zip(first, zip(mean.tolist(), variance.tolist(), strict=True), strict=True))
        found = np.array([told[key] for key in keys]).reshape(-1, 2)
        return found[:, 0], found[:, 1]


class Fit:
    """A process fitted to cells, with what judging it needs."""

    def __init__(
        self,
        inputs: Inputs,
        y: Floats,
        repeats: Floats,
        columns: Sequence[int],
        seed: int,
        weights: Weights | None = None,
    ) -> None:
        """`y`: shape (cells,), standardised; `repeats`: runs behind each; `seed`: which cells weights are learned on.

        `weights`: those that somebody has learned already.
        """
        self._inputs, self._y = inputs, y
        some = sample(len(y), MAX_LEARNING, seed)
        self.weights = weights or learn(inputs.pick(some), y[some], repeats[some], columns)
        self._noise = self.weights.noise / repeats + 1e-6
        self._centres = inputs.pick(sample(len(y), MAX_CENTRES, seed))
        self._features()
        self._solve()
        spread = (self._half**2).sum(0)
        left = 1 - spread / self._noise
        alone = self._off / left
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
        scaled = self._phi / np.sqrt(self._noise)[:, None]
        self._precision: Floats = _minus_squares(np.eye(self._phi.shape[1]), scaled, -1.0)
        """Its lower triangle; above it there is nothing."""
        self._factor = _factor(self._precision)
        self._half = _halved(self._factor, self._phi)
        """Shape (directions, cells): half.T @ half is what the posterior leaves unknown between cells."""
        self._pull: Floats = (self._y / self._noise) @ self._phi
        self._w: Floats = _solved(self._factor, self._pull)
        self._off: Floats = self._y - self._phi @ self._w

    def without(self, blocks: Iterable[Indexes]) -> tuple[Floats, Floats]:
        """Mean and variance (without noise) of every cell as it is told when its block is left out. Shapes (cells,).

        The blocks must cover all cells, each once. Weights stay those of all cells: they are few against the cells.
        """
        rows = np.arange(len(self._y))
        mean, variance = self._told_without(blocks, rows, self._phi, self._half)
        return mean, variance + self._unseen

    def foretold(self, blocks: Iterable[Indexes], asked: Inputs, rows: Indexes) -> tuple[Floats, Floats]:
        """As `without` for some cells, each asked about as `asked` says: as one of a workload that nobody knows, say.

        `rows`: those cells, rising; `asked`, mean and variance: in that order. Shapes (rows,).
        """
        features = self.weights.between(asked, self._centres) @ self._f.T
        mean, variance = self._told_without(blocks, rows, features, _halved(self._factor, features))
        return mean, variance + np.maximum(self.weights.prior - (features**2).sum(1), 0.0)

    def _told_without(
        self, blocks: Iterable[Indexes], rows: Indexes, features: Floats, half: Floats
    ) -> tuple[Floats, Floats]:
        """Of these rows, asked about with these features, by all cells but those of their block. `half`: see `_halved`.

        A small block is taken out of the answer, with one matrix of its own size; a large one out of the precision.
        """
        mean, variance = features @ self._w, (half * half).sum(0)
        place = np.full(len(self._y), -1)
        place[rows] = np.arange(len(rows))
        for block in blocks:
            mine = place[block]
            mine = mine[mine >= 0]
            if len(mine) == 0:
                continue
            phi, noise = self._phi[block], self._noise[block]
            if len(block) < phi.shape[1] // 2:
                between = half[:, mine].T @ self._half[:, block]
                left = np.diag(noise) - self._half[:, block].T @ self._half[:, block]
                taken = np.linalg.solve(left, np.column_stack([self._off[block], between.T]))
                mean[mine] -= between @ taken[:, 0]
                variance[mine] += np.einsum("ij,ji->i", between, taken[:, 1:])
            else:
                factor = _factor(_minus_squares(self._precision, phi / np.sqrt(noise)[:, None], 1.0))
                pull = self._pull - (self._y[block] / noise) @ phi
                mean[mine] = features[mine] @ _solved(factor, pull)
                variance[mine] = (_halved(factor, features[mine]) ** 2).sum(0)
        return mean, np.maximum(variance, 0.0)

    def process(self) -> Process:
        """What prediction needs, and nothing else."""
        values, vectors = eigh(self._precision, lower=True)
        turned = (vectors * np.sqrt(1 - 1 / values)).T
        told = ((self._phi @ turned.T) ** 2).mean(0)
        rising = np.argsort(told)
        left_out = rising[np.cumsum(told[rising]) < UNTOLD * self.weights.noise]
        known = np.delete(turned, left_out, axis=0) @ self._f
        return Process(self.weights, self._centres, self._f.T @ self._w, known.astype(np.float32))


def _minus_squares(matrix: Floats, x: Floats, times: float) -> Floats:
    """matrix − times · xᵀx, of both the lower triangle only; half of the work of a product."""
    found: Floats = dsyrk(-times, x.T, beta=1.0, c=matrix, lower=1)
    return found


def _factor(precision: Floats) -> Floats:
    """L with L·Lᵀ = precision, of which the lower triangle counts. Raises `LinAlgError`."""
    factor: Floats
    factor, failed = lapack.dpotrf(precision, lower=1, clean=1)
    if failed:
        raise np.linalg.LinAlgError("the cells contradict each other beyond rounding")
    return factor


def _halved(factor: Floats, features: Floats) -> Floats:
    """L⁻¹ · featuresᵀ: its columns' squares are variances. Shape (directions, rows)."""
    found: Floats
    found, _ = lapack.dtrtrs(factor, features.T, lower=1)
    return found


def _solved(factor: Floats, y: Floats) -> Floats:
    """precision⁻¹ · y."""
    found: Floats
    found, _ = lapack.dpotrs(factor, y, lower=1)
    return found


def sample(count: int, most: int, seed: int) -> Indexes:
    """At most that many rows, in order; all of them where they are fewer."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))
