"""The short ways of the process give what the long ones do."""

import numpy as np
import pytest

from penstock_services.estimator.core.resource_model import gaussian_process as process
from penstock_services.estimator.core.resource_model.covariance import SHARES, Weights
from penstock_services.estimator.core.resource_model.features import WIDTH, Inputs
from penstock_services.estimator.core.resource_model.gaussian_process import Fit, Remembering, sample
from penstock_services.estimator.core.resource_model.measurements import Floats

COLUMNS = (0, 1, 5)


def jobs(count: int, seed: int = 1) -> Inputs:
    chance = np.random.default_rng(seed)
    return Inputs(
        chance.normal(size=(count, WIDTH)), chance.integers(0, 5, count), chance.integers(0, 2, count),
        chance.integers(0, 3, count), np.zeros(count), np.zeros(count), np.zeros(count),
    )  # fmt: skip


@pytest.fixture(scope="module")
def fit() -> Fit:
    inputs, chance = jobs(90), np.random.default_rng(2)
    y = np.sin(inputs.columns[:, 0]) + 0.3 * inputs.workload + chance.normal(0, 0.1, 90)
    return Fit(inputs, (y - y.mean()) / y.std(), np.ones(90), COLUMNS, seed=0)


def one_pair(weights: Weights, a: Inputs, b: Inputs) -> float:
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
    """More rows than are done at once, names never seen among them: each entry is what the formula says."""
    chance = np.random.default_rng(5)
    weights = Weights(chance.normal(-1, 1, SHARES + 5 + 2 * len(columns) + 1), columns)
    some, others = jobs(150, 3), jobs(5, 4)
    some.workload[:20], some.gpu[10:30] = -1, -1
    k = weights.between(some, weights.side(others))
    for i in range(0, 150, 3):
        for j in range(5):
            pair = some.pick(np.array([i])), others.pick(np.array([j]))
            assert k[i, j] == pytest.approx(one_pair(weights, *pair), rel=1e-9)


def without(fit: Fit, rows: Floats) -> tuple[Floats, Floats]:
    """Mean and variance at `rows` by regression on the other rows alone, with features and noise as they are."""
    phi, noise, y = fit._phi, fit._noise, fit._y
    others = np.setdiff1d(np.arange(len(y)), rows)
    precision = np.eye(phi.shape[1]) + (phi[others].T / noise[others]) @ phi[others]
    inverse = np.linalg.inv(precision)
    mean = phi[rows] @ inverse @ (phi[others].T @ (y[others] / noise[others]))
    return mean, np.einsum("ij,jk,ik->i", phi[rows], inverse, phi[rows]) + fit._unseen[rows]


def test_a_block_left_out_is_told_by_the_others_alone(fit: Fit) -> None:
    """A block of one cell, a small one, and one that is most of all: the closed forms are a regression without it."""
    parts = [np.array([0]), np.arange(1, 20), np.arange(20, 90)]
    mean, variance = fit.without(parts)
    for rows in parts:
        right = without(fit, rows)
        assert mean[rows] == pytest.approx(right[0], rel=1e-6, abs=1e-6)
        assert variance[rows] == pytest.approx(right[1], rel=1e-6, abs=1e-6)


def test_some_cells_are_foretold_as_they_are_among_all(fit: Fit) -> None:
    """Asked as they are, they are told what leaving out tells; a third of them are told the same as in company."""
    parts = [np.arange(0, 8), np.arange(8, 90)]
    some = np.arange(0, 90, 3)
    mean, variance = fit.foretold(parts, jobs(90).pick(some), some)
    all_mean, all_variance = fit.without(parts)
    assert mean == pytest.approx(all_mean[some], rel=1e-6, abs=1e-6)
    assert variance == pytest.approx(all_variance[some], rel=1e-6, abs=1e-6)


def test_weights_that_are_known_are_not_searched_for(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second fit of a training takes those of the first."""
    monkeypatch.setattr(process, "learn", lambda *_: pytest.fail("it searched"))
    again = Fit(jobs(90), fit._y, np.ones(90), COLUMNS, seed=0, weights=fit.weights)
    asked = jobs(5, 9)
    told, before = again.process().predict(asked), fit.process().predict(asked)
    assert told[0] == pytest.approx(before[0])
    assert told[1] == pytest.approx(before[1])
    assert fit.process().mean(asked) == pytest.approx(before[0])


def test_a_sample_is_all_where_they_are_few() -> None:
    """Else it is drawn by the seed, without repeats and in order."""
    assert sample(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    drawn = sample(1_000, 50, 0)
    assert len(set(drawn)) == 50
    assert (np.diff(drawn) > 0).all()
    assert (drawn == sample(1_000, 50, 0)).all()


def test_what_is_remembered_is_what_is_computed(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that differ only in what this process does not look at have one answer; more of them than it remembers, too."""
    monkeypatch.setattr(process, "MAX_REMEMBERED", 30)
    asked, kept = jobs(40, 9), Remembering(fit.process())
    others = asked.columns.copy()
    others[:, [column for column in range(WIDTH) if column not in COLUMNS]] += 1.0
    alike = Inputs(others, *(getattr(asked, name) for name in Inputs.__slots__[1:]))
    mean, variance = fit.process().predict(asked)
    for told in (kept.predict(asked), kept.predict(alike), kept.predict(asked)):
        assert told[0] == pytest.approx(mean)
        assert told[1] == pytest.approx(variance)
    one_by_one = [kept.predict(alike.pick(np.array([row])))[0][0] for row in (3, 3, 39)]
    assert one_by_one == pytest.approx([mean[3], mean[3], mean[39]])


def test_a_question_that_was_asked_before_is_not_computed_again(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, asked = Remembering(fit.process()), jobs(4, 9)
    before = kept.predict(asked)
    monkeypatch.setattr(Weights, "parts", lambda *_: pytest.fail("it computed"))
    again = kept.predict(asked.pick(np.array([2, 0, 2])))
    assert again[0].tolist() == before[0][[2, 0, 2]].tolist()
    assert again[1].tolist() == before[1][[2, 0, 2]].tolist()
