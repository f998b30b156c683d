"""Adjustments of tasks: cores and memory bandwidth. The row has the desired state before it is applied, and
the answer after it.

An order older than the last applied one changes nothing (`Adjusted.token`, one per kind). An order that comes
before its task's program runs is applied when it does; a repeated start has its cores already. An unanswered
order is applied again after a restart.
"""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import SetBandwidth, SetCores
from penstock_services.node_reporter.core.actions import CapBandwidth, Decision, Emit, Note, SetAffinity
from penstock_services.node_reporter.core.inputs import Done
from penstock_services.node_reporter.core.state import Adjusted, NodeState, Put, Status, Task

MAX_DETAIL_CHARS = 1_000  # ShortText holds 1,024


def adjust(state: NodeState, order: SetCores | SetBandwidth) -> Iterator[Decision]:
    """Stores and applies a new order; a repeat is answered as before, or applied again where there is no
    answer yet."""
    task = state.tasks.get(order.task_id)
    if task is None or task.status is Status.STOPPING or order.token < task.token:
        yield Note(f"{order.task_id}: {order.TYPE} {order.token} finds no running task; ignored")
        return
    known = task.cores if isinstance(order, SetCores) else task.bandwidth
    if known is not None and order.token < known.token:
        yield Note(f"{order.task_id}: {order.TYPE} {order.token} is older than {known.token}; ignored")
        return
    if known is None or order.token > known.token:
        task = _desired(state, task, order)
        yield Put(task)
    for _, found, act in _asked(task, order.token):
        if found.answer is not None:
            yield Emit(found.answer, task.context)
        elif task.status is Status.RUNNING:
            yield act


def unconfirmed(tasks: Iterable[Task]) -> Iterator[Decision]:
    """Applies the unconfirmed desired states of these tasks, in the order of the decisions: tasks that give
    up cores come before tasks that get them."""
    asked = [each for task in tasks if task.status is Status.RUNNING for each in _asked(task)]
    yield from (act for _, found, act in sorted(asked, key=lambda each: each[0]) if found.answer is None)


def _asked(task: Task, token: int | None = None) -> Iterator[tuple[int, Adjusted, Decision]]:
    """Token, desired state and action of each kind, or of the one with this token."""
    if task.cores is not None and task.order is not None and token in (None, task.cores.token):
        percent = None if task.bandwidth is None else task.bandwidth.percent
        act: Decision = SetAffinity(
            task.task_id, task.token, task.cores.token, task.order.place.cores, percent
        )
        yield task.cores.token, task.cores, act
    if task.bandwidth is not None and token in (None, task.bandwidth.token):
        act = CapBandwidth(task.task_id, task.token, task.bandwidth.token, task.bandwidth.percent)
        yield task.bandwidth.token, task.bandwidth, act


def done(state: NodeState, given: Done) -> Iterator[Decision]:
    """The shell has set it and read it back, or could not. Not reported where a newer order, or the task's
    end, has come meanwhile."""
    task = state.tasks.get(given.task_id)
    if task is None or task.token != given.token:
        return
    known = task.cores if given.what == "cores" else task.bandwidth
    if known is None or known.token != given.order_token or known.answer is not None:
        return
    answer = TaskAdjusted(
        node_id=state.node_id,
        task_id=task.task_id,
        token=task.token,
        order_token=given.order_token,
        what=given.what,
        enforced=given.enforced,
        detail=given.detail[:MAX_DETAIL_CHARS],
    )
    known = replace(known, answer=answer)
    yield Put(replace(task, cores=known) if given.what == "cores" else replace(task, bandwidth=known))
    yield Emit(answer, task.context)


def _desired(state: NodeState, task: Task, order: SetCores | SetBandwidth) -> Task:
    """The task with the state that this order requests; where the node has no such cores only the answer."""
    if isinstance(order, SetBandwidth):
        return replace(task, bandwidth=Adjusted(order.token, order.memory_bandwidth_percent))
    assert task.order is not None
    missing = [core for core in order.cores if core >= state.cores]
    if not missing:
        place = replace(task.order.place, cores=order.cores)
        return replace(task, order=replace(task.order, place=place), cores=Adjusted(order.token))
    detail = f"not on this node: cores {', '.join(map(str, missing))}; it has {state.cores}"
    answer = TaskAdjusted(
        node_id=state.node_id,
        task_id=task.task_id,
        token=task.token,
        order_token=order.token,
        what="cores",
        enforced="",
        detail=detail[:MAX_DETAIL_CHARS],
    )
    return replace(task, cores=Adjusted(order.token, answer=answer))
