"""Proof that a silent node's tasks are dead: a probe that stays unanswered for longer than their lease
(decision 40).

    suspect ─▶ NodeProbed ─▶ the probe is in the log ─▶ ProbeSent ─▶ timer, within one term ─▶ ProbeExpired ─▶
    NodeLeft

ProbeSent and NodeLeft come through the nodes' topic. A joining before NodeLeft in that topic is the node's
answer. What becomes of the dead node's tasks and jobs: `membership.py`, `waiting/retries.py`.
"""

from collections.abc import Container, Generator, Iterator

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.lease import LEASE_TIMER, proven_ms
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.nouns.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.model.schema.event import Event
from penstock_services.placer.core.common import start_deadline, stop_deadline, timer

OUTLIVED = "lease_outlived: its node is silent, and has ended what ran there when its lease ended"


def suspect(state: CellState, node_id: str, reason: str) -> Iterator[Event]:
    """No new task is placed there; the node is probed."""
    if state.nodes[node_id].status is NodeStatus.READY:
        yield external_events.NodeSuspected(node_id=node_id, reason=reason)
        yield from probe(state.nodes[node_id])


def unanswered(
    state: CellState, job: JobState, status: TaskStatus, order: str
) -> Generator[Event, None, bool]:
    """Nodes that did not answer an order about tasks of this job in time are suspect;
    whether there are any."""
    silent = {task.place.node_id for task in job.tasks.values() if task.status is status}
    for node_id in sorted(silent):
        yield from suspect(state, node_id, f"no answer to the {order} of {job.job_id}")
    return bool(silent)


def probe(node: NodeState) -> Iterator[Event]:
    """For a suspect node without a probe. A reporter of an earlier version would not understand it."""
    doubt = node.suspicion
    if node.leases and not node.leaving and doubt is not None and not doubt.probe:
        yield ledger_events.NodeProbed(node_id=node.spec.node_id)


def answers_due(state: CellState, node: NodeState, alive: Container[str]) -> Iterator[Event]:
    """A node that joins gets its unanswered orders again; of tasks that its joining does not name, each order
    has its full time again."""
    for job_id in dict.fromkeys(job_id for task_id, job_id in node.tasks.items() if task_id not in alive):
        job = state.jobs[job_id]
        if job.status is JobStatus.LAUNCHING and timer_id(job_id, "launch_timeout") not in state.timers:
            yield start_deadline(state, job)
        elif job.status is JobStatus.STOPPING and timer_id(job_id, "stop_timeout") not in state.timers:
            yield from stop_deadline(state, job)


def sent(state: CellState, node_id: str) -> Iterator[Event]:
    """The probe is in the log: its time begins."""
    due_ms = proven_ms(state.nodes[node_id], state)
    if due_ms is not None:
        yield timer(state, node_id, LEASE_TIMER, due_ms - state.now_ms)


def due(state: CellState, node_id: str) -> Iterator[Event]:
    """The timer fired. A timer of an earlier term proves nothing:
    between terms a log's clock may have stepped."""
    node = state.nodes.get(node_id)
    if node is None or node.suspicion is None or node.status is not NodeStatus.SUSPECT or node.leaving:
        return
    yield from probe(node)
    due_ms = proven_ms(node, state)
    if due_ms is not None and state.now_ms >= due_ms and not node.suspicion.expired:
        yield ledger_events.ProbeExpired(node_id=node_id, probe=node.suspicion.probe)


def awaits_answer(node: NodeState) -> bool:
    """Whether only a joining counts as a sign of life:
    other reports may have been sent before its silence."""
    return node.suspicion is not None and bool(node.suspicion.probe)
