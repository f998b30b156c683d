"""Stories of proposed plans: each unit is answered by itself, the placer chooses GPUs and cores, and says who
wanted it so."""

from typing import Any

import pytest

from penstock.cli.following.event_text import describe
from penstock.cli.queries.explain import in_short
from penstock.cluster.reasons import Reason
from penstock.ledger.replica.snapshot import dump, load
from penstock.log.port import MAX_RECORD_BYTES
from penstock.model.decisions.ledger_events import PlacementDecided, ProposalAnswered
from penstock.model.decisions.plans import UnitRef
from penstock.model.decisions.refusals import UnitRefused
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCancelRequested,
    JobHoldRequested,
    NodeCordoned,
    NodeSuspected,
)
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import CoresProposed, MigrationProposed, PlanProposed, ProposedJob, ProposedUnit
from penstock.model.schema.errors import TooBig
from penstock.model.schema.topics import MAX_EVENT_BYTES, MAX_PLAN_BYTES
from penstock.model.wire.codec import as_written, decode, encode
from penstock.why.explain import explain
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.cloudevents import binary
from penstock_services.placer.core.step import Step
from tests.bench.scheduling import plans
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec


def cell_of(profile: str = "fifo", nodes: int = 2, **settings: Any) -> CellDriver:
    """Nodes n1, n2, … of four GPUs."""
    driver = CellDriver(PlacerSettings(profile=profile, **settings))
    driver.join(*(node_spec(f"n{number}") for number in range(1, nodes + 1)))
    return driver


def unit(*jobs: tuple[str, ...], why: str = "ends sooner", kind: Any = "solo") -> ProposedUnit:
    """Each job as its id and the nodes of its tasks."""
    named = tuple(ProposedJob(job_id=job_id, nodes=tuple(nodes)) for job_id, *nodes in jobs)
    return ProposedUnit(jobs=named, explanation=why, kind=kind)


def plan(*units: ProposedUnit, name: str = "p1", **more: Any) -> PlanProposed:
    return PlanProposed(proposal_id=name, proposer="batcher", units=units, **more)


def answered(step: Step) -> ProposalAnswered:
    [found] = [fact for fact in step.facts if isinstance(fact, ProposalAnswered)]
    return found


def placements(step: Step) -> dict[str, list[str]]:
    return {
        fact.job_id: [place.node_id for place in fact.tasks]
        for fact in step.facts
        if isinstance(fact, PlacementDecided)
    }


def blocked(profile: str = "fifo-strict", **settings: Any) -> CellDriver:
    """Three GPUs are free on each of n1 and n2, and `head` waits for four: nobody behind it is tried."""
    cell = cell_of(profile, **settings)
    for job_id in ("x", "y"):
        cell.submit(job_id, need=estimate(3))
    for job_id in ("x1", "y1"):
        cell.submit(job_id, need=estimate(1))
    for job_id in ("x", "y"):
        cell.start(job_id)
        cell.exit(f"{job_id}.1.w0")
    cell.submit("head", need=estimate(4))
    return cell


def test_units_are_answered_one_by_one() -> None:
    """Three units come, of which the second does not fit beside the first. The others start at once, each
    with who wanted it so and why."""
    cell = blocked()
    for job_id in ("a", "b", "c", "d"):
        cell.submit(job_id, need=estimate(2))
    units = unit(("a", "n1")), unit(("b", "n1")), unit(("c", "n2"), why="shares no link")
    step = cell.feed(plan(*units))
    assert kinds(step) == [
        "plan.proposed",
        "placement.decided",
        "timer.set",
        "placement.decided",
        "timer.set",
        "proposal.answered",
    ]
    assert placements(step) == {"a": ["n1"], "c": ["n2"]}
    assert answered(step) == ProposalAnswered(
        proposal_id="p1",
        proposer="batcher",
        verdict="accepted",
        started=2,
        refused=(
            UnitRefused(unit=1, reason="infeasible", detail="task 0 of b on n1: 1 GPUs are free, 2 needed"),
        ),
    )
    units_of = [fact.unit for fact in step.facts if isinstance(fact, PlacementDecided)]
    assert units_of == [UnitRef(proposer="batcher", proposal_id="p1", unit=number) for number in (0, 2)]
    assert [(found.job_id, found.proposer, found.reason) for found in step.explanation] == [
        ("a", "batcher", "ends sooner"),
        ("c", "batcher", "shares no link"),
    ]
    assert [found.candidates[0].nodes for found in step.explanation] == [("n1",), ("n2",)]
    assert (
        in_short({"placement": as_written(step.explanation[1])}, {}) == "proposed by batcher: shares no link"
    )


def test_a_plan_of_which_nothing_fits_is_refused() -> None:
    """Its reason is that of the first unit; each unit has its own."""
    cell = blocked()
    cell.submit("a", need=estimate(2))
    step = cell.feed(plan(unit(("head", "n1")), unit(("ghost", "n2"))))
    answer = answered(step)
    assert (answer.verdict, answer.reason) == ("refused", "infeasible")
    assert answer.detail == "task 0 of head on n1: 3 GPUs are free, 4 needed"
    assert [(found.unit, found.reason) for found in answer.refused] == [
        (0, "infeasible"),
        (1, "unknown_job"),
    ]
    assert kinds(step) == ["plan.proposed", "proposal.answered"]


def test_who_starts_by_a_plan_has_not_overtaken_the_head() -> None:
    """A batch of 200 jobs would use up in one record how often the head of the queue may be overtaken, and
    all would wait for it."""
    cell = blocked()
    for job_id in ("a", "b"):
        cell.submit(job_id, need=estimate(2))
    cell.feed(plan(unit(("a", "n1")), unit(("b", "n2"))))
    assert cell.job("head").backfill_count == 0


def test_the_stream_of_events_says_what_was_planned_and_what_became_of_it() -> None:
    """An operator watches `penstock events` while a batcher is tried out."""
    cell = blocked()
    for job_id in ("a", "b", "c"):
        cell.submit(job_id, need=estimate(2))
    step = cell.feed(plan(unit(("a", "n1"), ("c", "n2")), unit(("b", "n1"))))
    lines = [describe(fact.TYPE, as_written(fact)) for fact in (step.facts[0], step.facts[-1])]
    assert lines == [
        ("proposal", "batcher plans 3 jobs in 2 units"),
        (
            "proposal",
            "batcher: accepted, 1 started; 1 refused, the first (infeasible): task 0 of b on n1: 1 GPUs are "
            "free, 2 needed",
        ),
    ]


# ----------------------------------------------------------------------------- units that wait for stops


# of a node's memory: two such tasks do not live side by side, so none is ordered before the other has ended
LARGE_MIB = 80_000


def stopping(profile: str = "fifo", **settings: Any) -> CellDriver:
    """`old` has all of n1 and n2 and is being stopped; `a` and `b` wait for a node each."""
    cell = cell_of(profile, **settings)
    cell.submit("old", job_spec(workers=2), estimate(4, memory_mib=LARGE_MIB))
    cell.start("old")
    for job_id in ("a", "b"):
        cell.submit(job_id, need=estimate(4, memory_mib=LARGE_MIB))
    cell.feed(JobCancelRequested(job_id="old", reason="enough"))
    return cell


def ended(cell: CellDriver, task_id: str) -> Step:
    return cell.exit(task_id, None, cause="stopped", signal=15)


def test_a_unit_waits_until_the_exits_it_needs_are_proven() -> None:
    """A batch of two comes while a gang is being stopped. Each starts with the exit on its node, where the
    plan wanted it and not in the queue's order."""
    cell = stopping()
    step = cell.feed(plan(unit(("b", "n1")), unit(("a", "n2"), why="its data are there")))
    assert kinds(step) == ["plan.proposed", "plan.adopted", "proposal.answered"]
    assert (answered(step).started, answered(step).waiting, answered(step).refused) == (0, 2, ())
    assert explain(cell.state, "a").reason is Reason.AWAITING_STOPS
    step = ended(cell, "old.1.w1")
    assert placements(step) == {"a": ["n2"]}
    assert [(found.proposer, found.reason) for found in step.explanation] == [
        ("batcher", "its data are there")
    ]
    assert placements(ended(cell, "old.1.w0")) == {"b": ["n1"]}
    assert not cell.state.planned


def test_the_jobs_of_a_unit_wait_for_each_other() -> None:
    """Two jobs that talk to each other are one unit: the first exit starts none of them, though one has
    room."""
    cell = stopping()
    cell.feed(plan(unit(("a", "n1"), ("b", "n2"))))
    assert placements(ended(cell, "old.1.w0")) == {}
    assert placements(ended(cell, "old.1.w1")) == {"a": ["n1"], "b": ["n2"]}


def test_what_is_kept_goes_to_nobody_else() -> None:
    """Small jobs come between the two exits. They would take the room that the gang waits for; they go
    elsewhere, or wait."""
    cell = stopping()
    cell.submit("gang", job_spec(workers=2), estimate(4, memory_mib=LARGE_MIB))
    cell.feed(plan(unit(("gang", "n1", "n2"))))
    step = ended(cell, "old.1.w0")
    assert placements(step) == {}, "a fits on n1 and comes first"
    assert placements(cell.submit("small")) == {}
    found = explain(cell.state, "small")
    assert (found.reason, found.detail) == (
        Reason.KEPT_FOR_OTHERS,
        "n1, n2, for gang, by the plan p1 of batcher",
    )
    cell.join(node_spec("n3", 1))
    assert [place.place.node_id for place in cell.job("small").tasks.values()] == ["n3"]
    assert placements(ended(cell, "old.1.w1")) == {"gang": ["n1", "n2"]}


def test_who_fits_only_if_others_ended_is_refused() -> None:
    """Nobody is being stopped on n2: how long its job will run nobody knows, and nothing is kept for so
    long."""
    cell = cell_of()
    for job_id, memory_mib in (("x", LARGE_MIB), ("y", 1_024)):
        cell.submit(job_id, need=estimate(4, memory_mib=memory_mib))
        cell.start(job_id)
    cell.submit("a", need=estimate(4, memory_mib=LARGE_MIB))
    cell.feed(JobCancelRequested(job_id="x", reason="enough"))
    answer = answered(cell.feed(plan(unit(("a", "n2")))))
    assert (answer.reason, answer.detail) == (
        "infeasible",
        "task 0 of a on n2: 0 GPUs are free, 4 needed",
    )
    assert answered(cell.feed(plan(unit(("a", "n1")), name="p2"))).waiting == 1


def test_a_later_plan_supersedes_what_has_not_begun() -> None:
    """The batcher has thought again. A plan of which nothing can be done leaves the former one alone."""
    cell = stopping()
    cell.feed(plan(unit(("a", "n1")), unit(("b", "n2"))))
    cell.feed(plan(unit(("ghost", "n1")), name="p2"))
    assert list(cell.state.planned) == ["a", "b"]
    cell.feed(plan(unit(("b", "n1")), name="p3"))
    assert [(unit.job_id, unit.nodes) for unit in cell.state.planned.values()] == [("b", ("n1",))]
    cell.at(0)
    assert placements(ended(cell, "old.1.w1")) == {"a": ["n2"]}, "n2 is free for the queue"
    assert placements(ended(cell, "old.1.w0")) == {"b": ["n1"]}


@pytest.mark.parametrize(
    "happens",
    [
        NodeSuspected(node_id="n2", reason="silence"),
        NodeCordoned(node_id="n2", reason="fans", by="ada"),
        GpuFaulted(node_id="n2", gpu=0, fault="ecc"),
        JobCancelRequested(job_id="b", reason="not needed"),
        JobHoldRequested(job_id="b"),
    ],
    ids=lambda event: event.TYPE,
)
def test_a_unit_that_can_start_no_more_is_given_up(happens: Any) -> None:
    """Its other node is lost, or one of its jobs: its first job starts by the queue, on the node that was
    kept."""
    cell = stopping()
    cell.feed(plan(unit(("a", "n1"), ("b", "n2"))))
    cell.feed(happens)
    assert not cell.state.planned
    assert placements(ended(cell, "old.1.w0")) == {"a": ["n1"]}


def test_a_unit_expires_while_it_waits() -> None:
    """The exit takes longer than the plan is good for: the jobs start by the queue, in its order."""
    cell = stopping()
    cell.feed(plan(unit(("b", "n1")), unit(("a", "n2")), valid_until_ms=cell.now_ms + 5))
    cell.at(6)
    assert placements(ended(cell, "old.1.w0")) == {"a": ["n1"]}
    assert not cell.state.planned


def test_what_waits_survives_a_restart_of_the_placer() -> None:
    """It is in the fold: a snapshot has it."""
    cell = stopping()
    cell.feed(plan(unit(("a", "n1"), ("b", "n2")), valid_until_ms=9_000_000))
    assert dump(load(dump(cell.state))) == dump(cell.state)
    assert load(dump(cell.state)).planned == cell.state.planned


def test_neither_a_move_nor_more_cores_take_what_is_kept() -> None:
    """A migrator and a guard propose while a gang waits for a node and a half."""
    cell = cell_of(nodes=3)
    for job_id, gpus, memory_mib in (("old", 4, 100_000), ("near", 2, 1_024), ("far", 4, 1_024)):
        cell.submit(job_id, need=estimate(gpus, memory_mib=memory_mib))
        cell.start(job_id)
    cell.submit("gang", job_spec(workers=3), estimate(2, memory_mib=40_000))
    cell.submit("next", job_spec(workers=2), estimate(4))
    assert cell.job("near").tasks["near.1.w0"].place.node_id == "n2"
    cell.feed(JobCancelRequested(job_id="old", reason="enough"))
    cell.feed(plan(unit(("gang", "n1", "n1", "n2"))))
    move = MigrationProposed(
        proposal_id="m", proposer="migrator", job_id="far", nodes=("n2",), reason="to empty n3"
    )
    assert answered(cell.feed(move)).detail == "task 0 of far on n2: it is reserved for a proposed plan"
    more = CoresProposed(
        proposal_id="c", proposer="guard", task_id="near.1.w0", cores=3, reason="it waits for data"
    )
    assert answered(cell.feed(more)).detail == "the free part of n2 is reserved for a proposed plan"
    assert placements(ended(cell, "old.1.w0")) == {"gang": ["n1", "n1", "n2"]}


# ------------------------------------------------------------------------------------------ ids and bounds


def test_a_copy_of_a_proposal_never_acts_twice() -> None:
    """The batcher's producer repeats a record under another event id. The job has meanwhile failed and queues
    again: the copy must not place it."""
    cell = blocked()
    cell.submit("a", job_spec(attempts=3), estimate(2))
    cell.feed(plan(unit(("a", "n1"))))
    first = cell.head.seq
    cell.start("a")
    cell.exit("a.1.w0", 1)
    cell.at(60_000)
    assert cell.job("a").status is JobStatus.QUEUED
    step = cell.feed(plan(unit(("a", "n1"))))
    assert kinds(step) == ["plan.proposed", "proposal.answered"]
    assert (answered(step).verdict, answered(step).copy_of) == ("accepted", first)
    loaded = load(dump(cell.state))
    assert (loaded.proposals, dump(loaded)) == (cell.state.proposals, dump(cell.state))


def test_a_refused_copy_is_refused_again() -> None:
    """Its nodes are free by now: its proposer has long been told that nothing came of it, and may have
    planned otherwise."""
    cell = blocked()
    for job_id in ("x1", "y1"):
        cell.start(job_id)
    cell.submit("a", need=estimate(4))
    refused = answered(cell.feed(plan(unit(("a", "n1")))))
    cell.submit("b", need=estimate(4))
    cell.exit("x1.1.w0")
    cell.exit("y1.1.w0")
    copy = answered(cell.feed(plan(unit(("b", "n1")))))
    assert (copy.verdict, copy.reason, copy.detail) == (refused.verdict, refused.reason, refused.detail)
    other = PlanProposed(proposal_id="p1", proposer="another", units=(unit(("b", "n2")),))
    assert answered(cell.feed(other)).copy_of == 0, "an id is its proposer's own"


def test_ids_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,096 proposals: the oldest is forgotten first."""
    monkeypatch.setattr("penstock.ledger.fold.plans.MAX_PROPOSALS_REMEMBERED", 2)
    cell = cell_of()
    for name in ("p1", "p2", "p3"):
        cell.feed(plan(unit(("ghost", "n1")), name=name))
    assert list(cell.state.proposals) == ["batcher p2", "batcher p3"]


def test_the_head_of_the_queue_is_passed_by_so_many_plans_and_no_more() -> None:
    """A batcher never plans the job that is first. After `max_overtakes` plans none is accepted that leaves
    it out, until it has started."""
    cell = blocked(max_overtakes=2)
    for number in range(4):
        cell.submit(f"j{number}", need=estimate(1))
    for number in range(2):
        assert answered(cell.feed(plan(unit((f"j{number}", "n1")), name=f"p{number}"))).started == 1
    answer = answered(cell.feed(plan(unit(("j2", "n1")), name="p2")))
    assert (answer.reason, answer.detail) == (
        "wrong_state",
        "head is first in the queue and 2 plans have passed it: a plan must start it first",
    )
    cell.join(node_spec("n3", 1))
    cell.join(node_spec("n4", 4, boot="b"))
    assert cell.job("head").tasks
    assert cell.job("j2").plans_passed == 0


@pytest.mark.parametrize("profile", ["srtf", "tiresias"])
def test_under_a_profile_that_stops_jobs_the_profile_says_who_runs(profile: str) -> None:
    """A plan wants a job to start that the profile would stop at once. It says where those go whom the
    profile wants to run, no more."""
    cell = cell_of(profile, nodes=2)
    cell.submit("a", need=estimate(4))
    cell.submit("b", need=estimate(4))
    cell.submit("c", need=estimate(4))
    answer = answered(cell.feed(plan(unit(("c", "n1")))))
    assert (answer.reason, answer.detail) == (
        "wrong_state",
        f"profile {profile} does not start c now: others come first",
    )
    step = cell.feed(plan(unit(("b", "n1")), unit(("a", "n2")), name="p2"))
    assert placements(step) == {"b": ["n1"], "a": ["n2"]}
    assert [step for step in cell.at(0) if placements(step)] == []


# ------------------------------------------------------------------------------------------------- size


def test_a_plan_of_two_hundred_gangs_is_accepted_and_its_records_fit_into_every_log() -> None:
    """A burst of 200 jobs of three tasks on 128 nodes: none is refused, and what is written stays below what
    both logs take."""
    found = plans.measure()
    assert (found.placed, found.refused) == (200, 0)
    assert found.plan_bytes <= MAX_PLAN_BYTES
    assert found.record_bytes <= MAX_RECORD_BYTES


def test_a_plan_may_have_256_kib_and_no_other_proposal() -> None:
    """The bound is the plan's own, at the log and at the gateway's door; one byte more is dead-lettered or
    refused."""
    proposal = plans.plan_of(200, 128)
    value = encode(proposal)
    exact = value + b" " * (MAX_PLAN_BYTES - len(value))
    assert decode("penstock.plan.proposed.v2", exact) == proposal
    about = {"ce-specversion": "1.0", "ce-id": "e", "ce-source": "/b", "ce-type": "penstock.plan.proposed.v2"}
    assert binary(about, exact).data == proposal
    with pytest.raises(TooBig):
        decode("penstock.plan.proposed.v2", exact + b" ")
    with pytest.raises(Problem, match="the bound is 262144"):
        binary(about, exact + b" ")
    with pytest.raises(TooBig):
        decode("penstock.cores.proposed.v1", b" " * (MAX_EVENT_BYTES + 1))
