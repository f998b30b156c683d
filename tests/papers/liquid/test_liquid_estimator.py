"""Liquid §4 and §6.1: the forest, exactly, and what the paper says about it, on measured runs.

The figures are floors for the mean of three divisions into five folds (R², GPU memory / log throughput /
utilisation mean / its standard deviation): over ten other divisions 0.9746 ± 0.0018, 0.9747 ± 0.0012, 0.6745
± 0.0135 and 0.6457 ± 0.0159 (one division), each floor at least 4.9 standard errors below.
"""

import numpy as np
import pytest

from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    THROUGHPUT,
    UTILISATION,
    UTILISATION_STD,
    Runs,
    Task,
)
from tests.papers.estimator.cross_validation import Judged, cross_judge
from tests.papers.estimator.files.run_files import read_runs
from tests.papers.estimator.models.liquid import REGRESSORS, LiquidModel, PhaseModel, regressor
from tests.support.data import DATA_ROOT
from tests.support.trainings import measured_runs as cluster

DATA = DATA_ROOT / "lambda"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(),
    reason=f"the telemetry is not in {DATA}; set PENSTOCK_DATA to the folder that holds lambda/",
)
FLOORS = {MEMORY: 0.965, THROUGHPUT: 0.964, UTILISATION: 0.636, UTILISATION_STD: 0.600}


@pytest.fixture(scope="module")
def runs() -> Runs:
    return read_runs(DATA).runs


def test_the_forest_has_the_papers_settings() -> None:
    """70 trees, depth 13, at least 10 runs to split and 5 in a leaf."""
    forest = regressor("liquid", 0)
    predicted = forest.get_params()  # type: ignore[attr-defined]
    assert type(forest).__name__ == "RandomForestRegressor"
    assert (predicted["n_estimators"], predicted["max_depth"]) == (70, 13)
    assert (predicted["min_samples_split"], predicted["min_samples_leaf"]) == (10, 5)


def test_parameter_servers_and_workers_are_features() -> None:
    """§4 names them: the same job with two servers and four workers moves more over the network than with one
    of each."""
    noise = np.random.default_rng(0)
    tasks = [
        Task(
            "vgg16",
            "T4",
            float(workers),
            batch_size=32.0,
            parameter_servers=float(servers),
            workers=float(workers),
        )
        for servers in (1, 2)
        for workers in (1, 2, 4)
        for _ in range(20)
    ]
    bandwidth = np.array([200 * t.workers / t.parameter_servers for t in tasks]) + noise.normal(
        0, 2, len(tasks)
    )
    model = LiquidModel(Runs(tuple(tasks), {"bandwidth_mbps": bandwidth}))
    predicted = model.predict([tasks[0], tasks[-1]])["bandwidth_mbps"]
    assert predicted == pytest.approx([200, 400], rel=0.05)


def test_the_second_model_shows_the_phases_of_a_job() -> None:
    """§6.1: launch grows with the input, an iteration with the batch, saving with the model; one forest for
    all three."""
    noise = np.random.default_rng(0)
    tasks = [
        Task(model, "T4", batch_size=float(batch))
        for model in ("small", "large")
        for batch in (4, 8, 16, 32)
        for _ in range(30)
    ]
    resources = np.column_stack(
        [np.full(len(tasks), 4.0), np.full(len(tasks), 8_192.0), noise.choice([100.0, 1_000.0], len(tasks))]
    )
    large = np.array([task.model == "large" for task in tasks])
    batch = np.array([task.batch_size for task in tasks])
    phases_s = np.column_stack([2 + resources[:, 2] / 200, 0.01 * batch * (1 + large), 1 + 4 * large])
    model = PhaseModel(tasks, resources, phases_s * np.exp(noise.normal(0, 0.02, phases_s.shape)))
    predicted = model.predict(tasks, resources)
    assert np.median(np.abs(predicted / phases_s - 1)) < 0.05


def test_the_forest_beats_the_line_where_the_paper_says_so() -> None:
    """Memory that stops at the card's size is no linear function of anything."""
    found = {name: cross_judge(cluster.runs(), name, "random", 0)[MEMORY].r2 for name in REGRESSORS}
    assert found["liquid"] > found["linear"]


@needs_data
@pytest.mark.slow
def test_the_forest_on_cells_never_seen(runs: Runs) -> None:
    """Five folds of whole cells. Three seeds, which are fixed: no chance, the figures are the same in each
    run."""
    predicted: list[dict[str, Judged]] = [
        dict(cross_judge(runs, "liquid", "cells", seed)) for seed in range(3)
    ]
    for name, floor in FLOORS.items():
        assert np.mean([one[name].r2 for one in predicted]) >= floor, name
