"""Stops of tasks, and requests to save: which task is told to end, and when.

In a gang that saves by the SDK rank 0 saves for all, and needs the other ranks up to the end of its
iteration. So they are told to end when rank 0 has ended, as this node sees or as an order says
(`StopTask.chief_ended`), and within their own grace.
"""

import signal
from collections.abc import Iterator

from msgspec.structs import replace

from penstock.model.decisions.orders import CheckpointTask, StartTask, StopTask
from penstock.model.inputs.external_events import TaskExited
from penstock.model.inputs.saves import SaveRefused
from penstock_services.node_reporter.core.actions import (
    AskToSave,
    Decision,
    Emit,
    KillAt,
    LookForSaver,
    Note,
    Signal,
)
from penstock_services.node_reporter.core.inputs import Drain, GraceOver, Unsaved
from penstock_services.node_reporter.core.state import Context, NodeState, Put, Status, Task

MAX_DETAIL_CHARS = 1_000  # ShortText holds 1,024
NOT_REGISTERED = (
    "no process of it has called penstock.sdk.checkpoint yet; call checkpoint(save, restore) before the "
    "training loop"
)
NOT_HANDLED = (
    "no process of it handles SIGUSR1; handle it, or save by penstock.sdk.checkpoint and `checkpoint: sdk`"
)


def stop_ordered(state: NodeState, order: StopTask, now_ms: int, context: Context) -> Iterator[Decision]:
    """Answers a stop order, also for a task that has ended or is not known."""
    task = state.find(order.task_id)
    if task is not None and order.token < task.token:
        yield Note(f"{order.task_id}: stop order {order.token} is older than {task.token}; ignored")
    elif task is not None and task.exited is not None and order.token == task.token:
        yield Emit(task.exited, task.context)
    elif task is None or task.status is Status.ENDED:
        if task is not None and task.exited is not None:  # exit of this start, or of a lost one
            yield Emit(task.exited, task.context)
        tombstone = Task(order.task_id, order.token, state.boot_id, Status.ENDED, context=context)
        yield from _never_start(tombstone, order.node_id, now_ms, "never started")
    else:
        waits = not order.chief_ended and _follows(task)
        yield from _stop(task, order.grace_ms, now_ms, order.reason, waits=waits)


def drain(state: NodeState, given: Drain) -> Iterator[Decision]:
    """Stops everything. A rank whose rank 0 is on another node still waits for it:
    that may be drained, too."""
    for task in (*state.waiting(), *state.live()):
        why = "the node is being drained"
        yield from _stop(task, given.grace_ms, given.now_ms, why, waits=_follows(task))


def _follows(task: Task) -> bool:
    """Whether rank 0, in another task, saves for it."""
    return task.order is not None and _by_sdk(task) and task.order.place.rank > 0


def _by_sdk(task: Task) -> bool:
    """Whether its job saves by the SDK: its saver registers."""
    return task.order is not None and task.order.checkpoint is not None


def _stop(task: Task, grace_ms: int, now_ms: int, reason: str, *, waits: bool) -> Iterator[Decision]:
    """Stops a waiting, starting, running or stopping task; a repeat may shorten the grace, never lengthen it.

    `waits`: for the end of rank 0.
    """
    if task.status is Status.WAITING:
        assert task.order is not None
        yield from _never_start(
            replace(task, order=None), task.order.node_id, now_ms, f"never started: {reason}"
        )
    elif task.status is Status.STARTING:
        # Its program may run already, or its start may hang: on a network file system, or in a large archive.
        grace_ms = min(grace_ms, grace_ms if task.stop_grace_ms is None else task.stop_grace_ms)
        yield Put(replace(task, stop_grace_ms=grace_ms))
        yield Signal(task.task_id, task.token, signal.SIGTERM)
        yield KillAt(task.task_id, task.token, now_ms + grace_ms)
    elif task.status is Status.RUNNING:
        yield from terminate(task, grace_ms, now_ms, waits=waits)
    else:
        if task.awaits_chief and not waits:
            task = replace(task, awaits_chief=False)
            yield from _tell(task)
        if now_ms + grace_ms < (task.kill_at_ms or 0):
            yield from terminate(task, grace_ms, now_ms, waits=task.awaits_chief)


def terminate(task: Task, grace_ms: int, now_ms: int, *, waits: bool) -> Iterator[Decision]:
    """The stop of a running or stopping task. `waits`: SIGTERM comes when rank 0 has ended."""
    kill_at_ms = now_ms + grace_ms
    task = replace(
        task, status=Status.STOPPING, stop_grace_ms=grace_ms, kill_at_ms=kill_at_ms, awaits_chief=waits
    )
    if _by_sdk(task) and not _follows(task):
        yield LookForSaver(task.task_id, task.token)
    if waits:
        yield Put(task)
    else:
        yield from _tell(task)
    yield KillAt(task.task_id, task.token, kill_at_ms)


def chief_gone(state: NodeState, order: StartTask) -> Iterator[Decision]:
    """A task of this order has ended: if it had rank 0, others of its gang here need not wait for it."""
    if order.place.rank == 0:
        for task in state.live():
            if task.awaits_chief and task.order is not None and _of_one_gang(task.order, order):
                yield from _tell(replace(task, awaits_chief=False))


def _of_one_gang(one: StartTask, other: StartTask) -> bool:
    return (one.job_id, one.token) == (other.job_id, other.token)


def _tell(task: Task) -> Iterator[Decision]:
    yield Put(task)
    yield Signal(task.task_id, task.token, signal.SIGTERM)


def _never_start(task: Task, node_id: str, now_ms: int, detail: str) -> Iterator[Decision]:
    """Leaves a tombstone: an older start order that comes later is refused."""
    exited = TaskExited(
        node_id=node_id,
        task_id=task.task_id,
        token=task.token,
        cause="stopped",
        started_ms=now_ms,
        exited_ms=now_ms,
        detail=detail[:MAX_DETAIL_CHARS],
    )
    yield Put(replace(task, status=Status.ENDED, exited=exited))
    yield Emit(exited, task.context)


def grace_over(state: NodeState, given: GraceOver) -> Iterator[Decision]:
    """SIGKILL, if the task is still being stopped."""
    task = state.tasks.get(given.task_id)
    if task is None or task.token != given.token:
        return
    if task.status is Status.STOPPING or (task.status is Status.STARTING and task.stop_grace_ms is not None):
        yield Signal(task.task_id, task.token, signal.SIGKILL)


def ask_to_save(state: NodeState, order: CheckpointTask) -> Iterator[Decision]:
    """Asks a running task to save."""
    task = state.tasks.get(order.task_id)
    if task is None or task.status is not Status.RUNNING or order.token < task.token:
        yield Note(f"{order.task_id}: {order.TYPE} {order.token} finds no running task; ignored")
        return
    yield AskToSave(task.task_id, task.token, order.token, _by_sdk(task))


def unsaved(state: NodeState, given: Unsaved) -> Iterator[Decision]:
    """Reports that nothing is saved, and why."""
    task = state.tasks.get(given.task_id)
    if task is None or task.token != given.token:
        return
    refused = SaveRefused(
        node_id=state.node_id,
        task_id=task.task_id,
        token=task.token,
        at_ms=given.at_ms,
        reason=NOT_REGISTERED if _by_sdk(task) else NOT_HANDLED,
    )
    yield Emit(refused, task.context, f"save_refused/{given.order_token}")
