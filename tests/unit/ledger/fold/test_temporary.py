"""Everything that a service takes for a time ends without it (LAW 7): throttles and probes, however their
service dies."""

import pytest

from penstock.ledger.fold.evolve import begin
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.adjustments import ADJUSTED_FOR_MS, RENEWED_AFTER_MS
from penstock.model.inputs.external_events import NodeJoined, NodeSuspected, RunningTask
from penstock.model.nouns.nodes import BandwidthCap
from penstock.model.nouns.settings import Contention
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock.scheduling.acting.guard import PROPOSER
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.placer.core.step import PlacerCore
from tests.support.cluster.guarded_cell import GuardedCell, node

A, HOG = "a.1.w0", "hog.1.w0"
DAY_MS = 86_400_000


def contended(caps: BandwidthCap) -> GuardedCell:
    """A training, and a job without GPUs that the guard has slowed for it."""
    cell = GuardedCell(Contention(search="none"))
    cell.join(node(caps=caps))
    cell.runs("a", cores=4)
    cell.runs("hog", gpus=0, cores=16)
    for step_ms in (*5 * [100.0], 150.0, 105.0, 105.0):
        cell.passes()
        short = (
            step_ms > 100.0
        )  # as long as the training runs beside it; in the end its speed is nearly its own
        if caps == "resctrl":
            cell.sends("n1", memory_bandwidth_percent=90.0 if short else 20.0)
        else:
            cell.sends("n1", A, cpu_stalled_percent=60.0 if short else 2.0)
        cell.sends("n1", A, step_ms=step_ms)
        cell.acts()
    assert slowed(cell)
    return cell


def alive(cell: GuardedCell) -> tuple[RunningTask, ...]:
    """Both tasks, as their node lists them when it joins."""
    return tuple(
        RunningTask(task_id=task_id, token=cell.job(task_id.split(".")[0]).token) for task_id in (A, HOG)
    )


def slowed(cell: GuardedCell) -> bool:
    task = cell.job("hog").tasks[HOG]
    return task.memory_bandwidth_percent is not None or cell.cores(HOG) < 16


@pytest.mark.parametrize("caps", ["resctrl", "none"])
def test_a_throttle_ends_though_its_guard_has_died(caps: BandwidthCap) -> None:
    """The guard's machine burns down; the training ends a moment later, and nobody is left who would lift the
    throttle."""
    cell = contended(caps)
    cell.exit(A)
    began_ms = cell.now_ms
    while slowed(cell):
        cell.at(cell.now_ms - 1_000_000 + 60_000)
        assert cell.now_ms <= began_ms + ADJUSTED_FOR_MS
    adjusted = cell.job("hog").tasks[HOG]
    latest = adjusted.bandwidth_adjusted if caps == "resctrl" else adjusted.cores.adjusted
    assert latest is not None
    assert latest.reason == f"{PROPOSER} has not renewed it for 15 minutes"
    assert not cell.state.timers


@pytest.mark.parametrize("caps", ["resctrl", "none"])
def test_a_guard_that_lives_renews_a_throttle_that_is_needed(caps: BandwidthCap) -> None:
    """Two hours of contention: the telemetry of a node is quiet, since nothing changes. The throttle stays,
    and counts once."""
    cell = contended(caps)
    throttles, proposals = cell.job("hog").adjustments.throttles, len(cell.proposals)
    for _ in range(120):
        cell.passes(60_000)
        due = cell.guard.due_ms(cell.state)
        if due is not None and due <= cell.now_ms:
            cell.acts()
        assert slowed(cell)
    assert cell.job("hog").adjustments.throttles == throttles
    assert len(cell.proposals) - proposals == 120 * 60_000 // RENEWED_AFTER_MS - 1


def test_a_guard_that_starts_again_renews_it_too() -> None:
    cell = contended("resctrl")
    cell.guard = ContentionGuard()
    cell.acts()
    for _ in range(20):
        cell.passes(60_000)
        cell.acts()
        assert slowed(cell)


def test_the_same_throttle_proposed_at_once_is_no_news() -> None:
    """A proposer that repeats itself fills neither the ledger nor the orders of a node."""
    cell = contended("resctrl")
    again = ThrottleProposed(
        proposal_id="again",
        proposer=PROPOSER,
        task_id=HOG,
        memory_bandwidth_percent=cell.job("hog").tasks[HOG].memory_bandwidth_percent,
        reason="once more",
        cause="contention",
    )
    assert [fact.TYPE for fact in cell.feed(again).facts] == [
        "penstock.throttle.proposed",
        "penstock.proposal.answered",
    ]


def test_a_probe_that_nobody_ends_gives_the_cores_back() -> None:
    """The guard dies in the middle of a search: fewer cores on trial, then more on loan."""
    for probed in (2, 6):
        cell = GuardedCell(Contention())
        cell.join(node())
        cell.runs("a", cores=4)
        probe = CoresProposed(
            proposal_id="p", proposer=PROPOSER, task_id=A, cores=probed, reason="a probe", cause="probe"
        )
        cell.feed(probe)
        assert cell.cores(A) == probed
        cell.at(cell.now_ms - 1_000_000 + ADJUSTED_FOR_MS)
        assert cell.cores(A) == 4
        assert not cell.state.timers


def test_on_a_silent_node_it_is_tried_again_when_the_node_is_back() -> None:
    cell = contended("resctrl")
    cell.feed(NodeSuspected(node_id="n1", reason="silent"))
    cell.at(cell.now_ms - 1_000_000 + ADJUSTED_FOR_MS)
    assert slowed(cell), "no order reaches it"
    cell.join(node(caps="resctrl"), tasks=alive(cell))
    cell.at(cell.now_ms - 1_000_000 + ADJUSTED_FOR_MS)
    assert not slowed(cell)


def test_a_throttle_of_an_older_ledger_gets_an_end_when_its_node_joins() -> None:
    """A ledger of before, or one that has lost records: slowed, and no timer says until when. Nodes join
    again."""
    cell = contended("resctrl")
    state = load(dump(cell.state))
    state.timers.clear()
    core = PlacerCore(state)
    begin(state, state.seq + 1, cell.now_ms + DAY_MS, 1)
    joined = NodeJoined(node=node(caps="resctrl"), tasks=alive(cell))
    assert [fact.TYPE for fact in core.step(joined, "join").facts] == [
        "penstock.node.joined",
        "penstock.timer.set",
    ]


def test_an_operators_word_does_not_end() -> None:
    """Cores and caps that a person has set are no measure of a service."""
    cell = GuardedCell(Contention(search="none"))
    cell.join(node(caps="resctrl"))
    cell.runs("hog", gpus=0, cores=16)
    cell.feed(
        ThrottleProposed(
            proposal_id="t",
            proposer="gateway",
            by="ada",
            task_id=HOG,
            memory_bandwidth_percent=50,
            reason="measured by hand",
        )
    )
    assert not cell.state.timers
    cell.at(cell.now_ms - 1_000_000 + DAY_MS)
    assert cell.job("hog").tasks[HOG].memory_bandwidth_percent == 50
