"""Do 90 % intervals of the remaining iterations hold 90 %? On loss curves and runs that nobody here made.

Curves: 21 of char-rnn and the validation curves of five Pollux models. Runs: epochs to a target metric (Zeus).
`-s` shows every figure.
"""

import csv
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from penstock_services.estimator.core.eta.curves import (
    MIN_POINTS,
    Curve,
    curve,
    first_at,
    learn_curves,
    steps_to,
    targets_of,
)
from penstock_services.estimator.core.eta.remaining import Bounds, Learned, learn_runs, left_by_runs
from tests.papers.estimator.coverage import covered

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))
LEAST_EPOCHS = 8  # with fewer, one epoch more or less is most of the error
JOB = ("dataset", "network", "batch_size", "optimizer", "learning_rate", "target_metric")

pytestmark = pytest.mark.skipif(
    not (DATA / "zeus/summary_train.csv").is_file(),
    reason=f"charrnn/, pollux/ and zeus/ are not in {DATA}; set PENSTOCK_DATA to the folder that holds them",
)


def curves() -> list[tuple[str, Curve]]:
    """(model, curve) of every run with ten points or more."""
    found: list[tuple[str, Curve]] = []
    for path in sorted((DATA / "charrnn").glob("*_error.csv")):
        with path.open() as file:
            rows = list(csv.reader(file))
        for column in range(len(rows[0])):
            values = [float(row[column]) for row in rows[1:] if row[column]]
            found.append(("char-rnn", curve(range(1, len(values) + 1), values)))
    for path in sorted((DATA / "pollux/traces").glob("*/validation-*.csv")):
        with path.open() as file:
            values = [float(row["metric"]) for row in csv.DictReader(file)]
        if len(values) >= 10:
            found.append((path.parent.name, curve(range(1, len(values) + 1), values)))
    return found


def told_without(
    left_out: list[int], all_curves: list[tuple[str, Curve]]
) -> tuple[list[Bounds], list[float]]:
    """Intervals and remaining times of these curves, at moments of their own, predicted from the others."""
    model = learn_curves([one for place, one in enumerate(all_curves) if place not in left_out])
    intervals, came = [], []
    for place in left_out:
        kind, whole = all_curves[place]
        for target in targets_of(whole):
            end = first_at(whole, target)
            if end is None:
                continue
            for moment in np.random.default_rng(place).uniform(0.08, 0.92, 5):
                now = int((end + 1) * moment)
                found = steps_to(Curve(whole.steps[:now], whole.values[:now]), target, now, model, 0.9, kind)
                if now >= MIN_POINTS and found is not None:
                    intervals.append(Bounds(*found))
                    came.append(float(end + 1 - now))
    return intervals, came


def show(name: str, intervals: list[Bounds], came: list[float]) -> float:
    off = [abs(bounds.middle / value - 1) for bounds, value in zip(intervals, came, strict=True)]
    wide = [bounds.high / value for bounds, value in zip(intervals, came, strict=True)]
    share = covered(intervals, came)
    print(
        f"\n{name}: {len(intervals)} intervals hold {share:.1%}; error of the rest median {np.median(off):.0%}",
        end="",
    )
    print(f", p90 {np.quantile(off, 0.9):.0%}; upper bound {np.median(wide):.1f} × the actual time", end="")
    return share


def test_curves_of_known_models() -> None:
    """A model that ran before with other settings: every curve is predicted from all the others."""
    every = curves()
    intervals: list[Bounds] = []
    came: list[float] = []
    for place in range(len(every)):
        bounds, values = told_without([place], every)
        intervals += bounds
        came += values
    assert 0.88 <= show("curves, predicted from all others", intervals, came) <= 0.95


def test_curves_of_unknown_models() -> None:
    """A model that never ran: its curves are predicted from those of other models only, and hold less than promised."""
    every = curves()
    intervals: list[Bounds] = []
    came: list[float] = []
    for kind in sorted({kind for kind, _ in every}):
        bounds, values = told_without([place for place, (own, _) in enumerate(every) if own == kind], every)
        intervals += bounds
        came += values
    assert show("curves, predicted from other models only", intervals, came) >= 0.80


@pytest.mark.parametrize("passed", [0.0, 0.3, 0.5, 0.8])
def test_runs_of_a_known_job(passed: float) -> None:
    """A job ran 3 to 10 times; this time it has passed part of its way, and other jobs taught how runs scatter."""
    jobs: dict[tuple[str, ...], list[float]] = defaultdict(list)
    with (DATA / "zeus/summary_train.csv").open() as file:
        for row in csv.DictReader(file):
            if row["target_epoch"] != "nan" and float(row["target_epoch"]) >= LEAST_EPOCHS:
                jobs[tuple(row[name] for name in JOB)].append(float(row["target_epoch"]))
    known = {key: totals for key, totals in sorted(jobs.items()) if len(totals) >= 3}
    intervals, came = [], []
    for key, totals in known.items():
        spread, errors = learn_runs([others for other, others in known.items() if other != key])
        learned = Learned(run_spread=spread, run_errors=errors)
        for place, total in enumerate(totals):
            bounds = left_by_runs([*totals[:place], *totals[place + 1 :]], passed * total, learned)
            if bounds is not None:
                intervals.append(bounds)
                came.append((1.0 - passed) * total)
    assert len(intervals) > 400
    assert 0.87 <= show(f"runs at {passed:.0%} of their way", intervals, came) <= 0.94
