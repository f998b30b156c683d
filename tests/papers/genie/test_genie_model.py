"""Step times measured on 16 × 4 T4 (Pollux): GENIE's model and ours, each from what a profiler would have
seen.

What is taught by "other models" are the five that are not asked about. `-s` shows every figure.
"""

import csv
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock_services.estimator.core.records.placements import Cell, Measurement, Table, table
from penstock_services.estimator.core.step_time.fit import fit, reference_batch
from penstock_services.estimator.core.step_time.model import StepModel
from penstock_services.estimator.core.step_time.prior import WIDE, Prior
from tests.papers.estimator.step_validation import (
    light,
    noise,
    share_of,
    without,
)
from tests.papers.prediction.prediction_tables import (
    DATA,
    LIGHT,
    NETWORKS,
    step_errors,
    step_times,
    taught_without,
)

TRACES = DATA / "pollux/traces"
SEEDS = 10

pytestmark = pytest.mark.skipif(
    not (TRACES / "bert/placements.csv").is_file(),
    reason=f"Pollux' step times are not in {TRACES}; set PENSTOCK_DATA to the folder that holds pollux/",
)


Floats = NDArray[np.float64]


def scaled_up(model: str) -> Table:
    """6 to 16 nodes, GPUs spread evenly: far beyond the placements that are profiled."""
    with (TRACES / model / "scalability.csv").open() as file:
        runs = []
        for row in csv.DictReader(file):
            each, more = divmod(int(row["num_replicas"]), nodes := int(row["num_nodes"]))
            shape = (each,) * (nodes - more) + (each + 1,) * more
            runs.append(Measurement(Cell(shape, float(row["local_bsz"])), float(row["step_time"])))
    return table(runs)


def light_profile(model: str, prior: Prior) -> StepModel:
    whole, rng = step_times(model), np.random.default_rng(0)
    return fit(light(whole, prior, LIGHT, rng), prior, reference_batch(whole))


def judge(found: StepModel, asked: Table) -> tuple[Floats, NDArray[np.bool_]]:
    """(relative error of each cell, whether its 90 % interval holds it)."""
    steps = found.steps(list(asked.cells))
    off = steps.log_s - asked.log_s
    return np.abs(np.exp(off) - 1), np.abs(off) < found.factor(0.9) * steps.spread


def show(name: str, errors: Floats, held: NDArray[np.bool_] | None = None) -> None:
    covers = "" if held is None else f", 90 % intervals hold {held.mean():.1%}"
    print(f"\n{name}: median {np.median(errors):.1%}, p95 {np.quantile(errors, 0.95):.1%}{covers}", end="")


@cache
def profiled(model: str, known: str) -> tuple[Floats, NDArray[np.bool_], Floats, Floats]:
    """(errors, whether intervals hold them, errors on 6 to 16 nodes, half of the intervals' width in ln)
    after a light profile."""
    found = light_profile(model, taught_without(model) if known == "others" else WIDE)
    asked = without(step_times(model), found.table)
    error, inside = judge(found, asked)
    half = found.factor(0.9) * found.steps(list(asked.cells)).spread
    return error, inside, judge(found, scaled_up(model))[0], half


@pytest.mark.parametrize("known", ["others", "nothing"])
@pytest.mark.parametrize("model", NETWORKS)
def test_fifteen_points_predict_the_rest(model: str, known: str) -> None:
    """Each model is new to the cluster, profiled on 15 cells of its own plan; 526 to 1,647 others are asked
    for.

    No chance is in it: the plan is the same for each seed (8 tried).
    """
    error, inside, _, half = profiled(model, known)
    show(f"{model}, {LIGHT} points, {known} known", error, inside)
    print(f", ± {np.median(half):.0%}", end="")
    assert inside.mean() >= 0.88
    assert np.quantile(error, 0.95) <= 0.30
    assert np.median(error) <= 0.08


@pytest.mark.parametrize("known", ["others", "nothing"])
def test_fifteen_points_predict_the_rest_of_all(known: str) -> None:
    """All cells of all models, and far beyond what was profiled: 6 to 16 nodes."""
    errors, held, far, half = (
        np.concatenate(parts) for parts in zip(*(profiled(model, known) for model in NETWORKS), strict=True)
    )
    show(f"all, {LIGHT} points, {known} known", errors, held)
    show("all, on 6 to 16 nodes", far)
    assert np.quantile(errors, 0.95) <= 0.25
    assert np.quantile(far, 0.95) <= 0.45
    assert held.mean() >= 0.88
    assert np.median(half) <= 0.30, "an interval that holds everything is of no use"


def test_bert_is_slower_on_two_nodes_than_on_three() -> None:
    """The measured curve is not monotone; a policy that thinks it is would pay for it."""
    found = light_profile("bert", taught_without("bert"))
    two, three = np.exp(found.steps([Cell((4, 4), 12), Cell((4, 4, 4), 12)]).log_s)
    assert two > 1.2 * three


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["cells", "placements"])
def test_half_measured_shows_the_other_half(unit: str) -> None:
    """The cluster ran each model on half of its cells, or on half of its placements at all batches."""
    per_model: dict[str, list[float]] = {model: [] for model in NETWORKS}
    pooled, held = [], []
    for seed in range(SEEDS):
        errors = []
        for model in NETWORKS:
            whole, rng = step_times(model), np.random.default_rng(seed)
            seen = share_of(whole, 0.5, unit, rng)
            found = fit(seen, taught_without(model), reference_batch(whole))
            error, inside = judge(found, without(whole, seen))
            per_model[model].append(float(np.quantile(error, 0.95)))
            errors.append(error)
            held.append(inside)
        pooled.append(float(np.quantile(np.concatenate(errors), 0.95)))
    p95 = {model: float(np.mean(each)) for model, each in per_model.items()}
    print(f"\nhalf of the {unit}, {SEEDS} seeds: p95 {p95}")
    print(f"mean of the models {np.mean(list(p95.values())):.3f}, pooled {np.mean(pooled):.3f}", end=" ")
    print(f"± {np.std(pooled):.3f}, 90 % intervals hold {np.concatenate(held).mean():.1%}")
    assert np.mean(list(p95.values())) <= {"cells": 0.13, "placements": 0.16}[unit]
    assert np.mean(pooled) <= {"cells": 0.14, "placements": 0.18}[unit]
    assert 0.86 <= np.concatenate(held).mean() <= 0.94


def test_half_measured_is_near_the_noise_of_one_measurement() -> None:
    """Why 13 % over all cells of all models is out of reach: a single measurement lies off its own mean by 12
    % in one of twenty, and so would a model that knew every mean."""
    found = np.concatenate([noise(step_times(model)) for model in NETWORKS])
    show("noise", found)
    assert 0.11 < np.quantile(found, 0.95) < 0.13


def test_genies_own_form_is_far_off_here() -> None:
    """Why our default is not `genie`: eq. 1–3 know no slow second node and no host that slows its GPUs."""
    off = np.array([error for model in NETWORKS for error in step_errors(model, "genie")])
    show("genie, B + N + G runs", off)
    assert 0.30 < np.quantile(off, 0.95) < 3.0
