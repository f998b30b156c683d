"""Liquid's estimator, exactly: a random forest on what is known before a job starts.

Source: Liquid §4; §6.1 for the second model; its settings (70 trees, depth 13, at least 10 runs to split, 5
in a leaf) from the authors' code. Beside it the four regressors that the paper compares it with. Their
settings are not told: the tree has the forest's bounds, the others scikit-learn's defaults, boosting with the
forest's 70 trees.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
from sklearn.ensemble import AdaBoostRegressor, GradientBoostingRegressor, RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor

from penstock_services.estimator.core.learning.gaussian_process import Floats
from penstock_services.estimator.core.resource_model.measurements import (
    LABELS,
    MIB_PER_GIB,
    THROUGHPUT,
    Runs,
    Task,
    card_mib,
)

TREES = 70
BOUNDS = MappingProxyType({"max_depth": 13, "min_samples_split": 10, "min_samples_leaf": 5})
PHASES = ("launch_s", "train_s", "save_s")
"""T_l, T_t (of one iteration) and T_sa."""


class Regressor(Protocol):
    """What scikit-learn's regressors share."""

    def fit(self, x: Floats, y: Floats) -> object: ...

    def predict(self, x: Floats) -> Floats: ...


def regressor(name: str, seed: int) -> Regressor:
    """One of `REGRESSORS`; `seed` decides all its chance. Raises `KeyError`."""
    made: Regressor = {
        "liquid": lambda: RandomForestRegressor(TREES, random_state=seed, n_jobs=1, **BOUNDS),
        "linear": LinearRegression,
        "tree": lambda: DecisionTreeRegressor(random_state=seed, **BOUNDS),
        "adaboost": lambda: AdaBoostRegressor(n_estimators=TREES, random_state=seed),
        "gbdt": lambda: GradientBoostingRegressor(n_estimators=TREES, random_state=seed),
    }[name]()
    return made


REGRESSORS = ("liquid", "linear", "tree", "adaboost", "gbdt")


class Features:
    """Numbers as they are, names one column each, known from the runs it is made of; a new name is all zeros.

    Columns: GPUs, parameter servers, workers, batch size, batches, memory of the card (GiB); then one per GPU
    model, workload and precision. What is not told is 0 (workers: the GPUs), since a forest splits on it as
    well.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._gpus = sorted({task.gpu for task in tasks})
        self._models = sorted({task.model for task in tasks})
        self._precisions = sorted({task.precision for task in tasks})

    def of(self, tasks: Sequence[Task]) -> Floats:
        """Shape (tasks, features)."""
        return np.array([self._row(task) for task in tasks], dtype=np.float64)

    def _row(self, task: Task) -> list[float]:
        return [
            task.gpus,
            _or(task.parameter_servers, 0.0),
            _or(task.workers, task.gpus),
            _or(task.batch_size, 0.0),
            _or(task.batches, 0.0),
            _or(card_mib(task), 0.0) / MIB_PER_GIB,
            *(float(task.gpu == name) for name in self._gpus),
            *(float(task.model == name) for name in self._models),
            *(float(task.precision == name) for name in self._precisions),
        ]


class LiquidModel:
    """One regressor per label. Throughput is learned as its logarithm: it spans six decades over the
    workloads."""

    def __init__(self, runs: Runs, name: str = "liquid", seed: int = 0) -> None:
        """Raises `KeyError` for a regressor that is not one of `REGRESSORS`, `ValueError` for no runs."""
        self._features = Features(runs.tasks)
        x = self._features.of(runs.tasks)
        self._models: dict[str, Regressor] = {}
        for label in LABELS:
            measured = np.isfinite(runs.labels.get(label, np.empty(0)))
            if not measured.any():
                continue
            y = runs.labels[label][measured]
            found = regressor(name, seed)
            found.fit(x[measured], np.log(y) if label == THROUGHPUT else y)
            self._models[label] = found
        if not self._models:
            raise ValueError("no run measured anything: there is nothing to learn from")

    def predict(self, tasks: Sequence[Task]) -> Mapping[str, Floats]:
        """Label → shape (tasks,), in the label's own unit."""
        x = self._features.of(tasks)
        found = {label: model.predict(x) for label, model in self._models.items()}
        return {label: np.exp(y) if label == THROUGHPUT else y for label, y in found.items()}


class PhaseModel:
    """Times of a job's phases: launch, one training iteration, save. Source: Liquid §6.1, the same forest as
    in §4.

    `resources`: shape (tasks, 3): CPU cores, host memory (MiB), size of the input (MiB), beside the features
    above.
    """

    def __init__(self, tasks: Sequence[Task], resources: Floats, phases_s: Floats, seed: int = 0) -> None:
        """`phases_s`: shape (tasks, 3), seconds, in the order of `PHASES`."""
        self._features = Features(tasks)
        self._forest = regressor("liquid", seed)
        self._forest.fit(np.hstack([self._features.of(tasks), resources]), phases_s)

    def predict(self, tasks: Sequence[Task], resources: Floats) -> Floats:
        """Shape (tasks, 3), seconds."""
        return self._forest.predict(np.hstack([self._features.of(tasks), resources]))


def _or(value: float, other: float) -> float:
    return other if math.isnan(value) else value
