"""What stopping a job costs is charged before it is stopped: its save, its launch, and work that it cannot
save in time."""

import msgspec
import pytest

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.inputs.external_events import NodeCordoned, TaskCheckpointed
from penstock.model.inputs.saves import SaveRefused
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate
from penstock.scheduling.stop_cost import stop_cost_s
from penstock.why.explain import explain
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.unit.ledger.state.test_remaining import answer, left_s, pass_s, stopped
from tests.unit.scheduling.make_room.test_replan import cell, running, settle

SAVES = job_spec(checkpoint="sdk", attempts=3, grace_ms=30_000)


def needs(run_s: float) -> Estimate:
    return msgspec.structs.replace(estimate(4), run_ms=round(run_s * 1_000))


def submit(driver: CellDriver, job_id: str, left: float, spec: JobSpec = SAVES) -> None:
    """It runs, launched within no time, and is estimated to have so many seconds left."""
    driver.submit(job_id, spec, needs(left))
    settle(driver)


def saves(driver: CellDriver, job_id: str, save_ms: int, *, shared: bool = True) -> None:
    job = driver.job(job_id)
    [(task_id, task)] = job.tasks.items()
    driver.feed(
        TaskCheckpointed(
            node_id=task.place.node_id,
            task_id=task_id,
            token=job.token,
            at_ms=5,
            path=f"/shared/{job_id}/i{save_ms}",
            iteration=save_ms,
            size_bytes=7,
            save_ms=save_ms,
            shared=shared,
        )
    )
    settle(driver)


def test_nobody_is_stopped_for_a_gain_smaller_than_the_save() -> None:
    """A training with 110 s left saves in 20 s. A test of 100 s would gain 10 s by going first, and waits;
    one of 60 s goes first."""
    driver = cell("srtf", nodes=1)
    submit(driver, "train", 110)
    saves(driver, "train", 20_000)
    submit(driver, "test", 100)
    assert running(driver) == {"train"}
    why = explain(driver.state, "test")
    assert "train (1 min 50 s left, as estimated; a stop costs 20 s)" in why.detail
    submit(driver, "quick", 60)
    assert running(driver) == {"quick"}


def test_who_saves_without_saying_how_costs_nothing() -> None:
    """The published orders take preemption to be free; a job that does not take part in the contract is
    ordered as they say."""
    driver = cell("srtf", nodes=1)
    submit(driver, "train", 110, job_spec(attempts=3))
    submit(driver, "test", 100)
    assert running(driver) == {"test"}


def test_who_turns_out_to_save_nothing_is_ordered_as_who_does_not_say_how() -> None:
    """The node of a training found no process that saves: its launch and its save are no longer charged."""
    driver = cell("srtf", nodes=1)
    submit(driver, "train", 110)
    saves(driver, "train", 20_000)
    job = driver.job("train")
    [(task_id, task)] = job.tasks.items()
    driver.feed(
        SaveRefused(node_id=task.place.node_id, task_id=task_id, token=job.token, at_ms=6, reason="nobody")
    )
    assert stop_cost_s(driver.state, job) == 0
    submit(driver, "test", 100)
    assert running(driver) == {"test"}


@pytest.mark.parametrize("profile", ["srtf", "srsf"])
def test_work_that_cannot_be_saved_in_time_is_charged(profile: str) -> None:
    """Saving takes 40 s and SIGKILL comes after 30 s: all since the last checkpoint would be lost, more with
    every minute."""
    driver = cell(profile, nodes=1)
    submit(driver, "train", 1_000)
    pass_s(driver, 10)
    saves(driver, "train", 40_000)
    pass_s(driver, 300)
    assert stop_cost_s(driver.state, driver.job("train")) == 300
    assert left_s(driver, "train") == 690
    submit(driver, "test", 500)
    assert running(driver) == {"train"}
    saves(driver, "train", 40_000)
    submit(driver, "next", 600)
    assert running(driver) == {"test"}, "it has just saved by itself"


def test_jobs_of_one_size_give_way_in_the_order_of_gain() -> None:
    """Two trainings have 200 s left; one of them needs 60 s to save. The other one makes way, though it came
    first."""
    driver = cell("srtf", nodes=2)
    submit(driver, "cheap", 200, job_spec(checkpoint="sdk", attempts=3, grace_ms=300_000))
    submit(driver, "dear", 210, job_spec(checkpoint="sdk", attempts=3, grace_ms=300_000))
    saves(driver, "dear", 60_000)
    submit(driver, "test", 20)
    assert running(driver) == {"dear", "test"}


def test_the_launch_is_charged() -> None:
    """Its container took half a minute to come up, and would again."""
    driver = CellDriver(cell("srtf").state.settings)
    driver.join(node_spec("n0", 4))
    driver.submit("train", SAVES, needs(100))
    pass_s(driver, 30)
    driver.start("train")
    assert stop_cost_s(driver.state, driver.job("train")) == 30


def test_one_slow_save_does_not_count_for_long() -> None:
    """The disk was busy once. A placer that restarts goes on with the same mean."""
    driver = cell("srtf", nodes=1)
    submit(driver, "train", 1_000)
    for save_ms in (2_000, 2_001, 10_001):
        saves(driver, "train", save_ms)
    cost_s = stop_cost_s(driver.state, driver.job("train"))
    assert cost_s == pytest.approx(3.0, abs=0.001)
    restored = load(dump(driver.state))
    assert stop_cost_s(restored, restored.jobs["train"]) == cost_s


@pytest.mark.parametrize(("shared", "left"), [(True, 530), (False, 630)])
def test_a_job_keeps_what_its_checkpoint_has(*, shared: bool, left: int) -> None:
    """Saved 100 s after its start and stopped 30 s later: 30 s are lost where the next attempt finds the
    checkpoint, else all 130."""
    driver = cell("fifo", nodes=1)
    submit(driver, "train", 1_000)
    driver.feed(answer(driver, "train", 630))
    pass_s(driver, 100)
    saves(driver, "train", 2_000, shared=shared)
    pass_s(driver, 30)
    assert left_s(driver, "train") == 500
    driver.feed(NodeCordoned(node_id="n0", drain=True, by="ada", reason="new fans"))
    stopped(driver, "train")
    assert left_s(driver, "train") == 530
    driver.join(node_spec("n9", 4))
    settle(driver)
    assert driver.job("train").attempt == 2
    assert left_s(driver, "train") == left
