"""Running jobs that make way, under `penstock`, and under `genie` with `make_way`: who is stopped for whom,
where both go on, and who is left alone."""

from typing import Any

import pytest

from penstock.errors import ConfigurationError
from penstock.model.decisions.ledger_events import JobPreempted, PlacementDecided, ProposalAnswered
from penstock.model.decisions.plans import PlanUnit
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings, Stage
from penstock.model.nouns.types import Estimate, ResourceVector, ShapeOption
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.scheduling.profiles import profile_for
from penstock_papers.settings import Genie, GenieSettings
from penstock_services.placer.core.step import Step
from penstock_services.placer.shell.term import placer_settings
from tests.support.cluster.driver import CellDriver, node_spec
from tests.support.own_settings import with_own

HOUR_MS = 3_600_000
STEPS = {1: 100.0, 2: 50.0, 4: 24.0}
"""Workers → ms of an iteration; four have the best ratio."""


def estimate(run_ms: int = HOUR_MS, steps: dict[int, float] | None = None) -> Estimate:
    options = tuple(
        ShapeOption(workers=n, nodes=1, gpus_per_node=n, step_ms=ms, low_ms=ms, high_ms=ms)
        for n, ms in (steps or STEPS).items()
    )
    return Estimate(
        worker=ResourceVector(gpus=1),
        confidence=1.0,
        tier="user",
        source="a test",
        run_ms=run_ms,
        options=options,
    )


def spec(**more: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "command": ("x",),
        "workers": 4,
        "min_workers": 1,
        "global_batch_size": 64,
        "checkpoint": "sdk",
    }
    return JobSpec(**fields | more)


class Cell(CellDriver):
    """A node of four GPUs. A normal job has all of them since a minute ago; of its hour on one GPU, 14
    minutes on four, 13 are left."""

    def __init__(
        self,
        *,
        make_way: bool = True,
        gpus: int = 4,
        steps: dict[int, float] | None = None,
        profile: str = "genie",
        without: tuple[Stage, ...] = (),
        **more: Any,
    ) -> None:
        own = GenieSettings(genie=Genie(choose="protect", theta=0.0, make_way=make_way))
        super().__init__(with_own(profile, own, without=without))
        self.join(node_spec("n1", gpus))
        self.submit("long", spec(**more), estimate(steps=steps))
        self.start("long")
        self.at(60_000)
        assert self.job("long").workers == 4

    def asked(
        self, job_id: str, run_ms: int = 600_000, steps: dict[int, float] | None = None, **more: Any
    ) -> Step:
        return self.submit(job_id, spec(**more), estimate(run_ms, steps))

    def saved(self, job_id: str) -> list[Step]:
        """All its tasks have ended within their grace."""
        return [self.exit(task_id, 143) for task_id in list(self.job(job_id).tasks)]


def stopped(step: Step) -> list[str]:
    return [fact.job_id for fact in step.facts if isinstance(fact, JobPreempted)]


def placed(step: Step) -> dict[str, int]:
    """Job → its workers."""
    return {fact.job_id: len(fact.tasks) for fact in step.facts if isinstance(fact, PlacementDecided)}


def test_a_normal_job_shrinks_for_an_urgent_one() -> None:
    """It saves within its grace and goes on with two workers beside the urgent one, which has its order at
    once; both starts are those that were tried."""
    cell = Cell()
    step = cell.asked("hurry", qos="urgent", steps={1: 100.0, 2: 30.0})
    assert stopped(step) == ["long"]
    assert placed(step) == {"hurry": 2}
    [answer] = [fact for fact in step.facts if isinstance(fact, ProposalAnswered)]
    assert (answer.proposer, answer.verdict, answer.stopped) == ("genie", "accepted", 1)
    [why] = [one.reason for one in step.explanation if one.job_id == "hurry"]
    assert "long makes way for hurry: it goes on with 2 of 4 workers and is not late for it" in why
    *_, last = cell.saved("long")
    assert placed(last) == {"long": 2}
    assert cell.job("long").attempt == 2


def test_a_job_moves_as_it_is_where_there_is_room() -> None:
    """The urgent one may only have V100; a node of another model is free, on which the normal one goes on
    with all its workers."""
    cell = Cell()
    cell.join(node_spec("n2", 4, model="T4"))
    step = cell.asked("hurry", qos="urgent", steps={4: 30.0}, gpu_models=("V100",))
    assert stopped(step) == ["long"]
    *_, last = cell.saved("long")
    assert placed(last) == {"long": 4}
    assert {task.place.node_id for task in cell.job("long").tasks.values()} == {"n2"}


def test_who_would_be_in_time_waits_and_who_would_not_gets_its_place() -> None:
    """The GPUs are free in 13 minutes. Three minutes are needed: a deadline of an hour can wait for that, one
    of ten minutes cannot, and one of a minute is missed all the same."""
    need: dict[str, Any] = {"run_ms": 600_000, "steps": {1: 100.0, 2: 30.0}}
    assert stopped(Cell().asked("hour", deadline_ms=HOUR_MS, **need)) == []
    assert stopped(Cell().asked("minute", deadline_ms=60_000, **need)) == []
    step = Cell().asked("ten", deadline_ms=600_000, **need)
    assert stopped(step) == ["long"]
    assert placed(step) == {"ten": 2}


@pytest.mark.parametrize(
    "more",
    [
        {"make_way": False},
        {"checkpoint": "none"},
        {"preemptible": False},
        {"qos": "prior"},
        {"deadline_ms": 10 * HOUR_MS},
        {"min_workers": 4},
    ],
)
def test_nobody_is_stopped_where_that_does_not_pay(more: dict[str, Any]) -> None:
    """Not asked for; its work would be lost; it may not be stopped; it is no normal job; it has no other
    shape."""
    step = Cell(**more).asked("hurry", qos="urgent", steps={1: 100.0, 2: 40.0, 3: 20.0})
    assert stopped(step) == []
    assert placed(step) == {}


def later(cell: Cell, ms: int) -> Cell:
    """As if the normal job had been submitted so much earlier."""
    for state in (cell.state, cell.follower.state):
        state.jobs["long"].submitted_ms -= ms
    return cell


def test_who_is_in_time_stays_in_time() -> None:
    """The normal job is due in 19 minutes and ends in 13; with half of its workers it would take 28."""
    cell = later(Cell(), 100 * 60_000)
    assert stopped(cell.asked("hurry", qos="urgent", steps={1: 100.0, 2: 30.0})) == []


def test_who_is_late_already_may_lose_less_than_the_other_gains() -> None:
    """The normal job should have been done an hour ago, and ends in 13 minutes, which the urgent one would
    wait. With half of its workers it loses 14 minutes more, with three of four less than five."""
    two = later(Cell(), 3 * HOUR_MS).asked("hurry", qos="urgent", steps={1: 100.0, 2: 30.0})
    assert stopped(two) == []
    cell = later(Cell(steps={1: 100.0, 3: 32.1, 4: 24.0}), 3 * HOUR_MS)
    one = cell.asked("hurry", qos="urgent", steps={1: 100.0})
    assert stopped(one) == ["long"]
    [why] = [fact.reason for fact in one.facts if isinstance(fact, JobPreempted)]
    assert "it goes on with 3 of 4 workers and ends" in why


def test_a_job_makes_way_twice_at_most() -> None:
    """Urgent jobs come one after the other: it must not begin again for ever."""
    cell, made = Cell(), 0
    for number in range(4):
        name = f"hurry-{number}"
        step = cell.asked(name, qos="urgent", steps={1: 100.0, 2: 30.0})
        if stopped(step):
            made += 1
            cell.saved("long")
            cell.start("long")
        if cell.job(name).tasks:
            cell.start(name)
            cell.exit(f"{name}.1.w0")
            cell.exit(f"{name}.1.w1")
            cell.at(cell.now_ms - 1_000_000 + 60_000)
    assert made <= 2
    assert cell.job("long").retries.infrastructure <= 2


def test_nobody_makes_way_while_somebody_is_being_stopped() -> None:
    """A second urgent job comes before the first one's place is free."""
    cell = Cell()
    assert stopped(cell.asked("first", qos="urgent", steps={1: 100.0, 2: 30.0})) == ["long"]
    assert stopped(cell.asked("second", qos="urgent", steps={1: 100.0, 2: 30.0})) == []


HURRY: dict[str, Any] = {"qos": "urgent", "steps": {1: 100.0, 2: 30.0}}
"""An urgent job that takes two GPUs."""


def default(**more: Any) -> Cell:
    """Under the default profile, in which `genie.make_way` is not asked for."""
    return Cell(profile="penstock", make_way=False, **more)


def test_under_the_default_profile_a_job_shrinks_for_an_urgent_one() -> None:
    """The cell is full, so that nothing is placed when the urgent job comes: the normal one makes way all the
    same, at once, and goes on beside it."""
    cell = default()
    step = cell.asked("hurry", **HURRY)
    assert stopped(step) == ["long"]
    [answer] = [fact for fact in step.facts if isinstance(fact, ProposalAnswered)]
    assert (answer.proposer, answer.verdict, answer.stopped) == ("penstock", "accepted", 1)
    *_, last = cell.saved("long")
    assert placed(last) == {"long": 2}
    assert cell.job("hurry").tasks


@pytest.mark.parametrize("left_out", ["make_way", "deadlines"])
def test_the_default_profile_can_leave_it_out(left_out: Stage) -> None:
    """For ablation. It rests on the order by deadlines, and goes with that."""
    assert profile_for(PlacerSettings(profile="penstock")).make_way is not None
    assert stopped(default(without=(left_out,)).asked("hurry", **HURRY)) == []


def test_a_job_without_a_deadline_stops_no_other() -> None:
    """A class of normal, or none at all, waits as before."""
    cell = default()
    assert stopped(cell.asked("usual", steps={1: 100.0, 2: 30.0})) == []
    assert stopped(cell.asked("normal", qos="normal", steps={1: 100.0, 2: 30.0})) == []


def test_a_deadline_takes_no_place_from_a_tenant_beyond_the_share() -> None:
    """Ada has three nodes of four, and Zoe the fourth, less than her half. Ada's urgent job gets the place of
    a job of hers, and none of Zoe's where all of hers are prior; Zoe's gets one of Ada's."""
    for owner, others, expected in (("ada", (), ["a0"]), ("ada", ("prior",) * 3, []), ("zoe", (), ["a0"])):
        cell = CellDriver(PlacerSettings(profile="penstock"))
        for number in range(4):
            cell.join(node_spec(f"n{number}", 4))
            name, whose = (f"a{number}", "ada") if number < 3 else ("z", "zoe")
            more: dict[str, Any] = {"qos": others[number]} if number < len(others) else {}
            cell.submit(name, spec(owner=whose, **more), estimate(HOUR_MS + 1_000 * number))
            cell.start(name)
        cell.at(60_000)
        step = cell.submit("hurry", spec(owner=owner, qos="urgent"), estimate(600_000, {1: 100.0, 2: 30.0}))
        assert stopped(step) == expected, (owner, others)


def test_a_tenants_own_priorities_hold() -> None:
    """Her long job has a higher priority than her urgent one, which waits."""
    assert stopped(default(priority=1).asked("hurry", **HURRY)) == []
    assert stopped(default(priority=1).asked("hurry", priority=1, **HURRY)) == ["long"]


def test_jobs_of_one_shape_make_way_by_a_move() -> None:
    """Neither is moldable. The urgent one may only have V100; a node of another model is free, on which the
    normal one goes on as it is."""
    fixed: dict[str, Any] = {"workers": 4, "min_workers": None}
    cell = default(**fixed)
    cell.join(node_spec("n2", 4, model="T4"))
    step = cell.asked("hurry", qos="urgent", gpu_models=("V100",), **fixed)
    assert stopped(step) == ["long"]
    *_, last = cell.saved("long")
    assert placed(last) == {"long": 4}
    assert {task.place.node_id for task in cell.job("long").tasks.values()} == {"n2"}
    alone = default(**fixed)
    assert stopped(alone.asked("hurry", qos="urgent", **fixed)) == [], "there is no other place for it"


def test_nodes_that_are_reserved_for_another_job_are_left_alone() -> None:
    """A job without a deadline has waited so long that the node is reserved for it; the urgent one does not
    get what the running one would leave there."""
    cell = default(without=("make_way",))
    cell.asked("usual")
    cell.asked("hurry", **HURRY)
    stage = profile_for(PlacerSettings(profile="penstock")).make_way
    assert stage is not None
    found = stage.plan(cell.state)
    assert found is not None
    assert found.stops == ("long",)
    cell.state.planned = {"usual": PlanUnit(job_id="usual", nodes=("n1",), expected_ms=cell.now_ms + 1)}
    assert stage.plan(cell.state) is None


def test_no_plan_of_others_takes_the_place_that_was_made() -> None:
    """While the normal job saves, the batcher proposes another job for the node: it has to ask again, and the
    urgent one starts."""
    cell = default(checkpoint="sdk", grace_ms=30_000)
    cell.asked("usual", steps={1: 100.0})
    assert stopped(cell.asked("hurry", **HURRY)) == ["long"]
    unit = ProposedUnit(jobs=(ProposedJob(job_id="usual", nodes=("n1",)),), explanation="a test")
    step = cell.feed(PlanProposed(proposal_id="p", proposer="batcher", units=(unit,)))
    [answer] = [fact for fact in step.facts if isinstance(fact, ProposalAnswered)]
    assert (answer.verdict, answer.reason) == ("refused", "wrong_state")
    assert answer.detail == "a job makes way for another, and long still waits for its place"
    *_, last = cell.saved("long")
    assert placed(last)["long"] == 2
    assert cell.job("hurry").tasks


def test_a_cell_that_is_late_already_does_not_hide_who_can_be_in_time() -> None:
    """Four jobs are late whatever happens; the fifth is not, and gets its place."""
    cell = default()
    for number in range(4):
        cell.asked(f"late-{number}", deadline_ms=1, steps={1: 100.0, 2: 30.0})
    step = cell.asked("ten", run_ms=600_000, deadline_ms=600_000, steps={1: 100.0, 2: 30.0})
    assert stopped(step) == ["long"]


@pytest.mark.parametrize("profile", ["penstock", "fifo"])
def test_the_setting_is_never_without_effect(profile: str) -> None:
    """An operator asks for jobs that make way by a setting that only `genie` reads: the placer does not
    start, and names the setting and what to do."""
    given = {"PENSTOCK_PROFILE": profile, "PENSTOCK_GENIE": '{"make_way": true}'}
    assert profile_for(placer_settings({**given, "PENSTOCK_PROFILE": "genie"})).make_way is not None
    with pytest.raises(ConfigurationError, match=f"PENSTOCK_GENIE: profile {profile} has no .*leave it out"):
        placer_settings(given)
