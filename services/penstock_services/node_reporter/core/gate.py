"""Gate of a prelaunched task (`StartTask.prelaunch`): it launches while other tasks live on its GPUs, and
gets them when these are proven dead.

Its process runs up to the gate, which is a lock that its shim holds (`penstock.sdk.gate`); the start is
reported when the gate opens. At most one task is gated on a GPU, and later orders for that GPU wait for it.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from penstock_services.node_reporter.core.actions import OpenGate
from penstock_services.node_reporter.core.gpu_shares import fits
from penstock_services.node_reporter.core.state import LIVE, NodeState, Put, Status, Task, in_order


def launches(state: NodeState, task: Task) -> bool:
    """Whether a task that has to wait for its GPUs may launch meanwhile: only if live tasks hold them, and no
    other task waits."""
    waiting = (other for other in state.tasks.values() if other.gated or other.status is Status.WAITING)
    return task.order is not None and task.order.prelaunch and fits(waiting, task)


def opened(state: NodeState, at_ms: int) -> Iterator[Put]:
    """Tasks that get their GPUs, since another task is proven dead at this time."""
    for task in in_order([task for task in state.tasks.values() if task.gated]):
        if task.status not in LIVE or task.status is Status.STOPPING:
            continue
        before = [
            other
            for other in state.tasks.values()
            if other is not task and (other.token < task.token or (other.status in LIVE and not other.gated))
        ]
        if fits(before, task):
            yield Put(replace(task, gated=False, opened_ms=at_ms))


def open_again(state: NodeState) -> Iterator[OpenGate]:
    """For a reporter that has just started: the one before may have died between recording the opening and
    opening the gate."""
    for task in state.live():
        if task.opened_ms is not None and task.started_ms is not None:
            yield OpenGate(task.task_id, task.token)
