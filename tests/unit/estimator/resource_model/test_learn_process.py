"""The covariance is its formula, and the closed forms of the Gaussian process are those of a plain one."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from penstock_services.estimator.core.learning.gaussian_process import (
    Floats,
    Posterior,
    negative_log_likelihood,
    sample,
)
from penstock_services.estimator.core.resource_model import model as resource_model
from penstock_services.estimator.core.resource_model.covariance import SHARES, Covariance, search
from penstock_services.estimator.core.resource_model.features import WIDTH, Inputs
from penstock_services.estimator.core.resource_model.measurements import MEMORY
from penstock_services.estimator.core.resource_model.model import LabelModel, train
from tests.support.trainings import measured_runs as cluster

COLUMNS = (0, 1, 5)


def jobs(count: int, seed: int = 1) -> Inputs:
    rng = np.random.default_rng(seed)
    return Inputs(
        rng.normal(size=(count, WIDTH)),
        rng.integers(0, 5, count),
        rng.integers(0, 2, count),
        rng.integers(0, 3, count),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count),
    )


class Fitted:
    """Ninety cells of a law that the test knows, with unlike noise."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        self.inputs = jobs(90)
        y = np.sin(self.inputs.columns[:, 0]) + 0.3 * self.inputs.workload + rng.normal(0, 0.1, 90)
        self.y: Floats = (y - y.mean()) / y.std()
        self.covariance = search(self.inputs, self.y, np.ones(90), COLUMNS)
        self.noise = self.covariance.noise * rng.uniform(0.5, 2.0, 90)
        self.gram = self.covariance.between(self.inputs, self.inputs)
        self.posterior = Posterior(self.gram, self.noise, self.y)

    def without(self, rows: Floats, k: Floats) -> tuple[Floats, Floats]:
        """Mean and variance of questions with these covariances, by regression on the other cells alone."""
        others = np.setdiff1d(np.arange(90), rows)
        inverse = np.linalg.inv(self.gram[np.ix_(others, others)] + np.diag(self.noise[others]))
        mean = k[:, others] @ inverse @ self.y[others]
        return mean, self.covariance.prior - np.einsum("ij,jk,ik->i", k[:, others], inverse, k[:, others])


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return Fitted()


def one_pair(weights: Covariance, a: Inputs, b: Inputs) -> float:
    """k of two jobs, as the kernel's docstring has it."""
    share, t = np.exp(weights.values[:SHARES]), np.exp(weights.values[SHARES : SHARES + 5])
    d = len(weights.columns)
    rates = np.exp(weights.values[SHARES + 5 : -1]).reshape(2, d)
    away = (a.columns[0, list(weights.columns)] - b.columns[0, list(weights.columns)]) ** 2
    shared, own = np.exp(-(rates @ away))
    work = a.workload[0] != b.workload[0] or a.workload[0] < 0
    half = a.half[0] != b.half[0]
    same = a.gpu[0] == b.gpu[0] >= 0
    on_any = np.exp(-t[0] * work - t[1] * half)
    on_gpu = np.exp(-t[3] * work - t[4] * half)
    return float(
        share[0] * np.exp(-t[2] * half) * shared
        + (share[1] * own + share[2]) * on_any
        + same * (share[3] * on_gpu * own + share[4])
    )


@pytest.mark.parametrize("columns", [tuple(range(count)) for count in range(1, WIDTH + 1)])
def test_likeness_of_many_is_that_of_each_pair(columns: tuple[int, ...]) -> None:
    """Names never seen among them: each entry is what the formula says."""
    rng = np.random.default_rng(5)
    weights = Covariance(rng.normal(-1, 1, SHARES + 5 + 2 * len(columns) + 1), columns)
    some, others = jobs(150, 3), jobs(5, 4)
    some.workload[:20], some.gpu[10:30] = -1, -1
    k = weights.between(some, others)
    for i in range(0, 150, 3):
        for j in range(5):
            pair = some.pick(np.array([i])), others.pick(np.array([j]))
            assert k[i, j] == pytest.approx(one_pair(weights, *pair), rel=1e-9)


def test_a_group_left_out_is_predicted_by_the_others_alone(fitted: Fitted) -> None:
    """A group of one cell, a small one, and one that is most of all; asked as they are, and as something
    else."""
    groups = [np.array([0]), np.arange(1, 20), np.arange(20, 90)]
    for k in (fitted.gram, fitted.covariance.between(jobs(90, 7), fitted.inputs)):
        mean, variance = fitted.posterior.leave_groups_out(groups, k, fitted.covariance.prior)
        for rows in groups:
            right = fitted.without(rows, k[rows])
            assert_allclose(mean[rows], right[0], rtol=1e-6, atol=1e-6)
            assert_allclose(variance[rows], right[1], rtol=1e-6, atol=1e-6)


def test_one_cell_left_out_is_a_group_of_one(fitted: Fitted) -> None:
    error, variance = fitted.posterior.leave_one_out()
    alone = [np.array([row]) for row in range(90)]
    mean, plain = fitted.posterior.leave_groups_out(alone, fitted.gram, fitted.covariance.prior)
    assert_allclose(error, fitted.y - mean, rtol=1e-6, atol=1e-6)
    assert_allclose(variance, plain + fitted.noise, rtol=1e-6, atol=1e-6)


def test_a_prediction_is_the_textbooks(fitted: Fitted) -> None:
    """Rasmussen & Williams, equations 2.25 and 2.26."""
    k = fitted.covariance.between(jobs(5, 9), fitted.inputs)
    mean, variance = fitted.posterior.predict(k, fitted.covariance.prior)
    right = fitted.without(np.zeros(0, dtype=np.intp), k)
    assert_allclose(mean, right[0], rtol=1e-6)
    assert_allclose(variance, right[1], rtol=1e-6)


def test_surprise_is_the_density_and_none_where_there_is_none() -> None:
    """Of two independent values; and of a matrix that is no covariance."""
    assert negative_log_likelihood(np.diag([4.0, 1.0]), np.array([2.0, 1.0])) == pytest.approx(
        0.5 + 0.5 + np.log(2)
    )
    assert negative_log_likelihood(np.array([[1.0, 2.0], [2.0, 1.0]]), np.zeros(2)) > 1e9


def test_a_sample_is_all_where_they_are_few() -> None:
    """Else it is drawn by the seed, without repeats and in order."""
    assert sample(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    drawn = sample(1_000, 50, 0)
    assert len(set(drawn)) == 50
    assert (np.diff(drawn) > 0).all()
    assert (drawn == sample(1_000, 50, 0)).all()


def test_what_is_cached_is_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that differ in their batch alone have one prediction of memory, computed once; more of them than
    fit, too."""
    model = train(cluster.runs())
    memory, asked = model.labels[MEMORY], model.features.of(cluster.tasks())
    plain = memory.predict(MEMORY, asked)
    for limit in (30, 50_000):
        monkeypatch.setattr(resource_model, "MAX_CACHED", limit)
        assert_allclose(memory.predict(MEMORY, asked, cached=True).high, plain.high)
        assert_allclose(
            memory.predict(MEMORY, asked.pick(np.array([3, 3, 9])), cached=True).low, plain.low[[3, 3, 9]]
        )
    memory.predict(MEMORY, asked, cached=True)
    monkeypatch.setattr(LabelModel, "_computed", lambda *_: pytest.fail("it computed"))
    assert_allclose(memory.predict(MEMORY, asked, cached=True).high, plain.high)
