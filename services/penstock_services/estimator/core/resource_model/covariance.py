"""Covariance function (kernel) of resource needs between jobs, and the search for its hyperparameters.

k(x, x') = a₀·exp(−w₀·d) + a₁·exp(−w₁·d) + a₂·exp(−w₂·d) + g·(a₃·exp(−w₃·d) + a₄), where d are distances of
two jobs: the squared difference of each column, 1 where the precisions' widths differ, 1 where the workloads'
names differ; g = 1 on the same GPU model, else 0. `_layout` names the weights of each term.

The first term is shared by all workloads, the next two are the workload's own on any GPU of such size, the
last two the GPU model's own. For an unknown GPU these are 0 and the others carry over, since they describe
GPUs only by their capabilities: so one model interpolates the measured cells and predicts unseen GPU models.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import lapack
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from penstock_services.estimator.core.learning.gaussian_process import Floats, Indexes, Mask
from penstock_services.estimator.core.resource_model.features import Inputs

SHARES = 5
"""a₀ … a₄."""
ON_GPU = slice(3, 5)
"""Terms that count on the same GPU model only."""
T_WORK, T_HALF, T_HALF_SHARED, T_WORK_GPU, T_HALF_GPU = range(SHARES, SHARES + 5)
RATES = SHARES + 5  # the first of the rates
FIRST = (0.0, 0.0, 0.0, -1.0, -2.0, 0.0, -0.5, -1.0, 0.0, -0.5)
"""Mean of the prior on the logarithms, and start of the search:
the GPU model's own share is small until measured."""
FIRST_RATE, FIRST_NOISE = -2.0, -2.0  # one more or less of either: no R² changes by 0.006
PRIOR_VARIANCE = 2.0  # a factor of 4 costs half a unit of likelihood
PRIOR_VARIANCE_NOISE = 4.0  # half or twice: no R² changes by 0.002
JITTER = 1e-6  # of a variance of 1: the matrix stays positive definite where cells repeat
WIDEST = 14.0  # logarithms beyond e^±14 make no difference; the search's long steps would overflow
SEARCH_STEPS = 30  # the last of 100 change R² by less than 0.002
ABSENT = -1  # no hyperparameter


def _layout(columns: int) -> Indexes:
    """Which hyperparameter weighs which distance in which term, shape (SHARES, columns + 2); ABSENT: none."""
    shared, own = (list(range(RATES + i * columns, RATES + (i + 1) * columns)) for i in (0, 1))
    none = [ABSENT] * columns
    return np.array(
        [
            [*shared, T_HALF_SHARED, ABSENT],
            [*own, T_HALF, T_WORK],
            [*none, T_HALF, T_WORK],
            [*own, T_HALF_GPU, T_WORK_GPU],
            [*none, ABSENT, ABSENT],
        ],
        dtype=np.intp,
    )


@dataclass(frozen=True, slots=True)
class Covariance:
    """Logarithms of the parameters of `k` and of the noise. `columns`: the used ones of `Inputs.columns`."""

    values: Floats
    columns: tuple[int, ...]

    @property
    def noise(self) -> float:
        """Variance of one measurement, standardised units."""
        return float(np.exp(self.values[-1]))

    @property
    def prior(self) -> float:
        """k(x, x): variance of a job that is unlike all measured ones."""
        return float(np.exp(self.values[:SHARES]).sum())

    def between(self, some: Inputs, others: Inputs) -> Floats:
        """k of each pair. Shape (some, others). An unseen name (−1) equals none."""
        return self.to(others)(some)

    def to(self, others: Inputs) -> Callable[[Inputs], Floats]:
        """`between` with these others, for many questions.
        The effect of names and widths on a term has eight cases."""
        columns, weight = list(self.columns), _weights(self.values, _layout(len(self.columns)))
        same, differs, narrow = (np.arange(8) & bit > 0 for bit in (4, 2, 1))
        factor = np.exp(self.values[:SHARES, None] - weight[:, -2:] @ np.array([narrow, differs]))
        factor[ON_GPU] *= same
        shared, own, constant = factor[0], factor[1] + factor[3], factor[2] + factor[4]
        rates = np.sqrt(weight[:2, :-2])
        right = [others.columns[:, columns] * rate for rate in rates]

        def k(some: Inputs) -> Floats:
            case = _same(some.gpu, others.gpu).view(np.uint8) << 2
            case |= (~_same(some.workload, others.workload)).view(np.uint8) << 1
            case |= (some.half[:, None] != others.half).view(np.uint8)
            left = some.columns[:, columns]
            first, second = (
                np.exp(-cdist(left * rate, x, "sqeuclidean")) for rate, x in zip(rates, right, strict=True)
            )
            return np.asarray(shared[case] * first + own[case] * second + constant[case])

        return k

    def keys(self, inputs: Inputs) -> list[bytes]:
        """Per job the values on which k depends: jobs with equal keys have equal k with any other."""
        names = (inputs.workload, inputs.half, inputs.gpu)
        rows = np.column_stack([inputs.columns[:, self.columns], *names])
        whole, width = rows.tobytes(), rows.itemsize * rows.shape[1]
        return [whole[start : start + width] for start in range(0, len(whole), width)]


def _weights(values: Floats, layout: Indexes) -> Floats:
    return np.where(layout == ABSENT, 0.0, np.exp(values[layout]))


def _same(some: Indexes, others: Indexes) -> Mask:
    """Shape (some, others)."""
    return np.asarray((some[:, None] == others) & (others >= 0))


def search(inputs: Inputs, y: Floats, repeats: Floats, columns: Sequence[int]) -> Covariance:
    """Maximum a posteriori hyperparameters: the likelihood of these measurements times the prior around
    `FIRST`. Deterministic.

    `y`: shape (n,), mean 0, variance about 1; `repeats`: number of measurements of which each is the mean.
    O(n³) per step. Source of the gradient: Rasmussen & Williams, eq. 5.9.
    """
    count, x = len(y), inputs.columns[:, list(columns)]
    start = np.array([*FIRST, *[FIRST_RATE] * (2 * len(columns)), FIRST_NOISE])
    spread = np.full(len(start), PRIOR_VARIANCE)
    spread[-1] = PRIOR_VARIANCE_NOISE
    layout = _layout(len(columns))
    narrow, differs = inputs.half[:, None] != inputs.half, ~_same(inputs.workload, inputs.workload)
    distance = np.array([*((x[:, None] - x) ** 2).transpose(2, 0, 1), narrow, differs]).reshape(-1, count**2)
    same = _same(inputs.gpu, inputs.gpu).ravel()

    def loss(at: Floats) -> tuple[float, Floats]:
        weight = _weights(at, layout)
        terms = np.exp(at[:SHARES, None] - weight @ distance)
        terms[ON_GPU] *= same
        noise = np.exp(at[-1]) / repeats
        gram = terms.sum(0).reshape(count, count)
        gram.flat[:: count + 1] += noise + JITTER
        root, failed = lapack.dpotrf(gram, lower=1)
        if failed:
            return 1e10, np.zeros_like(at)
        alpha, _ = lapack.dpotrs(root, y, lower=1)
        half, _ = lapack.dpotri(root, lower=1)
        inverse = np.tril(half) + np.tril(half, -1).T
        pull = (0.5 * (inverse - np.outer(alpha, alpha))).ravel()
        terms *= pull
        slope = np.zeros_like(at)
        slope[:SHARES] = terms.sum(1)
        np.subtract.at(slope, layout, weight * (terms @ distance.T))  # ABSENT has weight 0
        slope[-1] = pull[:: count + 1] @ noise
        away = at - start
        value = 0.5 * float(y @ alpha) + float(np.log(np.diag(root)).sum())
        return value + 0.5 * float((away**2 / spread).sum()), slope + away / spread

    bounds, options = [(-WIDEST, WIDEST)] * len(start), {"maxiter": SEARCH_STEPS}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return Covariance(np.asarray(found.x), tuple(columns))
