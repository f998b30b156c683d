"""How alike two jobs are, and how the weights of that are learned.

k(x, x') = a₀·h₀·S₀ + (a₁·S₁ + a₂)·w + g·(a₃·w'·S₁ + a₄), with
S₀, S₁ = exp(−Σ r·(x − x')²), one rate r per column; h, w, w' = products of exp(−t) over what differs: the precision's
width, the workload's name; g = 1 on the same GPU model, else 0.

The first term is what all workloads share, the second what is the workload's own on any GPU of such size; the third is
the way of one GPU model. With an unknown GPU the third is gone and the first two carry over, for they know GPUs only by
what they can do: so one model remembers the cells it saw and yet says something about families it never saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import lapack
from scipy.optimize import minimize

from penstock.estimator.core.learn.design import Inputs
from penstock.estimator.core.learn.runs import Floats

SHARES = 5
"""a₀ … a₄."""
T_WORK, T_HALF, T_HALF_SHARED, T_WORK_GPU, T_HALF_GPU = range(SHARES, SHARES + 5)
RATES = SHARES + 5
FIRST = (0.0, 0.0, 0.0, -1.0, -2.0, 0.0, -0.5, -1.0, 0.0, -0.5)
"""Where the search starts and what it leans to, as logarithms: the GPU model's own share is small until shown."""
FIRST_RATE, FIRST_NOISE = -2.0, -2.0
LEAN = 2.0  # variance of that leaning: a factor of 4 costs half a unit of likelihood
LEAN_NOISE = 4.0
JITTER = 1e-6
WIDEST = 14.0  # logarithms beyond e^±14 are no different; the search's long steps would overflow
SEARCH_STEPS = 30  # the last of 100 change R² by less than 0.002


@dataclass(frozen=True, slots=True)
class Weights:
    """Logarithms of all that `k` and the noise need. `columns`: of `Inputs.columns`, those that count."""

    values: Floats
    columns: tuple[int, ...]

    @property
    def noise(self) -> float:
        """Variance of one measurement, standardised units."""
        return float(np.exp(self.values[-1]))

    @property
    def prior(self) -> float:
        """k(x, x): variance of a job that is like none measured. Its GPU has a way of its own, known or not."""
        return float(np.exp(self.values[:SHARES]).sum())

    def between(self, some: Inputs, others: Inputs) -> Floats:
        """k of each pair. Shape (some, others)."""
        share, t = np.exp(self.values[:SHARES]), np.exp(self.values[SHARES:RATES])
        differ = (some.workload[:, None] != others.workload[None, :]) | (some.workload[:, None] < 0)
        apart = some.half[:, None] != others.half[None, :]
        same = (some.gpu[:, None] == others.gpu[None, :]) & (some.gpu[:, None] >= 0)
        case = 4 * same.view(np.uint8) + 2 * differ.view(np.uint8) + apart.view(np.uint8)
        work, half, gpu = (np.arange(8) & bit > 0 for bit in (2, 1, 4))
        on_any = np.exp(-t[0] * work - t[1] * half)
        on_gpu = np.where(gpu, np.exp(-t[3] * work - t[4] * half), 0.0)
        first, second = (self._likeness(some, others, rates) for rates in self._rates())
        first *= (share[0] * np.exp(-t[2] * half))[case]
        second *= (share[1] * on_any + share[3] * on_gpu)[case]
        second += (share[2] * on_any + share[4] * gpu)[case]
        second += first
        return second

    def _rates(self) -> tuple[Floats, Floats]:
        """Of the shared likeness and of the other, one per column."""
        middle = RATES + len(self.columns)
        return self.values[RATES:middle], self.values[middle:-1]

    def _likeness(self, some: Inputs, others: Inputs, rates: Floats) -> Floats:
        """exp(−Σ r·(x − x')²), by |x|² + |y|² − 2xy: one matrix product instead of a cube."""
        root = np.exp(rates / 2)
        x, y = (one.columns[:, list(self.columns)] * root for one in (some, others))
        found = x @ (2 * y.T)
        found -= (x * x).sum(1)[:, None]
        found -= (y * y).sum(1)[None, :]
        np.minimum(found, 0.0, out=found)
        return np.asarray(np.exp(found, out=found))


def learn(inputs: Inputs, y: Floats, repeats: Floats, columns: Sequence[int]) -> Weights:
    """The weights under which these measurements are likeliest, leaning to `FIRST`. Deterministic.

    `y`: shape (n,), mean 0, variance about 1; `repeats`: how many measurements each is the mean of. O(n³) per step.
    """
    start = np.array([*FIRST, *[FIRST_RATE] * (2 * len(columns)), FIRST_NOISE])
    lean = np.full(len(start), LEAN)
    lean[-1] = LEAN_NOISE
    x = inputs.columns[:, list(columns)]
    likelihood = _Likelihood(inputs, x, y, repeats)

    def loss(at: Floats) -> tuple[float, Floats]:
        value, slope = likelihood(at)
        away = at - start
        return value + 0.5 * float((away**2 / lean).sum()), slope + away / lean

    bounds = [(-WIDEST, WIDEST)] * len(start)
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": SEARCH_STEPS}
    )
    return Weights(np.asarray(found.x), tuple(columns))


class _Likelihood:
    """Negative logarithm of the marginal likelihood, and its slope; the parts that no weight changes are kept."""

    def __init__(self, inputs: Inputs, x: Floats, y: Floats, repeats: Floats) -> None:
        self._n, self._d = x.shape
        self._square = ((x[:, None, :] - x[None, :, :]) ** 2).reshape(-1, self._d)
        work, half, gpu = inputs.workload, inputs.half, inputs.gpu
        self._work = ((work[:, None] != work[None, :]) | (work[:, None] < 0)).astype(np.float64)
        self._half = (half[:, None] != half[None, :]).astype(np.float64)
        self._same = ((gpu[:, None] == gpu[None, :]) & (gpu[:, None] >= 0)).astype(np.float64)
        self._y, self._repeats = y, repeats

    def _terms(self, at: Floats) -> list[Floats]:
        n, d = self._n, self._d
        a, t = np.exp(at[:SHARES]), np.exp(at[SHARES:RATES])
        first, second = (
            np.exp(-(self._square @ np.exp(at[RATES + i * d : RATES + (i + 1) * d]))).reshape(n, n)
            for i in (0, 1)
        )
        work = np.exp(-t[0] * self._work - t[1] * self._half)
        return [
            a[0] * first * np.exp(-t[2] * self._half),
            a[1] * work * second,
            a[2] * work,
            a[3] * self._same * np.exp(-t[3] * self._work - t[4] * self._half) * second,
            a[4] * self._same,
        ]

    def __call__(self, at: Floats) -> tuple[float, Floats]:
        d, n = self._d, self._n
        terms = self._terms(at)
        noise = np.exp(at[-1]) / self._repeats
        k = np.sum(terms, axis=0)
        k[np.diag_indices(n)] += noise + JITTER
        lower, failed = lapack.dpotrf(k, lower=1, clean=1)
        if failed:
            return 1e10, np.zeros_like(at)
        inverse, _ = lapack.dpotri(lower, lower=1)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        alpha = inverse @ self._y
        value = 0.5 * float(self._y @ alpha) + float(np.log(np.diag(lower)).sum())
        pull = 0.5 * (inverse - np.outer(alpha, alpha))
        moved = [pull * term for term in terms]
        t, rates = np.exp(at[SHARES:RATES]), np.exp(at[RATES:-1])
        own, on_gpu = moved[1] + moved[2], moved[3]
        slope = np.empty_like(at)
        slope[:SHARES] = [float(term.sum()) for term in moved]
        slope[T_WORK] = -t[0] * float((own * self._work).sum())
        slope[T_HALF] = -t[1] * float((own * self._half).sum())
        slope[T_HALF_SHARED] = -t[2] * float((moved[0] * self._half).sum())
        slope[T_WORK_GPU] = -t[3] * float((on_gpu * self._work).sum())
        slope[T_HALF_GPU] = -t[4] * float((on_gpu * self._half).sum())
        slope[RATES : RATES + d] = -rates[:d] * (moved[0].ravel() @ self._square)
        slope[RATES + d : -1] = -rates[d:] * ((moved[1] + on_gpu).ravel() @ self._square)
        slope[-1] = float((np.diag(pull) * noise).sum())
        return value, slope
