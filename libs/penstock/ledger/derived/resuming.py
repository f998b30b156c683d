"""Checkpoint source of a placed attempt: on its node, or fetched from another."""

from penstock.ledger.state.job.checkpoints import Checkpoint
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import NodeStatus


def resumed(state: CellState, job: JobState) -> Checkpoint | None:
    """The checkpoint that every task of the attempt finds where it starts, or fetches before: all tasks of a
    gang resume at the same checkpoint, or all start from zero."""
    found = job.saving.checkpoint
    if found is None or not found.path:
        return None
    if found.shared or all(task.place.node_id == found.node_id for task in job.tasks.values()):
        return found
    return None if source(state, job) is None else found


def source(state: CellState, job: JobState) -> NodeState | None:
    """The node from which the attempt's task fetches the checkpoint. None: it need not, or cannot.

    Ideal: gangs fetch, too. Departure: only jobs of one task fetch. Members of a gang must resume at the same
    checkpoint, and if one of them cannot fetch it, the others would have to be informed before they start.
    """
    found = job.saving.checkpoint
    if found is None or not found.path or found.shared or len(job.tasks) != 1:
        return None
    (task,) = job.tasks.values()
    node, own = state.nodes.get(found.node_id), state.nodes.get(task.place.node_id)
    if node is None or own is None or node is own or node.status is NodeStatus.GONE:
        return None
    return node if _serves(node) and own.public_key is not None else None


def only_home(state: CellState, job: JobState) -> str:
    """The one node on which the job can resume; empty: it has no checkpoint, or can resume elsewhere, too."""
    found = job.saving.checkpoint
    node = None if found is None or not found.path or found.shared else state.nodes.get(found.node_id)
    if node is None or node.status is NodeStatus.GONE:
        return ""
    alone = job.spec.workers + job.spec.parameter_servers == 1
    return "" if alone and _serves(node) else node.spec.node_id


def _serves(node: NodeState) -> bool:
    """Whether other nodes may fetch checkpoints from this one."""
    return node.spec.logs is not None and node.public_key is not None
