"""Training and judging the step model, and asking it: pure, so that a worker process does it."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.eta.quantiles import normal_quantile
from penstock_services.estimator.core.resource_model.saved import BadModel
from penstock_services.estimator.core.resource_model.training import Trained
from penstock_services.estimator.core.runs import FinishedRun
from penstock_services.estimator.core.step_time.durations import (
    Durations,
    digest_of,
    from_bytes,
    to_bytes,
    train,
)
from penstock_services.estimator.core.step_time.placements import Cell
from penstock_services.estimator.core.step_time.samples import SHARED, Sample, lessons, name_of, samples_of

FEWEST_SAMPLES = 10  # runs that tell a step time with its placement; fewer are their own history
HELD_OUT = 0.2  # the newest runs judge, the older ones teach
MAX_JUDGED = 500  # an answer takes 0.3 ms
WORSE_BY = 1.02  # a new model may be so much worse on recent runs: less is chance
LEVEL = 0.9
NORMAL_WIDTH = normal_quantile((1.0 + LEVEL) / 2.0)
SEED = 0


class StepAsked(NamedTuple):
    """A network of an owner's, in a cell of placements and batches."""

    owner: str
    network: str
    gpu: str
    cell: Cell


class StepTold(NamedTuple):
    """ln of the step in seconds, the standard deviation of one run's around it, and by what."""

    log_s: float
    spread: float
    cells: int
    """Measured, that it rests on."""
    own: bool
    """Of this owner's own runs."""
    width: float
    """Half of the interval of LEVEL, of ln."""


class LearnedSteps(NamedTuple):
    """A model that may answer."""

    version: str
    durations: Durations


def version_of(digest: str) -> str:
    """The model's name in estimates and events."""
    return f"steps-{digest[:12]}"


def read_steps(body: bytes, digest: str) -> LearnedSteps:
    """Takes up to half a second for a full model: off the loop. Raises `BadModel`, also for another digest's model."""
    if digest_of(body) != digest:
        raise BadModel("another model than the one that was written here")
    return LearnedSteps(version_of(digest), from_bytes(body))


def knows(durations: Durations, asked: StepAsked) -> bool:
    """Whether anybody measured this network there."""
    names = (name_of(whose, asked.network, asked.gpu) for whose in (asked.owner, SHARED))
    return any(name in durations.models for name in names)


def step_of(durations: Durations, asked: StepAsked) -> StepTold | None:
    """By the owner's own runs or by everybody's, whichever doubts less; None: nobody measured this network there."""
    return steps_of(durations, [asked])[asked]


def steps_of(durations: Durations, asked: Iterable[StepAsked]) -> dict[StepAsked, StepTold | None]:
    """As `step_of`; what rests on the same model is asked together, for most of an answer's time is not its own."""
    found: dict[StepAsked, StepTold | None] = dict.fromkeys(asked)
    by_name: dict[str, list[StepAsked]] = {}
    for one in found:
        for whose in (one.owner, SHARED):
            name = name_of(whose, one.network, one.gpu)
            if name in durations.models:
                by_name.setdefault(name, []).append(one)
    for name, mine in by_name.items():
        model = durations.models[name]
        own = not name.startswith(f"{SHARED} ")
        told = model.steps([one.cell for one in mine])
        factor, cells = model.factor(LEVEL), len(model.table.cells)
        for one, log_s, spread in zip(mine, told.log_s.tolist(), told.spread.tolist(), strict=True):
            apart = 0.0 if own else durations.apart
            wide = math.hypot(spread, apart)
            before = found[one]
            if before is None or (wide, not own) < (before.spread, not before.own):
                found[one] = StepTold(
                    log_s, wide, cells, own, math.hypot(factor * spread, NORMAL_WIDTH * apart)
                )
    return found


def train_steps(runs: Sequence[FinishedRun], current: bytes | None) -> Trained | None:
    """Learns from all runs; promoted if, learned from the older ones, it is no worse than `current` on the newest.

    None if too few runs tell a step time. `current` has seen some of those newest runs, which is in its favour.
    """
    samples = samples_of(runs)
    if len(samples) < FEWEST_SAMPLES:
        return None
    newest = samples[len(samples) - max(1, int(HELD_OUT * len(samples))) :]
    older = [run for run in runs if run.seq < newest[0].seq]
    candidate = _train(older)
    metrics = judged(candidate, newest)
    promoted = True
    if current is not None:
        before = judged(from_bytes(current), newest)
        metrics |= {f"before_{name}": value for name, value in before.items()}
        if "step_error" in before:
            promoted = metrics.get("step_error", math.inf) <= WORSE_BY * before["step_error"]
    final = _train(runs, candidate)
    body = to_bytes(final)
    digest = digest_of(body)
    version = version_of(digest)
    ended_ms = [run.measured.ended_ms for run in runs]
    return Trained(
        version, digest, body, len(samples), int(min(ended_ms)), int(max(ended_ms)), metrics, promoted
    )


def _train(runs: Sequence[FinishedRun], taught: Durations | None = None) -> Durations:
    """`taught`: lends its prior, which a fifth more runs hardly move and which takes longest to learn; None: only step
    times are learned, for they are what is judged."""
    learned = lessons(runs)
    chance = np.random.default_rng(SEED)
    if taught is None:
        return train(learned.tables, (), (), (), chance, teaching=learned.teaching, apart=learned.apart)
    return train(
        learned.tables,
        learned.curves,
        learned.totals,
        learned.windows,
        chance,
        prior=taught.prior,
        apart=learned.apart,
    )


def judged(durations: Durations, newest: Sequence[Sample]) -> dict[str, float]:
    """`step_error`: mean |ln (told / measured)| of a step; `step_within`: share inside the interval; `step_told`: share
    of the runs that it says anything about. Only what there is to judge."""
    chosen = newest[-MAX_JUDGED:]
    asked = [StepAsked(one.owner, one.network, one.gpu, one.cell) for one in chosen]
    answers = steps_of(durations, asked)
    told = [
        (found, math.log(sample.step_s) - found.log_s)
        for sample, one in zip(chosen, asked, strict=True)
        if (found := answers[one]) is not None
    ]
    metrics = {"step_told": len(told) / len(chosen)} if chosen else {}
    if told:
        metrics["step_error"] = sum(abs(off) for _, off in told) / len(told)
        metrics["step_within"] = sum(abs(off) <= found.width for found, off in told) / len(told)
    return metrics
