"""How well a model does on runs that it was not shown."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats, Mask
from penstock_services.estimator.core.resource_model.gpus import generation_of
from penstock_services.estimator.core.resource_model.measurements import (
    LABELS,
    THROUGHPUT,
    Runs,
    Task,
    cell_of,
)
from penstock_services.estimator.core.resource_model.model import blocks, train, within
from tests.papers.estimator.models.liquid import REGRESSORS, LiquidModel

FOLDS = 5


class Judged(NamedTuple):
    """One label of one model, over all runs each predicted once from folds without them."""

    r2: float
    """1 − squared errors / squared distances from the mean; of the logarithm for throughput. At most 1."""
    rmse: float
    mae: float
    p95_relative: float
    """|predicted / true − 1| that 95 % of runs stay within; runs whose truth is 0 are left out."""
    runs: int
    coverage: float
    """Share of runs inside their 90 % interval; NaN for a model that gives none."""
    width: float
    """Median width of that interval."""


class Predictions(NamedTuple):
    """One label's. Shapes (tasks,); the ends are NaN for a model without intervals."""

    value: Floats
    low: Floats
    high: Floats


class Trained(Protocol):
    """What is judged: tasks to predictions per label."""

    def __call__(self, tasks: Sequence[Task]) -> Mapping[str, Predictions]: ...


def _ours(runs: Runs, seed: int) -> Trained:
    model = train(runs, seed)

    def predict(tasks: Sequence[Task]) -> Mapping[str, Predictions]:
        return {name: Predictions(t.value, t.low, t.high) for name, t in model.predict(tasks).items()}

    return predict


def _plain(name: str) -> Callable[[Runs, int], Trained]:
    def learn(runs: Runs, seed: int) -> Trained:
        model = LiquidModel(runs, name, seed)

        def predict(tasks: Sequence[Task]) -> Mapping[str, Predictions]:
            nothing = np.full(len(tasks), math.nan)
            return {label: Predictions(y, nothing, nothing) for label, y in model.predict(tasks).items()}

        return predict

    return learn


MODELS: Mapping[str, Callable[[Runs, int], Trained]] = MappingProxyType(
    {"penstock": _ours, **{name: _plain(name) for name in REGRESSORS}}
)
"""Name → training on runs with a seed."""

SPLITS: Mapping[str, Callable[[int, Task], Hashable]] = MappingProxyType(
    {
        "cells": lambda _, task: cell_of(task),
        "both-precisions": lambda _, task: cell_of(task)[:3],
        "families": lambda _, task: task.gpu,
        "generations": lambda _, task: generation_of(task.gpu),
        "networks": lambda _, task: task.model,
        "random": lambda row, _: row,
    }
)
"""Name → what runs share that are held out together: the cell (GPU model, GPUs, workload, precision), the
same without its precision, the GPU model, its generation, the workload, nothing."""


class TooFew(ValueError):
    """A split needs at least two groups."""


def folds(runs: Runs, split: str, seed: int) -> Iterator[Mask]:
    """Which runs to hold out, FOLDS times (fewer where there are fewer groups); each run once. Raises
    `TooFew`."""
    groups = [SPLITS[split](row, task) for row, task in enumerate(runs.tasks)]
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        raise TooFew(f"split {split}: {len(names)} group; at least 2 are needed to hold one out")
    order = np.random.default_rng(seed).permutation(len(names))
    fold_of = {names[place]: position % min(FOLDS, len(names)) for position, place in enumerate(order)}
    mine = np.array([fold_of[group] for group in groups])
    for fold in range(min(FOLDS, len(names))):
        yield mine == fold


def cross_judge(runs: Runs, model: str, split: str, seed: int) -> Mapping[str, Judged]:
    """Every run predicted once by a model that was trained without its group. Raises `TooFew`, `KeyError`."""
    found: dict[str, Predictions] = {}
    for held_out in folds(runs, split, seed):
        predicted = MODELS[model](runs.pick(~held_out), seed)(runs.pick(held_out).tasks)
        for name, part in predicted.items():
            whole = found.setdefault(name, Predictions(*(np.full(len(runs), math.nan) for _ in range(3))))
            for column, values in zip(whole, part, strict=True):
                column[held_out] = values
    return judge_all(runs, found)


def judge_on(runs: Runs, others: Runs, model: str, seed: int) -> Mapping[str, Judged]:
    """Trained on `runs`, judged on `others`. Raises `KeyError`."""
    return judge_all(others, MODELS[model](runs, seed)(others.tasks))


def judge_all(runs: Runs, predicted: Mapping[str, Predictions]) -> Mapping[str, Judged]:
    """Label → figures, for labels that were both measured and predicted."""
    found = {}
    for name in LABELS:
        if name not in predicted or name not in runs.labels:
            continue
        both = np.isfinite(runs.labels[name]) & np.isfinite(predicted[name].value)
        if both.sum() >= 2:
            found[name] = judge(
                name, runs.labels[name][both], Predictions(*(c[both] for c in predicted[name]))
            )
    return found


def judge(name: str, truth: Floats, predicted: Predictions) -> Judged:
    """Of one label. Shapes (runs,), finite; at least two runs."""
    off = predicted.value - truth
    seen, answered = (
        (np.log(truth), np.log(predicted.value)) if name == THROUGHPUT else (truth, predicted.value)
    )
    spread = float(((seen - seen.mean()) ** 2).sum())
    relative = np.abs(off[truth > 0] / truth[truth > 0])
    bounded = bool(np.isfinite(predicted.low).all())
    return Judged(
        r2=1 - float(((answered - seen) ** 2).sum()) / spread if spread > 0 else math.nan,
        rmse=float(np.sqrt((off**2).mean())),
        mae=float(np.abs(off).mean()),
        p95_relative=float(np.quantile(relative, 0.95)) if relative.size else math.nan,
        runs=len(truth),
        coverage=float(within(predicted.low, predicted.high, truth).mean()) if bounded else math.nan,
        width=float(np.median(predicted.high - predicted.low)) if bounded else math.nan,
    )


FEWEST_REPEATS = 10  # beyond the first of each cell; fewer show no variance


def floor(runs: Runs, fewest: int = 1) -> Mapping[str, float]:
    """Label → the R² that no model can exceed: 1 − variance between repeats of one cell / variance of all.

    A model cannot know which repeat it is asked about. Labels with fewer than
    `fewest` repeats, beyond the first run of each cell, are left out.
    """
    cells = blocks([cell_of(task) for task in runs.tasks])
    found = {}
    for name in LABELS:
        if name not in runs.labels:
            continue
        column = np.log(runs.labels[name]) if name == THROUGHPUT else runs.labels[name]
        parts = [column[rows][np.isfinite(column[rows])] for rows in cells]
        repeats = [part for part in parts if len(part) > 1]
        freedom = sum(len(part) - 1 for part in repeats)
        total = float(np.nanvar(column))
        if freedom >= fewest and total > 0:
            between = sum(float(((part - part.mean()) ** 2).sum()) for part in repeats) / freedom
            found[name] = 1 - between / total
    return found
