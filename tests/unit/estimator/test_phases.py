"""How long a job launches and saves, by its own runs or by the nearest of its network."""

import pytest

from penstock.model.decisions.ledger_events import JobEnded
from penstock.model.inputs.external_events import TaskExited
from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.records.history import Run, Runs
from penstock_services.estimator.core.records.runs import job_info
from penstock_services.estimator.core.resources.nearest import Nearest, phase_ms
from tests.unit.estimator.reports import Reports
from tests.unit.estimator.service.test_estimator import usage

STEPS_MS = 5_000  # each record comes a second after the one before


def job(owner: str = "bob", model: str | None = "bert") -> JobSpec:
    return JobSpec(owner=owner, command=("python", f"{owner}.py"), model=model, batch_size=32)


def ran(seq: int, launch_ms: float, save_ms: float = float("nan")) -> Run:
    return Run(ended_ms=seq, seq=seq, launch_ms=launch_ms, save_ms=save_ms)


def test_the_same_jobs_runs_count_first() -> None:
    """Bob's nightly job launches in 20 s, once in 90 s from a cold disk; Ada's in 5 s: it is hers, with other
    data."""
    nearest, own = Nearest(), Runs()
    nearest.add(job_info(job("ada")), ran(1, 5_000, 1_000))
    for seq, launch_ms in enumerate((20_000, 90_000, 21_000)):
        own.add(ran(seq, launch_ms))
    assert phase_ms("launch_ms", job(), own, nearest) == 21_000
    assert phase_ms("save_ms", job(), own, nearest) == 1_000, "his own runs never told: the network's do"
    assert phase_ms("launch_ms", job_info(job()), None, nearest) == 5_000, (
        "a live job is known without its spec"
    )


@pytest.mark.parametrize("model", [None, "resnet50"])
def test_a_network_that_nobody_ran_is_computed_without(model: str | None) -> None:
    """Better no time around the training than somebody else's."""
    nearest = Nearest()
    nearest.add(job_info(job("ada")), ran(1, 5_000))
    assert phase_ms("launch_ms", job(model=model), None, nearest) == 0


@pytest.mark.parametrize("lie_ms", [0.0, 1e12])
def test_one_owner_does_not_move_it_beyond_two_others(lie_ms: float) -> None:
    """Mallory's script tells of a launch of thirty years, or of none at all, a hundred times."""
    nearest = Nearest()
    for owner, launch_ms in (("ada", 5_000), ("eve", 6_000)):
        for seq in range(2):
            nearest.add(job_info(job(owner)), ran(seq, launch_ms))
    for seq in range(100):
        nearest.add(job_info(job("mallory")), ran(seq, lie_ms))
    assert 5_000 <= phase_ms("launch_ms", job(), None, nearest) <= 6_000


def ended(cell: Reports, job_id: str, started_ms: int) -> Run:
    """By the node's own clock, like its phases; what was measured of it."""
    cell.record(
        TaskExited(
            node_id="node-1",
            task_id=f"{job_id}/1/0",
            token=1,
            cause="exited",
            exit_code=0,
            started_ms=started_ms,
            exited_ms=cell.node_ms,
            usage=usage(),
        )
    )
    cell.record(JobEnded(job_id=job_id, outcome="succeeded"))
    [run] = cell.stored
    return run.measured


def at_noon() -> Reports:
    cell = Reports()
    cell.now_ms = 43_200_000
    return cell


def test_a_launch_ends_where_the_gpus_are_waited_for() -> None:
    """A job launches beside another for 20 s, waits 70 s for its end and trains for 30 s: it launched for 20
    s and ran for 50."""
    cell = at_noon()
    began_ms = cell.node_ms
    cell.begin("j1", ring=(2,), early_ms=(20_000, 70_000))
    cell.phase("j1", "train", 0)
    cell.phase("j1", "save", 30_000)
    run = ended(cell, "j1", began_ms)
    assert run.train_ms == pytest.approx(30_000, abs=STEPS_MS)
    assert run.launch_ms == pytest.approx(20_000, abs=STEPS_MS)
    assert run.run_ms == pytest.approx(cell.node_ms - began_ms - 70_000, abs=STEPS_MS)


def test_one_that_has_its_gpus_while_it_launches_launched_until_it_trains() -> None:
    """The one before it ended early: it trains as soon as it is ready, and nothing was waited for."""
    cell = at_noon()
    began_ms = cell.node_ms
    cell.begin("j1", ring=(2,))
    cell.phase("j1", "ready", 20_000)
    cell.phase("j1", "train", 0)
    cell.phase("j1", "save", 30_000)
    run = ended(cell, "j1", began_ms)
    assert run.launch_ms == pytest.approx(20_000, abs=STEPS_MS)
    assert run.run_ms == pytest.approx(cell.node_ms - began_ms, abs=STEPS_MS)
