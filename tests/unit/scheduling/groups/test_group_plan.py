"""Properties of plans of groups on random cells: accepted as proposed, carried out without harm, and nothing
is left to do afterwards."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ledger.check.check import check
from penstock.model.decisions.groups import GroupDecided, Turns
from penstock.model.decisions.ledger_events import JobPreempted, PlacementDecided, ProposalAnswered
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import PlanProposed
from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.stages.regroup import PROPOSER, Answer, PlannedGroup
from penstock_services.placer.core.step import Step
from tests.support.batching.small_stages import FirstFitRegroup, known_as
from tests.support.cluster.driver import CellDriver, job_spec, node_spec
from tests.unit.ledger.groups.test_groups import needs

SIZES = (1, 2, 4)
MAX_ROUNDS = 12  # plans until one asks for nothing more: each frees what the one before it could not use


def answer_of(jobs: Sequence[tuple[str, int]], cuts: Sequence[int]) -> Answer:
    """Neighbours of equal size in this order share, as many as the cuts say."""
    left, groups = list(jobs), []
    for cut in cuts:
        if not left:
            break
        size = left[0][1]
        members = [job for job in left if job[1] == size][: max(1, cut)]
        left = [job for job in left if job not in members]
        names = tuple(name for name, _ in members)
        speeds = (0.5,) * len(names)
        turns = Turns(job_ids=names, period_ms=10.0, efficiency=0.6, speeds=speeds)
        groups.append(PlannedGroup(names, turns if len(names) > 1 else None))
    return Answer(tuple(groups))


def carried_out(cell: CellDriver) -> None:
    """Who is stopped ends, and who is placed starts, until nothing of either is left."""
    for _ in range(4 * MAX_ROUNDS):
        stopping = [job.job_id for job in cell.state.stopping.values()]
        for job_id in stopping:
            for task_id in list(cell.job(job_id).tasks):
                cell.exit(task_id, None, cause="stopped", signal=15)
        launching = [
            job.job_id
            for job in cell.state.holding.values()
            if (
                job.status is JobStatus.LAUNCHING
                and not any(name in cell.state.jobs for name in job.succession.after)
            )
            or (job.status is JobStatus.LAUNCHING and not cell.state.stopping)
        ]
        for job_id in launching:
            cell.start(job_id)
        if not stopping and not launching:
            return
    raise AssertionError("jobs go on being stopped and started")


def propose(cell: CellDriver, number: int, answer: Answer) -> tuple[Step, ProposalAnswered] | None:
    found = group_plan(cell.state, answer)
    again = group_plan(cell.state, answer)
    assert (list(found.units), list(found.stops)) == (list(again.units), list(again.stops))
    if not found.units and not found.stops:
        return None
    plan = PlanProposed(
        proposal_id=f"p{number}", proposer=PROPOSER, units=tuple(found.units), stops=tuple(found.stops)
    )
    step = cell.feed(plan)
    [answered] = [fact for fact in step.facts if isinstance(fact, ProposalAnswered)]
    assert check(cell.state) == []
    return step, answered


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_plans_are_accepted_carried_out_and_then_ask_for_nothing(data: Any) -> None:
    """A cell of a few nodes, jobs of one, two and four GPUs of which some run, and two answers after each
    other. Nothing is refused but turns without somebody who stays, whoever may not be stopped is not, nobody
    is stopped who was to stay where he is, and after some rounds the same answer asks for nothing more."""
    nodes = data.draw(st.lists(st.sampled_from((2, 4)), min_size=1, max_size=3))
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=8))
    firm = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
    with known_as("regroups", regroup=FirstFitRegroup()) as given_settings:
        cell = CellDriver(given_settings)
        cell.join(*(node_spec(f"n{number}", gpus) for number, gpus in enumerate(nodes)))
        jobs = [(f"j{number}", size) for number, size in enumerate(sizes)]
        for number, (job_id, size) in enumerate(jobs):
            need = needs(size, gpu_memory_mib=1_000, host_memory_mib=100, cores=1)
            cell.submit(job_id, job_spec(preemptible=number not in firm), need)
        carried_out(cell)
        number = 0
        for _ in range(2):
            order = data.draw(st.permutations([job for job in jobs if job[0] in cell.state.jobs]))
            cuts = data.draw(st.lists(st.integers(1, 4), min_size=len(order), max_size=len(order)))
            answer = answer_of(order, cuts)
            for _ in range(MAX_ROUNDS):
                number += 1
                found = propose(cell, number, answer)
                if found is None:
                    break
                step, answered = found
                stopped = [fact.job_id for fact in step.facts if isinstance(fact, JobPreempted)]
                assert not {f"j{index}" for index in firm} & set(stopped)
                # The answer may want more than fits: who was to leave a group then stays, and so do its
                # turns.
                assert all(one.detail.startswith("all of them run") for one in answered.refused), answered
                assert answered.started or answered.waiting or not stopped
                done = any(isinstance(fact, (PlacementDecided, GroupDecided)) for fact in step.facts)
                if not stopped and not done:
                    break
                carried_out(cell)
            else:
                raise AssertionError(f"plans do not end: {group_plan(cell.state, answer)}")
        assert check(cell.state) == []


def test_a_small_job_makes_room_beside_a_large_one_that_stays() -> None:
    """Two nodes, on each a job of two GPUs, one of one, and a free GPU: a further job of two fits once one of
    the small ones moves."""
    with known_as("regroups", regroup=FirstFitRegroup()) as given_settings:
        cell = CellDriver(given_settings)
        cell.join(node_spec("n0", 4), node_spec("n1", 4))
        for job_id, size in (("a", 2), ("b", 1), ("c", 1), ("d", 2), ("e", 1), ("f", 1)):
            cell.submit(job_id, job_spec(), needs(size, gpu_memory_mib=1_000, host_memory_mib=100, cores=1))
            carried_out(cell)
        for job_id in ("c", "f"):
            [task_id] = cell.job(job_id).tasks
            cell.exit(task_id, 0)
        cell.submit("g", job_spec(), needs(2, gpu_memory_mib=1_000, host_memory_mib=100, cores=1))
        answer = answer_of([("a", 2), ("b", 1), ("d", 2), ("e", 1), ("g", 2)], (1,) * 5)
        for number in range(MAX_ROUNDS):
            if propose(cell, number, answer) is None:
                break
            carried_out(cell)
        runs = {job.job_id for job in cell.state.holding.values() if job.status is JobStatus.RUNNING}
        assert runs == {"a", "b", "d", "e", "g"}
        assert sorted(cell.job(job_id).attempt for job_id in runs) == [1, 1, 1, 1, 2], "one has moved"


def test_a_job_without_gpus_runs_on_beside_whatever_is_planned() -> None:
    """Regroup stages plan jobs with whole GPUs. A plan that changed who has the node's GPUs counted the cores
    of a preprocessing job there as free, and named it to be stopped."""
    with known_as("regroups", regroup=FirstFitRegroup()) as given_settings:
        cell = CellDriver(given_settings)
        cell.join(node_spec("n0", 4))
        cell.submit("prepares", job_spec(), needs(0, host_memory_mib=100, cores=1))
        cell.submit("long", job_spec(), needs(4, gpu_memory_mib=1_000, host_memory_mib=100, cores=1))
        carried_out(cell)
        cell.submit("short", job_spec(), needs(4, gpu_memory_mib=1_000, host_memory_mib=100, cores=1))
        answer = answer_of([("short", 4)], (1,))
        assert list(group_plan(cell.state, answer).stops) == ["long"]
        for number in range(MAX_ROUNDS):
            if propose(cell, number, answer) is None:
                break
            carried_out(cell)
        assert cell.job("short").status is JobStatus.RUNNING
        assert (cell.job("prepares").status, cell.job("prepares").attempt) == (JobStatus.RUNNING, 1)
