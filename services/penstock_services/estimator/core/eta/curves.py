"""Extrapolation of loss curves (or of any measure that approaches a target) to the iterations until the
target.

Predicted is ln u, u = ln(iterations in all / iterations done): a weighted sum of ln u by a power law through
the curve and of ln of the part of the way that is left. The weights and the errors come from finished curves.
Errors are of ln(iterations left / done): early in a run the same error of ln u would be an unrealistically
large factor. A measure that rises to its target is negated first.
"""

from collections.abc import Mapping, Sequence
from math import exp, isfinite, log
from statistics import median
from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.eta.quantiles import ENOUGH_ERRORS, LEVEL, edges, thinned
from penstock_services.estimator.core.learning.gaussian_process import Floats
from penstock_services.estimator.core.learning.limits import MAX_CURVE_ERROR
from penstock_services.estimator.core.learning.new_group import ends_of_new_group

MIN_POINTS = 5  # with 4 or 7 intervals of an unseen kind hold 98 % instead of 100 %
MAX_POINTS = 100_000  # 1.6 MB
THINNED_POINTS = 60  # a fit takes 0.1 ms with so many points, spaced evenly in ln of the step
POWERS = np.array([0.15, 0.25, 0.4, 0.6, 0.9, 1.3, 2.0])
MAX_VALUE = 1e100  # a larger value is an overflow, not a loss
MAX_LEFT = 100.0  # times the whole way; a run that diverged further counts as no further away
MIN_LEFT = 0.005  # part of the way; below it noise dominates
STRETCH = (1.02, 30.0)  # range of iterations in all / done by the power law
LOG_U = (
    -4.6,
    1.6,
)  # range of the prediction: from 1 % more to 140 times the iterations done, for any learned values
SPREAD = 1.5  # of ln(left / done) while no finished curve is known; chosen by hand
MAX_LOG_LEFT = 50.0  # e^50 times the iterations done is still finite
RIDGE = 1.0  # half or twice: ends of intervals of unseen kinds move by 4 %
GAINS = (0.8, 0.9, 0.95)  # training targets of a finished curve: parts of its way
MOMENTS = tuple(n / 10 for n in range(1, 10))  # training points per target: parts of its iterations
CURVE_CONFIDENCE = 0.925  # of unseen kinds 1 in 13 may exceed an end more often; why this value: decision 15
EXAMPLES_OF_KIND = 40.0  # at most so many of a kind count where another kind is predicted
ENOUGH_OF_KIND = 20  # examples for a quantile of a kind's own errors
# the end of a curve is the minimum of its means over 1 / 50 of it, so that one outlier is not taken for the
# end
BEST_OF = 50


class Curve(NamedTuple):
    """`steps` rising, > 0; `values` of the measure there. Shape (points,) both."""

    steps: Floats
    values: Floats


class CurveModel(NamedTuple):
    """`weights` of (1, ln u of the power law, ln of the part left)."""

    weights: tuple[float, float, float] = (0.0, 1.0, 0.0)
    errors: tuple[float, ...] = ()
    """ln(iterations left / predicted) of finished curves predicted by all others; rising."""
    foreign_weights: tuple[float, float, float] = (0.0, 1.0, 0.0)
    """As `weights`, every kind with the same weight however many curves it has: for a job whose kind is not
    in the training set."""
    foreign_ends: tuple[float, float] | None = None
    """As `errors`, by these weights: bounds on the errors of one more kind, below and above, both ≥ 0; None:
    too few kinds."""
    kinds: tuple[str, ...] = ()
    """Kinds in the training set; sorted."""
    own_errors: tuple[tuple[float, ...], ...] = ()
    """For each of `kinds` the errors of its own curves; empty where they are too few."""


def curve(steps: Sequence[float], values: Sequence[float]) -> Curve:
    """In order of the steps; points that are not finite or beyond MAX_VALUE, or have no step above 0, are
    left out; of equal steps the last point counts."""
    known = {
        step: value
        for step, value in zip(steps, values, strict=True)
        if isfinite(step) and step > 0 and abs(value) <= MAX_VALUE
    }
    ordered = sorted(known)[-MAX_POINTS:]
    return Curve(np.array(ordered, dtype=np.float64), np.array([known[step] for step in ordered]))


def steps_to(
    seen: Curve, target: float, done: float, model: CurveModel, level: float, kind: str = ""
) -> tuple[float, float, float] | None:
    """(middle, low, high) of the iterations from `done` to the target; None where the curve is too short.

    All 0 where a point reached the target already. `kind`: as in `learn_curves`.
    """
    if len(seen.steps) < MIN_POINTS:
        return None
    if first_at(seen, target) is not None:
        return 0.0, 0.0, 0.0
    known = kind in model.kinds
    own = model.own_errors[model.kinds.index(kind)] if known else ()
    off = median(own) if own else 0.0  # bias of curves of this kind
    weights = model.weights if known else model.foreign_weights
    log_left = float(_log_left(np.dot(weights, _features(seen, target)))) + off
    ends = edges(own or (model.errors if known else ()), level, SPREAD)
    if not known and model.foreign_ends is not None:
        ends = -model.foreign_ends[0], model.foreign_ends[1]
    low, high = (min(max(edge - off, -MAX_CURVE_ERROR), MAX_CURVE_ERROR) for edge in ends)
    last = max(done, float(seen.steps[-1]))
    gone = last - done

    def left(log_left: float) -> float:
        return max(0.0, last * exp(min(log_left, MAX_LOG_LEFT)) + gone)

    return left(log_left), left(log_left + min(low, 0.0)), left(log_left + max(high, 0.0))


def learn_curves(finished: Sequence[tuple[str, Curve]]) -> CurveModel:
    """From (kind, curve) of finished runs; a kind groups similar curves, as the model's name.

    Weights by ridge regression. Errors are held out (leave-one-out): each curve is predicted with the weights
    of all others.
    """
    taught = [(kind, *_examples(one)) for kind, one in finished]
    taught = [(kind, features, log_u) for kind, features, log_u in taught if len(log_u)]
    if not taught:
        return CurveModel()
    sums: dict[str, tuple[Floats, Floats]] = {}
    for kind, features, log_u in taught:
        gram, pull = sums.get(kind, (np.zeros((3, 3)), np.zeros(3)))
        sums[kind] = gram + features.T @ features, pull + features.T @ log_u
    gram = np.sum([one for one, _ in sums.values()], axis=0) + RIDGE * np.eye(3)
    pull = np.sum([one for _, one in sums.values()], axis=0)
    errors: dict[str, list[float]] = {kind: [] for kind in sorted(sums)}
    for kind, features, log_u in taught:
        others = np.linalg.solve(gram - features.T @ features, pull - features.T @ log_u)
        errors[kind] += (_log_left(log_u) - _log_left(features @ others)).tolist()
    foreign_weights, foreign_ends = _learn_foreign(taught, sums)
    return CurveModel(
        weights=_weights(gram, pull),
        errors=thinned([error for own in errors.values() for error in own]),
        foreign_weights=foreign_weights,
        foreign_ends=foreign_ends,
        kinds=tuple(errors),
        own_errors=tuple(thinned(own) if len(own) >= ENOUGH_ERRORS else () for own in errors.values()),
    )


def _learn_foreign(
    taught: Sequence[tuple[str, Floats, Floats]], sums: Mapping[str, tuple[Floats, Floats]]
) -> tuple[tuple[float, float, float], tuple[float, float] | None]:
    """`foreign_weights` and `foreign_ends` of `CurveModel`: each kind predicted by all others. `sums`: gram
    and pull by kind."""
    count = {kind: sum(len(log_u) for own, _, log_u in taught if own == kind) for kind in sums}
    share = {kind: min(1.0, EXAMPLES_OF_KIND / count[kind]) for kind in sums}
    gram = np.sum([share[kind] * one for kind, (one, _) in sums.items()], axis=0) + RIDGE * np.eye(3)
    pull = np.sum([share[kind] * one for kind, (_, one) in sums.items()], axis=0)
    errors: dict[str, list[float]] = {kind: [] for kind in sorted(sums)}
    for kind, features, log_u in taught:
        others = _weights(gram - share[kind] * sums[kind][0], pull - share[kind] * sums[kind][1])
        errors[kind] += (_log_left(log_u) - _log_left(features @ others)).tolist()
    usable = [np.array(own) for own in errors.values() if len(own) >= ENOUGH_OF_KIND]
    return _weights(gram, pull), ends_of_new_group(usable, (1.0 + LEVEL) / 2.0, CURVE_CONFIDENCE)


def _log_left(log_u: Floats | float) -> Floats:
    """ln(iterations left / done) of ln u, cut to LOG_U."""
    return np.asarray(np.log(np.expm1(np.exp(np.clip(log_u, *LOG_U)))))


def _weights(gram: Floats, pull: Floats) -> tuple[float, float, float]:
    constant, law, left = np.linalg.solve(gram, pull).tolist()
    return constant, law, left


def first_at(seen: Curve, target: float) -> int | None:
    """Index of the first point at or beyond the target; None if there is none."""
    sign = -1.0 if target > seen.values[0] else 1.0
    reached = np.flatnonzero(sign * seen.values <= sign * target)
    return int(reached[0]) if len(reached) else None


def _features(seen: Curve, target: float) -> Floats:
    """(1, ln u by the power law, ln of the part of the way that is left)."""
    sign = -1.0 if target > seen.values[0] else 1.0
    gaps = sign * (seen.values - target)
    left = np.clip(gaps / max(float(gaps[0]), 1e-12), -1.0, MAX_LEFT)
    return np.array([1.0, log(log(_stretch(seen.steps, left))), log(max(float(left.min()), MIN_LEFT))])


def _stretch(steps: Floats, left: Floats) -> float:
    """Iterations in all / iterations done, by the power law floor + scale·step^-power that fits `left` best.

    `left`: part of the way at each step, 1 at the first; the target is where it is 0. Later points weigh
    more. Where the law would never get there, the largest of STRETCH.
    """
    at, mean, weight = _thin(steps / steps[-1], left)
    least, stretch = np.inf, STRETCH[1]
    for power in POWERS.tolist():
        shape = at**-power
        whole = weight.sum()
        x, y = float(weight @ shape) / whole, float(weight @ mean) / whole
        against = float(weight @ (shape - x) ** 2)
        scale = float(weight @ ((shape - x) * (mean - y))) / against if against > 0 else 0.0
        lowest = y - scale * x
        off = float(weight @ (mean - lowest - scale * shape) ** 2)
        if scale > 0 and off < least:
            least = off
            stretch = (scale / -lowest) ** (1.0 / power) if lowest < 0 else STRETCH[1]
    return min(max(stretch, STRETCH[0]), STRETCH[1])


def _thin(at: Floats, values: Floats) -> tuple[Floats, Floats, Floats]:
    """Means over spans that are even in ln of the step, and their weights: points × step."""
    points = len(at)
    if points <= THINNED_POINTS:
        return at, values, at
    cuts = np.unique(np.geomspace(1, points + 1, THINNED_POINTS + 1).astype(np.int64))[:-1] - 1
    counts = np.diff(np.append(cuts, points)).astype(np.float64)
    places = np.add.reduceat(at, cuts) / counts
    return places, np.add.reduceat(values, cuts) / counts, counts * places


def _examples(finished: Curve) -> tuple[Floats, Floats]:
    """Training examples of one finished curve: (features, ln u), shapes (examples, 3) and (examples,)."""
    features: list[Floats] = []
    answers: list[float] = []
    points = len(finished.steps)
    if points < 2 * MIN_POINTS:
        return np.zeros((0, 3)), np.zeros(0)
    for target in targets_of(finished):
        end = first_at(finished, target)
        if end is None:
            continue
        for moment in MOMENTS:
            now = int(np.searchsorted(finished.steps, finished.steps[end] * moment, side="right"))
            if MIN_POINTS <= now <= end:
                features.append(_features(Curve(finished.steps[:now], finished.values[:now]), target))
                answers.append(log(log(finished.steps[end] / finished.steps[now - 1])))
    return (np.array(features), np.array(answers)) if answers else (np.zeros((0, 3)), np.zeros(0))


def targets_of(finished: Curve) -> list[float]:
    """Values at the GAINS of the way from the first point to the best mean."""
    first = float(finished.values[0])
    width = max(1, len(finished.values) // BEST_OF)
    means = np.convolve(finished.values, np.ones(width) / width, "valid")
    best = float(means.min()) if first > finished.values[-1] else float(means.max())
    return [first + gain * (best - first) for gain in GAINS] if best != first else []
