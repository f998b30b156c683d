"""Covariance of resource needs between jobs, and the search for its hyperparameters.

k(x, x') = a₀·h₀·S₀ + (a₁·S₁ + a₂)·w + g·(a₃·w'·S₁ + a₄), with
S₀, S₁ = exp(−Σ r·(x − x')²), one rate r per column; h, w, w' = products of exp(−t) over what differs: the precision's
width, the workload's name; g = 1 on the same GPU model, else 0.

The first term is what all workloads share, the second what is the workload's own on any GPU of such size; the third is
the GPU model's own. For an unknown GPU the third is 0 and the first two carry over, since they describe GPUs only by what
they can do: so one model remembers the cells that it saw and predicts GPU models that it never saw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import lapack
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

from penstock_services.estimator.core.gaussian_process import Floats, Indexes
from penstock_services.estimator.core.resource_model.features import Inputs

SHARES = 5
"""a₀ … a₄."""
T_WORK, T_HALF, T_HALF_SHARED, T_WORK_GPU, T_HALF_GPU = range(SHARES, SHARES + 5)
RATES = SHARES + 5
FIRST = (0.0, 0.0, 0.0, -1.0, -2.0, 0.0, -0.5, -1.0, 0.0, -0.5)
"""Mean of the prior on the logarithms, and where the search starts: the GPU model's own share is small until shown."""
FIRST_RATE, FIRST_NOISE = -2.0, -2.0
PRIOR_VARIANCE = 2.0  # a factor of 4 costs half a unit of likelihood
PRIOR_VARIANCE_NOISE = 4.0
JITTER = 1e-6
WIDEST = 14.0  # logarithms beyond e^±14 are no different; the search's long steps would overflow
SEARCH_STEPS = 30  # the last of 100 change R² by less than 0.002


@dataclass(frozen=True, slots=True)
class Covariance:
    """Logarithms of all that `k` and the noise need. `columns`: of `Inputs.columns`, those that count."""

    values: Floats
    columns: tuple[int, ...]

    @property
    def noise(self) -> float:
        """Variance of one measurement, standardised units."""
        return float(np.exp(self.values[-1]))

    @property
    def prior(self) -> float:
        """k(x, x): variance of a job that is like none measured."""
        return float(np.exp(self.values[:SHARES]).sum())

    def between(self, some: Inputs, others: Inputs) -> Floats:
        """k of each pair. Shape (some, others). A name never seen (−1) equals none."""
        return self.to(others)(some)

    def to(self, others: Inputs) -> Callable[[Inputs], Floats]:
        """`between` with these others, for many questions."""
        share, t = np.exp(self.values[:SHARES]), np.exp(self.values[SHARES:RATES])
        same, differs, narrow = (np.arange(8) & bit > 0 for bit in (4, 2, 1))
        on_any = np.exp(-t[0] * differs - t[1] * narrow)
        on_gpu = np.where(same, np.exp(-t[3] * differs - t[4] * narrow), 0.0)
        factors = (
            share[0] * np.exp(-t[2] * narrow),
            share[1] * on_any + share[3] * on_gpu,
            share[2] * on_any + share[4] * same,
        )
        rates = np.exp(self.values[RATES:-1] / 2).reshape(2, -1)
        columns = list(self.columns)
        right = [others.columns[:, columns] * rate for rate in rates]
        workload, gpu = (np.where(names < 0, -2, names) for names in (others.workload, others.gpu))

        def k(some: Inputs) -> Floats:
            first, kind = _kinds(some)
            case = (some.gpu[first, None] == gpu).view(np.uint8) << 2
            case |= (some.workload[first, None] != workload).view(np.uint8) << 1
            case |= (some.half[first, None] != others.half).view(np.uint8)
            left = some.columns[:, columns]
            found, own = (
                np.exp(-cdist(left * rate, x, "sqeuclidean")) for rate, x in zip(rates, right, strict=True)
            )
            found *= factors[0][case][kind]
            own *= factors[1][case][kind]
            found += own
            found += factors[2][case][kind]
            return np.asarray(found)

        return k

    def keys(self, inputs: Inputs) -> list[bytes]:
        """Of each job what k depends on: jobs with equal keys have equal k with any other."""
        names = (inputs.workload, inputs.half, inputs.gpu)
        rows = np.column_stack([inputs.columns[:, self.columns], *names])
        whole, width = rows.tobytes(), rows.itemsize * rows.shape[1]
        return [whole[start : start + width] for start in range(0, len(whole), width)]


def _kinds(some: Inputs) -> tuple[Indexes, Indexes]:
    """The first job of each workload, width and GPU model, and which of these each job is: they are few."""
    code = (some.workload * 2 + some.half) * (1 << 20) + some.gpu
    if len(code) == 1:
        return np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp)
    _, first, kind = np.unique(code, return_index=True, return_inverse=True)
    return first, kind


def search(inputs: Inputs, y: Floats, repeats: Floats, columns: Sequence[int]) -> Covariance:
    """Maximum a posteriori hyperparameters: the likelihood of these measurements times the prior around `FIRST`. Deterministic.

    `y`: shape (n,), mean 0, variance about 1; `repeats`: how many measurements each is the mean of. O(n³) per step.
    """
    start = np.array([*FIRST, *[FIRST_RATE] * (2 * len(columns)), FIRST_NOISE])
    spread = np.full(len(start), PRIOR_VARIANCE)
    spread[-1] = PRIOR_VARIANCE_NOISE
    x = inputs.columns[:, list(columns)]
    likelihood = _Likelihood(inputs, x, y, repeats)

    def loss(at: Floats) -> tuple[float, Floats]:
        value, slope = likelihood(at)
        away = at - start
        return value + 0.5 * float((away**2 / spread).sum()), slope + away / spread

    bounds = [(-WIDEST, WIDEST)] * len(start)
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": SEARCH_STEPS}
    )
    return Covariance(np.asarray(found.x), tuple(columns))


class _Likelihood:
    """Negative logarithm of the marginal likelihood, and its slope; the parts that no weight changes are kept.

    k is symmetric, so all is done on its m = n (n + 1) / 2 pairs: the lower triangle with its diagonal.
    """

    def __init__(self, inputs: Inputs, x: Floats, y: Floats, repeats: Floats) -> None:
        self._n, self._d = x.shape
        i, j = np.tril_indices(self._n)
        self._i, self._j = i, j
        self._at = j * self._n + i
        """Where a pair stands in a matrix of LAPACK's order, column after column."""
        self._times = np.where(i == j, 0.5, 1.0)
        """Half of how often a pair stands in the matrix."""
        self._square = np.ascontiguousarray(((x[i] - x[j]) ** 2).T)
        """Shape (d, m)."""
        work, half, gpu = inputs.workload, inputs.half, inputs.gpu
        self._work = ((work[i] != work[j]) | (work[i] < 0)).astype(np.float64)
        self._half = (half[i] != half[j]).astype(np.float64)
        self._same = ((gpu[i] == gpu[j]) & (gpu[i] >= 0)).astype(np.float64)
        self._y, self._repeats = y, repeats

    def _terms(self, at: Floats) -> Floats:
        """Those of the sum that k is. Shape (SHARES, m)."""
        d = self._d
        a, t = np.exp(at[:SHARES]), np.exp(at[SHARES:RATES])
        work, half, shared_half, on_work, on_half = np.expm1(-t)
        first, second = (
            np.exp(-(np.exp(at[RATES + i * d : RATES + (i + 1) * d]) @ self._square)) for i in (0, 1)
        )
        terms = np.empty((SHARES, len(first)))
        terms[0] = a[0] * first * (1 + shared_half * self._half)
        terms[2] = a[2] * (1 + work * self._work) * (1 + half * self._half)
        terms[1] = a[1] / a[2] * terms[2] * second
        terms[3] = a[3] * self._same * (1 + on_work * self._work) * (1 + on_half * self._half) * second
        terms[4] = a[4] * self._same
        return terms

    def __call__(self, at: Floats) -> tuple[float, Floats]:
        d, n = self._d, self._n
        terms = self._terms(at)
        noise = np.exp(at[-1]) / self._repeats
        flat = np.zeros(n * n)
        flat[self._at] = terms.sum(0)
        flat[:: n + 1] += noise + JITTER
        lower, failed = lapack.dpotrf(flat.reshape(n, n).T, lower=1, clean=0, overwrite_a=1)
        if failed:
            return 1e10, np.zeros_like(at)
        alpha, _ = lapack.dpotrs(lower, self._y, lower=1)
        value = 0.5 * float(self._y @ alpha) + float(np.log(np.diag(lower)).sum())
        inverse, _ = lapack.dpotri(lower, lower=1, overwrite_c=1)
        pull = (inverse.T.reshape(-1)[self._at] - alpha[self._i] * alpha[self._j]) * self._times
        t, rates = np.exp(at[SHARES:RATES]), np.exp(at[RATES:-1])
        shared, own, on_gpu = pull * terms[0], pull * (terms[1] + terms[2]), pull * terms[3]
        with_second = pull * terms[1] + on_gpu
        slope = np.empty_like(at)
        slope[:SHARES] = terms @ pull
        slope[T_WORK] = -t[0] * float(own @ self._work)
        slope[T_HALF] = -t[1] * float(own @ self._half)
        slope[T_HALF_SHARED] = -t[2] * float(shared @ self._half)
        slope[T_WORK_GPU] = -t[3] * float(on_gpu @ self._work)
        slope[T_HALF_GPU] = -t[4] * float(on_gpu @ self._half)
        slope[RATES : RATES + d] = -rates[:d] * (self._square @ shared)
        slope[RATES + d : -1] = -rates[d:] * (self._square @ with_second)
        slope[-1] = 0.5 * float((np.diag(inverse) - alpha * alpha) @ noise)
        return value, slope
