"""Learned model of durations: step times by network and GPU, and the errors of remaining times. Trained,
evaluated and queried here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.eta.curves import learn_curves
from penstock_services.estimator.core.eta.quantiles import LEVEL, normal_quantile
from penstock_services.estimator.core.eta.remaining import (
    Learned,
    learn_runs,
    learn_steps,
    reach_of_new_kind,
)
from penstock_services.estimator.core.model_lifecycle import ModelKind
from penstock_services.estimator.core.records.placements import Cell
from penstock_services.estimator.core.records.runs import FinishedRun
from penstock_services.estimator.core.step_time.fit import fit as fit_table
from penstock_services.estimator.core.step_time.fit import learn_prior, reference_batch
from penstock_services.estimator.core.step_time.model import StepModel
from penstock_services.estimator.core.step_time.prior import Prior
from penstock_services.estimator.core.step_time.training_set import (
    OWNERS_APART,
    SHARED,
    TrainingSet,
    name_of,
    sample_of,
    samples_of,
    training_set,
)

MIN_TEACHING = 10  # runs that report a step time with its placement; for fewer the history is enough
MIN_NEW = 20  # runs; step times scatter by a few percent, resources do not: fewer runs suffice
MAX_EVALUATED = 500  # an answer takes 0.3 ms
NORMAL_WIDTH = normal_quantile((1.0 + LEVEL) / 2.0)
SEED = 0  # any: the same runs give the same models


class Durations(NamedTuple):
    """`models`: by name, as the owner, the network and the kind of GPU; `prior`: of every other one."""

    prior: Prior
    models: Mapping[str, StepModel]
    eta: Learned
    apart: float = OWNERS_APART
    """Standard deviation of ln step between owners of one network in the same cell."""


class StepQuestion(NamedTuple):
    """A network of an owner, in a cell of placements and batches."""

    owner: str
    network: str
    gpu: str
    cell: Cell


class StepAnswer(NamedTuple):
    """ln of the step in seconds, the standard deviation of one run's around it, and the source."""

    log_s: float
    spread: float
    cells: int
    """Number of measured cells in its model."""
    own: bool
    """True: from this owner's own runs."""
    width: float
    """Half of the interval of LEVEL, of ln."""


def train(found: TrainingSet, generator: np.random.Generator, prior: Prior | None = None) -> Durations:
    """The same data and generator give the same model, in any order of the tables. `prior`: one that is known
    already.

    Raises `ValueError` for more than MAX_CELLS cells in a table.
    """
    named = [(name, table) for name, table in sorted(found.tables.items()) if table.cells]
    if prior is None:
        prior = learn_prior([table for name, table in named if name in found.teaching], generator)
    models = {name: fit_table(table, prior, reference_batch(table)) for name, table in named}
    return Durations(prior, models, _learn_eta(found), found.apart)


def _learn_eta(found: TrainingSet) -> Learned:
    spread, errors = learn_runs([totals for _, totals in found.totals])
    by_kind: dict[str, list[Sequence[float]]] = {}
    for kind, totals in found.totals:
        if len(totals) > 1:
            by_kind.setdefault(kind, []).append(totals)
    return Learned(
        curves=learn_curves(found.curves),
        run_spread=spread,
        run_errors=errors,
        run_kinds=tuple(sorted(by_kind)),
        foreign_reach=reach_of_new_kind(by_kind),
        step_errors=learn_steps(found.windows),
    )


def fit(runs: Sequence[FinishedRun], like: Durations | None) -> Durations:
    """`like` supplies its prior, which a fifth more runs hardly change and which takes longest to learn;
    without it only step times are learned, since only they are evaluated."""
    found, generator = training_set(runs), np.random.default_rng(SEED)
    if like is None:
        return train(found._replace(curves=(), totals=(), windows=()), generator)
    return train(found, generator, like.prior)


def knows(durations: Durations, asked: StepQuestion) -> bool:
    """Whether any owner measured this network there."""
    return any(name in durations.models for name in _names(asked))


def answer(durations: Durations, asked: Iterable[StepQuestion]) -> dict[StepQuestion, StepAnswer | None]:
    """From the owner's own runs or from all owners', whichever is more certain; None: no owner measured this
    network there.

    Questions to the same model are answered in one batch, since most of the cost is per batch.
    """
    found: dict[StepQuestion, StepAnswer | None] = dict.fromkeys(asked)
    by_name: dict[str, list[StepQuestion]] = {}
    for one in found:
        for name in _names(one):
            if name in durations.models:
                by_name.setdefault(name, []).append(one)
    for name, mine in by_name.items():
        model = durations.models[name]
        own = not name.startswith(f"{SHARED} ")
        times = model.steps([one.cell for one in mine])
        factor, cells = model.factor(LEVEL), len(model.table.cells)
        apart = 0.0 if own else durations.apart
        for one, log_s, spread in zip(mine, times.log_s.tolist(), times.spread.tolist(), strict=True):
            wide = math.hypot(spread, apart)
            before = found[one]
            if before is None or (wide, not own) < (before.spread, not before.own):
                width = math.hypot(factor * spread, NORMAL_WIDTH * apart)
                found[one] = StepAnswer(log_s, wide, cells, own, width)
    return found


def evaluate(durations: Durations, runs: Sequence[FinishedRun]) -> dict[str, float]:
    """`step_error`: mean |ln (predicted / measured)| of a step; `step_within`: share inside the interval;
    `step_told`: share of the runs that are answered. Only metrics with data."""
    samples = samples_of(runs)[-MAX_EVALUATED:]
    asked = [StepQuestion(one.owner, one.network, one.gpu, one.cell) for one in samples]
    answers = answer(durations, asked)
    off = [
        (found, math.log(sample.step_s) - found.log_s)
        for sample, one in zip(samples, asked, strict=True)
        if (found := answers[one]) is not None
    ]
    metrics = {"step_told": len(off) / len(samples)} if samples else {}
    if off:
        metrics["step_error"] = sum(abs(error) for _, error in off) / len(off)
        metrics["step_within"] = sum(abs(error) <= found.width for found, error in off) / len(off)
    return metrics


def eta_missed(run: FinishedRun) -> bool | None:
    """Whether the run ended outside the interval of its remaining time; None: none was published in time."""
    return None if run.eta is None else not run.eta.low_ms <= run.eta.actual_ms <= run.eta.high_ms


def _names(asked: StepQuestion) -> tuple[str, ...]:
    return tuple(name_of(whose, asked.network, asked.gpu) for whose in (asked.owner, SHARED))


STEPS = ModelKind(
    name="steps",
    type=Durations,
    teaching=lambda runs: [run for run in runs if sample_of(run) is not None],
    min_teaching=MIN_TEACHING,
    fit=fit,
    evaluate=evaluate,
    error="step_error",
    min_new=MIN_NEW,
    counts=lambda run: run.steps is not None,
    missed=eta_missed,
)
