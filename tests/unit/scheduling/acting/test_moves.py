"""Stories of moves: a running job is stopped and goes on at a target that nobody else gets meanwhile."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import PlacementDecided, ProposalAnswered, StopDecided
from penstock.model.decisions.moves import Moved, MoveDecided, MoveGivenUp
from penstock.model.decisions.orders import StartTask, StopTask
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCancelRequested,
    JobHoldRequested,
    NodeCordoned,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
    OrderRefused,
    RunningTask,
    TaskCheckpointed,
)
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import MigrationProposed
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

NUMBERS = count()
"""Of proposals: a second one under the same id would be a copy."""


@pytest.fixture
def cell() -> CellDriver:
    """Two nodes of four GPUs; job `a` runs with three of n1."""
    return cell_of()


def cell_of(profile: str = "fifo", *nodes: str, **more: Any) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile))
    driver.join(*(node_spec(name) for name in nodes or ("n1", "n2")))
    driver.submit("a", job_spec(**more), estimate(gpus=3))
    driver.at(0)
    driver.start("a")
    return driver


def nodes_of(cell: CellDriver, job_id: str) -> list[str]:
    return [task.place.node_id for task in cell.job(job_id).tasks.values()]


def asks(job_id: str, *nodes: str, **more: Any) -> MigrationProposed:
    fields: dict[str, Any] = {
        "proposal_id": f"m{next(NUMBERS)}",
        "proposer": "migrator",
        "reason": "converges",
    }
    return MigrationProposed(**fields | more, job_id=job_id, nodes=nodes)


def refusal(step: Step) -> tuple[str, str]:
    answer = step.facts[-1]
    assert isinstance(answer, ProposalAnswered)
    assert answer.verdict == "refused"
    return answer.reason, answer.detail


def stopped(cell: CellDriver, task_id: str) -> Step:
    return cell.exit(task_id, None, cause="stopped", signal=15)


def test_a_job_goes_on_at_its_target_in_the_record_of_its_last_exit(cell: CellDriver) -> None:
    """The migrator frees a node. The job saves within its grace; where it goes was decided before it was
    stopped."""
    step = cell.feed(asks("a", "n2"))
    assert kinds(step) == ["migration.proposed", "move.decided", "stop.decided", "proposal.answered"]
    decided, stop = step.facts[1], step.facts[2]
    assert isinstance(decided, MoveDecided)
    assert (decided.attempt, decided.by, decided.reason) == (1, "migrator", "converges")
    [place] = decided.tasks
    assert (place.task_id, place.node_id, place.gpus, place.cores) == ("a.2.w0", "n2", (0, 1, 2), (0, 1))
    assert isinstance(stop, StopDecided)
    assert stop.reason == "migrated"
    assert [type(order) for order in cell.orders()] == [StopTask]
    step = stopped(cell, "a.1.w0")
    assert kinds(step)[:3] == ["task.exited", "job.requeued", "placement.decided"]
    placed = step.facts[2]
    assert isinstance(placed, PlacementDecided)
    assert placed.tasks == decided.tasks
    assert [type(order) for order in cell.orders()] == [StartTask]
    job = cell.job("a")
    assert (job.attempt, job.retries.infrastructure, job.status) == (2, 1, JobStatus.LAUNCHING)
    assert job.moves.latest is not None
    assert (job.moves.latest.outcome, job.moves.latest.nodes) == ("arrived", ("n2",))
    assert cell.state.nodes["n1"].free_gpu_mask == 0b1111
    cell.start("a")
    cell.exit("a.2.w0")
    assert cell.state.ended["a"] == "succeeded"
    assert cell.state.nodes["n2"].free_gpu_mask == 0b1111


@pytest.mark.parametrize("saves", [True, False])
def test_a_move_is_explained_from_its_decision_to_its_arrival(saves: bool) -> None:
    """A user asks why the job is on another node: who asked, what else there was, and what its stop cost. It
    ran 130 s before the operator moved it, had saved 30 s before, or never, and took 5 s to end."""
    cell = cell_of("fifo", "n1", "n2", checkpoint="signal" if saves else "none")
    cell.join(node_spec("n3", gpus=1))
    if saves:
        cell.at(100_000)
        fields = {"node_id": "n1", "task_id": "a.1.w0", "token": cell.job("a").token, "at_ms": cell.now_ms}
        cell.feed(TaskCheckpointed(**fields, path="/c", iteration=700, shared=True))  # type: ignore[arg-type]
    cell.at(130_000)
    step = cell.feed(asks("a", "n2", by="ops/ana", reason="its fans are loud"))
    seq = cell.state.seq
    [why] = step.explanation
    assert (why.job_id, why.proposer, why.reason) == ("a", "ops/ana", "its fans are loud")
    assert [found.nodes for found in why.candidates] == [("n2",)]
    assert (why.feasible, why.rejected) == (1, {"gpus_busy": 1, "gpus_too_few": 1})
    assert why.moved == Moved(seq=seq, attempt=1, nodes=("n1",))
    cell.at(135_000)
    [there] = stopped(cell, "a.1.w0").explanation
    assert (there.candidates, there.proposer, there.reason) == (why.candidates, why.proposer, why.reason)
    cost = {"lost_ms": 30_000, "resumes_at": 700} if saves else {"lost_ms": 130_000}
    assert there.moved == Moved(seq=seq, attempt=1, nodes=("n1",), stop_ms=5_000, **cost)


def test_a_move_that_was_given_up_leaves_the_next_place_to_the_profile(cell: CellDriver) -> None:
    """Its target is cordoned while it saves: where it starts then was chosen by the profile, and is explained
    as that."""
    cell.feed(asks("a", "n2"))
    cell.feed(NodeCordoned(node_id="n2", by="ops/ana", reason="fans"))
    step = stopped(cell, "a.1.w0")
    [why] = step.explanation
    assert (why.candidates[0].nodes, why.proposer, why.moved) == (("n1",), "", None)


def test_what_a_program_that_reports_no_checkpoint_lost_is_not_known() -> None:
    """It saves by itself when it is told to stop, and says nothing of it."""
    cell = cell_of(checkpoint="signal")
    cell.at(10_000)
    cell.feed(asks("a", "n2"))
    [why] = stopped(cell, "a.1.w0").explanation
    assert why.moved is not None
    assert why.moved.lost_ms is None


@pytest.mark.parametrize(
    "profile", ["fifo", "liquid", "drf", "srtf", "tiresias", "penstock", "random", "hived"]
)
def test_nobody_else_gets_the_target(profile: str) -> None:
    """Jobs come while the moved one still saves. They fit beside its target or wait, under every profile."""
    cell = cell_of(profile)
    [there] = {"n1", "n2"} - set(nodes_of(cell, "a"))
    cell.feed(asks("a", there))
    for number in range(3):
        cell.submit(f"b{number}", need=estimate(gpus=2 if number else 1))
        cell.at(cell.now_ms - 1_000_000)
    assert cell.state.nodes[there].free_gpu_mask in (0b1000, 0)
    assert cell.job("a").target
    stopped(cell, "a.1.w0")
    cell.at(cell.now_ms - 1_000_000 + 10)
    assert nodes_of(cell, "a") == [there]
    assert cell.job("a").status is JobStatus.LAUNCHING


def test_what_the_job_holds_of_its_target_passes_to_it_exit_by_exit() -> None:
    """A gang of two on n1 and n2 is put together on n1: its task there holds GPUs of the target until its own
    end is proven."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", gpus=3), node_spec("n2", gpus=2))
    cell.submit("g", job_spec(workers=2), estimate(gpus=2, cores=20, memory_mib=40_000))
    cell.start("g")
    assert nodes_of(cell, "g") == ["n1", "n2"]
    cell.submit("x", need=estimate(gpus=1, cores=1))
    cell.start("x")
    assert nodes_of(cell, "x") == ["n1"]
    assert refusal(cell.feed(asks("g", "n1", "n1")))[0] == "infeasible"
    cell.exit("x.1.w0")
    cell.join(node_spec("n3", gpus=4, cores=64))
    cell.feed(asks("g", "n3", "n1"))
    n1, n3 = cell.state.nodes["n1"], cell.state.nodes["n3"]
    assert (n1.free_gpu_mask, n3.free_gpu_mask) == (0b100, 0b1100)
    assert n1.free_host_memory_mib == 131_072 - 40_000
    stopped(cell, "g.1.w0")
    assert n1.free_gpu_mask == 0b100  # its two GPUs are reserved now
    cell.submit("y", need=estimate(gpus=2, cores=1))
    assert nodes_of(cell, "y") == ["n3"]
    stopped(cell, "g.1.w1")
    assert nodes_of(cell, "g") == ["n3", "n1"]
    assert cell.state.nodes["n2"].free_gpu_mask == 0b11


@pytest.mark.parametrize("ends", ["cancel", "finish", "drain"])
def test_a_job_that_ends_otherwise_frees_its_target(cell: CellDriver, ends: str) -> None:
    """The user cancels meanwhile; or the last iteration was done before the stop came; or the target's node
    is to be emptied."""
    cell.feed(asks("a", "n2"))
    cell.submit("b", need=estimate(gpus=4))
    assert cell.job("b").status is JobStatus.QUEUED
    if ends == "cancel":
        cell.feed(JobCancelRequested(job_id="a"))
        assert cell.state.nodes["n2"].free_gpu_mask == 0b1111
        stopped(cell, "a.1.w0")
        assert cell.state.ended["a"] == "cancelled"
    elif ends == "finish":
        cell.exit("a.1.w0")
        assert cell.state.ended["a"] == "succeeded"
    else:
        step = cell.feed(NodeCordoned(node_id="n2", by="ops/ana", drain=True, reason=""))
        assert MoveGivenUp(job_id="a", attempt=1, reason="n2 is cordoned") in step.facts
        assert nodes_of(cell, "b") == []
    assert not cell.state.moving
    assert cell.job("b").status is JobStatus.LAUNCHING or ends == "drain"


@pytest.mark.parametrize("lost", ["fault", "left", "held", "refused", "rejoined"])
def test_a_target_that_is_lost_is_given_up_and_the_job_queues(cell: CellDriver, lost: str) -> None:
    """Hardware fails while the job saves. It does not wait for what will not come: it goes where there is
    room."""
    cell.feed(asks("a", "n2"))
    if lost == "fault":
        step = cell.feed(GpuFaulted(node_id="n2", gpu=1, fault="xid", code=79))
    elif lost == "left":
        step = cell.feed(NodeLeft(node_id="n2", boot_id="b1", proof="fenced", by="ops/ana", reason="smoke"))
    elif lost == "held":
        step = cell.feed(JobHoldRequested(job_id="a", by="alice"))
    elif lost == "refused":
        cell.feed(NodeCordoned(node_id="n1", by="ops/ana", drain=False, reason=""))
        cell.submit("b")
        assert nodes_of(cell, "b") == ["n2"]
        fields: dict[str, Any] = {"reason": "unknown_gpu", "highest_token": 0, "missing_gpus": ("GPU-n2-0",)}
        step = cell.feed(OrderRefused(node_id="n2", task_id="b.1.w0", token=cell.job("b").token, **fields))
    else:
        step = cell.feed(NodeJoined(node=node_spec("n2", gpus=2)))
    assert "move.given_up" in kinds(step)
    assert not cell.state.moving
    stopped(cell, "a.1.w0")
    job = cell.job("a")
    assert job.moves.latest is not None
    assert job.moves.latest.outcome == "given_up"
    assert job.status is (JobStatus.QUEUED if lost == "held" else JobStatus.LAUNCHING)
    assert job.retries.infrastructure == 1


def test_a_silent_target_is_waited_for_until_the_job_has_stopped(cell: CellDriver) -> None:
    """The target's node loses its connection for a second: it is given up only if it is silent when the job
    could start."""
    cell.feed(asks("a", "n2"))
    cell.feed(NodeSuspected(node_id="n2", reason="its connection broke"))
    assert cell.job("a").target
    step = stopped(cell, "a.1.w0")
    assert kinds(step)[:3] == ["task.exited", "move.given_up", "job.requeued"]
    assert nodes_of(cell, "a") == ["n1"]


@pytest.mark.parametrize(
    ("proposal", "reason", "says"),
    [
        (asks("ghost", "n2"), "unknown_job", "ghost is unknown"),
        (asks("a", "n2", "n2"), "invalid", "a has 1 tasks, and 2 nodes are named"),
        (asks("a", "n1"), "invalid", "runs on these nodes already"),
        (asks("a", "n9"), "infeasible", "task 0 of a on n9: no such node"),
        (asks("a", "n3"), "infeasible", "2 GPUs are free, 3 needed"),
        (asks("a", "n4"), "infeasible", "its GPUs are of another model"),
        (asks("a", "n5"), "infeasible", "the node is cordoned"),
        (asks("w", "n2"), "wrong_state", "w is launching, not running"),
        (asks("p", "n2"), "wrong_state", "preemptible is false"),
    ],
)
def test_what_cannot_move_is_refused_with_the_reason(
    proposal: MigrationProposed, reason: str, says: str
) -> None:
    """Proposers see the cell late: targets fill, nodes are cordoned, jobs end."""
    cell = cell_of(models=("V100",))
    cell.join(node_spec("n3", gpus=2), node_spec("n4", model="A100"), node_spec("n5"))
    cell.feed(NodeCordoned(node_id="n5", by="ops/ana", drain=False, reason=""))
    cell.submit("p", job_spec(preemptible=False), estimate(gpus=1))
    cell.start("p")
    cell.submit("w", need=estimate(gpus=1))
    before = dump(cell.state)
    found = refusal(cell.feed(proposal))
    assert found[0] == reason
    assert says in found[1]
    assert cell.job("a").status is JobStatus.RUNNING
    assert cell.job("a").moves.latest is None
    assert len(dump(cell.state)) == pytest.approx(len(before), abs=400)


def test_a_second_proposal_finds_the_job_on_its_way(cell: CellDriver) -> None:
    """A copy comes late, or two migrators think alike: the job is stopped once."""
    cell.feed(asks("a", "n2"))
    assert refusal(cell.feed(asks("a", "n2"))) == ("wrong_state", "a is stopping, not running")
    stopped(cell, "a.1.w0")
    cell.start("a")
    assert refusal(cell.feed(asks("a", "n2"))) == ("invalid", "a runs on these nodes already")


def test_a_snapshot_in_the_middle_of_a_move_folds_on_as_the_original(cell: CellDriver) -> None:
    """A placer fails over between the stop and the exit."""
    cell.feed(asks("a", "n2"))
    again = load(dump(cell.state))
    assert dump(again) == dump(cell.state)
    assert again.moving.keys() == cell.state.moving.keys()
    assert again.nodes["n2"].reserved == {"a"}
    assert again.nodes["n2"].free_gpu_mask == 0b1000


def test_a_change_of_the_inventory_keeps_what_is_reserved(cell: CellDriver) -> None:
    """The node-reporter of the target restarts and finds one GPU more."""
    cell.feed(asks("a", "n2"))
    cell.join(node_spec("n2", gpus=5))
    assert cell.state.nodes["n2"].free_gpu_mask == 0b11000
    stopped(cell, "a.1.w0")
    assert nodes_of(cell, "a") == ["n2"]


def test_a_share_of_a_gpu_moves_beside_another_one() -> None:
    """Two small jobs share a GPU of n1; one of them moves beside a third on n2. What is kept for it is not
    given to a fourth."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", gpus=1), node_spec("n2", gpus=1))
    half = estimate(gpu_memory_mib=100)
    half = replace(half, worker=replace(half.worker, gpu_share_milli=400))
    for name in ("a", "b", "c"):
        cell.submit(name, need=half)
        cell.start(name)
    assert [nodes_of(cell, name) for name in ("a", "b", "c")] == [["n1"], ["n1"], ["n2"]]
    cell.feed(asks("a", "n2"))
    cell.submit("d", need=half)
    assert cell.job("d").status is JobStatus.QUEUED
    stopped(cell, "a.1.w0")
    assert nodes_of(cell, "a") == ["n2"]
    assert nodes_of(cell, "d") == ["n1"]
    assert cell.state.nodes["n2"].shared[0].milli == 200


JOBS = ("a", "b", "c", "d")
DEED = st.tuples(
    st.sampled_from(
        ("move", "move", "stop", "stop", "done", "start", "cancel", "fault", "cordon", "join", "hold", "lose")
    ),
    st.sampled_from(JOBS),
    st.lists(st.sampled_from(("n1", "n2", "n3")), min_size=2, max_size=2),
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(("fifo", "srtf", "tiresias", "penstock")), st.lists(DEED, min_size=5, max_size=40))
def test_whatever_happens_books_and_targets_are_right(
    profile: str, deeds: list[tuple[str, str, list[str]]]
) -> None:
    """Gangs of two move about while nodes break, people cancel and hold: after every record the books are
    right, and who arrives is at its target."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(*(node_spec(name, gpus=4, cores=8) for name in ("n1", "n2", "n3")))
    for name in JOBS:
        cell.submit(name, job_spec(workers=2, attempts=50), estimate(gpus=1, cores=1 + JOBS.index(name)))
    cell.at(0)
    for number, (deed, name, nodes) in enumerate(deeds):
        _do(cell, deed, name, nodes, number)
        cell.at(1_000 * (number + 1))
        for job in cell.state.jobs.values():
            latest = job.moves.latest
            if latest is not None and latest.outcome == "arrived" and job.attempt == latest.attempt + 1:
                there = tuple(task.place.node_id for task in job.tasks.values())
                assert there == latest.nodes or not job.tasks
    assert dump(load(dump(cell.state))) == dump(cell.state)


def _do(cell: CellDriver, deed: str, name: str, nodes: list[str], number: int) -> None:
    job, node = cell.state.jobs.get(name), cell.state.nodes[nodes[0]]
    tasks = {} if job is None else job.tasks
    living = [task_id for task_id, task in tasks.items() if task.exit.at_ms is None]
    match deed:
        case "move":
            cell.feed(asks(name, *nodes, proposal_id=f"m{number}"))
        case "stop" | "done" if living and job is not None and job.status is JobStatus.STOPPING:
            cell.exit(
                living[0], 0 if deed == "done" else None, cause="exited" if deed == "done" else "stopped"
            )
        case "start" if job is not None and job.status is JobStatus.LAUNCHING:
            cell.start(name)
        case "cancel":
            cell.feed(JobCancelRequested(job_id=name))
        case "hold":
            cell.feed(JobHoldRequested(job_id=name))
        case "fault":
            cell.feed(GpuFaulted(node_id=nodes[0], gpu=number % 4, fault="xid", code=79))
        case "cordon":
            cell.feed(NodeCordoned(node_id=nodes[0], by="ops", drain=nodes[1] == "n1", reason=""))
        case "join":
            alive = tuple(
                RunningTask(task_id=task_id, token=cell.job(job_id).token)
                for task_id, job_id in node.tasks.items()
            )
            cell.join(node_spec(nodes[0], gpus=3 + number % 3, cores=8), tasks=alive)
        case "lose":
            cell.feed(NodeLeft(node_id=nodes[0], boot_id="b1", proof="fenced", by="ops", reason=""))
