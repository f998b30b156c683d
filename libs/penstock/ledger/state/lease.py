"""Failure detection by leases and probes, as folded state: which lease a node has, and how long a probe may
stay unanswered.

Decision 40 gives the proof. The answer to a probe is a joining.
"""

from typing import Literal

from msgspec.structs import replace

from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.node.suspicion import Suspicion
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import NodeProbed, ProbeExpired
from penstock.model.inputs.external_events import ProbeSent

LEASE_TIMER: Literal["lease"] = "lease"
MAX_NODE_ID_CHARS = 128 - len(f":{LEASE_TIMER}")
"""A node with a longer id has no timer: it is never proven dead by its lease."""
MARGIN = 4  # a quarter of the lease; see `wait_ms`


def lease_of(node: NodeState, state: CellState) -> int | None:
    """The longest lease of the tasks that may run on this node, ms; None: a task runs without a lease, or
    this is not known."""
    if not node.leases or node.epoch != state.epoch or not has_timer(node):
        return None
    leases = [state.jobs[job_id].tasks[task_id].lease_ms for task_id, job_id in node.tasks.items()]
    leases = leases or [state.settings.lease_ms]
    return max(leases) if all(leases) else None


def has_timer(node: NodeState) -> bool:
    """Whether a timer can be named after the node."""
    return len(node.spec.node_id) <= MAX_NODE_ID_CHARS


def timer_id(node: NodeState) -> str:
    return f"{node.spec.node_id}:{LEASE_TIMER}"


def wait_ms(lease_ms: int) -> int:
    """How long a probe must stay unanswered, by the ledger's time, until the node's lease has certainly ended
    by the node's own clock.

    The margin covers a slow clock of the node and a fast one of the placer, each by 8.3 %, the largest
    correction rate of time servers (chrony's `maxslewrate`): a factor of 1.183, with the thousandth of
    `penstock.clock.SLEW`. The rest, 6.7 % of the lease, is for ending processes.
    """
    return lease_ms + lease_ms // MARGIN


def proven_ms(node: NodeState, state: CellState) -> int | None:
    """Ledger time at which the node's tasks will be proven dead, if it stays silent;
    None: not known, or never."""
    lease_ms, doubt = lease_of(node, state), node.suspicion
    if doubt is None or lease_ms is None or not doubt.sent_ms or doubt.sent_term != state.term:
        return None
    return doubt.sent_ms + wait_ms(lease_ms)


def suspected(state: CellState, node: NodeState, reason: str) -> None:
    node.suspicion = Suspicion(reason, state.now_ms)


def cleared(state: CellState, node: NodeState) -> None:
    """The node has answered, or is proven gone."""
    node.suspicion = None
    state.timers.pop(timer_id(node), None)


def node_probed(state: CellState, fact: NodeProbed) -> None:
    node = state.nodes[fact.node_id]
    if node.suspicion is not None:
        doubt = node.suspicion
        node.suspicion = Suspicion(doubt.reason, doubt.at_ms, state.token)


def probe_sent(state: CellState, fact: ProbeSent) -> None:
    node = state.nodes[fact.node_id]
    if node.suspicion is not None:
        node.suspicion = replace(node.suspicion, sent_ms=state.now_ms, sent_term=state.term)


def probe_expired(state: CellState, fact: ProbeExpired) -> None:
    node = state.nodes[fact.node_id]
    if node.suspicion is not None:
        node.suspicion = replace(node.suspicion, expired=True)
