"""Sharing GPUs between tasks: which exclude each other, and whether one more fits beside those that are there."""

from collections.abc import Iterable

from penstock.model.types import WHOLE_GPU
from penstock_services.node_reporter.core.state import Task


def exclude(one: Task, other: Task) -> bool:
    """Whether the cell cannot want both at once: they meet on a GPU, and one of them has it whole."""
    return bool(set(one.gpus) & set(other.gpus)) and WHOLE_GPU in (one.share_milli, other.share_milli)


def fits(others: Iterable[Task], task: Task) -> bool:
    """Whether each of its GPUs has so much left beside the others."""
    own = set(task.gpus)
    met = [other for other in others if not own.isdisjoint(other.gpus)]
    if not met:
        return True
    left = dict.fromkeys(own, WHOLE_GPU - task.share_milli)
    for other in met:
        for gpu in own.intersection(other.gpus):
            left[gpu] -= other.share_milli
    return all(milli >= 0 for milli in left.values())
