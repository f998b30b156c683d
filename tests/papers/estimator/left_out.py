"""Leave-one-group-out cross-validation of intervals: GPU models, networks or kinds of training that were
never seen, a row each."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from penstock_services.estimator.core.eta.curves import (
    MIN_POINTS,
    Curve,
    CurveModel,
    first_at,
    learn_curves,
    steps_to,
    targets_of,
)
from penstock_services.estimator.core.eta.quantiles import LEVEL
from penstock_services.estimator.core.eta.remaining import (
    Bounds,
    Learned,
    learn_runs,
    left_by_runs,
    reach_of_new_kind,
)
from penstock_services.estimator.core.resource_model.measurements import Runs
from penstock_services.estimator.core.resource_model.model import train
from tests.papers.estimator.cross_validation import SPLITS, TooFew
from tests.papers.estimator.files.curve_files import kind_of

GROUPS = ("families", "generations", "networks")
"""Of `SPLITS`, those with few enough groups to train once for each."""
FEWEST = 5  # runs or moments of a group; of fewer no share is judged
MOMENTS = 5  # of a curve on its way to one target
PASSED = (0.0, 0.3, 0.5, 0.8)  # parts of its way that a run has behind it when it is asked about


class Held(NamedTuple):
    """One group that nothing was learned from. Shares are of the values asked for, 0 to 1."""

    label: str
    group: str
    asked: int
    inside: float
    """In their 90 % interval."""
    above: float
    """Over its upper end: of GPU memory the promise."""
    error: float
    """Median of |middle / true − 1|, where the truth is not 0."""
    high: float
    """Median of upper end / truth."""


def held(
    label: str, group: str, truth: ArrayLike, middle: ArrayLike, low: ArrayLike, high: ArrayLike
) -> Held:
    """Shape of all: (asked,), at least one; truths ≥ 0."""
    true, value, least, most = (np.asarray(column, np.float64) for column in (truth, middle, low, high))
    some = true > 0
    return Held(
        label,
        group,
        len(true),
        float(((least <= true) & (true <= most)).mean()),
        float((true > most).mean()),
        float(np.median(np.abs(value[some] / true[some] - 1))) if some.any() else math.nan,
        float(np.median(most[some] / true[some])) if some.any() else math.nan,
    )


def of_runs(runs: Runs, split: str, seed: int = 0, only: Sequence[str] | None = None) -> list[Held]:
    """Per label and group of `split`, one of GROUPS; `only`: of these groups. Raises `TooFew`."""
    names = [str(SPLITS[split](row, task)) for row, task in enumerate(runs.tasks)]
    groups = list(dict.fromkeys(names))
    if len(groups) < 2:
        raise TooFew(f"split {split}: {len(groups)} group; at least 2 are needed to leave one out")
    found = []
    for group in groups if only is None else only:
        mine = np.array([name == group for name in names])
        asked = runs.pick(mine)
        for label, predicted in train(runs.pick(~mine), seed).predict(asked.tasks).items():
            known = np.isfinite(asked.labels[label]) if label in asked.labels else np.zeros(0, np.bool_)
            if known.sum() >= FEWEST:
                columns = (asked.labels[label], predicted.value, predicted.low, predicted.high)
                found.append(held(label, group, *(column[known] for column in columns)))
    return sorted(found, key=lambda one: one.label)


def of_curves(curves: Sequence[tuple[str, Curve]]) -> list[Held]:
    """Iterations left until a target, by curves of other kinds only; a row per kind."""
    return _by_kind(
        "iterations by loss curve",
        sorted({kind for kind, _ in curves}),
        lambda kind: asked_of_curves([place for place, (own, _) in enumerate(curves) if own == kind], curves),
    )


def asked_of_curves(
    left_out: Sequence[int], curves: Sequence[tuple[str, Curve]]
) -> tuple[list[Bounds], list[float]]:
    """Intervals and remaining times of these curves, at moments of their own, predicted from the others."""
    model: CurveModel = learn_curves([one for place, one in enumerate(curves) if place not in left_out])
    intervals, came = [], []
    for place in left_out:
        kind, whole = curves[place]
        for target in targets_of(whole):
            end = first_at(whole, target)
            if end is None:
                continue
            for moment in np.random.default_rng(place).uniform(0.08, 0.92, MOMENTS):
                now = int((end + 1) * moment)
                found = steps_to(
                    Curve(whole.steps[:now], whole.values[:now]), target, now, model, LEVEL, kind
                )
                if now >= MIN_POINTS and found is not None:
                    intervals.append(Bounds(*found))
                    came.append(float(end + 1 - now))
    return intervals, came


def of_totals(jobs: Mapping[tuple[str, ...], Sequence[float]]) -> list[Held]:
    """Epochs left by earlier runs of the job, how runs scatter being known from other kinds only; a row per
    kind."""

    def asked(kind: str) -> tuple[list[Bounds], list[float]]:
        others: dict[str, list[Sequence[float]]] = {}
        for job, totals in jobs.items():
            others.setdefault(kind_of(job), []).append(totals)
        mine = others.pop(kind)
        spread, errors = learn_runs([totals for own in others.values() for totals in own])
        learned = Learned(
            run_spread=spread,
            run_errors=errors,
            run_kinds=tuple(others),
            foreign_reach=reach_of_new_kind(others),
        )
        return asked_of_totals(mine, PASSED, learned, kind)

    return _by_kind("epochs by earlier runs", sorted(set(map(kind_of, jobs))), asked)


def asked_of_totals(
    jobs: Sequence[Sequence[float]], passed: Sequence[float], learned: Learned, kind: str | None = None
) -> tuple[list[Bounds], list[float]]:
    """Intervals and remaining epochs of each run, by the others of its job."""
    intervals, came = [], []
    for totals in jobs:
        for place, total in enumerate(totals):
            for part in passed:
                others = [*totals[:place], *totals[place + 1 :]]
                bounds = left_by_runs(others, part * total, learned, kind=kind)
                if bounds is not None:
                    intervals.append(bounds)
                    came.append((1.0 - part) * total)
    return intervals, came


def _by_kind(
    label: str, kinds: Sequence[str], asked: Callable[[str], tuple[list[Bounds], list[float]]]
) -> list[Held]:
    found = []
    for kind in kinds:
        intervals, came = asked(kind)
        if len(came) >= FEWEST:
            found.append(held(label, kind, came, *np.array(intervals).T))
    return found


def table(rows: Sequence[Held]) -> str:
    """For people; the last row of each label is its worst group in each column."""
    lines: list[tuple[str, ...]] = [
        ("label", "never seen", "asked", "in 90 %", "above", "error", "high / true")
    ]
    for label in dict.fromkeys(row.label for row in rows):
        mine = [row for row in rows if row.label == label]
        worst = Held(
            label,
            "worst of all",
            sum(row.asked for row in mine),
            min(row.inside for row in mine),
            max(row.above for row in mine),
            max(row.error for row in mine),
            max(row.high for row in mine),
        )
        lines += [_line(row) for row in (*mine, worst)]
    wide = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(size) if column < 2 else text.rjust(size)
            for column, (text, size) in enumerate(zip(line, wide, strict=True))
        ).rstrip()
        for line in lines
    )


def _line(row: Held) -> tuple[str, ...]:
    return (
        row.label,
        row.group,
        str(row.asked),
        f"{100 * row.inside:.1f} %",
        f"{100 * row.above:.1f} %",
        f"{100 * row.error:,.0f} %",
        f"{row.high:,.2f}",
    )
