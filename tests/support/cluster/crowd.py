"""Shares of cores, recounted from the whole state."""

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import TaskStatus


def share_of(state: CellState, job: JobState) -> float:
    """The job's cores over those of all running tasks on its most crowded node, as `Crowding` defines them.
    O(tasks of the cell)."""
    own: dict[str, int] = {}
    busy: dict[str, int] = {}
    for other in state.jobs.values():
        for task in other.tasks.values():
            node_id, cores = task.place.node_id, max(1, len(task.place.cores))
            if other is job:
                own[node_id] = own.get(node_id, 0) + cores
            if task.status is TaskStatus.RUNNING:
                busy[node_id] = busy.get(node_id, 0) + cores
    return min(cores / max(cores, busy.get(node_id, 0)) for node_id, cores in own.items())
