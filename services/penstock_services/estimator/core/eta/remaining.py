"""Remaining time (ETA) of a running job, with an interval: iterations left × time of one, and the phases
around them.

Ideal: the distribution of the remaining time. Departure: a median and an interval, each side from how far
earlier estimates of the same kind were off (conformal: the quantile of held-out errors), so that it covers as
often as it promises wherever the new job is like the past ones. Iterations left come from the most precise
source: the number asked for, else finished runs of the same job, else the curve of its loss on the way to a
target.
"""

from collections.abc import Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.eta.curves import MOMENTS, Curve, CurveModel, steps_to
from penstock_services.estimator.core.eta.quantiles import (
    ENOUGH_ERRORS,
    LEVEL,
    NORMAL,
    edges,
    normal_quantile,
    reach,
    thinned,
)
from penstock_services.estimator.core.learning.limits import MAX_RUN_ERROR, MAX_RUN_SPREAD, MAX_STEP_ERROR
from penstock_services.estimator.core.learning.new_group import ends_of_new_group

OUTLIVED = 0.99  # a run past this part of its kind is of another kind

# Used until enough errors are known; chosen by hand, wide on purpose, of ln.
RUN_SPREAD, STEP_SPREAD = 0.2, 0.1
MAX_LOG = 100.0  # of a number of iterations: no job is so long, and e^100 · e^100 is still finite
MIN_STEP_SPREAD = 0.01  # of ln: even if the training runs were steady, clocks and neighbours are not
RUN_CONFIDENCE = 0.95  # of unseen kinds 1 in 20 may exceed an end more often
RUN_WEIGHT = 2.0  # weight, in runs, of the spread that other jobs have


class Bounds(NamedTuple):
    """`low` ≤ `middle` ≤ `high`, all ≥ 0; the true value lies between with the requested probability."""

    middle: float
    low: float
    high: float


class Learned(NamedTuple):
    """Parameters learned from finished runs. Tuples of floats, so that it is stored and hashed as JSON."""

    curves: CurveModel = CurveModel()
    run_spread: float = RUN_SPREAD
    """Standard deviation of ln of the total iterations among runs of one job."""
    run_errors: tuple[float, ...] = ()
    """|error| / spread of each finished run, predicted from the others of its job; rising."""
    run_kinds: tuple[str, ...] = ()
    """Kinds of training whose runs are in the two fields above."""
    foreign_reach: float | None = None
    """As the largest of `run_errors` that count, for a run of another kind; None: too few kinds."""
    step_errors: tuple[float, ...] = ()
    """ln (actual mean of the remaining steps / predicted) of finished runs; rising."""


class Step(NamedTuple):
    """The known times of a step, on the GPUs that the job has now."""

    measured_s: Sequence[float] = ()
    """Mean step of equally long windows since its placement there."""
    log_s: float | None = None
    """ln of the step that the step model predicts."""
    spread: float = 0.0
    """Standard deviation of that ln."""


class Asked(NamedTuple):
    """A running job. `total`: iterations asked for; `past_totals`: of finished runs of the same job."""

    done: float
    step: Step
    total: float | None = None
    past_totals: Sequence[float] = ()
    curve: Curve | None = None
    target: float | None = None
    kind: str = ""
    """As in `learn_curves`."""
    after_s: float = 0.0
    """Time to save at the end."""


class Eta(NamedTuple):
    """Seconds and iterations that are left, and their sources."""

    left_s: Bounds
    steps: Bounds
    step_s: Bounds
    source: str
    first_of_kind: bool = False
    """The error of such an answer was learned from runs of other kinds of training, and none of this kind."""


def eta(asked: Asked, learned: Learned, level: float = LEVEL) -> Eta | None:
    """None where neither the iterations left nor the time of one is known."""
    step = step_time(asked.step, learned, level)
    sources = _sources(asked, learned, level)
    if step is None or not sources:
        return None
    source, steps, known = min(sources, key=lambda one: _width(one[1]))
    run = _times(steps, step)
    return Eta(Bounds(*(part + asked.after_s for part in run)), steps, step, source, not known)


def _sources(asked: Asked, learned: Learned, level: float) -> list[tuple[str, Bounds, bool]]:
    """(name, iterations left, whether its kind is in the training set) of every source; the number asked for
    bounds the others."""
    found: list[tuple[str, Bounds, bool]] = []
    most = inf
    if asked.total is not None:
        most = max(0.0, asked.total - asked.done)
        if asked.target is None:
            return [("iterations asked for", Bounds(most, most, most), True)]
    by_runs = left_by_runs(asked.past_totals, asked.done, learned, level, asked.kind)
    if by_runs is not None:
        source = f"{len(asked.past_totals)} finished runs of the same job"
        found.append((source, by_runs, _taught(asked.kind, learned.run_kinds)))
    if asked.curve is not None and asked.target is not None:
        predicted = steps_to(asked.curve, asked.target, asked.done, learned.curves, level, asked.kind)
        if predicted is not None:
            source = f"loss curve of {len(asked.curve.steps)} points"
            found.append((source, Bounds(*predicted), _taught(asked.kind, learned.curves.kinds)))
    if most < inf:
        if not found:
            return [("iterations asked for; the target may end it earlier", Bounds(most, 0.0, most), True)]
        return [(name, Bounds(*(min(part, most) for part in bounds)), known) for name, bounds, known in found]
    return found


def _taught(kind: str, kinds: Sequence[str]) -> bool:
    """Where the training set has no kind, intervals are set by hand and all kinds count as known."""
    return not kinds or kind in kinds


def left_by_runs(
    totals: Sequence[float], done: float, learned: Learned, level: float = LEVEL, kind: str | None = None
) -> Bounds | None:
    """Iterations left, given the totals of finished runs and that this one has outlived `done`. `kind`: None
    for one of the training set.

    ln of the total is normal around the runs' mean; their spread is shrunk to that of other jobs' runs. None
    where no run can be used, or this one has outlived them so far that they predict nothing.
    """
    usable = [log(total) for total in totals if isfinite(total) and total > 0]
    if not usable:
        return None
    middle, spread = _predicted_by(usable, learned.run_spread)
    far = max(reach(learned.run_errors, level), 1e-3)
    if kind is not None and kind not in learned.run_kinds and learned.foreign_reach is not None:
        far = max(far, learned.foreign_reach)
    spread *= far / normal_quantile((1.0 + level) / 2.0)
    passed = NORMAL.cdf((log(done) - middle) / spread) if done > 0 else 0.0
    if passed > OUTLIVED:
        return None

    def quantile(share: float) -> float:
        rank = min(passed + share * (1.0 - passed), 1.0 - 1e-9)
        log_total = middle + spread * NORMAL.inv_cdf(max(rank, 1e-9))
        return max(0.0, exp(min(log_total, MAX_LOG)) - done)

    return Bounds(quantile(0.5), quantile((1.0 - level) / 2.0), quantile((1.0 + level) / 2.0))


def step_time(step: Step, learned: Learned, level: float = LEVEL) -> Bounds | None:
    """Mean seconds of the remaining steps; None where there is neither a measurement nor a model.

    Both are weighted by their precision: the model's dominates at the start, after some windows the run's own
    mean.
    """
    usable = [value for value in step.measured_s if isfinite(value) and value > 0]
    modelled = step.log_s is not None and isfinite(step.log_s) and isfinite(step.spread)
    if not usable and not modelled:
        return None
    precision = pull = 0.0
    if step.log_s is not None and modelled:
        precision = 1.0 / max(step.spread, 1e-3) ** 2
        pull = precision * step.log_s
    if usable:
        logs = [log(value) for value in usable]
        mean = log(sum(usable) / len(usable))
        wobble = sum((value - mean) ** 2 for value in logs) / len(logs) + STEP_SPREAD**2 / len(logs)
        own = len(logs) / max(wobble, 1e-6)
        precision += own
        pull += own * mean
    log_s = pull / precision
    if len(learned.step_errors) >= ENOUGH_ERRORS and usable:
        low, high = edges(learned.step_errors, level, STEP_SPREAD)
        least = normal_quantile((1.0 + level) / 2.0) * MIN_STEP_SPREAD
        low, high = min(low, -least), max(high, least)
    else:
        high = normal_quantile((1.0 + level) / 2.0) * sqrt(1.0 / precision + STEP_SPREAD**2)
        low = -high
    return Bounds(exp(log_s), exp(log_s + min(0.0, low)), exp(log_s + max(0.0, high)))


def learn_runs(totals: Sequence[Sequence[float]]) -> tuple[float, tuple[float, ...]]:
    """(`run_spread`, `run_errors`) from the totals of finished runs, one sequence per job, in iterations."""
    logs = [[log(one) for one in job if isfinite(one) and one > 0] for job in totals]
    logs = [job for job in logs if len(job) > 1]
    if not logs:
        return RUN_SPREAD, ()
    squares = sum(sum((one - sum(job) / len(job)) ** 2 for one in job) for job in logs)
    spread = min(max(sqrt(squares / sum(len(job) - 1 for job in logs)), 1e-3), MAX_RUN_SPREAD)
    return spread, thinned(_run_errors(logs, spread))


def reach_of_new_kind(totals: Mapping[str, Sequence[Sequence[float]]]) -> float | None:
    """`foreign_reach`, from the totals of finished runs by kind: each kind is predicted with the spread of
    all others."""
    errors = []
    for kind, jobs in sorted(totals.items()):
        spread, _ = learn_runs([job for other, own in totals.items() if other != kind for job in own])
        logs = [[log(one) for one in job if isfinite(one) and one > 0] for job in jobs]
        errors.append(np.array(_run_errors([job for job in logs if len(job) > 1], spread)))
    ends = ends_of_new_group(errors, LEVEL, RUN_CONFIDENCE)
    return None if ends is None else min(ends[1], MAX_RUN_ERROR)


def _run_errors(logs: Sequence[Sequence[float]], spread: float) -> list[float]:
    """|error| of each run predicted by the others of its job, in units of the expected error. `logs`: of
    totals, two or more per job."""
    errors = []
    for job in logs:
        for place, one in enumerate(job):
            middle, wide = _predicted_by([*job[:place], *job[place + 1 :]], spread)
            errors.append(min(abs(one - middle) / wide, MAX_RUN_ERROR))
    return errors


def learn_steps(runs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """`step_errors` from finished runs: the mean step of each of its windows, in their order.

    Predicted at some points of each run from the windows until then, compared with the mean of the windows
    after.
    """
    errors = []
    for run in runs:
        usable = [value for value in run if isfinite(value) and value > 0]
        for moment in MOMENTS:
            now = int(len(usable) * moment)
            predicted = step_time(Step(usable[:now]), Learned())
            if predicted is not None and now < len(usable):
                error = log(sum(usable[now:]) / (len(usable) - now) / predicted.middle)
                errors.append(min(max(error, -MAX_STEP_ERROR), MAX_STEP_ERROR))
    return thinned(errors)


def _predicted_by(logs: Sequence[float], spread: float) -> tuple[float, float]:
    """(mean, standard deviation of a further run around it), the runs' own spread shrunk to `spread`."""
    count = len(logs)
    middle = sum(logs) / count
    squares = sum((one - middle) ** 2 for one in logs) + RUN_WEIGHT * spread**2
    return middle, sqrt(squares / (count - 1 + RUN_WEIGHT) * (1.0 + 1.0 / count))


def _width(bounds: Bounds) -> float:
    """In ln; 0 for a certain value."""
    if bounds.low == bounds.high:
        return 0.0
    return log(bounds.high / bounds.low) if bounds.low > 0 else inf


def _times(steps: Bounds, step: Bounds) -> Bounds:
    """Bounds of the product; the errors of both are independent, so that their squares add,
    in ln and on each side."""
    middle = steps.middle * step.middle
    if middle <= 0:
        return Bounds(middle, 0.0, steps.high * step.high)
    above = sqrt(log(steps.high / steps.middle) ** 2 + log(step.high / step.middle) ** 2)
    if steps.low <= 0:
        return Bounds(middle, 0.0, middle * exp(above))
    below = sqrt(log(steps.middle / steps.low) ** 2 + log(step.middle / step.low) ** 2)
    return Bounds(middle, middle * exp(-below), middle * exp(above))
