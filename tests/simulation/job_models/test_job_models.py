"""job models on numbers that can be followed by hand."""

from pathlib import Path

import orjson
import pytest

from penstock.model.inputs.external_events import JobProgress
from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.job_models.measurements.interpolation import interpolate
from penstock.simulator.job_models.measurements.measured import read_model
from penstock.simulator.job_models.measurements.placement_table import RESTART_S, TableWork
from penstock.simulator.job_models.model import Allocation, End, NotMeasured
from penstock.simulator.traces.jobs import Stages, TraceJob
from penstock_papers.job_models.muri import MuriWork
from tests.support.cli.command_process import run

START_UP_S = {("m", 1): 5.0, ("m", 2): 5.0}


def muri_job(job_id: str, iterations: int, gpus: int = 1) -> TraceJob:
    """An iteration takes a second alone, once the source's 1.5 % are added."""
    stages = Stages(1_000 / 1.015, 0, 0, 0)
    return TraceJob(job_id, 0, iterations, gpus, "m", 1, "", iterations, stages)


def test_muri_loses_the_start_up_between_any_two_moments() -> None:
    """a and b run from 0; at 40 somebody arrives: both lose 5 s before, and again after, though nobody
    moved."""
    work = MuriWork(START_UP_S)
    assert work.admit(muri_job("a", 100), 0.0) == JobProgress(job_id="a", attained_s=0.0, remaining_s=100.0)
    work.admit(muri_job("b", 200), 0.0)
    work.started("a", {"n": Allocation()}, 0.0)
    work.started("b", {"n": Allocation()}, 0.0)
    assert work.next_s() == 100, "the prediction knows nothing of the loss"
    instant = work.advance(40.0)
    assert [(report.attained_s, report.remaining_s) for report in instant.progress] == [(40, 65), (40, 165)]
    assert work.next_s() == 105
    instant = work.advance(105.0)
    assert instant.ended == [End("a", 105.0)], "complete, although 5 s of work are left"
    assert [(report.attained_s, report.remaining_s) for report in instant.progress] == [(105, 105)]
    work.stopped("b", 105.0)
    assert work.next_s() is None


def test_muri_ends_equal_jobs_in_one_moment_and_reports_at_limits() -> None:
    """Two equal jobs are one completion; a limit of 60 GPU seconds is a moment of its own, at 30 s on two
    GPUs."""
    work = MuriWork(START_UP_S, limits_gpu_s=(60.0,))
    for name, gpus in (("a", 1), ("b", 1), ("c", 2)):
        work.admit(muri_job(name, 50, gpus), 0.0)
        work.started(name, {f"n-{name}": Allocation(tuple(range(gpus)))}, 0.0)
    assert work.next_s() == 30
    instant = work.advance(30.0)
    assert instant.ended == []
    assert [report.attained_s for report in instant.progress] == [30, 30, 30]
    assert work.next_s() == 55, "the limit of the one-GPU jobs comes at 60, their end at 55"
    assert [end.job_id for end in work.advance(55.0).ended] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arrival_s", "moment_s"), [(100.00009, 100.00009), (99.99991, 99.99991), (100.0002, 100.0), (0.0, 100.0)]
)
def test_under_muris_policies_a_completion_beside_an_arrival_is_one_moment_with_it(
    arrival_s: float, moment_s: float
) -> None:
    """The source merges them within 0.1 ms, at the arrival's time. An arrival of an earlier moment has
    passed."""
    work = MuriWork(START_UP_S, arrivals_s=(0.0, arrival_s))
    work.admit(muri_job("a", 100), 0.0)
    work.started("a", {"n": Allocation()}, 0.0)
    assert work.next_s() == moment_s
    assert work.advance(moment_s).ended == [End("a", moment_s)]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A model of two epochs, measured on up to two nodes. Noise is nil: a larger batch is worth no more."""
    folder = tmp_path / "pollux/traces/tiny"
    folder.mkdir(parents=True)
    (folder / "placements.csv").write_text(
        "placement,local_bsz,step_time,sync_time\n"
        "1,8,0.5,0.0\n1,16,1.0,0.0\n2,8,0.6,0.1\n2,16,1.1,0.1\n11,8,0.8,0.3\n11,16,1.3,0.3\n"
        "12,8,0.9,0.3\n12,16,1.4,0.3\n"
    )
    (folder / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
        "3,3,8,1.2,0.6\n3,3,16,1.8,0.6\n3,6,8,1.5,0.6\n3,6,16,2.1,0.6\n"
    )
    for batch in (8, 32):
        (folder / f"validation-{batch}.csv").write_text(
            "progress,iteration,metric,grad_sqr,grad_var\n100,1,0,1.0,0.0\n200,1,0,1.0,0.0\n"
        )
    return folder


def test_batches_are_accumulated_where_memory_lacks(measured: Path) -> None:
    """32 samples on one GPU that holds 16: two passes of 16; on two GPUs one pass."""
    model = read_model(measured)
    assert (model.smallest_batch, model.largest_batch, model.local_max) == (8, 32, 16)
    assert model.batching(1, 32) == (16, 1)
    assert model.batching(2, 32) == (16, 0)
    assert model.batching(1, 16) == (8, 1), "alone and above the smallest batch, it always accumulates"
    assert model.iteration_s((1,), 16, 1) == 2.0
    assert model.iteration_s((1, 1), 16, 0) == 1.3
    assert model.iteration_s((2, 1), 8, 0) == 0.9, "a placement is the same in any rotation"
    assert model.iteration_s((1,), 12, 0) == 0.75
    assert interpolate([(8, 1.0), (16, 2.0)], 99) == (2.0,)


def test_what_was_not_measured_is_interpolated_or_refused(measured: Path) -> None:
    """Three nodes with one GPU each were measured, seven nodes never were: nothing is made up."""
    model = read_model(measured)
    assert model.iteration_s((1, 1, 1), 8, 0) == pytest.approx(1.2)
    with pytest.raises(NotMeasured, match="tiny on"):
        model.iteration_s((4, 4, 4, 4, 4, 4, 4), 8, 0)


def test_a_start_costs_half_a_minute_and_a_stop_keeps_progress(measured: Path) -> None:
    """200 iterations of 1 s on one GPU: 30 s restart, 70 iterations, a stop, and the rest on two GPUs."""
    work = TableWork({"tiny": read_model(measured)}, gpus_per_node=4)
    one = TraceJob("a", 0, 0, 2, "tiny", 32)
    assert work.alone_s(one) == pytest.approx(200 * 1.1)
    work.admit(one, 0.0)
    work.started("a", {"n": Allocation((0,)), "m": Allocation((0,))}, 0.0)
    assert work.next_s() == pytest.approx(RESTART_S + 200 * 1.3)
    work.advance(RESTART_S + 70 * 1.3)
    work.stopped("a", RESTART_S + 70 * 1.3)
    assert work.next_s() is None
    work.advance(1_000.0)
    work.started("a", {"n": Allocation((0, 1))}, 1_000.0)
    end_s = work.next_s()
    assert end_s == pytest.approx(1_000 + RESTART_S + 130 * 1.1)
    assert end_s is not None
    assert [end.job_id for end in work.advance(end_s).ended] == ["a"]


def test_ticks_round_epochs_to_whole_seconds_as_the_source_does(measured: Path) -> None:
    """100 iterations of 1.1 s: the first 60 s hold 30 s of work; the end is reported with its own time at the
    tick."""
    work = TableWork({"tiny": read_model(measured)}, gpus_per_node=4, tick_s=60.0)
    work.admit(TraceJob("a", 0, 0, 2, "tiny", 32), 0.0)
    work.started("a", {"n": Allocation((0, 1))}, 0.0)
    ended: list[End] = []
    while not ended:
        now_s = work.next_s()
        assert now_s is not None
        ended = list(work.advance(now_s).ended)
    assert ended == [End("a", RESTART_S + 220)]
    assert now_s == 300


def test_an_epoch_that_lacks_a_fraction_of_a_second_goes_on_after_the_tick(measured: Path) -> None:
    """A quarter of a second is missing at the tick: the job keeps its GPUs for one step more, and ended at
    the tick."""
    work = TableWork({"tiny": read_model(measured)}, gpus_per_node=4, tick_s=54.0)
    work.admit(TraceJob("a", 0, 0, 2, "tiny", 18), 0.0)
    work.started("a", {"n": Allocation((0, 1))}, 0.0)
    assert [work.advance(54.0 * step).ended for step in (1, 2, 3)] == [[], [], []]
    assert work.advance(216.0).ended == [End("a", 162.0)]


def test_tables_with_holes_are_refused(measured: Path) -> None:
    (measured / "placements.csv").write_text("placement,local_bsz,step_time\n1,8,fast\n")
    with pytest.raises(BadFile, match=r"line 1, column sync_time: missing"):
        read_model(measured)
    (measured / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1,8,fast,0\n")
    with pytest.raises(BadFile, match=r"line 2, column step_time: 'fast' is not a number"):
        read_model(measured)


MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,resource_time_1,resource_time_2,priority\n"
)


def test_muri_needs_start_up_times_of_every_model(tmp_path: Path) -> None:
    """Somebody adds a model to a trace and forgets its profile: the message names it."""
    (tmp_path / "t.csv").write_text(MURI + "0,1,0,10,bert,4,1000,0,100,1,1,1,0\n")
    command = ("simulate", str(tmp_path / "t.csv"), "--truth", "muri")
    (tmp_path / "stage_profiles.csv").write_text("model,num_gpu,startup_overhead_s\nvgg16,1,30\n")
    done = run(*command)
    assert done.returncode == 2
    assert "stage_profiles.csv has no start-up time of bert on 1 GPU" in done.stderr
    (tmp_path / "stage_profiles.csv").write_text("model,num_gpu,startup_overhead_s\nbert,1,30\n")
    done = run(*command, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["makespan_s"] == pytest.approx(1.015)
