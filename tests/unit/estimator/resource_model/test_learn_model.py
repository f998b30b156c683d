"""The default model on a small cluster whose truth is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock_services.estimator.core.learning.limits import CELLS_OF_ONE
from penstock_services.estimator.core.resource_model.features import memory_line
from penstock_services.estimator.core.resource_model.labels import UNITS
from penstock_services.estimator.core.resource_model.measurements import (
    LABELS,
    MEMORY,
    THROUGHPUT,
    UTILISATION,
    Runs,
    Task,
    card_mib,
    runs_of,
)
from penstock_services.estimator.core.resource_model.model import (
    Model,
    cells,
    limited_per_owner,
    merged,
    train,
)
from tests.papers.estimator.cross_validation import cross_judge, floor, folds, judge_on
from tests.support.trainings import measured_runs as cluster


@pytest.fixture(scope="module")
def model() -> Model:
    return train(cluster.runs())


def test_it_finds_the_memory_of_a_batch_that_nobody_tried(model: Model) -> None:
    """Batches of 8 and 48 were run; a user asks for 24: the line between them, within a fifth."""
    asked = [Task(name, "A100", 2.0, "FP16", 24.0) for name in cluster.LINES]
    predicted = model.predict(asked)[MEMORY]
    truth = np.array([cluster.memory_mib(task) for task in asked])
    assert np.abs(predicted.value / truth - 1).max() < 0.2
    assert (predicted.high <= [card_mib(task) for task in asked]).all()


@pytest.mark.parametrize("name", ["resnet50", "bert", "ncf", "never-seen"])
@pytest.mark.parametrize("gpu", ["A100", "T4", "never-seen"])
def test_memory_never_falls_as_the_batch_grows(model: Model, name: str, gpu: str) -> None:
    """A user doubles the batch: whatever the model learned from noise, it must not promise him less."""
    batches = [2.0**power for power in np.arange(0, 14, 0.25)]
    asked = [Task(name, gpu, 4.0, "FP32", batch, card_mib=16_384.0) for batch in batches]
    predicted = model.predict(asked)[MEMORY]
    for column in (predicted.value, predicted.low, predicted.high):
        assert (np.diff(column) >= -1e-6).all()
    assert (predicted.high <= 16_384.0 * (1 + 1e-9)).all()


def test_a_gpu_nobody_has_yet_is_judged_by_what_it_can_do() -> None:
    """The cluster buys T4 cards; runs so far are on other models. Speed and memory must carry over."""
    seen = cluster.runs(gpus=(*cluster.GPUS, "1080Ti", "P100"))
    asked = cluster.runs(seed=1, gpus=("T4",))
    judged, plain = (judge_on(seen, asked, name, 0) for name in ("penstock", "liquid"))
    assert judged[THROUGHPUT].r2 > max(0.9, plain[THROUGHPUT].r2)
    assert judged[MEMORY].r2 > 0.99


def test_it_says_when_it_knows_little(model: Model) -> None:
    """A workload that was never run: wide intervals and little known, so that another tier may answer."""
    seen, new = model.predict([Task("bert", "A100", 2.0, "FP16", 48.0), Task("novel", "H100", 64.0)])[
        UTILISATION
    ].known
    assert seen > 0.8
    assert new < seen
    predicted = model.predict(
        [Task("bert", "A100", 2.0, "FP16", 48.0), Task("novel", "A100", 2.0, "FP16", 48.0)]
    )
    width = predicted[MEMORY].high - predicted[MEMORY].low
    assert width[1] > 2 * width[0]


def test_nine_of_ten_runs_left_out_lie_in_their_interval() -> None:
    """Placement promises the upper bound: it must hold on cells that were held back, and not by being
    endless."""
    judged = cross_judge(cluster.runs(), "penstock", "cells", 0)
    for name in (MEMORY, UTILISATION, THROUGHPUT):
        assert 0.82 <= judged[name].coverage <= 0.98, name
    assert judged[MEMORY].width < 4_000


def test_training_twice_gives_the_same_model(model: Model) -> None:
    """A replay trains again from the same runs: the answers must be the same to the last bit."""
    again = train(cluster.runs())
    asked = cluster.tasks()
    for name, predicted in model.predict(asked).items():
        assert (predicted.value == again.predict(asked)[name].value).all()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_runs_or_one_class_make_a_model_all_the_same(count: int) -> None:
    """The first day of a cluster: a handful of runs, all of one workload; estimates are finite and humble."""
    runs = cluster.runs()
    few = runs.pick(np.arange(count))
    predicted = train(few).predict([*few.tasks, Task("novel", "T4")])
    for name in few.labels:
        assert np.isfinite(predicted[name].value).all()
        assert (predicted[name].low <= predicted[name].high).all()


def test_labels_that_nobody_measured_are_not_reported() -> None:
    """Nodes without a network counter: no bandwidth. Runs without any label at all teach nothing."""
    assert "bandwidth_mbps" not in train(cluster.runs()).predict(cluster.tasks())
    with pytest.raises(ValueError, match="nothing to learn"):
        train(runs_of([Task("m", "T4")], [{}]))


def test_bandwidth_is_learned_where_it_is_measured() -> None:
    """Gradients of four GPUs cross the network, those of one do not."""
    wanted = cluster.tasks()
    predicted = train(
        runs_of(wanted, [{"bandwidth_mbps": 800 * (task.gpus - 1)} for task in wanted])
    ).predict([Task("bert", "A100", float(gpus), "FP16", 48.0) for gpus in (1, 4)])["bandwidth_mbps"]
    assert predicted.value[0] < 200
    assert 1_600 < predicted.value[1] < 3_600


def test_a_line_is_found_whatever_launcher_reported_the_batch() -> None:
    """Some launchers tell the batch of one GPU, others that of all; some runs take all memory that is
    left."""
    batch = np.array([8.0, 16, 32, 64, 8, 16, 32, 64])
    gpus = np.array([1.0, 1, 1, 1, 4, 4, 4, 4])
    a, b, c = memory_line(batch, gpus, 2_000 + 100 * batch)
    assert (a, b) == (pytest.approx(2_000, rel=0.01), pytest.approx(100, rel=0.01))
    assert c == pytest.approx(0, abs=1)
    memory = 2_000 + 400 * batch / gpus
    memory[1] = 16_000
    a, b, c = memory_line(batch, gpus, memory)
    assert (a, c) == (pytest.approx(2_000, rel=0.1), pytest.approx(400, rel=0.1))


def test_one_owner_cannot_move_what_two_others_measured() -> None:
    """Mallory sends 500 runs that claim 1 MiB for a job that Alice and Bob both ran: their word stands."""
    runs = cluster.runs()
    wanted = [replace(task, owner=owner) for owner in ("alice", "bob") for task in runs.tasks]
    rows = [{name: column[row] for name, column in runs.labels.items()} for row in range(len(runs))] * 2
    about = Task("bert", "A100", 2.0, "FP16", 48.0)
    honest = train(runs_of(wanted, rows)).predict([about])[MEMORY].value[0]
    lies = [replace(about, owner="mallory")] * 500
    poisoned = train(runs_of([*wanted, *lies], [*rows, *[{MEMORY: 1.0}] * 500])).predict([about])[MEMORY]
    assert poisoned.value[0] == pytest.approx(honest, rel=0.1)


def test_an_owner_with_many_made_up_cells_is_cut_to_the_weight_of_the_others() -> None:
    """Mallory runs 1,000 jobs with 1,000 batch sizes: alone he may say as much as all others together."""
    honest = cluster.tasks(owner="alice")
    lies = [Task("bert", "A100", 1.0, "FP16", float(batch), owner="mallory") for batch in range(100, 1_100)]
    runs = runs_of([*honest, *lies], [{MEMORY: 5_000.0}] * (len(honest) + len(lies)))
    stored = limited_per_owner(runs, 0)
    his = sum(task.owner == "mallory" for task in stored.tasks)
    assert his == max(len(honest), CELLS_OF_ONE)
    assert sum(task.owner == "alice" for task in stored.tasks) == len(honest)
    assert limited_per_owner(runs, 0).tasks == stored.tasks
    assert limited_per_owner(cluster.runs(), 0).tasks == cluster.runs().tasks


def test_repeats_of_a_cell_are_merged_by_owner() -> None:
    """Alice repeats a job nine times, Bob and Carol once each: the cell is the middle of three, not Alice's
    mean."""
    task = Task("m", "T4", batch_size=8.0)
    tasks = [replace(task, owner=owner) for owner in (*["alice"] * 9, "bob", "carol")]
    runs = runs_of(tasks, [{MEMORY: value} for value in (*[9.0] * 9, 1.0, 2.0)])
    first, row_of = cells(runs.tasks)
    value, repeats = merged(runs, runs.labels[MEMORY], row_of, len(first))
    assert (value.tolist(), repeats.tolist()) == ([2.0], [8.0])


@pytest.mark.parametrize("split", ["cells", "families", "random"])
def test_every_run_is_held_out_once_and_with_its_group(split: str) -> None:
    """A repeat of a cell in both halves would let any model look it up."""
    runs = cluster.runs()
    held = np.sum([mask.astype(int) for mask in folds(runs, split, 3)], axis=0)
    assert (held == 1).all()
    for mask in folds(runs, split, 3):
        if split == "families":
            assert not {t.gpu for t in runs.pick(mask).tasks} & {t.gpu for t in runs.pick(~mask).tasks}


def test_no_model_can_foresee_which_repeat_it_is_asked_about() -> None:
    """Two runs of each of two cells, 10 apart, the cells 100 apart: 1 − 50 / 2,525."""
    tasks = [Task("m", gpu) for gpu in ("T4", "T4", "V100", "V100")]
    values = np.array([0.0, 10.0, 100.0, 110.0])
    assert floor(Runs(tuple(tasks), {MEMORY: values}))[MEMORY] == pytest.approx(1 - 50 / 2_525)


def test_all_labels_have_a_unit_both_ways(model: Model) -> None:
    """What is learned must be told in the label's own unit, at the ends of its range too."""
    inputs = model.features.of([Task("bert", "A100", 4.0, "FP16", 48.0)] * 3)
    ends = {UTILISATION: [0.0, 50.0, 100.0], "gpu_utilisation_std": [0.0, 25.0, 50.0]}
    for name in LABELS:
        values = np.array(ends.get(name, [1.0, 500.0, 30_000.0]))
        predicted = UNITS[name].measured(UNITS[name].learned(values, inputs), inputs)
        assert np.allclose(predicted, values, rtol=1e-9, atol=1e-9), name
    assert not math.isnan(float(model.predict([Task("bert", "A100")])[MEMORY].value[0]))
