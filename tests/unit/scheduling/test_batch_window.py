"""Stories of the batch window: a burst waits for a plan of all of it, never longer than the window."""

from typing import Any

import pytest

from penstock.cluster.reasons import Reason
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.decisions.plans import BatchWindowClosed, BatchWindowOpened
from penstock.model.inputs.external_events import JobCancelRequested
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.why.explain import explain
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

WINDOW_MS = 1_000


def cell_of(profile: str = "fifo", **settings: Any) -> CellDriver:
    """Nodes n1 and n2 of four GPUs; three arrivals within a second are fast."""
    given = {"batch_window_ms": WINDOW_MS, "batch_arrivals": 3} | settings
    driver = CellDriver(PlacerSettings(profile=profile, **given))
    driver.join(node_spec("n1"), node_spec("n2"))
    return driver


def plan(*jobs: tuple[str, str], name: str = "p1") -> PlanProposed:
    units = tuple(
        ProposedUnit(jobs=(ProposedJob(job_id=job_id, nodes=(node,)),), explanation="")
        for job_id, node in jobs
    )
    return PlanProposed(proposal_id=name, proposer="batcher", units=units)


def placed(*steps: Step) -> dict[str, str]:
    return {
        fact.job_id: fact.tasks[0].node_id
        for step in steps
        for fact in step.facts
        if isinstance(fact, PlacementDecided)
    }


def burst(cell: CellDriver, jobs: int = 5, every_ms: int = 100) -> list[Step]:
    """j0, j1, … arrive one after the other."""
    steps = []
    for number in range(jobs):
        steps.append(cell.submit(f"j{number}", need=estimate(1)))
        cell.at(cell.now_ms - 1_000_000 + every_ms)
    return steps


@pytest.mark.parametrize("profile", ["fifo", "penstock", "drf", "srtf"])
def test_a_burst_waits_for_its_plan(profile: str) -> None:
    """Three of five jobs that come within half a second wait; the batcher's plan places two of them, and the
    third is tried as usual at once."""
    cell = cell_of(profile)
    steps = burst(cell)
    assert [kinds(step)[1:] for step in steps[2:]] == [["batch_window.opened", "timer.set"], [], []]
    opened = steps[2].facts[1]
    assert opened == BatchWindowOpened(until_ms=1_000_200 + WINDOW_MS)
    found = explain(cell.state, "j3")
    assert (found.reason, found.detail) == (Reason.BATCH_WINDOW, "the wait for a plan is over in 0.8 s")
    step = cell.feed(plan(("j3", "n2"), ("j4", "n2")))
    assert placed(step) == {"j3": "n2", "j4": "n2"}
    assert kinds(step)[-2:] == ["batch_window.closed", "timer.set"]
    assert list(placed(*cell.at(500))) == ["j2"]


@pytest.mark.parametrize("profile", ["fifo", "penstock", "drf", "srtf"])
def test_where_no_plan_comes_nobody_waits_longer_than_the_window(profile: str) -> None:
    """The batcher is down. At the end of the window all are placed; the next ones are placed as they come
    until that many were fast again."""
    cell = cell_of(profile)
    burst(cell)
    steps = cell.at(1_200)
    assert sorted(placed(*steps)) == ["j2", "j3", "j4"]
    assert [fact for step in steps for fact in step.facts if isinstance(fact, BatchWindowClosed)] == [
        BatchWindowClosed(reason="over")
    ]
    for number in range(3):
        cell.submit(f"k{number}", need=estimate(1))
        cell.at(1_210 + number)
    assert [bool(cell.job(f"k{number}").tasks) for number in range(3)] == [True, True, False]


def test_the_window_is_over_when_its_time_is_and_not_when_its_timer_is_read() -> None:
    """The placer was busy: inputs are answered before the timer that was due. They are placed at once."""
    cell = cell_of()
    burst(cell)
    cell.now_ms = 1_000_200 + WINDOW_MS
    assert list(placed(cell.submit("late"))) == ["late"]


def test_an_exit_does_not_place_who_waits_for_the_plan() -> None:
    """A job ends in the middle of the window: what it leaves is for the plan as well."""
    cell = cell_of()
    cell.submit("old", need=estimate(1))
    cell.start("old")
    burst(cell)
    assert placed(cell.exit("old.1.w0")) == {}
    assert list(placed(*cell.at(2_000))) == ["j1", "j2", "j3", "j4"]


def test_a_plan_of_which_nothing_can_be_done_ends_the_window_too() -> None:
    """It was computed for another burst. A copy of it, which comes in the next window, does not."""
    cell = cell_of()
    burst(cell, 3)
    late = plan(("ghost", "n1"))
    assert kinds(cell.feed(late))[-3:] == ["proposal.answered", "batch_window.closed", "timer.set"]
    cell.at(300)
    assert "batch_window.opened" in kinds(cell.submit("next"))
    assert kinds(cell.feed(late))[-1] == "proposal.answered"
    assert cell.state.in_window


def test_slow_arrivals_open_no_window_and_by_default_none_does() -> None:
    """Two a second are not three; and a cell without a batcher has no window."""
    slow = cell_of()
    burst(slow, 6, every_ms=501)
    assert all(slow.job(f"j{number}").tasks for number in range(6))
    plain = CellDriver()
    plain.join(node_spec("n1"))
    burst(plain, 4, every_ms=0)
    assert all(plain.job(f"j{number}").tasks for number in range(4))
    assert plain.state.arrivals == []


def test_a_snapshot_in_a_window_folds_on() -> None:
    """A placer takes over in the middle of a window: it ends when it would have."""
    cell = cell_of()
    burst(cell)
    again = load(dump(cell.state))
    assert dump(again) == dump(cell.state)
    assert (again.window_until_ms, again.arrivals) == (cell.state.window_until_ms, cell.state.arrivals)
    cell.feed(JobCancelRequested(job_id="j0", reason=""))
    assert len(cell.state.arrivals) == 3


def waiting_burst(profile: str) -> CellDriver:
    """One node of four GPUs is full with `old` and `j0`; j1 … j4 of the same burst wait, their window is over
    with an answer."""
    cell = CellDriver(PlacerSettings(profile=profile, batch_window_ms=WINDOW_MS, batch_arrivals=2))
    cell.join(node_spec("n1"))
    cell.submit("old", job_spec(workers=2), estimate(1))
    cell.start("old")
    cell.at(10_000)
    for number in range(5):
        cell.submit(f"j{number}", job_spec(workers=2), estimate(1))
    cell.feed(plan(name="first"))
    cell.at(10_500)
    assert cell.job("j0").tasks
    assert not cell.state.in_window
    return cell


def test_what_a_burst_still_waits_for_is_left_to_a_plan_again() -> None:
    """A task of `old` ends: nobody takes its GPU before the plan or the end of the window; the profile
    without a batch stage tries at once."""
    cell = waiting_burst("liquid")
    step = cell.exit("old.1.w0")
    assert "batch_window.opened" in kinds(step)
    assert placed(cell.exit("old.1.w1")) == {}
    assert placed(cell.feed(plan(("j3", "n1"), name="second"))) == {}, "it wants two places"
    assert list(placed(*cell.at(11_000))) == ["j1"]
    plain = waiting_burst("fifo")
    assert "batch_window.opened" not in kinds(plain.exit("old.1.w0"))


def test_without_an_answer_the_rest_of_a_burst_goes_the_usual_way() -> None:
    """The batcher is down: its first window costs what it lasts, the next exit opens none."""
    cell = waiting_burst("liquid")
    for task in ("w0", "w1"):
        cell.exit(f"old.1.{task}")
    assert list(placed(*cell.at(12_000))) == ["j1"]
    cell.start("j1")
    assert "batch_window.opened" not in kinds(cell.exit("j1.1.w0"))


def test_the_steady_queue_of_a_full_cell_opens_no_window() -> None:
    """Jobs that came one by one wait: an exit places the first at once."""
    cell = CellDriver(PlacerSettings(profile="liquid", batch_window_ms=WINDOW_MS, batch_arrivals=2))
    cell.join(node_spec("n1"))
    for number in range(6):
        cell.submit(f"j{number}", job_spec(workers=2), estimate(1))
        cell.at(2_000 * (number + 1))
    cell.start("j0")
    cell.exit("j0.1.w0")
    assert list(placed(cell.exit("j0.1.w1"))) == ["j2"]
