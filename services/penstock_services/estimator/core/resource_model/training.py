"""Training set and evaluation of the model of resources: which finished runs it uses,
and how a model is scored."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from penstock.model.nouns.types import WHOLE_GPU
from penstock_services.estimator.core.model_lifecycle import ModelKind
from penstock_services.estimator.core.records.conditions import comparable
from penstock_services.estimator.core.records.runs import FinishedRun
from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    UTILISATION,
    UTILISATION_STD,
    Runs,
    Task,
    card_mib,
    runs_of,
)
from penstock_services.estimator.core.resource_model.model import Model, train, within

MIN_TEACHING = 30  # runs; fewer leave no test set
# runs; fewer predict worse than the history of their own keys. Source: Liquid §4 holds out as many for a test
MIN_NEW = 50
SEED = 0  # any: the same runs give the same model
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        MEMORY: "gpu_memory_mib",
        UTILISATION: "gpu_utilisation_percent",
        UTILISATION_STD: "gpu_utilisation_std",
    }
)
"""Label → field of `Run`."""


def measured(run: FinishedRun) -> tuple[Task, Mapping[str, float]] | None:
    """The run as the model's input; None where it cannot be used: no named network, a part of a GPU, absurd
    values. Fields that a disturbance falsifies are missing."""
    info, allocation = run.info, run.allocation
    if run.rejected or info.model is None or allocation.gpus < 1 or allocation.gpu_share_milli < WHOLE_GPU:
        return None
    task = Task(
        model=info.model,
        gpu=allocation.card.model,
        gpus=allocation.gpus * info.workers,
        batch_size=math.nan if info.batch_size is None else info.batch_size,
        card_mib=allocation.card.memory_mib or math.nan,
        owner=info.owner,
    )
    labels = {
        label: getattr(run.measured, name) if comparable(name, run.measured.disturbed) else math.nan
        for label, name in FIELDS.items()
    }
    memory, card = labels[MEMORY], card_mib(task)
    unusable = memory == 0 or memory > card or math.isnan(card) or all(map(math.isnan, labels.values()))
    return None if unusable else (task, labels)


def teaching(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """The runs that can be used."""
    return [run for run in runs if measured(run) is not None]


def table(runs: Sequence[FinishedRun]) -> Runs:
    """The usable runs, as columns."""
    rows = [row for run in runs if (row := measured(run)) is not None]
    return runs_of([task for task, _ in rows], [labels for _, labels in rows])


def fit(runs: Sequence[FinishedRun], like: Model | None) -> Model:
    """See `model.train`. Raises `ValueError`."""
    return train(table(runs), SEED, like)


def evaluate(model: Model, runs: Sequence[FinishedRun]) -> dict[str, float]:
    """Per label the mean error and the share of runs inside their 90 % interval. `error`, by which models are
    promoted, is that of memory: utilisation is reported, and no decision uses it.

    Errors: of memory as a logarithm (0.1 is 10 %), of percentages as a share of 100.
    """
    newest = table(runs)
    predicted = model.predict(newest.tasks)
    found: dict[str, float] = {}
    for name in (MEMORY, UTILISATION, UTILISATION_STD):
        truth = newest.labels.get(name, np.empty(0))
        rows = np.flatnonzero(np.isfinite(truth))
        if name not in predicted or not rows.size:
            continue
        value, right = predicted[name].value[rows], truth[rows]
        off = np.log(value / right) if name == MEMORY else (value - right) / 100
        found[f"{name}_error"] = float(np.abs(off).mean())
        inside = within(predicted[name].low, predicted[name].high, truth)[rows]
        found[f"{name}_within"] = float(inside.mean())
    return found | {"error": found.get(f"{MEMORY}_error", math.inf)}


def promise_broken(run: FinishedRun) -> bool | None:
    """Whether the run took more GPU memory than this model had promised; None: the promise came from another
    tier, or the user."""
    if run.estimate is None or run.estimate.tier != "model" or "gpu_memory_mib" in run.info.asked:
        return None
    return run.measured.gpu_memory_mib > run.estimate.gpu_memory_mib


RESOURCES = ModelKind(
    name="resources",
    type=Model,
    teaching=teaching,
    min_teaching=MIN_TEACHING,
    fit=fit,
    evaluate=evaluate,
    error="error",
    min_new=MIN_NEW,
    counts=lambda run: True,
    missed=promise_broken,
)
