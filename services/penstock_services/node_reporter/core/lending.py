"""Idle cores of a node: a task whose job asked for no number of cores uses its share of them until somebody
needs them.

What the placer gives (`place.cores`) stays the task's own. A core that no task on this node was given does
nothing; so it is lent, and taken back when a task is given it: affinity and cpuset follow each start and each
end. Tasks with step times, or with cores that were decided since their start, keep to their own: the search
for their cores compares speeds (decision 99).
"""

from collections.abc import Iterator

from msgspec.structs import replace

from penstock.model.decisions.orders import StartTask
from penstock.model.nouns.types import WHOLE_GPU
from penstock_services.node_reporter.core.actions import Decision, SetAffinity, Spawn
from penstock_services.node_reporter.core.inputs import Stepped
from penstock_services.node_reporter.core.state import NodeState, Put, Status, Task, in_order


def widened(state: NodeState, order: StartTask) -> Iterator[Decision]:
    """Spawns the task with the cores that are lent to it: its thread pools have as many threads."""
    task = state.tasks[order.task_id]
    more = _shares(state, _borrowers(state)).get(task.task_id, ())
    if more:
        yield Put(replace(task, lent=more))
        order = replace(order, place=replace(order.place, cores=(*order.place.cores, *more)))
    yield Spawn(order)


def lent(state: NodeState) -> Iterator[Decision]:
    """Brings the cores of running tasks up to date with what is idle now;
    nothing where that is so already."""
    borrowers = _borrowers(state)
    shares = _shares(state, borrowers)
    for task in borrowers:
        more = shares.get(task.task_id, ())
        if task.status is not Status.RUNNING or task.lent == more or task.order is None:
            continue
        yield Put(replace(task, lent=more))
        percent = None if task.bandwidth is None else task.bandwidth.percent
        yield SetAffinity(task.task_id, task.token, 0, (*task.order.place.cores, *more), percent)


def stepped(state: NodeState, given: Stepped) -> Iterator[Decision]:
    task = state.tasks.get(given.task_id)
    if task is not None and task.token == given.token and not task.steps:
        yield Put(replace(task, steps=True))


def _borrowers(state: NodeState) -> list[Task]:
    """Tasks whose job asked for no number of cores."""
    return [task for task in state.tasks.values() if task.order is not None and task.order.spare_cores]


def _shares(state: NodeState, borrowers: list[Task]) -> dict[str, tuple[int, ...]]:
    """Task → idle cores that it may use: each every n-th of them, up to its fair share of the node."""
    takers = in_order([task for task in borrowers if _borrows(task)])
    if not takers:
        return {}
    given = {core for task in state.tasks.values() if task.order for core in task.order.place.cores}
    idle = [core for core in range(state.cores) if core not in given]
    return {
        task.task_id: tuple(idle[number :: len(takers)][: _most(state, task)])
        for number, task in enumerate(takers)
    }


def _borrows(task: Task) -> bool:
    """Whether it may use more than its own cores."""
    order = task.order
    if order is None or not order.place.cores or order.companions:
        return False
    if task.gated and task.opened_ms is None:  # it launches on the cores of the task before it
        return False
    return task.status in (Status.STARTING, Status.RUNNING) and task.cores is None and not task.steps


def _most(state: NodeState, task: Task) -> int:
    """Cores beyond its own: up to the node's in proportion to its GPUs; without GPUs all that are idle."""
    assert task.order is not None
    if not task.gpus:
        return state.cores
    fair = state.cores * len(task.gpus) * task.share_milli // (len(state.gpus) * WHOLE_GPU)
    return max(0, fair - len(task.order.place.cores))
