"""Crash recovery of a node from its disk and the process table. Used after every start.

1. Tasks of an older boot are dead; others are in the state of their records: started, ended, or never begun.
2. Living ones are watched again. (pid, start time and token must agree.)
3. The reporter's own processes that belong to no task are killed and proven dead.
4. Adjustments of running tasks that are not known to be applied are applied, before anything starts.
5. Only then does the node join, with all living tasks.
"""

import logging

from penstock.clock import wall_ms
from penstock_services.node_reporter.core.inputs import Gone, Outcome, Resumed, Spawned
from penstock_services.node_reporter.core.state import Status, Task
from penstock_services.node_reporter.shell.node import Node
from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.process.exits import lost_outcome, outcome_of

logger = logging.getLogger(__name__)


def recover(node: Node) -> None:
    """Brings the node's tasks into line with the machine. Raises `JournalFailed` or `Immortal`."""
    known: set[int] = {node.launcher.pid}
    for task in node.state.waiting():
        _give_up_if_impossible(node, task)
    for task in node.state.live():
        known |= _recover_task(node, task)
    orphans = node.host.end_orphans(known)
    if orphans:
        logger.warning("%d processes of unknown tasks were ended", orphans)
    node.feed([Resumed()], durable=False)
    for task in node.state.live():
        _resume(node, task)


def _give_up_if_impossible(node: Node, task: Task) -> bool:
    """Whether a task that has not begun never can, since its boot is over or a GPU of it is missing."""
    missing = [gpu for gpu in task.gpus if gpu not in node.state.gpus]
    if task.boot_id != node.spec.boot_id:
        why = "the node was booted anew before it could start"
    elif not node.lease.holds(task.order):
        why = "its lease ended before it could start"
    elif missing:
        why = f"before it could start, its GPU was gone: {', '.join(missing)}"
    else:
        return False
    outcome = Outcome(wall_ms(), lost=why)
    node.feed([Gone(task.task_id, task.token, outcome)], durable=True)
    return True


def _recover_task(node: Node, task: Task) -> set[int]:
    """Determines the state of one task; returns its shim's pid when it lives."""
    key = (task.task_id, task.token)
    started = node.host.started(key)
    outcome = outcome_of(node.host.exit(key), task.order)
    if outcome is None and task.boot_id != node.spec.boot_id:
        outcome = Outcome(wall_ms(), lost="the node was booted anew while it ran")
    elif outcome is None and started is None and task.status is not Status.STARTING:
        outcome = _lost(node, task)
    elif outcome is None and started is not None:
        if node.launcher.attach(key, started.shim, started.shim_start):
            _feed_started(node, task, started)
            node.follow(key)
            return {started.shim}
        outcome = outcome_of(node.host.exit(key), task.order) or _lost(node, task)
    if outcome is not None:
        if started is not None and not outcome.failure:
            _feed_started(node, task, started)
        node.feed([Gone(*key, outcome)], durable=False)
    return set()


def _feed_started(node: Node, task: Task, started: Started) -> None:
    if task.status is Status.STARTING:
        given = Spawned(task.task_id, task.token, started.pid, started.started_ms, wall_ms())
        node.feed([given], durable=False)


def _lost(node: Node, task: Task) -> Outcome:
    """Its shim is gone without an exit record: its remaining processes are ended first."""
    return lost_outcome(node.host.end_task((task.task_id, task.token)), wall_ms())


def _resume(node: Node, task: Task) -> None:
    """A start that had not begun begins now; a stop continues."""
    key = (task.task_id, task.token)
    if task.status is Status.STARTING and node.host.started(key) is None:
        assert task.order is not None
        if not _give_up_if_impossible(node, task):
            node.start_again(task.order)
    elif task.status is Status.STOPPING and task.stop_grace_ms is not None:
        left_ms = max(0, (task.kill_at_ms or 0) - wall_ms())
        node.stop_again(key, min(left_ms, task.stop_grace_ms), told=not task.awaits_chief)
