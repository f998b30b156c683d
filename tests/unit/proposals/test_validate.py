"""Proposals are accepted on the state as it is, or refused with the one reason that a proposer can act on."""

import pytest

from penstock.cluster.reasons import Refusal
from penstock.ledger.check.check import check
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.proposals import (
    PlanProposed,
    ProposedJob,
    ProposedUnit,
    ReadVersion,
)
from penstock.proposals.validate import validate
from penstock.proposals.validate_plans import validate_plan
from tests.support.cluster import builders as b


def unit(*jobs: tuple[str, ...], kind: str = "solo") -> ProposedUnit:
    """Each job as its id and the nodes of its tasks."""
    named = tuple(ProposedJob(job_id=job_id, nodes=nodes) for job_id, *nodes in jobs)
    return ProposedUnit(jobs=named, kind=kind, explanation="ends sooner")  # type: ignore[arg-type]


def plan(
    *units: ProposedUnit, read: tuple[ReadVersion, ...] = (), valid_until_ms: int | None = None
) -> PlanProposed:
    return PlanProposed(
        proposal_id="p1", proposer="batcher", units=units, read=read, valid_until_ms=valid_until_ms
    )


def answers(state: CellState, proposal: PlanProposed) -> list[str] | str:
    """Per unit why it is refused, empty where it is not; one reason where no unit is looked at. The state
    stays as it is."""
    before = [(node.free(), node.version) for node in state.nodes.values()]
    found = validate_plan(state, proposal)
    assert before == [(node.free(), node.version) for node in state.nodes.values()]
    assert check(state) == []
    verdict = validate(state, proposal)
    assert verdict.accepted == (verdict.reason == "")
    if isinstance(found, Refusal):
        assert (verdict.reason, verdict.detail) == found
        return found.reason
    assert verdict.accepted == any(validated.refusal is None for validated in found.units)
    return ["" if validated.refusal is None else validated.refusal.reason for validated in found.units]


def commit(state: CellState, proposal: PlanProposed) -> None:
    """Folds what its units get."""
    found = validate_plan(state, proposal)
    assert not isinstance(found, Refusal)
    for validated in found.units:
        for placed in validated.placed:
            job_id = placed.job.job_id
            b.apply(state, ledger_events.PlacementDecided(job_id=job_id, attempt=1, tasks=placed.tasks))


def test_a_sound_batch_is_accepted_and_folds():
    """Two waiting jobs, planned one after the other by the batcher, with the versions that it read. Nobody
    has named a GPU or a core."""
    state = b.cell(nodes=2, gpus=4)
    b.queued(state, "a", workers=2, parameter_servers=1)
    b.queued(state, "b", worker=b.need(gpus=4))
    read = (
        *(ReadVersion(kind="job", id=i, version=state.jobs[i].version) for i in "ab"),
        *(ReadVersion(kind="node", id=n, version=state.nodes[n].version) for n in ("n0", "n1")),
    )
    proposal = plan(unit(("a", "n0", "n0", "n1")), unit(("b", "n1")), read=read)
    assert answers(state, proposal) == ["", ""]
    commit(state, proposal)
    assert check(state) == []
    places = [task.place for job in state.jobs.values() for task in job.tasks.values()]
    assert [(place.node_id, place.gpus, place.cores) for place in places] == [
        ("n0", (0,), (0,)),
        ("n0", (1,), (1,)),
        ("n1", (), (0,)),
        ("n1", (0, 1, 2, 3), (1,)),
    ]


def test_units_that_fit_alone_but_not_together():
    """A proposer forgot that its own first unit takes the GPUs of the second. The third goes elsewhere and is
    not touched by that."""
    state = b.cell(nodes=2, gpus=4)
    for job_id in "abc":
        b.queued(state, job_id, worker=b.need(gpus=3))
    a, other, c = unit(("a", "n0")), unit(("b", "n0")), unit(("c", "n1"))
    assert answers(state, plan(other)) == [""]
    assert answers(state, plan(a, other, c)) == ["", "infeasible", ""]


def test_a_unit_is_all_or_nothing():
    """Two jobs are to start together and the second does not fit: the first leaves its room to the next
    unit."""
    state = b.cell(nodes=1, gpus=4)
    for job_id in "abc":
        b.queued(state, job_id, worker=b.need(gpus=3))
    proposal = plan(unit(("a", "n0"), ("b", "n0")), unit(("c", "n0")))
    assert answers(state, proposal) == ["infeasible", ""]
    commit(state, proposal)
    assert [job_id for job_id, job in state.jobs.items() if job.tasks] == ["c"]


def test_what_was_read_has_moved_on():
    """While the GGA ran, somebody else was placed on the node, or the job was placed, or the node left. Units
    that rest on nothing of that go on."""
    state = b.cell(nodes=2, gpus=4)
    job = b.queued(state, "a")
    b.queued(state, "c")
    a, c = unit(("a", "n0")), unit(("c", "n1"))
    node_read = ReadVersion(kind="node", id="n0", version=state.nodes["n0"].version)
    job_read = ReadVersion(kind="job", id="a", version=job.version)
    b.placed_on(state, b.queued(state, "other"), "n0")
    assert answers(state, plan(a, c, read=(node_read,))) == ["stale", ""]
    assert answers(state, plan(a, c, read=(job_read,))) == ["", ""]
    b.placed(state, job)
    assert answers(state, plan(a, c, read=(job_read,))) == ["stale", ""]
    unknown = ReadVersion(kind="node", id="n9", version=1)
    assert answers(state, plan(a, c, read=(unknown,))) == "stale", "it names what no unit is about"


def test_the_job_is_not_there_to_be_placed():
    """It runs already, is held, has ended, or was never submitted; or nothing is placed at all."""
    state = b.cell(nodes=1, gpus=4)
    job = b.queued(state, "a")
    proposal = plan(unit(("a", "n0")))
    assert answers(state, plan(unit(("ghost", "n0")))) == ["unknown_job"]
    b.apply(state, ledger_events.CellFrozen(reason="most nodes vanished"))
    assert answers(state, proposal) == "wrong_state"
    b.apply(state, ledger_events.CellThawed(reason="they are back"))
    b.apply(state, external_events.JobHoldRequested(job_id="a"))
    assert answers(state, proposal) == ["wrong_state"]
    b.apply(state, external_events.JobReleaseRequested(job_id="a"))
    b.placed(state, job)
    assert answers(state, proposal) == ["wrong_state"]
    b.exited(state, job)
    assert answers(state, proposal) == ["unknown_job"]


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (("good",), "invalid"),
        (("good", "good", "good"), "invalid"),
        (("good", "n9"), "infeasible"),
        (("good", "silent"), "infeasible"),
        (("good", "old"), "infeasible"),
        (("good", "faulted"), "infeasible"),
        (("good", "filled"), "infeasible"),
        (("good", "closed"), "infeasible"),
    ],
)
def test_each_way_to_be_wrong(nodes: tuple[str, ...], reason: str):
    """A proposer with a bug, or with a picture of the cell that was never true."""
    state = b.cell_of(
        [
            b.node("good", gpus=4),
            b.node("silent"),
            b.node("old", gpu_model="K80"),
            b.node("faulted", gpus=2),
            b.node("filled"),
            b.node("closed"),
        ]
    )
    b.apply(state, external_events.NodeSuspected(node_id="silent", reason="silence"))
    b.apply(state, external_events.GpuFaulted(node_id="faulted", gpu=1, fault="ecc"))
    b.apply(state, external_events.NodeCordoned(node_id="closed", reason="fans", by="ada"))
    b.placed_on(state, b.queued(state, "memory", worker=b.need(gpus=0, host_memory_mib=262_000)), "filled")
    b.queued(state, "a", workers=2, gpu_models=("V100",), worker=b.need(gpus=2))
    assert answers(state, plan(unit(("a", "good", "good")))) == [""]
    assert answers(state, plan(unit(("a", *nodes)))) == [reason]


def test_a_job_planned_twice_is_invalid():
    state = b.cell()
    b.queued(state, "a")
    assert answers(state, plan(unit(("a", "n0")), unit(("a", "n1")))) == "invalid"
    assert answers(state, plan(unit(("a", "n0"), ("a", "n1")))) == "invalid"


def test_a_plan_of_too_many_tasks_is_invalid():
    """16 gangs of 300 workers: what follows from a plan has to fit into few records."""
    state = b.cell(nodes=1)
    for number in range(16):
        b.queued(state, f"g{number}", workers=256)
    units = [unit((f"g{number}", *["n0"] * 256)) for number in range(16)]
    assert answers(state, plan(*units)) == ["infeasible"] * 16
    b.queued(state, "one")
    assert answers(state, plan(*units, unit(("one", "n0")))) == "invalid"
    together = ProposedUnit(jobs=tuple(job for found in units[:3] for job in found.jobs), explanation="")
    assert answers(state, plan(together)) == ["invalid"], "a unit starts in one record"


def test_a_plan_that_has_expired_starts_nothing():
    """The batcher was stopped for a minute. Its plan is from another time, though every node has room."""
    state = b.cell()
    b.queued(state, "a")
    until_ms = state.now_ms
    proposal = plan(unit(("a", "n0")), valid_until_ms=until_ms)
    assert answers(state, proposal) == [""]
    b.queued(state, "b")
    assert answers(state, proposal) == "expired"


def test_a_unit_beside_a_group_has_what_the_group_leaves():
    """`a` and `b` hold one set of GPUs and cores on n0 together; what is left is the next unit's, counted
    once."""
    state = b.cell()
    for job_id in "abc":
        b.queued(state, job_id)
    group = unit(("a", "n0"), ("b", "n0"), kind="group")
    assert answers(state, plan(group, unit(("c", "n0")))) == ["", ""]
    alone = unit(("a", "n0"), kind="group")
    assert answers(state, plan(alone, unit(("c", "n0")))) == ["invalid", ""]


@pytest.mark.parametrize(
    "need",
    [
        b.need(gpus=5, cores=1),
        b.need(gpus=1, cores=33),
        b.need(gpus=1, cores=1, host_memory_mib=140_000),
        b.need(gpus=1, cores=1, bandwidth_mbps=6_000),
    ],
    ids=["gpus", "cores", "host_memory", "bandwidth"],
)
def test_two_units_collide_in_one_resource_only(need: b.ResourceVector):
    """Apart in everything else, they want the same GPUs, cores, memory or the network card of a node."""
    state = b.cell(nodes=1)
    b.queued(state, "a", worker=need)
    b.queued(state, "b", worker=need)
    assert answers(state, plan(unit(("b", "n0")))) == [""]
    assert answers(state, plan(unit(("a", "n0")), unit(("b", "n0")))) == ["", "infeasible"]
