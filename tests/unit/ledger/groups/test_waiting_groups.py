"""Stories of groups that wait for stops: for GPUs, for memory, for a place in the group; and of groups that
wait in vain."""

from typing import Any

import pytest

from penstock.cluster.reasons import Reason
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.groups import GroupDecided
from penstock.model.decisions.ledger_events import PlacementDecided, ProposalAnswered
from penstock.model.inputs.external_events import GpuFaulted, JobCancelRequested, NodeCordoned, NodeSuspected
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.why.explain import explain
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import job_spec, node_spec
from tests.unit.ledger.groups.test_groups import BOTH, Cell, free, needs

LARGE_MIB = 80_000  # of a node's 131,072


def answer_in(step: Step) -> ProposalAnswered:
    [found] = [fact for fact in step.facts if isinstance(fact, ProposalAnswered)]
    return found


def begun(step: Step) -> tuple[list[tuple[str, ...]], list[tuple[str, str | None]]]:
    """Members of the groups that form, and (job, group) of who starts."""
    formed = [fact.job_ids for fact in step.facts if isinstance(fact, GroupDecided)]
    placed = [fact for fact in step.facts if isinstance(fact, PlacementDecided)]
    return formed, [(fact.job_id, fact.group) for fact in placed]


def two_nodes(profile: str = "fifo", **old: Any) -> Cell:
    """Gang `old` holds two nodes of two GPUs, and is being stopped; `b` and `c`, as large, wait."""
    cell = Cell(PlacerSettings(profile=profile))
    cell.join(node_spec("n1", 2), node_spec("n2", 2))
    cell.submit("old", job_spec(workers=2), needs(**old))
    cell.start("old")
    for job_id in "bc":
        cell.submit(job_id, job_spec(workers=2), needs())
    cell.feed(JobCancelRequested(job_id="old", reason="enough"))
    return cell


def ended(cell: Cell, task_id: str) -> Step:
    return cell.exit(task_id, None, cause="stopped", signal=15)


def waits(step: Step) -> bool:
    answer = answer_in(step)
    return (answer.verdict, answer.started, answer.waiting) == ("accepted", 0, 1)


def test_a_new_group_waits_for_the_gpus_of_a_gang_that_is_being_stopped() -> None:
    """The batcher pairs two gangs while all GPUs are still held. They start as a group with the second exit,
    and nobody comes in between."""
    cell = two_nodes()
    assert waits(cell.group("c", "b", nodes=BOTH))
    why = explain(cell.state, "b", cell.state.now_ms)
    assert (why.reason, why.detail) == (Reason.AWAITING_STOPS, "old on n1, n2")
    cell.submit("small", job_spec(), needs(1))
    assert begun(ended(cell, "old.1.w0")) == ([], [])
    formed, started = begun(ended(cell, "old.1.w1"))
    assert formed == [("b", "c")]
    [group] = cell.state.groups
    assert started == [("b", group), ("c", group)]
    assert free(cell) == (0, 28, 131_072 - 2_000, 9_900)
    assert not cell.state.planned


def test_who_joins_waits_for_memory_that_is_being_freed() -> None:
    """`b` is to take turns with `a`, and the node's memory is with a small neighbour of `a` that somebody has
    cancelled. `a` runs on all the time."""
    cell = Cell(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", 3))
    for job_id, need in (("a", needs()), ("small", needs(1, host_memory_mib=LARGE_MIB))):
        cell.submit(job_id, None, need)
        cell.start(job_id)
    cell.submit("b", None, needs(host_memory_mib=LARGE_MIB))
    reason, detail = cell.refused("a", "b", nodes=("n1",))
    assert (reason, detail) == (
        "infeasible",
        "task 0 of b on n1: 50072 MiB of memory are free, 80000 more needed",
    )
    cell.feed(JobCancelRequested(job_id="small"))
    assert waits(cell.group("a", "b", nodes=("n1",)))
    assert list(cell.state.planned) == ["b"]
    formed, _ = begun(ended(cell, "small.1.w0"))
    assert formed == [("a", "b")]
    assert (cell.job("a").attempt, cell.job("a").status) == (1, JobStatus.RUNNING)


def test_who_joins_waits_for_a_place_in_the_group() -> None:
    """A group has four members at most; one of them is being stopped when another is to take its place."""
    cell = Cell(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", 2))
    for job_id in "abcde":
        cell.submit(job_id, None, needs(gpu_memory_mib=3_000))
    cell.start("a")
    cell.formed("a", "b", "c", "d", nodes=("n1",))
    for job_id in "bcd":
        cell.start(job_id)
    cell.feed(JobCancelRequested(job_id="c"))
    assert waits(cell.group("a", "b", "d", "e", nodes=("n1",)))
    assert begun(ended(cell, "c.1.w0"))[0] == [("a", "b", "d", "e")]
    assert cell.job("e").status is JobStatus.LAUNCHING


def test_what_waits_is_the_same_after_a_restart() -> None:
    """The placer dies: its successor has the group from a snapshot, with those who run."""
    cell = Cell(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", 3))
    for job_id, need in (("a", needs()), ("small", needs(1, host_memory_mib=LARGE_MIB))):
        cell.submit(job_id, None, need)
        cell.start(job_id)
    cell.submit("b", None, needs(host_memory_mib=LARGE_MIB))
    cell.feed(JobCancelRequested(job_id="small"))
    cell.group("a", "b", nodes=("n1",))
    kept = load(dump(cell.state)).planned["b"].proposed
    assert kept == cell.state.planned["b"].proposed
    assert kept is not None
    assert kept.group == ("a",)


@pytest.mark.parametrize(
    "happens",
    [
        JobCancelRequested(job_id="c"),
        NodeSuspected(node_id="n2", reason="silence"),
        NodeCordoned(node_id="n2", reason="fans", by="ada"),
        GpuFaulted(node_id="n2", gpu=0, fault="ecc"),
    ],
    ids=lambda event: event.TYPE,
)
def test_a_group_that_can_form_no_more_is_given_up(happens: Any) -> None:
    """A member is cancelled, or a node lost: nothing is kept for it any more, and who is left waits in the
    queue."""
    cell = two_nodes()
    cell.group("b", "c", nodes=BOTH)
    cell.feed(happens)
    assert not cell.state.planned
    ended(cell, "old.1.w0")
    ended(cell, "old.1.w1")
    assert cell.state.groups == {}


def test_a_group_is_given_up_when_who_runs_has_ended() -> None:
    """`a` ends before the memory is free that `b` needs beside it: a group of one is none, and `b` starts
    alone by the queue."""
    cell = Cell(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", 3))
    for job_id, need in (("a", needs()), ("small", needs(1, host_memory_mib=LARGE_MIB))):
        cell.submit(job_id, None, need)
        cell.start(job_id)
    cell.submit("b", None, needs(host_memory_mib=LARGE_MIB))
    cell.feed(JobCancelRequested(job_id="small"))
    cell.group("a", "b", nodes=("n1",))
    cell.exit("a.1.w0")
    assert not cell.state.planned
    assert begun(ended(cell, "small.1.w0")) == ([], [("b", None)])


def test_what_no_stop_makes_possible_is_refused() -> None:
    """Its GPUs have too little memory for both, whoever ends."""
    cell = two_nodes()
    cell.submit("d", job_spec(workers=2), needs(gpu_memory_mib=14_000))
    assert cell.refused("b", "d", nodes=BOTH) == (
        "infeasible",
        "task 0 of d on n1: all members need 18000 MiB of each GPU, which has 16384",
    )


def test_where_the_profile_stops_jobs_no_group_waits() -> None:
    """Under `srtf` what a stop frees is for who comes first in its order."""
    cell = two_nodes("srtf")
    answer = answer_in(cell.group("b", "c", nodes=BOTH))
    assert answer.verdict == "refused"
    assert not any(unit.proposed for unit in cell.state.planned.values())
