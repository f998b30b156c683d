"""Liquid's model of phase times on runs that it was not shown, beside the medians that answer."""

import numpy as np
import pytest

from penstock_services.estimator.core.resource_model.measurements import Task
from tests.papers.estimator.cross_validation import TooFew
from tests.papers.estimator.models.phases import Phased, judge_phases, nearest_phases, phased_of


def measured() -> Phased:
    """Two networks, four batch sizes, two cards; launching grows with the input, an iteration with the batch,
    saving with the network; 3 % of noise."""
    rng = np.random.default_rng(0)
    tasks = [
        Task(model, gpu, batch_size=float(batch))
        for model in ("small", "large")
        for gpu in ("T4", "V100")
        for batch in (4, 8, 16, 32)
        for _ in range(12)
    ]
    large = np.array([task.model == "large" for task in tasks])
    batch = np.array([task.batch_size for task in tasks])
    resources = np.column_stack([np.full(len(tasks), 4.0), np.full(len(tasks), 8_192.0), 100 + 900.0 * large])
    phases_s = np.column_stack([2 + resources[:, 2] / 200, 0.01 * batch * (1 + large), 1 + 4 * large])
    return Phased(tuple(tasks), resources, phases_s * np.exp(rng.normal(0, 0.03, phases_s.shape)))


def test_both_are_judged_on_runs_left_out() -> None:
    """The forest knows all three phases; the medians know launching and saving, which are the network's, as
    well as it."""
    found = judge_phases(measured(), "random", 0)
    assert set(found["liquid"]) == {"launch_s", "train_s", "save_s"}
    assert set(found["penstock"]) == {"launch_s", "save_s"}, "iterations are the step model's"
    for phase, predicted in found["penstock"].items():
        assert predicted.runs == len(measured().tasks)
        assert predicted.r2 > 0.97
        assert predicted.r2 > found["liquid"][phase].r2 - 0.01
    assert found["liquid"]["train_s"].r2 > 0.9


def test_a_network_that_nobody_ran_gets_the_median_of_all() -> None:
    """Nothing is known of it; a batch that nobody was near to is as unknown."""
    known = measured()
    found = nearest_phases(
        known, [Task("new", "T4", batch_size=8.0), Task("large", "T4", batch_size=4_096.0)]
    )
    assert found == pytest.approx(np.tile(np.median(known.phases_s, axis=0), (2, 1)))


def test_runs_without_all_phases_are_left_out() -> None:
    """A script that never saves tells two phases of three."""
    tasks = [Task("m", "T4"), Task("m", "T4")]
    found = phased_of(tasks, [[1, np.nan, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, np.nan]])
    assert len(found.tasks) == 1
    assert found.resources.tolist() == [[1, 0, 3]]
    assert phased_of([], [], []).phases_s.shape == (0, 3)


def test_one_class_alone_cannot_be_judged() -> None:
    """All runs are of one GPU model: nothing is left to learn from when it is held out."""
    runs = measured()
    with pytest.raises(TooFew):
        judge_phases(runs.pick(np.array([task.gpu == "T4" for task in runs.tasks])), "families", 0)
