"""Where a placed attempt gets the checkpoint of its job from."""

from penstock.ledger.checkpoints import Checkpoint
from penstock.ledger.job_state import JobState
from penstock.ledger.node_state import NodeState
from penstock.ledger.state import CellState
from penstock.model.transitions import NodeStatus


def resumed(state: CellState, job: JobState) -> Checkpoint | None:
    """What every task of the attempt finds where it starts, or fetches before: all of a gang go on at one checkpoint, or begin anew
    together."""
    found = job.checkpoint
    if found is None or not found.path:
        return None
    if found.shared or all(task.place.node_id == found.node_id for task in job.tasks.values()):
        return found
    return None if source(state, job) is None else found


def source(state: CellState, job: JobState) -> NodeState | None:
    """The node from which the attempt's task fetches it. None: it need not, or cannot.

    Ideal: gangs fetch, too. Departure: jobs of one task alone. Members of a gang must go on at the same checkpoint, and where one
    of them cannot fetch it the others would have to know before they start.
    """
    found = job.checkpoint
    if found is None or not found.path or found.shared or len(job.tasks) != 1:
        return None
    (task,) = job.tasks.values()
    node, own = state.nodes.get(found.node_id), state.nodes.get(task.place.node_id)
    if node is None or own is None or node is own or node.status is NodeStatus.GONE:
        return None
    serves = node.spec.logs is not None and node.public_key is not None and own.public_key is not None
    return node if serves else None
