"""Stories of groups that keep less than their plan promised: they are dissolved after a minute, and jobs of
these kinds are not grouped again for a day."""

from typing import Any

import pytest

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.groups import SPEED_STEP, GroupDissolved, KindsApart, Shortfall, Turns
from penstock.model.decisions.ledger_events import JobPreempted, ProposalAnswered, StopDecided, TimerFired
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate, ResourceVector, StageTimes
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.proposals.dissolution import APART_MS, PATIENCE_MS
from penstock.scheduling.stop_cost import LOSES_MS
from penstock.why.explain import explain
from penstock_services.batcher.core.batcher import Batcher, solve
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, job_spec, node_spec

READER = StageTimes(storage_ms=60, cpu_ms=10, gpu_ms=20, network_ms=10, iteration_ms=100)
COMPUTER = StageTimes(storage_ms=10, cpu_ms=10, gpu_ms=60, network_ms=20, iteration_ms=100)
PROMISED = 0.5


class Cell(CellDriver):
    """One node with one GPU, whose batcher sees each fact at once."""

    def __init__(self, profile: str = "penstock", nodes: int = 1) -> None:
        self.batcher = Batcher()
        self.plans = 0
        super().__init__(PlacerSettings(profile=profile))
        self.join(*(node_spec(f"n{number}", 1) for number in range(nodes)))

    def feed(self, event: Any) -> Step:
        step = super().feed(event)
        for fact in step.facts:
            self.batcher.see(fact)
        return step

    def enter(self, job_id: str, stages: StageTimes = READER, *, runs: bool = False, **spec: Any) -> None:
        """Submitted, and started where it has a place."""
        fields = {"owner": "vision", "name": job_id, "checkpoint": "sdk"} | spec
        worker = ResourceVector(gpus=1, cores=2, host_memory_mib=1_024, gpu_memory_mib=1_024)
        need = Estimate(worker=worker, confidence=1.0, tier="user", source="a test", stages=stages)
        self.submit(job_id, job_spec(**fields), need)
        if runs:
            self.start(job_id)

    def group(self, *job_ids: str, speed: float = PROMISED, turns: bool = True) -> ProposalAnswered:
        """The jobs share the GPU of n0."""
        self.plans += 1
        predicted = Turns(job_ids=job_ids, period_ms=200.0, efficiency=0.7, speeds=(speed,) * len(job_ids))
        unit = ProposedUnit(
            jobs=tuple(ProposedJob(job_id=job_id, nodes=("n0",)) for job_id in job_ids),
            kind="group",
            explanation="they take turns",
            turns=predicted if turns else None,
        )
        step = self.feed(PlanProposed(proposal_id=f"p{self.plans}", proposer="batcher", units=(unit,)))
        for job_id in job_ids:
            if self.job(job_id).status is JobStatus.LAUNCHING:
                self.start(job_id)
        return next(fact for fact in step.facts if isinstance(fact, ProposalAnswered))

    def reports(self, job_id: str, speed: float) -> Step:
        """It did not wait for this part of its latest iterations."""
        job = self.job(job_id)
        [(task_id, task)] = job.tasks.items()
        return self.feed(
            StepsMeasured(
                node_id=task.place.node_id,
                task_id=task_id,
                token=job.token,
                at_ms=self.now_ms,
                done=self.head.seq,
                steps=10,
                step_ms=1_000.0,
                waited_ms=1_000.0 * (1 - speed),
            )
        )

    def passes(self, ms: int) -> list[GroupDissolved]:
        """Groups that are dissolved meanwhile."""
        steps = self.at(self.now_ms - 1_000_000 + ms)
        return [fact for step in steps for fact in step.facts if isinstance(fact, GroupDissolved)]

    def ends(self, job_id: str) -> None:
        """A job that was stopped has saved."""
        for task_id in list(self.job(job_id).tasks):
            self.exit(task_id, None, cause="stopped", signal=15)

    def planned(self) -> list[tuple[str, ...]]:
        """Groups of the batcher's plans, which the placer carries out, until it has none."""
        found = []
        while (work := self.batcher.next(self.state, self.now_ms)) is not None:
            plan = self.batcher.answered(self.state, work, solve(work))
            if plan is not None:
                self.feed(plan)
                units = [unit for unit in plan.units if unit.kind == "group"]
                found += [tuple(job.job_id for job in unit.jobs) for unit in units]
                for job in list(self.state.holding.values()):
                    if job.status is JobStatus.LAUNCHING:
                        self.start(job.job_id)
        return found


def pair(**spec: Any) -> Cell:
    """`slow` holds the GPU for 9.9 s in each iteration, and `quick` waits for it."""
    cell = Cell()
    cell.enter("slow", COMPUTER, runs=True, **spec)
    cell.enter("quick", READER, **spec)
    assert cell.group("slow", "quick").verdict == "accepted"
    return cell


def test_a_group_below_its_promise_for_a_minute_is_dissolved() -> None:
    """`quick` has 1 % of its speed. After a minute the job that makes it wait is stopped and queues again,
    with the reason in the ledger; `quick` goes on alone."""
    cell = pair()
    assert [fact.TYPE for fact in cell.reports("quick", 0.01).facts[1:]] == ["penstock.timer.set"]
    cell.reports("slow", 0.99)
    assert cell.passes(PATIENCE_MS - 1) == []
    steps = cell.at(cell.now_ms - 1_000_000 + 1)
    [step] = [one for one in steps if any(isinstance(fact, GroupDissolved) for fact in one.facts)]
    dissolved, preempted, stopped = (
        next(fact for fact in step.facts if isinstance(fact, kind))
        for kind in (GroupDissolved, JobPreempted, StopDecided)
    )
    assert dissolved.job_ids == ("slow", "quick")
    assert dissolved.leaves == ("slow",)
    assert [(one.job_id, one.promised) for one in dissolved.short] == [("quick", PROMISED)]
    assert dissolved.short[0].measured == pytest.approx(0.01)
    assert dissolved.apart == (KindsApart(one="vision quick 0 1", other="vision slow 0 1"),)
    assert dissolved.reason == "for a minute quick has had 1% of its speed, promised were 50%"
    assert (preempted.job_id, preempted.by_job_id, preempted.reason) == ("slow", "quick", dissolved.reason)
    assert (stopped.job_id, stopped.reason) == ("slow", "preempted")
    cell.ends("slow")
    assert cell.job("slow").in_line
    quick = cell.job("quick")
    assert (quick.sharing.group, quick.sharing.measured, quick.pace.speed) == ("", None, 1.0)
    why = explain(cell.state, "slow").detail
    assert "it shares no GPUs: quick and slow are not grouped for 1440 minutes" in why
    assert why.endswith(dissolved.reason)


def test_a_member_that_recovers_within_the_minute_keeps_its_group() -> None:
    """The other one evaluates for half a minute. Nothing is stopped, and no timer goes on."""
    cell = pair()
    cell.reports("quick", 0.1)
    assert cell.passes(PATIENCE_MS // 2) == []
    cell.reports("quick", 0.6)
    assert cell.passes(10 * PATIENCE_MS) == []
    assert not [name for name in cell.state.timers if name.endswith(":turns")]


def test_a_minute_begins_anew_with_each_recovery() -> None:
    cell = pair()
    cell.reports("quick", 0.1)
    cell.passes(PATIENCE_MS - 10_000)
    cell.reports("quick", 0.6)
    cell.passes(5_000)
    cell.reports("quick", 0.1)
    assert cell.passes(PATIENCE_MS - 1) == []
    assert len(cell.passes(1)) == 1


@pytest.mark.parametrize(
    ("speed", "turns", "dissolved"),
    [
        (PROMISED / SPEED_STEP + 0.01, True, False),
        (PROMISED / SPEED_STEP - 0.01, True, True),
        (0.41, False, False),
        (0.39, False, True),
    ],
)
def test_a_speed_counts_as_short_beyond_the_step_of_reports(
    speed: float, turns: bool, dissolved: bool
) -> None:
    """A node reports changes by a quarter, so less may be the promise itself. Where a proposer predicted
    nothing each member is promised its part of the time."""
    cell = Cell()
    cell.enter("slow", COMPUTER, runs=True)
    cell.enter("quick")
    cell.group("slow", "quick", turns=turns)
    cell.reports("quick", speed)
    assert bool(cell.passes(PATIENCE_MS)) == dissolved


def test_papers_groups_are_left_as_they_are() -> None:
    """Muri's algorithm knows neither measured speeds nor tenants."""
    cell = Cell("muri-s")
    cell.enter("slow", COMPUTER, runs=True)
    cell.enter("quick", owner="speech")
    assert cell.group("slow", "quick").verdict == "accepted"
    assert len(cell.reports("quick", 0.01).facts) == 1
    assert cell.passes(10 * PATIENCE_MS) == []


def test_of_three_members_the_one_that_waits_for_nobody_leaves() -> None:
    """Two wait for `slow`, of which no report has come since it never waits. They go on as a group."""
    cell = pair()
    cell.enter("third")
    cell.group("slow", "quick", "third", speed=0.4)
    cell.reports("quick", 0.05)
    cell.reports("third", 0.3)
    [dissolved] = cell.passes(PATIENCE_MS)
    assert dissolved.leaves == ("slow",)
    cell.ends("slow")
    assert cell.job("quick").sharing.group == cell.job("third").sharing.group != ""
    cell.reports("quick", 0.6)
    cell.reports("third", 0.6)
    assert cell.passes(10 * PATIENCE_MS) == []


@pytest.mark.parametrize(("slow", "leaves"), [(None, "slow"), (0.95, "slow"), (0.5, "third")])
def test_the_member_with_most_beyond_its_promise_leaves(slow: float | None, leaves: str) -> None:
    """Of two that are not slowed the one that waits less makes the third one wait."""
    cell = pair()
    cell.enter("third")
    cell.group("slow", "quick", "third", speed=0.4)
    cell.reports("quick", 0.05)
    cell.reports("third", 0.6)
    if slow is not None:
        cell.reports("slow", slow)
    [dissolved] = cell.passes(PATIENCE_MS)
    assert dissolved.leaves == (leaves,)


def test_two_that_still_wait_when_the_third_has_left_are_separated_after_another_minute() -> None:
    """It was the wrong one: no report follows, since nothing has changed for `quick`."""
    cell = pair()
    cell.enter("third")
    cell.group("slow", "quick", "third", speed=0.4)
    cell.reports("quick", 0.05)
    cell.reports("third", 0.9)
    [first] = cell.passes(PATIENCE_MS)
    cell.ends(first.leaves[0])
    [second] = cell.passes(2 * PATIENCE_MS)
    assert {*first.leaves, *second.leaves} == {"slow", "third"}


def test_where_the_one_that_holds_turns_may_not_be_stopped_the_other_leaves() -> None:
    cell = Cell()
    cell.enter("slow", COMPUTER, runs=True, preemptible=False)
    cell.enter("quick")
    cell.group("slow", "quick")
    cell.reports("quick", 0.01)
    [dissolved] = cell.passes(PATIENCE_MS)
    assert dissolved.leaves == ("quick",)
    cell.ends("quick")
    assert not cell.job("slow").sharing.group


def test_where_neither_may_be_stopped_the_group_stays_and_why_says_what_it_keeps() -> None:
    cell = pair(preemptible=False)
    cell.reports("quick", 0.01)
    assert cell.passes(10 * PATIENCE_MS) == []
    assert not [name for name in cell.state.timers if name.endswith(":turns")], "nobody polls"
    text = explain(cell.state, "quick", cell.now_ms).text
    said = "Measured: it runs for 1% of its time, less than promised since 10 min."
    assert text.endswith(f"Expected: 50% of its speed alone. {said}")


@pytest.mark.parametrize(("minutes", "leaves"), [(0, "slow"), (10, "quick"), (120, "quick")])
def test_who_loses_more_than_the_others_have_waited_stays(minutes: int, leaves: str) -> None:
    """`slow` does not save, has run alone for so long and would lose that; `quick` has just begun."""
    cell = Cell()
    cell.enter("slow", COMPUTER, runs=True, checkpoint="none")
    cell.passes(minutes * 60_000)
    cell.enter("quick", checkpoint="none")
    cell.group("slow", "quick")
    cell.passes(1_000)
    cell.reports("quick", 0.01)
    [dissolved] = cell.passes(PATIENCE_MS)
    assert dissolved.leaves == (leaves,)


def test_a_job_that_does_not_save_is_not_stopped_after_an_hour() -> None:
    cell = Cell()
    cell.enter("slow", COMPUTER, runs=True, checkpoint="none")
    cell.enter("quick", checkpoint="none")
    cell.group("slow", "quick")
    cell.passes(LOSES_MS)
    cell.reports("quick", 0.01)
    assert cell.passes(PATIENCE_MS) == []


def test_a_placer_that_takes_over_in_the_minute_dissolves_the_group_in_time() -> None:
    """The timer and the speeds are the ledger's: neither a placer, nor a batcher, nor a node has to live
    on."""
    cell = pair()
    cell.reports("quick", 0.01)
    state = load(dump(cell.state))
    timer_id = "quick:turns"
    assert state.timers[timer_id].at_ms == cell.now_ms + PATIENCE_MS
    cell.now_ms = state.now_ms + PATIENCE_MS
    step = cell.feed(TimerFired(timer_id=timer_id))
    assert any(isinstance(fact, GroupDissolved) for fact in step.facts)


def test_the_pair_is_not_grouped_again_for_a_day() -> None:
    """Its batcher leaves the jobs apart, and so do jobs of the same kinds that are submitted again; the
    placer refuses other proposers' groups of them. After a day it is tried again."""
    cell = Cell()
    cell.enter("slow", COMPUTER, runs=True)
    cell.enter("quick", preemptible=False)
    cell.group("slow", "quick")
    cell.reports("quick", 0.01)
    [dissolved] = cell.passes(PATIENCE_MS)
    cell.ends("slow")
    assert dissolved.until_ms == cell.now_ms + APART_MS
    assert cell.planned() == []
    refused = cell.group("quick", "slow")
    assert (refused.verdict, refused.reason) == ("refused", "infeasible")
    assert "dissolved" in refused.detail
    cell.enter("again", COMPUTER, name="slow")
    assert cell.planned() == []
    assert cell.group("quick", "again").verdict == "refused"
    cell.enter("other", COMPUTER)
    assert cell.planned() == [("quick", "other")]
    cell.passes(APART_MS)
    assert cell.group("quick", "other", "slow").verdict == "accepted"
    cell.reports("quick", 0.01)
    cell.passes(PATIENCE_MS)
    assert len(cell.state.apart) == 1, "what is over is dropped"


def test_the_batcher_plans_anew_when_a_group_is_dissolved() -> None:
    batcher = Batcher()
    batcher._due = False
    batcher.see(
        GroupDissolved(
            group_id="g",
            job_ids=("a", "b"),
            short=(Shortfall(job_id="a", promised=0.5, measured=0.1),),
            leaves=("b",),
            apart=(),
            until_ms=0,
            reason="r",
        )
    )
    assert batcher._due
