"""Proposals are accepted on the state as it is, or refused with the one reason that a proposer can act on."""

from collections.abc import Callable

import msgspec
import pytest

from penstock.ledger.check import check
from penstock.ledger.state import CellState
from penstock.model import external_events, ledger_events
from penstock.model.proposals import (
    CoresProposed,
    JobPlan,
    MigrationProposed,
    PlanProposed,
    Proposal,
    ReadVersion,
    ThrottleProposed,
)
from penstock.model.types import TaskPlacement
from penstock.policies.base import LazyRng, assign
from penstock.policies.liquid import Liquid
from penstock.policies.validate import validate
from tests.support import builders as b


def plan_of(state: CellState, job_id: str) -> JobPlan:
    """What a proposer would compute for this job on this state."""
    job = state.jobs[job_id]
    plan = Liquid(0.5).place(state, job, LazyRng(0, "batch"))
    assert plan is not None
    return JobPlan(job_id=job_id, tasks=assign(state, job, plan).tasks)


def batch(*plans: JobPlan, read: tuple[ReadVersion, ...] = (), kind: str = "batch") -> PlanProposed:
    return PlanProposed(proposal_id="p1", proposer="batcher", kind=kind, plans=plans, read=read)  # type: ignore[arg-type]


def changed(plan: JobPlan, which: int = 0, **fields: object) -> JobPlan:
    tasks = list(plan.tasks)
    tasks[which] = TaskPlacement(**{**msgspec.structs.asdict(tasks[which]), **fields})
    return JobPlan(job_id=plan.job_id, tasks=tuple(tasks))


def verdict(state: CellState, proposal: Proposal) -> tuple[bool, str]:
    before = [(node.free(), node.version) for node in state.nodes.values()]
    answer = validate(state, proposal)
    assert before == [(node.free(), node.version) for node in state.nodes.values()]
    assert check(state) == []
    assert answer.accepted == (answer.reason == "")
    assert answer.accepted or answer.detail
    return answer.accepted, answer.reason


def test_a_sound_batch_is_accepted_and_folds():
    """Two waiting jobs, planned one after the other by the batcher, with the versions that it read."""
    state = b.cell(nodes=2, gpus=4)
    b.queued(state, "a", workers=2, parameter_servers=1)
    b.queued(state, "b", worker=b.need(gpus=4))
    read = (
        *(ReadVersion(kind="job", id=i, version=state.jobs[i].version) for i in "ab"),
        *(ReadVersion(kind="node", id=n, version=state.nodes[n].version) for n in ("n0", "n1")),
    )
    first = plan_of(state, "a")
    second = changed(plan_of(state, "b"), node_id="n1", gpus=(0, 1, 2, 3))
    assert verdict(state, batch(first, second, read=read)) == (True, "")
    for plan in (first, second):
        b.apply(state, ledger_events.PlacementDecided(job_id=plan.job_id, attempt=1, tasks=plan.tasks))
    assert check(state) == []


def test_plans_that_fit_alone_but_not_together_are_infeasible():
    """A proposer forgot that its own first plan takes the GPUs of the second."""
    state = b.cell(nodes=1, gpus=4)
    b.queued(state, "a", worker=b.need(gpus=3))
    b.queued(state, "b", worker=b.need(gpus=3))
    a, other = plan_of(state, "a"), plan_of(state, "b")
    assert verdict(state, batch(a)) == (True, "")
    assert verdict(state, batch(other)) == (True, "")
    assert verdict(state, batch(a, other)) == (False, "infeasible")


def test_what_was_read_has_moved_on():
    """While the GGA ran, somebody else was placed on the node, or the job was placed, or the node left."""
    state = b.cell(nodes=1, gpus=4)
    job = b.queued(state, "a")
    plan = plan_of(state, "a")
    node_read = ReadVersion(kind="node", id="n0", version=state.nodes["n0"].version)
    job_read = ReadVersion(kind="job", id="a", version=job.version)
    b.placed(state, b.queued(state, "other"))
    assert verdict(state, batch(plan, read=(node_read,))) == (False, "stale")
    assert verdict(state, batch(plan, read=(job_read,))) == (False, "infeasible")  # same GPU, by now taken
    b.placed(state, job)
    assert verdict(state, batch(plan, read=(job_read,))) == (False, "stale")
    unknown = ReadVersion(kind="node", id="n9", version=1)
    assert verdict(state, batch(plan, read=(unknown,))) == (False, "stale")


def test_the_job_is_not_there_to_be_placed():
    """It runs already, has ended, or was never submitted; or nothing is placed at all."""
    state = b.cell(nodes=1, gpus=4)
    job = b.queued(state, "a")
    plan = plan_of(state, "a")
    assert verdict(state, batch(JobPlan(job_id="ghost", tasks=plan.tasks))) == (
        False,
        "unknown_job",
    )
    b.apply(state, ledger_events.CellFrozen(reason="most nodes vanished"))
    assert verdict(state, batch(plan)) == (False, "wrong_state")
    b.apply(state, ledger_events.CellThawed(reason="they are back"))
    b.placed(state, job)
    assert verdict(state, batch(plan)) == (False, "wrong_state")
    b.exited(state, job)
    assert verdict(state, batch(plan)) == (False, "unknown_job")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: changed(p, task_id="a.2.w0"), "invalid"),
        (lambda p: changed(p, rank=1), "invalid"),
        (lambda p: changed(p, role="ps"), "invalid"),
        (lambda p: changed(p, gpus=(0, 0)), "invalid"),
        (lambda p: changed(p, gpus=(0,)), "invalid"),
        (lambda p: changed(p, cores=(0, 1, 2)), "invalid"),
        (lambda p: changed(p, host_memory_mib=1), "invalid"),
        (lambda p: changed(p, gpu_memory_mib=16_384), "invalid"),
        (lambda p: JobPlan(job_id="a", tasks=p.tasks[:1]), "invalid"),
        (lambda p: changed(p, gpus=(0, 4)), "infeasible"),
        (lambda p: changed(p, cores=(64,)), "infeasible"),
        (lambda p: changed(p, node_id="n9"), "infeasible"),
        (lambda p: changed(p, node_id="silent"), "infeasible"),
        (lambda p: changed(p, node_id="old"), "infeasible"),
        (lambda p: changed(p, node_id="faulted"), "infeasible"),
        (lambda p: changed(p, node_id="filled"), "infeasible"),
    ],
)
def test_each_way_to_be_wrong(change: Callable[[JobPlan], JobPlan], reason: str):
    """A proposer with a bug, or with a picture of the cell that was never true."""
    state = b.cell_of(
        [
            b.node("good", gpus=4),
            b.node("silent"),
            b.node("old", gpu_model="K80"),
            b.node("faulted"),
            b.node("filled"),
        ]
    )
    b.apply(state, external_events.NodeSuspected(node_id="silent", reason="silence"))
    b.apply(state, external_events.GpuFaulted(node_id="faulted", gpu=1, fault="ecc"))
    b.placed_on(state, b.queued(state, "memory", worker=b.need(gpus=0, host_memory_mib=262_000)), "filled")
    b.queued(state, "a", workers=2, gpu_models=("V100",), worker=b.need(gpus=2))
    plan = plan_of(state, "a")
    assert verdict(state, batch(plan)) == (True, "")
    assert verdict(state, batch(change(plan))) == (False, reason)


def test_a_job_planned_twice_is_invalid():
    state = b.cell()
    b.queued(state, "a")
    assert verdict(state, batch(plan_of(state, "a"), plan_of(state, "a"))) == (False, "invalid")


def test_what_this_placer_does_not_act_on_is_unsupported():
    """Groups, migrations, cores and throttles are answered, not dropped."""
    state = b.cell()
    b.queued(state, "a")
    plan = plan_of(state, "a")
    head = {"proposal_id": "p", "proposer": "x"}
    for proposal in (
        batch(plan, kind="group"),
        MigrationProposed(**head, plan=plan, reason="slow"),
        CoresProposed(**head, task_id="a.1.w0", cores=2, reason="starved"),
        ThrottleProposed(**head, task_id="a.1.w0", memory_bandwidth_percent=50, reason="noisy"),
    ):
        assert verdict(state, proposal) == (False, "unsupported")


@pytest.mark.parametrize(
    ("need", "second"),
    [
        (b.need(gpus=1, cores=1), {"cores": (1,)}),
        (b.need(gpus=1, cores=1), {"gpus": (1,)}),
        (b.need(gpus=1, cores=1, host_memory_mib=140_000), {"gpus": (1,), "cores": (1,)}),
        (b.need(gpus=1, cores=1, bandwidth_mbps=6_000), {"gpus": (1,), "cores": (1,)}),
    ],
    ids=["gpus", "cores", "host_memory", "bandwidth"],
)
def test_two_plans_collide_in_one_resource_only(need: b.ResourceVector, second: dict[str, object]):
    """Apart in everything else, they share one GPU, one core, the memory or the network card of a node."""
    state = b.cell(nodes=1)
    b.queued(state, "a", worker=need)
    b.queued(state, "b", worker=need)
    first, other = plan_of(state, "a"), changed(plan_of(state, "b"), **second)
    assert verdict(state, batch(other)) == (True, "")
    assert verdict(state, batch(first, other)) == (False, "infeasible")
