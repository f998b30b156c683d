"""Job model `step-times`: iterations on measured placements, by hand on a model of our own."""

from pathlib import Path

import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.measurements.measured import read_model
from penstock.simulator.job_models.measurements.placement_table import RESTART_S
from penstock.simulator.job_models.measurements.steps import StepTimes
from penstock.simulator.job_models.model import Allocation, NotMeasured
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import ends
from tests.support.cli.command_line import penstock

HEADER = "job_id,submit_s,duration_s,gpus,model,batch_size,iterations,workers,min_workers"
ONE, TWO = Allocation((0,)), Allocation((0, 1))


@pytest.fixture
def job_model(tmp_path: Path) -> StepTimes:
    """One model: a GPU needs 0.5 s for 8 samples and 1 s for 16; two on one node exchange for 0.1 s, apart
    for 0.6."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "placements.csv").write_text(
        "placement,local_bsz,step_time,sync_time\n"
        "1,8,0.5,0.0\n1,16,1.0,0.0\n2,8,0.6,0.1\n2,16,1.1,0.1\n11,8,1.1,0.6\n11,16,1.6,0.6\n"
    )
    (folder / "scalability.csv").write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n")
    for batch in (8, 32):
        (folder / f"validation-{batch}.csv").write_text(
            "progress,iteration,metric,grad_sqr,grad_var\n1,1,0,1,0\n"
        )
    return StepTimes({"tiny": read_model(folder)}, gpus_per_node=4)


def tiny(gpus: int, batch: int, inference: bool = False) -> TraceJob:
    return TraceJob("a", 0, 0, gpus, "tiny", batch, iterations=100, inference=inference)


def test_a_task_is_its_iterations_on_what_it_asked_for(job_model: StepTimes) -> None:
    """100 iterations of 16 samples: on one GPU 100 s, on two of one node 60 s; of 32 on one GPU in two passes
    200 s."""
    assert job_model.work_s(tiny(1, 8)) == pytest.approx(50)
    assert job_model.work_s(tiny(2, 16)) == pytest.approx(60)
    assert job_model.work_s(tiny(1, 32)) == pytest.approx(200)
    assert job_model.start_up_s(tiny(1, 8)) == RESTART_S


def test_more_gpus_and_nearer_ones_are_faster(job_model: StepTimes) -> None:
    """A task that asked for one GPU gets two: 16 samples take 0.6 s on one node, 1.1 s on two, against 1 s
    alone."""
    task = tiny(1, 16)
    alone_s = 1.0
    assert job_model.speed(task, {"n": ONE}, ()) == 1
    assert job_model.speed(task, {"n": TWO}, ()) == pytest.approx(alone_s / 0.6)
    assert job_model.speed(task, {"n": ONE, "m": ONE}, ()) == pytest.approx(alone_s / 1.1)
    assert job_model.network_share(task, {"n": TWO}) == 0
    assert job_model.network_share(task, {"n": ONE, "m": ONE}) == pytest.approx(0.6 / 1.1)


def test_inference_exchanges_nothing(job_model: StepTimes) -> None:
    """The same task, only forward: two GPUs are twice as fast as one, wherever they are."""
    task = tiny(1, 16, inference=True)
    assert job_model.speed(task, {"n": TWO}, ()) == pytest.approx(2)
    assert job_model.speed(task, {"n": ONE, "m": ONE}, ()) == pytest.approx(2)
    assert job_model.network_share(task, {"n": ONE, "m": ONE}) == 0


def test_what_nobody_measured_is_refused(job_model: StepTimes) -> None:
    """Three nodes are beyond all measurements of this model; another model was never measured."""
    with pytest.raises(NotMeasured, match="tiny on"):
        job_model.speed(tiny(1, 24), {"n": ONE, "m": ONE, "o": ONE}, ())
    with pytest.raises(NotMeasured, match="step-times: huge was never measured"):
        job_model.work_s(tiny(1, 8)._replace(model="huge"))


@pytest.mark.parametrize("profile", ["fifo", "penstock", "srtf"])
def test_a_moldable_job_runs_as_long_as_was_measured_on_what_it_got(
    job_model: StepTimes, profile: str
) -> None:
    """100 iterations of 16 samples by one or two workers. `first` finds two GPUs: 0.6 s each; `second` comes
    beside a job that holds one: 1 s each. Each start costs the source's 30 s."""
    held = TraceJob("held", 200, 0, 1, "tiny", 8, iterations=1_000)
    first = tiny(2, 16)._replace(job_id="first", submit_s=0, workers=2, min_workers=1)
    second = first._replace(job_id="second", submit_s=210)
    jobs = (first, held, second)
    run = Simulation(
        nodes_of("1x2"),
        PlacerSettings(profile=profile),
        SteadyWork(job_model),
        jobs,
        Options(check_every_step=True),
    )
    found = ends(run)
    assert found["first"] == pytest.approx(60 + RESTART_S, abs=0.1)
    assert found["second"] == pytest.approx(210 + 100 + RESTART_S, abs=0.1)


@pytest.mark.parametrize(
    ("job_model_name", "why"),
    [
        (
            "constant",
            "column model: job model constant knows a job's run time in one shape only; take step-times",
        ),
        (
            "placement-table",
            "column min_workers: job model placement-table knows a job's run time in one shape only",
        ),
    ],
)
def test_a_truth_of_one_shape_refuses_moldable_jobs(
    tmp_path: Path, job_model_name: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody measured how long this job runs with fewer workers; a guess would decide the comparison."""
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{HEADER}\na,0,60,4,cifar10,512,100,4,1\n")
    status = penstock("simulate", str(trace), "--cluster", "1x4", "--truth", job_model_name)
    assert status != 0
    found = capfd.readouterr().err
    assert why in found


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("a,0,60,4,cifar10,512,100,4,5", "min_workers: 5 is more than the most workers, 4"),
        ("a,0,60,4,cifar10,2,100,4,1", "global_batch_size: 2 leaves some of 4 workers without a sample"),
        (
            "a,0,60,4,cifar10,,100,4,1",
            "a range needs the columns workers, the most that it may have, and batch_size",
        ),
        ("a,0,60,4,cifar10,512,100,,1", "a range needs the columns workers"),
        ("a,0,60,4,cifar10,512,100,4,0", "min_workers"),
        ("a,0,60,4,cifar10,512,100,4,many", "min_workers"),
    ],
)
def test_a_wrong_range_in_a_trace_is_refused_with_its_line(
    tmp_path: Path, row: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Traces come from spreadsheets."""
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{HEADER}\n{row}\n")
    status = penstock("simulate", str(trace), "--cluster", "1x4", "--truth", "step-times")
    assert status != 0
    found = capfd.readouterr().err
    assert "line 2" in found
    assert why in found
