"""Our default model on measured runs (843 of nvidia-smi, 17 GPU models), against Liquid's on the same splits.

To reach, R² of memory / log throughput / utilisation mean / std: 0.97 / 0.98 / 0.65 / 0.48 on cells never
seen, 0.75 / 0.96 / 0.50 / 0.30 on whole GPU models never seen. Of the runs held out, 88 – 92 % of cells never
seen lie in their 90 % interval, and at least 88 % of each GPU model never seen.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from penstock_services.estimator.core.learning.saved import digest_of, from_bytes, to_bytes
from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    THROUGHPUT,
    UTILISATION,
    UTILISATION_STD,
    Runs,
)
from penstock_services.estimator.core.resource_model.model import Model, train
from tests.papers.estimator.cross_validation import Judged, cross_judge
from tests.papers.estimator.files.run_files import Read, read_runs
from tests.papers.estimator.left_out import of_runs, table
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "lambda"
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(),
    reason=f"the telemetry is not in {DATA}; set PENSTOCK_DATA to the folder that holds lambda/",
)
REACH = {
    "cells": {MEMORY: 0.97, THROUGHPUT: 0.98, UTILISATION: 0.65, UTILISATION_STD: 0.48},
    "families": {MEMORY: 0.75, THROUGHPUT: 0.96, UTILISATION: 0.50, UTILISATION_STD: 0.30},
}
SEEDS = 8
"""Divisions into folds. Over ten others the nearest bounds lie 5.2 standard errors of the mean of eight off:
ours above Liquid's by 0.076 ± 0.041 (one division) for the utilisation's standard deviation on whole GPU
models, and a coverage of 0.894 ± 0.015 for throughput."""


@pytest.fixture(scope="module")
def read() -> Read:
    return read_runs(DATA)


def test_runs_with_more_memory_than_their_card_are_rejected(read: Read) -> None:
    """A laptop's 3080 that was noted as the desktop's, three runs on a larger V100: 28 of 843."""
    assert read.reasons() == {"more GPU memory than the card has": 28}
    assert len(read.runs) == 815


def test_memory_is_monotone_and_within_the_card_everywhere(read: Read) -> None:
    """Every cell that was measured, asked again with batches from one sample to far beyond the card."""
    body = to_bytes(train(read.runs))
    model = from_bytes(body, digest_of(body), Model)
    tasks = list(dict.fromkeys(replace(task, batch_size=1.0) for task in read.runs.tasks))
    before = np.zeros(len(tasks))
    for power in range(21):
        predicted = model.predict([replace(task, batch_size=2.0**power) for task in tasks])[MEMORY]
        assert (predicted.high >= before - 1e-6).all()
        assert (predicted.high <= [task.card_mib + 1e-6 for task in tasks]).all()
        before = predicted.high


@pytest.mark.slow
@pytest.mark.parametrize("split", list(REACH))
def test_ours_reaches_its_figures_and_beats_liquids(read: Read, split: str) -> None:
    """Five folds; every run is predicted by a model that saw nothing of its cell, or of its GPU model."""
    ours, liquids = (
        [cross_judge(read.runs, name, split, seed) for seed in range(SEEDS)]
        for name in ("penstock", "liquid")
    )

    def mean(predicted: list[Mapping[str, Judged]], label: str, figure: str) -> float:
        return float(np.mean([getattr(one[label], figure) for one in predicted]))

    for label, least in REACH[split].items():
        assert mean(ours, label, "r2") >= max(least, mean(liquids, label, "r2")), label
        if split == "cells":
            assert 0.865 <= mean(ours, label, "coverage") <= 0.935, label


HARDEST = ("A40", "RTX8000", "A100_80GB")
"""The GPU models whose memory is least like that of the others: calibrated on all runs of the others together
70, 80 and 76 % held, and of RTX8000 15 % took more than they were promised."""


def test_memory_on_gpu_models_never_seen(read: Read) -> None:
    """A cell gets its first such card: of no model do more than 12 % of the runs leave their interval, and of
    all of them at most 5 % take more than their promise, which is at most a third above what they take."""
    memory = Runs(read.runs.tasks, {MEMORY: read.runs.labels[MEMORY]})
    found = of_runs(memory, "families", only=HARDEST)
    print("\n" + table(found))
    assert [one.group for one in found] == list(HARDEST)
    assert min(one.inside for one in found) >= 0.88
    assert sum(one.above * one.asked for one in found) <= 0.05 * sum(one.asked for one in found)
    assert max(one.high for one in found) <= 4 / 3


def test_memory_on_generations_never_seen(read: Read) -> None:
    """A cell of Volta and Turing gets its first Ampere cards: calibrated on GPU models of generations that
    taught, 74 % held."""
    memory = Runs(read.runs.tasks, {MEMORY: read.runs.labels[MEMORY]})
    found = of_runs(memory, "generations")
    print("\n" + table(found))
    assert {one.group for one in found} == {"Volta", "Turing", "Ampere"}
    for one in found:
        assert one.inside >= 0.88, one
        assert one.above <= 0.05, one
        assert one.high <= 1.15, one


@pytest.mark.slow
def test_every_label_on_each_gpu_model_never_seen(read: Read) -> None:
    found = of_runs(read.runs, "families") + of_runs(read.runs, "generations")
    print("\n" + table(found))
    assert len(found) == 4 * (17 + 3)
    for one in found:
        assert one.inside >= 0.88, one
        assert one.label != MEMORY or one.above <= 0.06, one
