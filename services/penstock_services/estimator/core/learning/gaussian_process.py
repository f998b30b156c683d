"""Gaussian process regression: exact, with noise per cell and leave-group-out cross-validation in closed
form.

Source: Rasmussen & Williams, Gaussian Processes for Machine Learning, algorithm 2.1 and §5.4.2. Shared by the
models of resources and of step times, which supply their covariances. Why it is not scikit-learn's: decision
15.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cholesky, lapack

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indexes = NDArray[np.intp]
Mask = NDArray[np.bool_]

MIN_VARIANCE = 1e-12  # a difference of variances near 1 is below 0 by rounding errors up to this
WITHOUT_DENSITY = 1e12  # nats: above any likelihood, so that a search turns back


class Posterior:
    """Of a function with mean 0, given `y` at n cells."""

    def __init__(self, gram: Floats, noise: Floats, y: Floats) -> None:
        """`gram`: covariance of the cells, shape (n, n);
        `noise`: variance of each y. Raises `LinAlgError`."""
        self.y = y
        self.root: Floats = np.linalg.inv(np.linalg.cholesky(gram + np.diag(noise)))
        """R with RᵀR = (gram + noise)⁻¹."""
        self.alpha: Floats = self.root.T @ (self.root @ y)

    def predict(self, k: Floats, prior: Floats | float) -> tuple[Floats, Floats]:
        """Mean and variance without noise, shape (q,). `k`: covariance of the queries with the cells, shape
        (q, n); `prior`: variance of the queries before any measurement."""
        variance = prior - ((k @ self.root.T) ** 2).sum(axis=1)
        return k @ self.alpha, np.maximum(variance, MIN_VARIANCE)

    def leave_one_out(self) -> tuple[Floats, Floats]:
        """y less its mean when predicted from all other cells, and the variance of that, noise included."""
        precision = (self.root**2).sum(axis=0)
        return self.alpha / precision, 1.0 / precision

    def leave_groups_out(
        self, groups: Iterable[Indexes], k: Floats, prior: Floats | float
    ) -> tuple[Floats, Floats]:
        """As `predict` for one question per cell, each answered from the cells outside its group."""
        precision = self.root.T @ self.root
        mean, variance = np.zeros(len(k)), np.zeros(len(k))
        for group in groups:
            mine = k[group]
            mine[:, group] = 0.0
            share = np.linalg.solve(precision[np.ix_(group, group)], precision[group])
            seen = mine @ precision
            seen -= seen[:, group] @ share
            mean[group] = seen @ self.y
            variance[group] = (seen * mine).sum(axis=1)
        return mean, np.maximum(prior - variance, MIN_VARIANCE)


def negative_log_likelihood(covariance: Floats, y: Floats) -> float:
    """-ln of the normal density of y, shape (n,), without its constant."""
    try:
        lower = cholesky(covariance, lower=True)
    except LinAlgError:
        return WITHOUT_DENSITY
    unit, _ = lapack.dtrtrs(lower, y, lower=1)
    return float(0.5 * unit @ unit + np.log(np.diag(lower)).sum())


def sample(count: int, at_most: int, seed: int) -> Indexes:
    """At most that many rows, in order; all of them where they are fewer."""
    if count <= at_most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, at_most, replace=False))
