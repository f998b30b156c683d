"""Job model `convergence`: losses by hand on small curves, and on the measured ones."""

from pathlib import Path

import pytest

from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.job_models.measurements.convergence import Convergence, LossCurve
from penstock.simulator.job_models.measurements.tables import read_charrnn, read_curves
from penstock.simulator.job_models.model import Allocation, Constant, NotMeasured
from penstock.simulator.traces.jobs import TraceJob
from tests.support.data import DATA_ROOT as DATA

needs_curves = pytest.mark.skipif(
    not all((DATA / name).is_dir() for name in ("charrnn", "pollux", "zeus")),
    reason=f"the curves are not in {DATA}; set PENSTOCK_DATA to the folder that holds charrnn/, pollux/ and "
    "zeus/",
)

FALLING = LossCurve([(0.0, 5.0), (0.1, 3.0), (0.5, 1.0), (1.0, 2.0)])
FLAT = LossCurve([(0.0, 2.0), (1.0, 2.0)])


def gained_by(curve: LossCurve, share: float) -> float:
    """The progress at which the run has first gained this share of all that it gains; 0 – 1."""
    first, best = curve.points[0][1], min(loss for _, loss in curve.points)
    wanted = first - share * (first - best)
    before = curve.points[0]
    for point in curve.points:
        if point[1] <= wanted:
            fallen = before[1] - point[1]
            part = (before[1] - wanted) / fallen if fallen > 0 else 1.0
            return before[0] + (point[0] - before[0]) * part
        before = point
    return 1.0


def test_a_loss_is_reported_as_it_was_measured() -> None:
    """From 5 down to 1 and up again to 2, linear between points: what a script reports is not normalised by
    what comes later."""
    job_model = Convergence(Constant(), {"m": FALLING, "flat": FLAT})
    job = TraceJob("a", 0, 100.0, 1, "m")
    losses = [job_model.loss(job, progress) for progress in (0.0, 0.05, 0.1, 0.3, 0.5, 0.75, 1.0)]
    assert losses == pytest.approx([5.0, 4.0, 3.0, 2.0, 1.0, 1.5, 2.0])
    assert gained_by(FALLING, 0.5) == pytest.approx(0.1)
    assert gained_by(FALLING, 0.75) == pytest.approx(0.3)
    assert gained_by(FALLING, 0.95) == pytest.approx(0.46)
    flat = job._replace(model="flat")
    assert [job_model.loss(flat, 0.0), job_model.loss(flat, 1.0)] == [2, 2]
    assert gained_by(FLAT, 0.95) == 0, "it has nothing to gain"
    with pytest.raises(NotMeasured, match="there is no curve 'tree'"):
        job_model.loss(job._replace(model="tree"), 0.0)


def test_it_does_not_change_the_speed() -> None:
    """How fast a job runs is up to the inner job model; it is only asked about neighbours where they matter
    there."""
    job_model = Convergence(Constant(), {"m": FALLING})
    job = TraceJob("a", 0, 100.0, 1, "m")
    assert job_model.work_s(job) == 100
    assert job_model.speed(job, {"n": Allocation((0,))}, ()) == 1
    assert not job_model.neighbours_matter


VALIDATION_HEADER = "progress,iteration,metric,grad_sqr,grad_var\n"
CURVES = {
    "charrnn/charrnn_x_error.csv": "x_1.0,x_1.0.1\n4,8\n2,6\n1,7\n",
    "pollux/traces/ncf/validation-256.csv": f"{VALIDATION_HEADER}10,1,0.2,1,1\n40,4,0.6,1,1\n",
    "pollux/traces/yolov3/validation-8.csv": f"{VALIDATION_HEADER}10,1,20,1,1\n20,4,5,1,1\n",
    "zeus/summary_train.csv": (
        "dataset,network,batch_size,optimizer,learning_rate,run,target_metric,target_epoch\n"
        "imagenet,net,8,sgd,1e-1,1,0.5,2\nimagenet,net,8,sgd,1e-1,2,0.5,4\n"
        "imagenet,net,8,sgd,1e-1,1,0.9,10\nimagenet,net,8,sgd,1e-1,2,0.9,nan\n"
        "librispeech,net,8,sgd,1e-1,1,60,1\nlibrispeech,net,8,sgd,1e-1,1,40,4\n"
    ),
}


def test_curves_of_three_sources_are_read_by_name(tmp_path: Path) -> None:
    """Accuracies are turned round, errors are not; a target that one of two seeds never met counts once."""
    for name, text in CURVES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_curves(tmp_path)
    assert {name: list(curve.points) for name, curve in found.items()} == {
        "charrnn/x_1.0": [(0.0, 4.0), (0.5, 2.0), (1.0, 1.0)],
        "charrnn/x_1.0.1": [(0.0, 8.0), (0.5, 6.0), (1.0, 7.0)],
        "pollux/ncf-256": [(0.0, -0.2), (0.25, -0.2), (1.0, -0.6)],
        "pollux/yolov3-8": [(0.0, 20.0), (0.5, 20.0), (1.0, 5.0)],
        "zeus/imagenet-net-8": [(0.0, -0.5), (0.3, -0.5), (1.0, -0.9)],
        "zeus/librispeech-net-8": [(0.0, 60.0), (0.25, 60.0), (1.0, 40.0)],
    }
    assert list(found) == sorted(found)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "charrnn_x_error.csv").write_text("x_1.0\n4\nnan\n")
    with pytest.raises(BadFile, match=r"line 3, column x_1\.0: 'nan' is not a number"):
        read_charrnn(bad)


@needs_curves
def test_most_is_gained_early() -> None:
    """Pollux's long runs have half of their gain after 3 – 11 % of the epochs, the 21 runs by iterations
    after 1 %."""
    found = read_curves(DATA)
    kinds = {
        kind: [name for name in found if name.startswith(kind)] for kind in ("charrnn/", "pollux/", "zeus/")
    }
    assert {kind: len(names) for kind, names in kinds.items()} == {"charrnn/": 21, "pollux/": 40, "zeus/": 63}
    long = [name for name in kinds["pollux/"] if len(found[name].points) > 50]
    assert all(0.03 < gained_by(found[name], 0.5) < 0.11 for name in long)
    assert all(gained_by(found[name], 0.5) < 0.0105 for name in kinds["charrnn/"])
    for curve in found.values():
        assert 0 < gained_by(curve, 0.5) <= gained_by(curve, 0.95) <= 1
