"""Pre-scheduling (Liquid §6.1): the next job launches where another comes to its end, and goes back to the
queue where that does not come."""

from typing import Any

import pytest
from msgspec import structs

from penstock.cli.queries.explain import in_short
from penstock.ledger.derived.succession import awaited
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import JobRequeued, PlacementDecided, StopDecided
from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.external_events import JobCancelRequested, JobHoldRequested, TaskPhaseChanged
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate
from penstock.model.proposals import CoresProposed, MigrationProposed
from penstock.model.wire.codec import as_written
from penstock.scheduling.make_room.prelaunch import MAX_FALSE_ENDS
from penstock.why.explain import explain
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec

STARTED = 1_000_000
WAITS = job_spec(prelaunch=True)


def cell(*nodes: NodeSpec, profile: str = "penstock", **settings: Any) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile, **settings))
    driver.join(*(nodes or (node_spec("n0", 1),)))
    return driver


def timed(run_s: float | None, launch_s: float | None = None, **need: Any) -> Estimate:
    """What the estimator says of a job, in seconds."""
    times = {
        "run_ms": None if run_s is None else round(run_s * 1_000),
        "launch_ms": None if launch_s is None else round(launch_s * 1_000),
    }
    return structs.replace(estimate(**need), **times)


def reports(driver: CellDriver, job_id: str, phase: Any) -> Step:
    """Each task of the job; the step of the last one."""
    job = driver.job(job_id)
    for task_id, task in list(job.tasks.items()):
        step = driver.feed(
            TaskPhaseChanged(
                node_id=task.place.node_id,
                task_id=task_id,
                token=job.token,
                phase=phase,
                at_ms=driver.now_ms,
            )
        )
    return step


def placed(*steps: Step) -> list[tuple[str, tuple[str, ...], bool]]:
    found = [fact for step in steps for fact in step.facts if isinstance(fact, PlacementDecided)]
    return [(fact.job_id, fact.after, fact.prelaunch) for fact in found]


def running(
    driver: CellDriver, job_id: str, spec: JobSpec | None = None, need: Estimate | None = None
) -> None:
    driver.submit(job_id, spec, need)
    driver.start(job_id)


@pytest.mark.parametrize("profile", ["penstock", "liquid"])
def test_the_next_job_launches_while_one_saves(profile: str) -> None:
    """`a` reports that it saves: `b`, which is next, is ordered to launch there. `a` ends by itself, and
    nothing of what both had is freed."""
    driver = cell(node_spec("n0", 1, cores=4), profile=profile)
    running(driver, "a", None, timed(None, cores=4))
    driver.submit("b", WAITS, timed(None, cores=3))
    assert placed(reports(driver, "a", "save")) == [("b", ("a",), True)]
    [order] = [order for order in driver.orders() if isinstance(order, StartTask)]
    assert (order.job_id, order.prelaunch) == ("b", True)
    why = explain(driver.state, "b", driver.state.now_ms)
    assert "launches" in why.text
    assert "a" in why.text
    assert driver.state.jobs["b"].status is JobStatus.LAUNCHING
    assert "prelaunched after a" in in_short({"placement": as_written(driver.explanations[-1])}, {})
    driver.exit("a.1.w0")
    assert awaited(driver.state, driver.job("b")) == ()
    assert driver.state.nodes["n0"].free_gpu_mask == 0
    assert driver.state.nodes["n0"].free_core_mask.bit_count() == 1
    driver.start("b")
    driver.at(600_000)
    assert driver.job("b").status is JobStatus.RUNNING
    assert dump(load(dump(driver.state))) == dump(driver.state)


def test_it_launches_so_long_before_the_end_as_it_takes() -> None:
    """`a` runs for 100 s and does not report phases; `b` takes 30 s to launch. It is ordered after 70 s, and
    not when it comes."""
    driver = cell()
    running(driver, "a", None, timed(100))
    assert placed(driver.submit("b", WAITS, timed(50, 30))) == []
    assert placed(*driver.at(69_000)) == []
    assert placed(*driver.at(70_000)) == [("b", ("a",), True)]


def test_who_comes_before_a_running_job_is_known_waits_for_its_start() -> None:
    """`b` has queued while `a` was launched: when `a` will end is known from its start on."""
    driver = cell()
    driver.submit("a", None, timed(100))
    driver.submit("b", WAITS, timed(50, 30))
    driver.at(20_000)
    driver.start("a")
    assert placed(*driver.at(89_000)) == []
    assert placed(*driver.at(90_000)) == [("b", ("a",), True)]


def test_a_late_end_costs_a_bounded_wait() -> None:
    """`a` runs longer than expected. `b` waits for the time that the cell allows and goes back to its place,
    twice; then nobody waits for `a` any more, and `b` starts when `a` has ended."""
    driver = cell(prelaunch_wait_ms=20_000)
    running(driver, "a", None, timed(100))
    driver.submit("b", WAITS, timed(50, 30))
    assert placed(*driver.at(119_999)) == [("b", ("a",), True)]
    for attempt in range(1, MAX_FALSE_ENDS + 1):
        steps = driver.at(100_000 + attempt * 20_000)
        stops = [fact for step in steps for fact in step.facts if isinstance(fact, StopDecided)]
        assert [(stop.job_id, stop.reason) for stop in stops] == [("b", "predecessor_late")]
        step = driver.exit(f"b.{attempt}.w0", None, cause="stopped", signal=15)
        [again] = [fact for fact in step.facts if isinstance(fact, JobRequeued)]
        assert again.reason == "predecessor_late"
        assert len(placed(step)) == (attempt < MAX_FALSE_ENDS)
    assert driver.job("b").retries.infrastructure == MAX_FALSE_ENDS
    assert placed(*driver.at(900_000)) == []
    assert placed(driver.exit("a.1.w0")) == [("b", (), False)]


def test_who_trains_on_was_only_saving_a_checkpoint() -> None:
    """A script reports `save` at each of its checkpoints and trains on: `b` goes back at once, and is not
    fooled again."""
    driver = cell()
    running(driver, "a")
    driver.submit("b", WAITS)
    assert placed(reports(driver, "a", "save")) == [("b", ("a",), True)]
    step = reports(driver, "a", "train")
    assert [fact.reason for fact in step.facts if isinstance(fact, StopDecided)] == ["predecessor_late"]
    driver.exit("b.1.w0", None, cause="stopped", signal=15)
    assert placed(reports(driver, "a", "save")) == []
    assert placed(driver.exit("a.1.w0")) == [("b", (), False)]


def test_the_first_in_order_gets_the_gpus_or_nobody_early() -> None:
    """`b` comes before `c` and does not wait at a gate: `c`, which would, does not pass it."""
    driver = cell()
    running(driver, "a")
    driver.submit("b")
    driver.submit("c", WAITS)
    assert placed(reports(driver, "a", "save")) == []
    assert placed(driver.exit("a.1.w0"))[0] == ("b", (), False)


def test_who_does_not_fit_is_passed_as_at_the_end() -> None:
    """`g` comes first and needs two GPUs; `a` leaves one. Its end would start `c`, so `c` launches."""
    driver = cell(node_spec("n0", 2))
    for job_id in ("a", "other"):
        running(driver, job_id)
    driver.submit("g", WAITS, estimate(gpus=2))
    driver.submit("c", WAITS)
    assert placed(reports(driver, "a", "save")) == [("c", ("a",), True)]


@pytest.mark.parametrize("profile", ["penstock", "liquid"])
def test_a_gang_gathers_no_gpus_that_others_would_get(profile: str) -> None:
    """`a` and `b` save at once. `g`, which comes first, would fit on what both leave; but the end of the
    first of them starts `c`, on one of the two, with and without early launches.

    As long as gangs gathered them, the mean completion time of busy cells was 2 % above that without early
    launches.
    """
    driver = cell(node_spec("n0", 2), profile=profile)
    for job_id in ("a", "b"):
        running(driver, job_id)
    driver.submit("g", WAITS, estimate(gpus=2))
    driver.submit("c", WAITS)
    steps = [reports(driver, job_id, "save") for job_id in ("a", "b")]
    assert placed(*steps) == [("c", ("a",), True)]
    assert placed(driver.exit("b.1.w0")) == []
    driver.exit("a.1.w0")
    driver.start("c")
    assert placed(driver.exit("c.1.w0")) == [("g", (), False)]


def test_the_tasks_of_a_gang_end_one_after_the_other() -> None:
    """The two workers of `a` save. The end of the first one starts `c`; `g`, which needs both GPUs, comes
    after, though it is first in order."""
    driver = cell(node_spec("n0", 2), profile="liquid")
    running(driver, "a", job_spec(workers=2))
    driver.submit("g", WAITS, estimate(gpus=2))
    driver.submit("c", WAITS)
    assert placed(reports(driver, "a", "save")) == [("c", ("a",), True)]


def test_what_is_reserved_is_used_by_those_alone_that_end_in_time() -> None:
    """`g` has waited long for two GPUs: those of `x` and `a` are reserved for it, until 3,100 s. `c`, which
    runs for longer, does not launch on that of `x`; `e` does."""
    driver = cell(*(node_spec(f"n{number}", 1) for number in range(3)))
    for job_id, run_s in (("a", 3_100), ("b", 20_000), ("x", 3_000)):
        running(driver, job_id, None, timed(run_s))
    driver.submit("g", job_spec(workers=2), timed(1))
    driver.submit("c", WAITS, timed(5_000, 100))
    driver.submit("held")
    driver.at(2_800_000)
    driver.feed(JobHoldRequested(job_id="held"))
    [reserved] = driver.state.planned.values()
    assert (reserved.job_id, len(reserved.nodes)) == ("g", 2)
    assert placed(*driver.at(2_980_000)) == []
    driver.submit("e", WAITS, timed(50, 10))
    assert placed(*driver.at(2_989_000)) == []
    assert placed(*driver.at(2_990_000)) == [("e", ("x",), True)]


def test_who_launches_later_takes_what_it_will_get() -> None:
    """`a` ends in 20 s and `b` in 30 s. `c`, which is first, launches for 5 s and will get the GPU of `a`;
    `d` launches for 20 s and gets that of `b`, not that of `a`."""
    driver = cell(node_spec("n0", 1), node_spec("n1", 1), profile="liquid")
    running(driver, "a", None, timed(20))
    running(driver, "b", None, timed(30))
    driver.submit("c", WAITS, timed(50, 5))
    assert placed(driver.submit("d", WAITS, timed(50, 20))) == []
    assert placed(*driver.at(9_999)) == []
    assert placed(*driver.at(10_000)) == [("d", ("b",), True)]
    assert placed(*driver.at(15_000)) == [("c", ("a",), True)]


def test_a_moldable_job_has_as_many_workers_as_at_the_end() -> None:
    """`a` leaves two GPUs: `m`, which takes one to four, launches with two workers."""
    driver = cell(node_spec("n0", 2))
    running(driver, "a", None, estimate(gpus=2))
    driver.submit("m", job_spec(prelaunch=True, workers=4, min_workers=1, global_batch_size=64))
    [decided] = [fact for fact in reports(driver, "a", "save").facts if isinstance(fact, PlacementDecided)]
    assert (decided.job_id, len(decided.tasks), decided.prelaunch) == ("m", 2, True)


def test_a_moldable_job_with_a_deadline_chooses_its_shape_at_the_end() -> None:
    """Nobody launches in its place either."""
    driver = cell(node_spec("n0", 2))
    running(driver, "a", None, estimate(gpus=2))
    moldable = job_spec(prelaunch=True, workers=2, min_workers=1, global_batch_size=64, deadline_ms=90_000)
    driver.submit("m", moldable, timed(20))
    driver.submit("c", WAITS, estimate(gpus=2))
    assert placed(reports(driver, "a", "save")) == []
    assert placed(driver.exit("a.1.w0"))[0] == ("m", (), False)


def test_who_goes_on_from_an_earlier_attempt_launches_once_more() -> None:
    """`a` takes 100 s with a launch of 30 s. It fails after 40 s and goes on from its checkpoint: 60 s are
    left, and another launch. `b` is ordered 10 s before that, not 40 s."""
    driver = cell()
    running(driver, "a", job_spec(attempts=2), timed(100, 30))
    driver.at(40_000)
    driver.exit("a.1.w0", 1)
    driver.at(60_000)
    driver.start("a")
    driver.submit("b", WAITS, timed(50, 10))
    assert placed(*driver.at(139_000)) == []
    assert placed(*driver.at(140_000)) == [("b", ("a",), True)]


def test_one_that_does_not_fit_there_does_not_take_it() -> None:
    """`b` needs more memory than is left beside `a`: it cannot be there at once, and comes after."""
    driver = cell(node_spec("n0", 1))
    running(driver, "a", None, estimate(memory_mib=100_000))
    driver.submit("b", WAITS, estimate(memory_mib=100_000))
    assert placed(reports(driver, "a", "save")) == []
    assert placed(driver.exit("a.1.w0")) == [("b", (), False)]


def test_a_gang_comes_after_such_as_save_on_each_node() -> None:
    """`g` has a worker on each of two nodes. It launches when both `a` and `b` save; one that is merely
    expected to end is not waited for."""
    driver = cell(node_spec("n0", 1), node_spec("n1", 1), profile="liquid")
    running(driver, "a", None, timed(100))
    running(driver, "b", None, timed(100))
    driver.submit("g", job_spec(workers=2, prelaunch=True), timed(50, 30))
    driver.at(80_000)
    assert placed(reports(driver, "a", "save")) == []
    assert placed(reports(driver, "b", "save")) == [("g", ("a", "b"), True)]
    driver.exit("b.1.w0")
    assert awaited(driver.state, driver.job("g")) == ("a",)
    driver.exit("a.1.w0")
    driver.start("g")
    assert driver.job("g").status is JobStatus.RUNNING


@pytest.mark.parametrize("profile", ["fifo", "tiresias", "srtf", "hived"])
def test_profiles_whose_sources_do_not_know_it_order_nobody_early(profile: str) -> None:
    driver = cell(profile=profile)
    driver.submit("a")
    driver.at(0)
    driver.start("a")
    driver.submit("b", WAITS)
    driver.at(0)
    assert placed(reports(driver, "a", "save")) == []


def test_an_operator_turns_it_off() -> None:
    driver = cell(prelaunch_wait_ms=0)
    running(driver, "a", None, timed(100))
    driver.submit("b", WAITS, timed(50, 30))
    assert placed(reports(driver, "a", "save"), *driver.at(90_000)) == []


def test_one_whose_gpus_are_promised_is_left_alone() -> None:
    """`b` launches beside `a`: nobody gives `a` other cores, moves it or lets others join it now."""
    driver = cell(node_spec("n0", 1), node_spec("n1", 1))
    driver.submit("other")
    driver.submit("a")
    for job_id in ("other", "a"):
        driver.start(job_id)
    driver.submit("b", WAITS)
    reports(driver, "a", "save")
    where = driver.job("a").tasks["a.1.w0"].place.node_id
    other = driver.job("other").tasks["other.1.w0"].place.node_id
    assert where != other
    base = {"proposer": "test", "proposal_id": "1", "reason": "a test"}
    for event in (
        CoresProposed(task_id="a.1.w0", cores=1, **base),
        MigrationProposed(job_id="a", nodes=(other,), **base | {"proposal_id": "2"}),
    ):
        step = driver.feed(event)
        [answer] = [fact for fact in step.facts if fact.TYPE == "penstock.proposal.answered"]
        assert "is about to end" in answer.detail  # type: ignore[attr-defined]


def test_it_may_be_cancelled_while_it_launches() -> None:
    driver = cell()
    running(driver, "a")
    driver.submit("b", WAITS)
    reports(driver, "a", "save")
    driver.feed(JobCancelRequested(job_id="b", reason="a mistake"))
    driver.exit("b.1.w0", None, cause="stopped", signal=15)
    assert driver.state.nodes["n0"].free_gpu_mask == 0
    driver.exit("a.1.w0")
    assert driver.state.nodes["n0"].free_gpu_mask == 1


def test_the_end_before_it_may_be_a_failure() -> None:
    """`a` fails while it saves and is to run again: it queues behind `b`, whose GPU that is by now."""
    driver = cell()
    running(driver, "a", job_spec(attempts=3))
    driver.submit("b", WAITS)
    reports(driver, "a", "save")
    driver.exit("a.1.w0", 1)
    driver.start("b")
    driver.at(60_000)
    assert driver.job("a").status is JobStatus.QUEUED
    assert driver.job("b").status is JobStatus.RUNNING
    driver.exit("b.1.w0")
    assert driver.job("a").attempt == 2
