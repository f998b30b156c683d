"""Do 90 % intervals of the remaining iterations hold 90 %? On loss curves and runs that nobody here made.

Curves: 21 of char-rnn and the validation curves of five Pollux models. Runs: epochs to a target metric
(Zeus). `-s` shows every figure.
"""

import numpy as np
import pytest

from penstock_services.estimator.core.eta.remaining import Bounds, Learned, learn_runs
from tests.papers.estimator.coverage import covered
from tests.papers.estimator.files.curve_files import read_curves, read_totals
from tests.papers.estimator.left_out import asked_of_curves, asked_of_totals, of_curves, of_totals, table
from tests.support.data import DATA_ROOT as DATA

CURVES = {"char-rnn", "cifar10", "deepspeech2", "imagenet", "yolov3"}  # ncf has two moments to ask about
RUNS = {"cifar100/shufflenetv2", "imagenet/resnet50", "librispeech/deepspeech2", "movielens-1m/ncf"}

pytestmark = pytest.mark.skipif(
    not (DATA / "zeus/summary_train.csv").is_file(),
    reason=f"charrnn/, pollux/ and zeus/ are not in {DATA}; set PENSTOCK_DATA to the folder that holds them",
)


def show(name: str, intervals: list[Bounds], came: list[float]) -> float:
    off = [abs(bounds.middle / value - 1) for bounds, value in zip(intervals, came, strict=True)]
    wide = [bounds.high / value for bounds, value in zip(intervals, came, strict=True)]
    share = covered(intervals, came)
    print(
        f"\n{name}: {len(intervals)} intervals hold {share:.1%}; error of the rest median "
        f"{np.median(off):.0%}",
        end="",
    )
    print(f", p90 {np.quantile(off, 0.9):.0%}; upper bound {np.median(wide):.1f} × the actual time", end="")
    return share


@pytest.mark.slow
def test_curves_of_known_models() -> None:
    """A model that ran before with other settings: every curve is predicted from all the others."""
    every = read_curves(DATA)
    intervals: list[Bounds] = []
    came: list[float] = []
    for place in range(len(every)):
        bounds, values = asked_of_curves([place], every)
        intervals += bounds
        came += values
    assert 0.88 <= show("curves, predicted from all others", intervals, came) <= 0.95


@pytest.mark.parametrize("what", ["curves", "runs"])
def test_kinds_of_training_never_seen(what: str) -> None:
    """A network that never ran: each kind is predicted from all others only, and none holds less than
    promised.

    Calibrated on the errors of all other kinds together, 58 % (imagenet's curves) and 71 % (ncf's runs) held.
    Upper ends are at most 25 times the truth: from errors of ln u they were 109 times for imagenet.
    """
    found = of_curves(read_curves(DATA)) if what == "curves" else of_totals(read_totals(DATA))
    print("\n" + table(found))
    assert {one.group for one in found} == (CURVES if what == "curves" else RUNS)
    for one in found:
        assert one.inside >= 0.88, one.group
        assert one.above <= 0.05, one.group
        assert one.error <= 0.90, one.group
        assert one.high <= 25, one.group


@pytest.mark.parametrize("passed", [0.0, 0.3, 0.5, 0.8])
def test_runs_of_a_known_job(passed: float) -> None:
    """A job ran 3 to 10 times; this time it has passed part of its way, and other jobs taught how runs
    scatter."""
    known = read_totals(DATA)
    intervals, came = [], []
    for key, totals in known.items():
        spread, errors = learn_runs([others for other, others in known.items() if other != key])
        bounds, values = asked_of_totals([totals], [passed], Learned(run_spread=spread, run_errors=errors))
        intervals += bounds
        came += values
    assert len(intervals) > 400
    assert 0.87 <= show(f"runs at {passed:.0%} of their way", intervals, came) <= 0.94
