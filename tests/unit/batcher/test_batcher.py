"""Stories of the batcher's core: when it plans, what it proposes, and what becomes of it in a cell."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from penstock.model.decisions.ledger_events import (
    MAX_RANKS,
    JobRank,
    PlacementDecided,
    ProposalAnswered,
    TermStarted,
)
from penstock.model.decisions.plans import MAX_PROPOSED_UNITS, MAX_UNITS
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.inputs.external_events import JobCancelRequested, NodeCordoned
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import MAX_GANG_TASKS, MAX_TEXT
from penstock.model.proposals import (
    ANSWER_WITHIN_MS,
    MAX_PLANNED_STOPS,
    PlanProposed,
    ProposedJob,
    ProposedUnit,
)
from penstock.model.schema.event import Event
from penstock.model.schema.topics import MAX_PLAN_BYTES
from penstock.model.wire.codec import encode
from penstock.scheduling.groups.interleave import LIMITS_GPU_S
from penstock_services.batcher.core.batcher import LONGEST_RETRY_MS, RETRY_MS, VALID_MS, Batcher, Work, solve
from penstock_services.batcher.core.proposal import Planned, proposal_of
from penstock_services.placer.core.step import Step
from tests.support.batching.small_stages import FirstFitBatch, FirstFitRegroup, known_as
from tests.support.cluster.driver import CellDriver, estimate, node_spec

WINDOW_MS = 1_000


class PlannedCell(CellDriver):
    """A cell whose batcher sees each fact at once. Two nodes of four GPUs; three arrivals within a second are
    fast."""

    def __init__(self, settings: PlacerSettings) -> None:
        self.batcher = Batcher()
        super().__init__(settings)
        self.join(node_spec("n1"), node_spec("n2"))

    def feed(self, event: Event) -> Step:
        step = super().feed(event)
        for fact in step.facts:
            self.batcher.see(fact)
        return step

    def work(self) -> Work | None:
        """What the batcher asks now."""
        return self.batcher.next(self.state, self.now_ms)

    def plan(self, work: Work | None = None) -> PlanProposed | None:
        """What the batcher proposes now, or after `work`."""
        work = work or self.work()
        return None if work is None else self.batcher.answered(self.state, work, solve(work))

    def burst(self, jobs: int = 3) -> None:
        """j0, j1, … come within some milliseconds."""
        for number in range(jobs):
            self.submit(f"j{number}", need=estimate(1))


@pytest.fixture
def bursts() -> Iterator[PlannedCell]:
    with known_as("small", batch=FirstFitBatch()) as settings:
        yield PlannedCell(msgspec.structs.replace(settings, batch_window_ms=WINDOW_MS, batch_arrivals=3))


@pytest.fixture
def groups() -> Iterator[PlannedCell]:
    with known_as("small-groups", regroup=FirstFitRegroup()) as settings:
        cell = PlannedCell(settings)
        cell.plan()
        yield cell


def placed(step: Step) -> dict[str, str]:
    return {fact.job_id: fact.tasks[0].node_id for fact in step.facts if isinstance(fact, PlacementDecided)}


def test_a_burst_is_planned_towards_the_end_of_its_window(bursts: PlannedCell) -> None:
    """The third job opens the window. It waits until half of it is over, so that the later ones are there;
    then one plan has all."""
    bursts.burst()
    due_ms = bursts.batcher.due_ms(bursts.state)
    assert due_ms == bursts.state.window_until_ms - WINDOW_MS // 2
    assert bursts.plan() is None
    bursts.submit("late", need=estimate(1))
    bursts.now_ms = due_ms
    plan = bursts.plan()
    assert plan is not None
    assert [unit.jobs[0].job_id for unit in plan.units] == ["j2", "late"]
    assert plan.valid_until_ms == bursts.state.window_until_ms
    assert {read.id: read.version for read in plan.read} == {
        name: bursts.job(name).version for name in ("j2", "late")
    }
    assert placed(bursts.feed(plan)) == {"j2": "n2", "late": "n2"}
    assert not bursts.state.in_window
    assert bursts.plan() is None, "nothing has happened since"


def test_more_than_one_plan_holds_is_planned_at_once(bursts: PlannedCell) -> None:
    """300 jobs wait: whatever comes until the window's end is for the next plan, so this one goes out."""
    bursts.burst(300)
    plan = bursts.plan()
    assert plan is not None
    assert len(plan.units) == MAX_PROPOSED_UNITS
    assert plan.units[0].jobs[0].job_id == "j2"
    step = bursts.feed(plan)
    assert list(placed(step).values()) == ["n2"] * 4


def test_a_plan_that_comes_after_its_window_is_not_sent(bursts: PlannedCell) -> None:
    """The worker was slow: the placer's timer has placed everybody. In the next window the answer of this one
    is not used either."""
    bursts.burst()
    bursts.at(500)
    work = bursts.work()
    assert work is not None
    bursts.at(WINDOW_MS + 10)
    assert bursts.job("j2").tasks
    assert bursts.plan(work) is None
    for number in range(3):
        bursts.submit(f"k{number}", need=estimate(1))
    assert bursts.state.in_window
    assert bursts.plan(work) is None


def test_a_plan_that_is_read_after_its_window_is_refused_by_the_placer(bursts: PlannedCell) -> None:
    """It was computed in time and the log was slow. It costs nobody anything: those it names wait, or run
    where they are."""
    bursts.burst()
    bursts.at(500)
    plan = bursts.plan()
    assert plan is not None
    bursts.at(WINDOW_MS + 10)
    step = bursts.feed(plan)
    assert placed(step) == {}
    assert (step.facts[1].verdict, step.facts[1].reason) == ("refused", "expired")


def test_one_window_is_planned_once(bursts: PlannedCell) -> None:
    """The worker died: the window ends by its timer, as without a batcher, and the next one is planned
    again."""
    bursts.burst()
    bursts.at(500)
    work = bursts.work()
    assert work is not None
    bursts.batcher.failed(work)
    assert bursts.work() is None
    bursts.at(2_000)
    for number in range(3):
        bursts.submit(f"k{number}", need=estimate(1))
    bursts.now_ms += 500
    assert bursts.plan() is not None


def test_a_batcher_that_starts_within_a_window_plans_it(bursts: PlannedCell) -> None:
    """It was killed and is back before the window is over. Another one that read the same gives the same
    proposal, byte for byte."""
    bursts.burst(5)
    bursts.at(600)
    first = bursts.plan()
    bursts.batcher = Batcher()
    second = bursts.plan()
    assert first is not None
    assert second is not None
    assert encode(first) == encode(second)
    bursts.feed(first)
    assert bursts.feed(second).facts[1].copy_of, "a copy is answered as the first, and nothing follows"


def test_without_windows_or_a_stage_it_never_plans() -> None:
    """Idle is idle: it asks nothing and sends nothing under any profile without a stage, and for a burst only
    within a window."""
    for settings in (
        PlacerSettings(profile="fifo", batch_window_ms=WINDOW_MS, batch_arrivals=2),
        PlacerSettings(profile="newer-than-this-batcher"),
    ):
        batcher = Batcher()
        if settings.profile == "fifo":
            cell = CellDriver(settings)
            cell.join(node_spec("n1"))
            for number in range(4):
                cell.submit(f"j{number}", need=estimate(1))
            assert batcher.due_ms(cell.state) is None
        else:
            state = CellDriver().state
            state.settings = settings
            assert batcher.due_ms(state) is None


def test_who_runs_is_planned_when_something_happens(groups: PlannedCell) -> None:
    """A job comes, ends, a node is cordoned: one plan each. Nothing, a report of progress or its own plan:
    none."""
    groups.submit("j0", need=estimate(4))
    groups.start("j0")
    assert groups.plan() is None, "it runs already: nobody waits"
    groups.submit("j1", need=estimate(4))
    groups.submit("j2", need=estimate(4))
    plan = groups.plan()
    assert plan is not None
    assert plan.valid_until_ms == groups.state.now_ms + VALID_MS
    groups.feed(plan)
    assert groups.plan() is None, "its own plan is no reason to plan"
    groups.feed(NodeCordoned(node_id="n2", by="an operator", reason=""))
    assert groups.plan() is not None


def test_a_profile_that_becomes_known_is_a_reason_to_plan(groups: PlannedCell) -> None:
    """Two jobs of a kind wait; one that runs has shown what an iteration of theirs needs: they may be put
    together now."""
    for name in ("j0", "j1", "j2"):
        groups.submit(name, need=estimate(4))
    plan = groups.plan()
    assert plan is not None
    groups.feed(plan)
    assert groups.plan() is None
    groups.feed(
        StagesProfiled(
            model="resnet50",
            batch_size=64,
            gpus=4,
            storage_ms=1.0,
            cpu_ms=1.0,
            gpu_ms=1.0,
            network_ms=1.0,
            idle_ms=0.0,
            iteration_ms=4.0,
            iterations=20,
        )
    )
    assert groups.plan() is not None


def test_one_plan_is_under_way_at_a_time(groups: PlannedCell) -> None:
    """Until the placer has answered, what happens waits, and leads to one more plan; without an answer it
    goes on after a while."""
    for name in ("j0", "j1", "j2"):
        groups.submit(name, need=estimate(4))
    work = groups.work()
    groups.submit("j3", need=estimate(4))
    assert groups.work() is None, "the question before is being solved"
    plan = groups.plan(work)
    assert plan is not None
    groups.submit("j4", need=estimate(4))
    assert groups.work() is None, "the proposal is not answered yet"
    groups.feed(plan)
    again = groups.plan()
    assert again is not None
    assert {unit.jobs[0].job_id for unit in again.units} >= {"j3", "j4"}
    groups.submit("j5", need=estimate(4))
    assert groups.batcher.due_ms(groups.state) == groups.state.now_ms + ANSWER_WITHIN_MS
    groups.now_ms += ANSWER_WITHIN_MS
    assert groups.plan() is not None


def test_a_plan_whose_worker_died_is_made_again_though_nothing_happens(groups: PlannedCell) -> None:
    """The machine is so busy that the worker is ended after half a minute. The jobs that wait ask for no more
    plans: nothing else would."""
    for name in ("j0", "j1", "j2"):
        groups.submit(name, need=estimate(4))
    work = groups.work()
    assert work is not None
    groups.batcher.failed(work)
    assert groups.batcher.due_ms(groups.state) == work.now_ms + RETRY_MS
    assert groups.work() is None
    groups.now_ms += RETRY_MS
    assert groups.plan() is not None


def test_a_stage_that_always_fails_is_asked_less_and_less(groups: PlannedCell) -> None:
    """Its bug shows in this cell's present state, in which nothing happens over the weekend: once an hour is
    enough."""
    for name in ("j0", "j1", "j2"):
        groups.submit(name, need=estimate(4))
    waits_ms = []
    for _ in range(12):
        work = groups.work()
        assert work is not None
        groups.batcher.failed(work)
        due_ms = groups.batcher.due_ms(groups.state)
        assert due_ms is not None
        waits_ms.append(due_ms - work.now_ms)
        groups.now_ms = due_ms
    assert waits_ms[:3] == [RETRY_MS, 2 * RETRY_MS, 4 * RETRY_MS]
    assert waits_ms[-2:] == [LONGEST_RETRY_MS, LONGEST_RETRY_MS]
    assert groups.plan() is not None, "as soon as it has an answer"


def test_a_proposal_that_is_lost_is_made_again_though_nothing_happens(groups: PlannedCell) -> None:
    """It never reached the placer. Once the next one is answered, nothing more is asked."""
    for name in ("j0", "j1", "j2"):
        groups.submit(name, need=estimate(4))
    assert groups.plan() is not None
    assert groups.batcher.due_ms(groups.state) == groups.state.now_ms + ANSWER_WITHIN_MS
    groups.now_ms += ANSWER_WITHIN_MS
    again = groups.plan()
    assert again is not None
    groups.feed(again)
    assert groups.batcher.due_ms(groups.state) is None


@pytest.mark.parametrize(("reason", "asked"), [("expired", True), ("stale", True), ("infeasible", False)])
def test_a_plan_that_came_too_late_is_made_again(groups: PlannedCell, reason: Any, asked: bool) -> None:
    """The batcher was stopped for a minute between question and proposal. What is refused for another reason
    would be refused again."""
    for name in ("j0", "j1", "j2"):
        groups.submit(name, need=estimate(4))
    plan = groups.plan()
    assert plan is not None
    groups.batcher.see(
        ProposalAnswered(
            proposal_id=plan.proposal_id,
            proposer=plan.proposer,
            verdict="refused",
            reason=reason,
            detail="late",
        )
    )
    assert (groups.plan() is not None) is asked


def test_other_settings_than_those_it_was_asked_under_need_another_plan(groups: PlannedCell) -> None:
    """A term with another profile began while it was being solved."""
    for name in ("j0", "j1", "j2"):
        groups.submit(name, need=estimate(4))
    work = groups.work()
    groups.feed(TermStarted(term=2, placer_id="p2", settings=PlacerSettings(profile="fifo")))
    assert groups.plan(work) is None
    assert groups.plan() is None, "fifo plans nothing"


def test_who_has_left_meanwhile_is_not_proposed(groups: PlannedCell) -> None:
    for name in ("j0", "j1", "j2", "j3"):
        groups.submit(name, need=estimate(4))
    work = groups.work()
    for name in ("j2", "j3"):
        groups.feed(JobCancelRequested(job_id=name, reason=""))
    assert groups.plan(work) is None, "nothing is left of it, so nothing is sent"


def unit(number: int, tasks: int = 1, why: str = "") -> ProposedUnit:
    job = ProposedJob(job_id=f"j{number}", nodes=("n1",) * tasks)
    return ProposedUnit(jobs=(job,), explanation=why)


@pytest.mark.parametrize(
    ("planned", "units", "cut"),
    [
        (Planned([unit(n) for n in range(300)]), 256, True),
        (Planned([unit(n, 512) for n in range(12)]), 8, True),
        (Planned([unit(0, MAX_GANG_TASKS + 1) if n == 0 else unit(n) for n in range(3)]), 2, True),
        (Planned([unit(n, why="x" * MAX_TEXT) for n in range(250)]), None, True),
        (Planned([unit(n) for n in range(9)]), 9, False),
        (Planned([], [f"j{n}" for n in range(9)]), 0, False),
        (Planned([unit(1)], [f"j{n}" for n in range(MAX_PLANNED_STOPS + 1)]), 1, True),
        (
            Planned(
                [unit(1)],
                (),
                [JobRank(job_id=f"j{n}", level=0, chosen=True, position=n) for n in range(MAX_RANKS + 1)],
            ),
            1,
            True,
        ),
    ],
)
def test_a_proposal_keeps_to_its_bounds(planned: Planned, units: int | None, cut: bool) -> None:
    """What comes first in the plan is in it; it says whether there is more."""
    found = proposal_of(CellDriver().state, planned, "p1", 1)
    assert found.proposal is not None
    assert found.cut is cut
    assert len(encode(found.proposal)) <= MAX_PLAN_BYTES
    assert sum(len(one.jobs) for one in found.proposal.units) <= MAX_UNITS
    names = [one.jobs[0].job_id for one in found.proposal.units]
    assert (
        names
        == [one.jobs[0].job_id for one in planned.units if len(one.jobs[0].nodes) <= MAX_GANG_TASKS][
            : len(names)
        ]
    )
    if units is not None:
        assert len(names) == units


def test_nothing_to_change_is_not_proposed() -> None:
    assert proposal_of(CellDriver().state, Planned(), "p1", 1) == (None, False)


def test_time_passes_for_it_though_no_record_comes() -> None:
    """Two jobs of unknown run time, one GPU, and a log that takes nothing: it asks anew when who runs comes
    to its next queue, and not again before the one after."""
    cell = PlannedCell(PlacerSettings(profile="interleave"))
    cell.join(node_spec("n0", gpus=1))
    for node_id in ("n1", "n2"):
        cell.feed(NodeCordoned(node_id=node_id, by="ana/console", reason="one GPU is enough"))
    for job_id in ("first", "second"):
        cell.submit(job_id, need=estimate(1))
    proposal = cell.plan()
    assert proposal is not None
    cell.feed(proposal)
    cell.start("first")
    cell.plan()
    woken: list[int] = []
    while len(woken) < 4 and (due_ms := cell.batcher.due_ms(cell.state)) is not None:
        work = cell.batcher.next(cell.state, due_ms)
        assert work is not None
        assert not woken or due_ms >= woken[-1] + 1_000, woken
        woken.append(due_ms)
        cell.batcher.answered(cell.state, work, solve(work))
    assert woken


def test_a_refused_plan_wakes_nobody_for_jobs_that_did_not_start() -> None:
    """Two jobs of unknown run time, one GPU. The first has run so long that it is in its last queue, so the
    plan gives its GPU to the second; the placer refuses that. No job comes to another queue, and nothing is
    asked until something happens. Once a plan is accepted, it asks when the job that was started comes to its
    next queue."""
    cell = PlannedCell(PlacerSettings(profile="interleave"))
    cell.join(node_spec("n0", gpus=1))
    for node_id in ("n1", "n2"):
        cell.feed(NodeCordoned(node_id=node_id, by="ana/console", reason="one GPU is enough"))
    cell.submit("first", need=estimate(1))
    cell.start("first")
    cell.at(cell.now_ms + 36_000_000)
    cell.submit("second", need=estimate(1))
    proposal = cell.plan()
    assert proposal is not None
    assert proposal.stops == ("first",)
    answer = ProposalAnswered(
        proposal_id=proposal.proposal_id,
        proposer=proposal.proposer,
        verdict="refused",
        reason="infeasible",
        detail="n0 is reserved for a gang",
    )
    cell.batcher.see(answer)
    assert cell.batcher.due_ms(cell.state) is None
    cell.submit("third", need=estimate(1))
    proposal = cell.plan()
    assert proposal is not None
    asked_ms = cell.state.now_ms
    cell.feed(proposal)
    assert cell.batcher.due_ms(cell.state) == asked_ms + 1_000 * LIMITS_GPU_S[0]
