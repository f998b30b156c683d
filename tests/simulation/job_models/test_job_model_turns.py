"""Job model `turns`: groups by hand, bounds for any group, and a group in a cell."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.model import Allocation, Constant, NotMeasured
from penstock.simulator.job_models.restarts import RestartCost, RestartingWork
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.job_models.turns import Turns, speeds
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import Stages, TraceJob
from tests.simulation.scenarios import ends
from tests.support.cli.command_line import penstock

COLUMNS = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,resource_time_1,resource_time_2,priority"
)
MIX = f"{COLUMNS}\n0,1,0,1000,loads,8,100000,0,100,100,0,0,0\n1,1,0,1000,trains,8,100000,0,100,0,100,0,0\n"

STORAGE = Stages(100, 100, 0, 0)
GPU = Stages(100, 0, 100, 0)
NETWORK = Stages(100, 0, 0, 100)
EDGE = 0.02  # of a cycle that is counted in whole iterations
stage_ms = st.sampled_from((0.0, 0.5, 14.0, 100.0, 700.0))


def trace_job(job_id: str, stages: Stages | None, duration_s: float = 1_000, submit_s: float = 0) -> TraceJob:
    return TraceJob(job_id, submit_s, duration_s, 1, job_id, 8, "owner", 1_000, stages)


def test_members_that_need_different_things_are_as_fast_as_alone() -> None:
    assert speeds((STORAGE, GPU, NETWORK)) == pytest.approx((1, 1, 1), abs=EDGE)


def test_members_that_need_the_same_share_it() -> None:
    """Two that compute only; four; and two that load only, which are at storage and at the cores in turn."""
    assert speeds((GPU, GPU)) == pytest.approx((1 / 2, 1 / 2), abs=EDGE)
    assert speeds((GPU,) * 4) == pytest.approx((1 / 4,) * 4, abs=EDGE)
    assert speeds((STORAGE, STORAGE)) == pytest.approx((1, 1), abs=EDGE)


def test_a_lock_passes_on_by_arrival_and_nobody_waits_for_a_round() -> None:
    """10 ms beside 90 ms at one GPU: one each, in turn. At different ones the short one goes round as often
    as it can."""
    short, long = Stages(10, 0, 10, 0), Stages(90, 0, 90, 0)
    assert speeds((short, long)) == pytest.approx((0.1, 0.9), abs=EDGE)
    assert speeds((short, NETWORK)) == pytest.approx((1, 1), abs=EDGE)


def test_what_stages_overlap_alone_is_lost_under_locks() -> None:
    """100 ms at the GPU and 100 ms at the network, at the same time alone; beside somebody who uses neither,
    one after the other."""
    assert speeds((Stages(100, 0, 100, 100), STORAGE))[0] == pytest.approx(0.5, abs=EDGE)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 2_000), stage_ms, stage_ms, stage_ms), min_size=2, max_size=4))
def test_no_lock_is_held_more_than_always(members: list[tuple[float, float, float, float]]) -> None:
    """Whatever they need: each gets on, none beyond its speed alone, and no resource works more than there is
    time."""
    group = tuple(sorted(Stages(*one) for one in members))
    found = speeds(group)
    assert all(0 < speed <= 1 for speed in found)
    for part, locks in ((1, 2), (2, 1), (3, 1)):
        used = sum(speed * one[part] / one.iteration_ms for speed, one in zip(found, group, strict=True))
        assert used <= locks * (1 + 2 * EDGE)


def test_only_who_has_the_same_gpus_takes_turns() -> None:
    model, job = Turns(Constant()), trace_job("a", GPU)
    here, beside = {"n": Allocation((0,))}, {"n": Allocation((1,))}
    assert model.speed(job, here, [model.neighbour(trace_job("b", GPU), beside)]) == 1
    assert model.speed(job, here, [model.neighbour(trace_job("b", GPU), here)]) == pytest.approx(
        0.5, abs=EDGE
    )


def test_a_job_without_stage_times_is_refused_with_the_remedy() -> None:
    with pytest.raises(NotMeasured, match="job a has no stage times; take a trace of format muri"):
        Turns(Constant()).work_s(trace_job("a", None))


def test_two_jobs_take_turns_on_the_one_gpu_of_a_cell() -> None:
    """Under `muri-s` one loads and one computes: both end as if alone, and the GPU is held once."""
    jobs = [trace_job("loads", STORAGE), trace_job("trains", GPU)]
    found = Simulation(
        nodes_of("1x1"),
        PlacerSettings(profile="muri-s"),
        SteadyWork(Turns(Constant())),
        jobs,
        Options(check_every_step=True),
    )
    assert ends(found) == pytest.approx({"loads": 1_000, "trains": 1_000}, rel=2 * EDGE)
    assert found.figures(1, 1).gpu_allocation == pytest.approx(1, abs=2 * EDGE)


def test_a_job_that_is_regrouped_pays_its_restart() -> None:
    """A third job comes and the group is made anew: whoever is started again launches for 20 s, and that is
    counted."""
    jobs = [
        trace_job("loads", STORAGE, 2_000),
        trace_job("trains", GPU, 2_000),
        trace_job("short", GPU, 100, 500),
    ]
    work = RestartingWork(Turns(Constant()), lambda job: RestartCost(0, 20))
    found = Simulation(
        nodes_of("1x1"), PlacerSettings(profile="muri-s"), work, jobs, Options(check_every_step=True)
    )
    assert len(ends(found)) == 3
    figures = found.figures(1, 1)
    started = sum(life.starts for life in found.meter.lives.values())
    assert figures.launch_gpu_h == pytest.approx((started - 3) * 20 / 3_600)


def test_the_command_line_gives_the_batcher_its_time_and_wrong_stage_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody asks what a slow batcher costs, and profiles that are wrong: both are said in the output;
    nonsense is refused."""
    (tmp_path / "t.csv").write_text(MIX)
    command = ("simulate", str(tmp_path / "t.csv"), "--cluster", "1x1", "--truth", "turns", "-o", "json")
    options = ("--profile", "muri-s", "--durations", "known")
    assert penstock(*command, *options, "--batcher-time", "30s", "--profile-noise", "0.5") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan_s"] == pytest.approx(130, abs=1)
    assert "the batcher plans for 30 s" in found["assumptions"]["latency"]
    assert "up to 50% too large or too small" in found["assumptions"]["stage_times"]
    assert penstock(*command, *options, "--profile-noise", "2") == 2
    assert "--profile-noise: between 0 and 1" in capsys.readouterr().err
    assert penstock(*command, *options, "--batcher-time", "soon") == 2
    assert "--batcher-time: " in capsys.readouterr().err
