"""Stories of cores and memory bandwidth of running tasks: decided as facts, ordered from the valid ledger,
answered by nodes."""

from typing import Any

import msgspec
import pytest

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.adjustments import BandwidthDecided, CoresDecided, TaskAdjusted
from penstock.model.decisions.ledger_events import LedgerAccepted, ProposalAnswered
from penstock.model.decisions.orders import SetBandwidth, SetCores, StartTask, StopTask
from penstock.model.inputs.external_events import JobCancelRequested, NodeSuspected, TaskStarted
from penstock.model.nouns.nodes import Isolation
from penstock.model.nouns.token import token_of
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock_services.placer.core.orders import orders_of, outstanding
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

A, B = "a.1.w0", "b.1.w0"
TWO_CORES = CoresDecided(
    job_id="a", attempt=1, task_id=A, node_id="n1", by="guard", reason="starved", cores=(0, 1), cause="other"
)


@pytest.fixture
def cell() -> CellDriver:
    """One node of 8 cores, on which job `a` runs with cores 0–3."""
    driver = CellDriver()
    driver.join(node_spec("n1", cores=8))
    driver.submit("a", need=estimate(0, cores=4))
    driver.start("a")
    assert cores(driver, A) == (0, 1, 2, 3)
    return driver


def cores(cell: CellDriver, task_id: str) -> tuple[int, ...]:
    return cell.job(task_id.split(".")[0]).tasks[task_id].place.cores


def asks(task_id: str, count: int, **more: Any) -> CoresProposed:
    fields: dict[str, Any] = {"proposal_id": f"p-{task_id}-{count}", "proposer": "guard", "reason": "starved"}
    return CoresProposed(**fields | more, task_id=task_id, cores=count)


def adjusted(cell: CellDriver, task_id: str, enforced: Any = "affinity", **more: Any) -> TaskAdjusted:
    job = cell.job(task_id.split(".")[0])
    asked = job.tasks[task_id].cores.adjusted
    fields: dict[str, Any] = {
        "node_id": "n1",
        "task_id": task_id,
        "token": job.token,
        "what": "cores",
        "enforced": enforced,
        "order_token": asked.token if asked is not None else 1,
    }
    return TaskAdjusted(**fields | more)


def test_a_task_keeps_its_lowest_cores_and_gets_the_lowest_free_ones(cell: CellDriver) -> None:
    """The guard sees four cores half idle, then the same task starving beside a newer one."""
    step = cell.feed(asks(A, 2))
    assert kinds(step) == ["cores.proposed", "cores.decided", "proposal.answered"]
    assert step.facts[1] == TWO_CORES
    cell.submit("b", need=estimate(0, cores=1))
    assert cores(cell, B) == (2,)
    cell.feed(asks(A, 5))
    assert cores(cell, A) == (0, 1, 3, 4, 5)
    assert cell.state.nodes["n1"].free_core_mask == 0b1100_0000


def test_what_a_task_gives_up_starts_the_job_that_waits_for_it(cell: CellDriver) -> None:
    """A job of six cores waits beside four free ones. The order to shrink comes first in the node's
    partition."""
    cell.submit("b", need=estimate(0, cores=6))
    assert cell.job("b").status is JobStatus.QUEUED
    step = cell.feed(asks(A, 2))
    assert kinds(step)[:4] == ["cores.proposed", "cores.decided", "proposal.answered", "placement.decided"]
    sent = [order for fact in step.facts for order in orders_of(cell.state, fact, cell.state.seq)]
    assert [type(order) for order in sent] == [SetCores, StartTask]
    repeated = cell.orders()
    assert [type(order) for order in repeated] == [SetCores, StartTask]
    assert isinstance(repeated[0], SetCores)
    assert isinstance(repeated[1], StartTask)
    assert not set(repeated[0].cores) & set(repeated[1].place.cores)


def test_an_exit_frees_the_cores_that_the_task_has_and_no_others(cell: CellDriver) -> None:
    cell.feed(asks(A, 7))
    cell.exit(A)
    assert cell.state.nodes["n1"].free_core_mask == 0b1111_1111


def test_the_next_attempt_has_what_was_estimated(cell: CellDriver) -> None:
    """An adjustment is one attempt's: what starved on this node may not on the next."""
    cell.submit("c", job_spec(attempts=2, backoff_ms=1_000), estimate(0, cores=2))
    cell.start("c")
    cell.feed(asks("c.1.w0", 4))
    assert len(cores(cell, "c.1.w0")) == 4
    cell.exit("c.1.w0", 1)
    cell.at(cell.state.now_ms + 60_000)
    assert len(cores(cell, "c.2.w0")) == 2
    assert cell.job("c").tasks["c.2.w0"].cores.adjusted is None


@pytest.mark.parametrize(
    ("task_id", "count", "reason", "says"),
    [
        (A, 9, "infeasible", "it can have 8 at most"),
        ("a.1.w1", 2, "unknown_job", "not a task of a running job"),
        ("ghost.1.w0", 2, "unknown_job", "not a task of a running job"),
        ("a", 2, "unknown_job", "not a task of a running job"),
        (B, 2, "wrong_state", "assigned, not running"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    cell: CellDriver, task_id: str, count: int, reason: str, says: str
) -> None:
    """Proposers see the cell late: tasks have ended, nodes are full, starts are under way."""
    if task_id == B:
        cell.submit("b", need=estimate(0, cores=1))
    refused = cell.feed(asks(task_id, count)).facts[-1]
    assert isinstance(refused, ProposalAnswered)
    assert (refused.verdict, refused.reason) == ("refused", reason)
    assert says in refused.detail
    assert cores(cell, A) == (0, 1, 2, 3)


def test_nothing_changes_on_a_silent_node(cell: CellDriver) -> None:
    cell.feed(NodeSuspected(node_id="n1", reason="its connection broke"))
    refused = cell.feed(asks(A, 2)).facts[-1]
    assert isinstance(refused, ProposalAnswered)
    assert (refused.reason, refused.detail) == ("wrong_state", "a.1.w0 runs on n1, which is suspect")


def test_a_stopping_task_keeps_what_it_has(cell: CellDriver) -> None:
    """Its node may be killing it already; what it holds is free when that is proven."""
    cell.feed(JobCancelRequested(job_id="a"))
    refused = cell.feed(asks(A, 2)).facts[-1]
    assert isinstance(refused, ProposalAnswered)
    assert refused.reason == "wrong_state"


def test_orders_are_repeated_until_the_node_has_answered(cell: CellDriver) -> None:
    """A placer ends between its record and the order; the next one reads what is not answered."""
    cell.feed(asks(A, 2))
    first = cell.state.seq
    cell.feed(asks(A, 3))
    [order] = cell.orders()
    assert order == SetCores(token=cell.state.seq, node_id="n1", task_id=A, cores=(0, 1, 2))
    assert orders_of(cell.state, TWO_CORES, first) == []
    late = adjusted(cell, A, order_token=first)
    assert cell.feed(late).reason == "stale_adjustment"
    assert kinds(cell.feed(adjusted(cell, A, "cpuset"))) == ["task.adjusted"]
    assert cell.orders() == []
    assert cell.feed(adjusted(cell, A)).reason == "duplicate_adjustment"
    known = cell.job("a").tasks[A].cores.adjusted
    assert known is not None
    assert (known.enforced, known.problem) == ("cpuset", "")


def test_what_a_node_cannot_do_is_in_the_ledger(cell: CellDriver) -> None:
    """A container under another user: the kernel refuses, and nobody is told that the task has the cores."""
    cell.feed(asks(A, 2))
    cell.feed(adjusted(cell, A, "", detail="process 17: Operation not permitted"))
    known = cell.job("a").tasks[A].cores.adjusted
    assert known is not None
    assert (known.enforced, known.problem) == ("", "process 17: Operation not permitted")
    assert cell.orders() == []


def test_a_cancelled_task_gives_up_what_it_was_to_give_up_before_it_is_stopped(cell: CellDriver) -> None:
    """`a` is to give up two cores, is cancelled, and `b` gets them. The placer is killed before it has sent
    any of these orders. What the next one repeats must not leave `b` on cores of a task that saves for as
    long as its grace: first `a` gives them up."""
    cell.submit("b", need=estimate(0, cores=4))
    cell.start("b")
    cell.feed(asks(A, 2))
    first = cell.state.seq
    cell.feed(JobCancelRequested(job_id="a"))
    cell.feed(asks(B, 6))
    repeated = cell.orders()
    assert [(type(order), order.task_id) for order in repeated] == [
        (SetCores, A),
        (SetCores, B),
        (StopTask, A),
    ]
    assert isinstance(repeated[0], SetCores)
    assert isinstance(repeated[1], SetCores)
    assert not set(repeated[0].cores) & set(repeated[1].cores)
    assert orders_of(cell.state, TWO_CORES, first) == repeated[:1], "also where the state has run ahead"


def test_a_cancelled_task_gets_no_cap_and_is_not_asked_to_save(cell: CellDriver) -> None:
    """What nobody else waits for."""
    cell.feed(
        ThrottleProposed(
            proposal_id="t", proposer="guard", reason="x", task_id=A, memory_bandwidth_percent=50
        )
    )
    cell.feed(JobCancelRequested(job_id="a"))
    assert [type(order) for order in cell.orders()] == [StopTask]


def test_the_same_cores_again_decide_nothing(cell: CellDriver) -> None:
    """A proposer repeats itself: it is answered, and no node hears of it."""
    assert kinds(cell.feed(asks(A, 4))) == ["cores.proposed", "proposal.answered"]
    assert cell.orders() == []


def test_bandwidth_is_capped_where_the_node_can_and_refused_elsewhere(cell: CellDriver) -> None:
    """CODA throttles a CPU job whose memory traffic slows a GPU job; most machines have no resctrl."""
    throttle = ThrottleProposed(
        proposal_id="t", proposer="guard", task_id=A, memory_bandwidth_percent=40, reason="noisy"
    )
    refused = cell.feed(throttle).facts[-1]
    assert isinstance(refused, ProposalAnswered)
    assert (refused.reason, refused.detail) == (
        "unsupported",
        "n1 cannot cap memory bandwidth: it has neither resctrl nor quotas of processor time that it can use",
    )
    able = msgspec.structs.replace(
        node_spec("n2", cores=8), isolation=Isolation(exits="pid_namespace", files=True, bandwidth="resctrl")
    )
    cell.join(able)
    cell.submit("b", need=estimate(0, cores=5))
    cell.start("b")
    assert cell.job("b").tasks[B].place.node_id == "n2"
    step = cell.feed(msgspec.structs.replace(throttle, proposal_id="t2", task_id=B))
    assert kinds(step) == ["throttle.proposed", "bandwidth.decided", "proposal.answered"]
    assert isinstance(step.facts[1], BandwidthDecided)
    assert cell.orders() == [
        SetBandwidth(token=cell.state.seq, node_id="n2", task_id=B, memory_bandwidth_percent=40)
    ]
    token = cell.state.seq
    done = TaskAdjusted(
        node_id="n2",
        task_id=B,
        token=cell.job("b").token,
        order_token=token,
        what="memory_bandwidth",
        enforced="resctrl",
    )
    cell.feed(done)
    assert cell.orders() == []
    lifted = msgspec.structs.replace(throttle, proposal_id="t3", task_id=B, memory_bandwidth_percent=None)
    cell.feed(lifted)
    assert [order.memory_bandwidth_percent for order in cell.orders() if isinstance(order, SetBandwidth)] == [
        None
    ]


def test_a_snapshot_in_between_changes_nothing(cell: CellDriver) -> None:
    """A placer takes over from a snapshot with an order that is not answered: it repeats it as the first one
    would."""
    cell.feed(asks(A, 2))
    state = load(dump(cell.state))
    assert state.jobs["a"].tasks[A].cores.adjusted == cell.job("a").tasks[A].cores.adjusted
    assert state.nodes["n1"].free_core_mask == cell.state.nodes["n1"].free_core_mask


def test_a_restored_ledger_sets_again_what_it_gives(cell: CellDriver) -> None:
    """The lost records gave task `a` more cores, and its node has obeyed. The ledger gives those to others:
    it must take them back."""
    cell.submit("b", need=estimate(0, cores=2))
    accepted = LedgerAccepted(epoch=1, nodes_offset=0, reason="restored from a copy")
    token = token_of(1, cell.state.seq)
    evolve(cell.state, accepted)
    repeated = [order for order in outstanding(cell.state, ["n1"], token) if isinstance(order, SetCores)]
    assert repeated == [SetCores(token=token, node_id="n1", task_id=A, cores=(0, 1, 2, 3))]
    job = cell.job("b")
    started = TaskStarted(node_id="n1", task_id=B, token=job.token, pid=7, started_ms=1)
    evolve(cell.state, started)
    [late] = orders_of(cell.state, started, cell.state.seq)
    assert late == SetCores(token=token, node_id="n1", task_id=B, cores=(4, 5))
