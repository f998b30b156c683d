"""Restart cost: what saving, lost work and launching again do to jobs that are stopped, moved and asked for a
checkpoint."""

import json
from pathlib import Path

import pytest

from penstock.model.decisions.orders import CheckpointTask
from penstock.model.inputs.external_events import TaskCheckpointed
from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.measurements.measured_restarts import (
    STOPS_AND_STARTS,
    measured_costs,
    state_mib,
)
from penstock.simulator.job_models.model import Allocation, Checkpoint, Constant, End, Work
from penstock.simulator.job_models.restarts import RestartCost, RestartingWork
from penstock.simulator.job_models.sharing import Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.nodes import Latency
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from penstock_services.node_reporter.core.inputs import OrderRead
from tests.simulation.scenarios import BUSY, ends, job
from tests.support.cli.command_line import penstock

COST = RestartCost(save_s=5, launch_s=20, interval_s=30)
PREEMPTED = [job("a", 0, 100, 4), job("b", 10, 20, 4)]


def costly(
    jobs: list[TraceJob],
    cost: RestartCost = COST,
    *,
    profile: str = "srtf",
    sink: object = None,
    **options: object,
) -> Simulation:
    return Simulation(
        nodes_of("1x4"),
        PlacerSettings(profile=profile),
        RestartingWork(Constant(), lambda job: cost),
        jobs,
        Options(check_every_step=True)._replace(**options),
        sink,  # type: ignore[arg-type]
    )


def test_a_job_that_gives_way_saves_first_and_launches_again() -> None:
    """A short job comes at 10 s: the long one saves until 15, on GPUs that it holds, and launches for 20 s
    when they are free again."""
    found = costly(PREEMPTED)
    assert ends(found) == {"b": 35, "a": 35 + 20 + 90}
    figures = found.figures(1, 1)
    assert (figures.preemptions, figures.restarts_per_job) == (1, 0.5)
    assert figures.save_gpu_h * 3_600 == pytest.approx(4 * 5)
    assert figures.launch_gpu_h * 3_600 == pytest.approx(4 * 20)
    assert figures.lost_gpu_h == 0
    assert figures.gpu_allocation == pytest.approx(1)  # nothing is free while a job saves or launches


def test_a_job_that_is_killed_while_it_saves_goes_back_to_its_last_checkpoint() -> None:
    """The owner left the grace at 2 s, and saving takes 5: SIGKILL comes first. Of 40 s of work the
    checkpoint at 30 holds 30."""
    found = costly([job("a", 0, 100, 4), job("b", 40, 20, 4)], grace_ms=2_000)
    assert ends(found) == {"b": 62, "a": 62 + 20 + 70}
    figures = found.figures(1, 1)
    assert figures.lost_gpu_h * 3_600 == pytest.approx(4 * 10)
    assert figures.save_gpu_h * 3_600 == pytest.approx(4 * 2)


def test_a_job_that_never_saves_begins_anew() -> None:
    """A CPU job is aborted after 10 of its 100 s: it gives way at once, and has all of them before it."""
    found = costly(PREEMPTED, RestartCost(begins_anew=True))
    assert ends(found) == {"b": 30, "a": 30 + 100}
    assert found.figures(1, 1).lost_gpu_h * 3_600 == pytest.approx(4 * 10)


def test_without_checkpoints_of_its_own_a_killed_job_begins_again() -> None:
    """Its script saves only when it is asked to."""
    found = costly([job("a", 0, 100, 4), job("b", 40, 20, 4)], COST._replace(interval_s=0), grace_ms=2_000)
    assert ends(found) == {"b": 62, "a": 62 + 20 + 100}


def test_who_has_saved_and_then_hangs_loses_nothing() -> None:
    """It saves for 5 s and then does not end: SIGKILL comes after ten seconds, and the checkpoint is
    whole."""
    found = costly(PREEMPTED, latency=Latency(stop_s=3_600))
    assert ends(found) == {"b": 40, "a": 40 + 20 + 90}
    assert found.figures(1, 1).lost_gpu_h == 0


def test_a_job_that_still_launches_has_nothing_to_save() -> None:
    """Stopped twice in a row: the second time it had not begun to train, and gives its GPUs back at once."""
    found = costly([job("a", 0, 100, 4), job("b", 10, 20, 4), job("c", 40, 10, 4)])
    # a launches again from 35 on, and gives way at 40; c runs until 50.
    assert ends(found) == {"b": 35, "c": 50, "a": 50 + 20 + 90}
    figures = found.figures(1, 1)
    assert figures.launch_gpu_h * 3_600 == pytest.approx(4 * (5 + 20))
    assert figures.save_gpu_h * 3_600 == pytest.approx(4 * 5)
    assert figures.restarts_per_job == pytest.approx(2 / 3)


def test_a_gang_saves_once() -> None:
    """Two workers on two nodes get SIGTERM in one record; each holds its GPUs until the save is done."""
    found = Simulation(
        nodes_of("2x4"),
        PlacerSettings(profile="srtf"),
        RestartingWork(Constant(), lambda job: COST),
        [job("a", 0, 100, 8), job("b", 10, 20, 8)],
        Options(check_every_step=True),
    )
    assert ends(found) == {"b": 35, "a": 145}
    assert found.figures(1, 1).save_gpu_h * 3_600 == pytest.approx(8 * 5)


def test_an_ordered_checkpoint_saves_and_the_job_trains_on() -> None:
    """Somebody asks a running job for a checkpoint: it stands still for the save, reports it, and is not
    killed."""
    values: list[bytes] = []
    found = costly([job("a", 0, 100, 4)], sink=values.append)
    assert found.step()
    (task_id,) = found.cell.state.jobs["a"].tasks
    order = CheckpointTask(token=found.cell.head.seq, node_id="n0", task_id=task_id)
    found._answer(found.cell.state.jobs["a"].tasks[task_id].place.node_id, OrderRead(order, 0))
    assert ends(found) == {"a": 105}
    facts = [fact for value in values for fact in json.loads(value)["facts"]]
    saved = [fact["data"] for fact in facts if fact["type"] == TaskCheckpointed.TYPE + ".v1"]
    assert [(one["task_id"], one["at_ms"]) for one in saved] == [(task_id, 5_000)]
    figures = found.figures(1, 1)
    assert (figures.preemptions, figures.restarts_per_job) == (0, 0)
    assert figures.save_gpu_h * 3_600 == pytest.approx(4 * 5)


def test_an_ordered_checkpoint_is_what_a_killed_job_goes_back_to() -> None:
    """Ordered at 40 s of work, killed at 50: only ten seconds are done again. Speeds by hand, without a
    cell."""
    work = RestartingWork(Constant(), lambda job: COST._replace(interval_s=0))
    work.admit(job("a", 0, 100), 0)
    work.started("a", {"n": Allocation()}, 0)
    work.checkpoint("a", 40)
    assert work.next_s() == 45
    assert work.advance(45).checkpoints == [Checkpoint("a", 45)]
    work.stopped("a", 55)
    work.gone("a", 56, killed=True)
    work.started("a", {"n": Allocation()}, 60)
    assert work.charges.lost_gpu_s == 10
    assert work.next_s() == 80  # it launches
    work.advance(80)
    assert work.next_s() == 140
    assert work.advance(140).ended == [End("a", 140)]


def test_a_job_stopped_while_an_ordered_checkpoint_is_written_saves_anew() -> None:
    """What was written so far is no checkpoint."""
    work = RestartingWork(Constant(), lambda job: COST)
    work.admit(job("a", 0, 100), 0)
    work.started("a", {"n": Allocation()}, 0)
    work.checkpoint("a", 20)
    assert work.saving_s("a", 23) == 5
    work.stopped("a", 23)
    assert work.saving_s("a", 24) == 4
    work.gone("a", 28, killed=False)
    assert work.charges.save_gpu_s == 3 + 5
    work.started("a", {"n": Allocation()}, 30)
    work.advance(50)
    assert work.next_s() == 130


def test_a_job_stopped_while_it_saves_its_result_has_that_saved() -> None:
    """Its work is done, and it writes its model when it has to give way: it saves, and comes back only to
    write again."""
    work = RestartingWork(Phases(Constant(), 0, 8), lambda job: COST)
    work.admit(job("a", 0, 100), 0)
    work.started("a", {"n": Allocation()}, 0)
    work.advance(100)
    assert work.saving_s("a", 103) == 5
    work.stopped("a", 103)
    work.gone("a", 108, killed=False)
    work.started("a", {"n": Allocation()}, 110)
    work.advance(130)  # launched; no work is left
    assert work.advance(138).ended == [End("a", 138)]


@pytest.mark.parametrize("profile", ["srtf", "tiresias"])
def test_costs_of_nothing_change_no_byte(profile: str) -> None:
    """A comparison from last year must come out the same: without costs the ledger has the same bytes."""
    heads = set()
    works: list[Work] = [SteadyWork(Constant()), RestartingWork(Constant(), lambda job: RestartCost())]
    for work in works:
        found = Simulation(nodes_of("2x4+1x8"), PlacerSettings(profile=profile), work, BUSY)
        ends(found)
        figures = found.figures(1, 1)
        assert figures.restarts_per_job > 0
        assert (figures.save_gpu_h, figures.launch_gpu_h, figures.lost_gpu_h) == (0, 0, 0)
        heads.add(figures.ledger_hash)
    assert len(heads) == 1


TRACE = "job_id,submit_s,duration_s,gpus\na,0,100,4\nb,10,20,4\n"
KNOWN = ("--profile", "srtf", "--durations", "known", "--cluster", "1x4")


def test_the_command_line_charges_restarts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`penstock simulate --restart-cost 5s,20s,10m`: figures, and a sentence that says what was assumed."""
    (tmp_path / "t.csv").write_text(TRACE)
    command = ("simulate", str(tmp_path / "t.csv"), *KNOWN)
    costs = ("--restart-cost", "5s,20s,10m")
    assert penstock(*command, "-o", "json") == 0
    before = json.loads(capsys.readouterr().out)
    assert penstock(*command, *costs, "-o", "json") == 0
    after = json.loads(capsys.readouterr().out)
    assert (before["makespan_s"], after["makespan_s"]) == (120, 145)
    assert (before["save_gpu_h"], after["save_gpu_h"]) == (0, pytest.approx(20 / 3_600))
    assert after["assumptions"]["restarts"] == (
        "A job that is stopped saves for 5 s and goes on where it was, after 20 s for launching; it has "
        "checkpoints of its own, as far apart as 10 min, which its run time holds already, and goes back to "
        "the last one where it is killed before it has saved, 10 s after SIGTERM."
    )
    assert penstock(*command, *costs) == 0
    table = capsys.readouterr().out
    assert "launch_gpu_h" in table
    assert "lost_gpu_h" not in table  # nothing was lost


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--restart-cost", "5s,20s"), "none, measured, or SAVE,LAUNCH,INTERVAL"),
        (("--restart-cost", "5s,soon,10m"), "LAUNCH: 'soon' is not a duration"),
        (("--restart-cost", "20m,5s,10m"), "SAVE is between 0 and 600 seconds"),
        (("--restart-cost", "5s,5s,5s", "--grace", "20m"), "--grace: between 0 and 600 seconds"),
        (
            ("--restart-cost", "5s,5s,5s", "--truth", "placement-table"),
            "placement-table has restart costs of its own",
        ),
    ],
)
def test_bad_costs_are_refused_with_the_remedy(
    tmp_path: Path, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cost that cannot be, as a save that no grace covers, is named with its option before anything
    runs."""
    (tmp_path / "t.csv").write_text(TRACE)
    assert penstock("simulate", str(tmp_path / "t.csv"), *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())


START_UPS = (
    "model,num_gpu,batch_size,startup_overhead_s\nvgg19,1,64,7\nvgg19,8,64,9\nbert,1,4,11\nbert,8,4,13\n"
)


def test_measured_costs_go_by_model_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A VGG-19 is stopped: its 1.6 GiB are saved as fast as a live cell did, and it launches as Muri measured
    it; another model as their median."""
    cost_of = measured_costs({("vgg19", 1): 7, ("vgg19", 8): 9, ("bert", 1): 11, ("bert", 8): 13})
    large, small = (cost_of(TraceJob("j", 0, 1, gpus, model)) for gpus, model in ((8, "vgg19"), (1, "dqn")))
    assert (large.launch_s, small.launch_s) == (9, 9)
    low, high = STOPS_AND_STARTS[-2], STOPS_AND_STARTS[-1]
    assert state_mib("VGG-19") == pytest.approx(143.7e6 * 12 / (1 << 20))
    assert large.save_s == pytest.approx(
        low[1] + (state_mib("vgg19") - low[0]) / (high[0] - low[0]) * (high[1] - low[1])
    )
    assert small.save_s < cost_of(TraceJob("j", 0, 1, 1, "of my own")).save_s < large.save_s
    assert cost_of(TraceJob("j", 0, 1, 0)).launch_s < 1  # no GPU, no framework

    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))
    (tmp_path / "t.csv").write_text(TRACE)
    command = ("simulate", str(tmp_path / "t.csv"), *KNOWN, "--restart-cost", "measured", "-o", "json")
    assert penstock(*command) == 2
    assert (
        "--restart-cost measured needs muri/stage_profiles.csv; set PENSTOCK_DATA" in capsys.readouterr().err
    )
    (tmp_path / "muri").mkdir()
    (tmp_path / "muri" / "stage_profiles.csv").write_text(START_UPS)
    assert penstock(*command) == 0
    found = json.loads(capsys.readouterr().out)
    launch_s = 9 + 3 / 7 * 2  # four GPUs: between the medians of one and of eight
    assert found["launch_gpu_h"] * 3_600 == pytest.approx(4 * launch_s)
    assert found["makespan_s"] == pytest.approx(120 + found["save_gpu_h"] * 900 + launch_s, abs=0.01)
