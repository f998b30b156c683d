"""Sharing of GPUs between tasks: which tasks exclude each other, whether one more fits beside the present
ones, and the memory limit of each.

Parts of GPUs add up. Whole GPUs are shared by companions alone, tasks of one group in the ledger. The order
of the later one names the earlier one, which runs on and gets no message about it; so a task's companions are
those named in its order, and those whose orders name it.
"""

from collections.abc import Iterable

from penstock.model.nouns.types import WHOLE_GPU
from penstock_services.node_reporter.core.state import LIVE, NodeState, Task


def companions(one: Task, other: Task) -> bool:
    """Whether they share their GPUs as members of a group."""
    return _names(one, other) or _names(other, one)


def _names(one: Task, other: Task) -> bool:
    return one.order is not None and any(
        known.task_id == other.task_id and known.token == other.token for known in one.order.companions
    )


def exclude(one: Task, other: Task) -> bool:
    """Whether the cell cannot want both at once: they have a GPU in common, one of them has it whole, and
    they are no companions."""
    if not set(one.gpus) & set(other.gpus) or WHOLE_GPU not in (one.share_milli, other.share_milli):
        return False
    return not companions(one, other)


def fits(others: Iterable[Task], task: Task) -> bool:
    """Whether each of its GPUs has enough left beside the others."""
    own = set(task.gpus)
    met = [other for other in others if not own.isdisjoint(other.gpus) and not companions(other, task)]
    if not met:
        return True
    left = dict.fromkeys(own, WHOLE_GPU - task.share_milli)
    for other in met:
        for gpu in own.intersection(other.gpus):
            left[gpu] -= other.share_milli
    return all(milli >= 0 for milli in left.values())


def promised_mib(state: NodeState, task_id: str, token: int) -> int:
    """GPU memory that the task may hold on each of its GPUs now; 0: it has them alone, or no amount was
    promised.

    A member of a group has its GPUs alone until a companion's program runs, and again when all companions are
    proven dead.
    """
    task = state.tasks.get(task_id)
    if task is None or task.token != token or task.order is None or not task.gpus:
        return 0
    alone = task.share_milli == WHOLE_GPU and not any(
        _runs_beside(other, task) for other in state.tasks.values()
    )
    return 0 if alone else task.order.place.gpu_memory_mib


def _runs_beside(other: Task, task: Task) -> bool:
    if other.status not in LIVE or other.started_ms is None or other.gated:
        return False
    return not set(task.gpus).isdisjoint(other.gpus) and companions(other, task)
