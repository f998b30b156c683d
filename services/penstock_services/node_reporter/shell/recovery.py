"""From what is on disk and in /proc to a node that may go on: used after every start and every failure.

1. Tasks of an older boot are dead; others are where their folders say: started, ended, or never begun.
2. Living ones are watched again. (pid, start time and token must agree.)
3. Processes of ours that no task accounts for are killed and proven dead.
4. Only then does the node join, with everything that lives.
"""

import logging
import os

from penstock.clock import wall_ms
from penstock_services.node_reporter.core import machine
from penstock_services.node_reporter.core.state import Status, Task
from penstock_services.node_reporter.shell import processes
from penstock_services.node_reporter.shell.exits import lost_outcome, outcome_of, sweep_task
from penstock_services.node_reporter.shell.node import Node
from penstock_services.node_reporter.shell.spawner import read_json, task_folder

logger = logging.getLogger(__name__)


def recover(node: Node) -> None:
    """Brings the node's tasks into line with the machine. Raises `JournalFailed` or `Immortal`."""
    known: set[int] = {node.spawner.launcher_pid}
    for task in node.state.waiting():
        if task.boot_id != node.spec.boot_id:
            outcome = machine.Outcome(wall_ms(), lost="the node was booted anew before it could start")
            node.feed([machine.Gone(task.task_id, task.token, outcome)], durable=True)
    for task in node.state.live():
        known |= _recover_task(node, task)
    orphans = _kill_orphans(node, known)
    if orphans:
        logger.warning("%d processes of unknown tasks were ended", orphans)
    for task in node.state.live():
        _resume(node, task)


def _recover_task(node: Node, task: Task) -> set[int]:
    """Learns what became of one task; returns its shim's pid when it lives."""
    key = (task.task_id, task.token)
    folder = task_folder(node.options.state_dir, *key)
    started = read_json(folder / "started.json")
    outcome = outcome_of(folder, task.order)
    if started is not None and (started["task_id"], started["token"]) != key:
        started = None
    if outcome is None and task.boot_id != node.spec.boot_id:
        outcome = machine.Outcome(wall_ms(), lost="the node was booted anew while it ran")
    elif outcome is None and started is None and task.status is not Status.STARTING:
        outcome = _lost(node, task)
    elif outcome is None and started is not None:
        if node.spawner.attach(key, started["shim"], started["shim_start"]):
            _feed_started(node, task, started["pid"], started["started_ms"])
            node.follow(key)
            return {started["shim"]}
        outcome = outcome_of(folder, task.order) or _lost(node, task)
    if outcome is not None:
        if started is not None and not outcome.failure:
            _feed_started(node, task, started["pid"], started["started_ms"])
        node.feed([machine.Gone(*key, outcome)], durable=False)
    return set()


def _feed_started(node: Node, task: Task, pid: int, started_ms: int) -> None:
    if task.status is Status.STARTING:
        given = machine.Spawned(task.task_id, task.token, pid, started_ms, wall_ms())
        node.feed([given], durable=False)


def _lost(node: Node, task: Task) -> machine.Outcome:
    """Its shim is gone without a word: whatever is left of it is ended first."""
    key = (task.task_id, task.token)
    return lost_outcome(sweep_task(task_folder(node.options.state_dir, *key), node.marks, key), wall_ms())


def _kill_orphans(node: Node, known: set[int]) -> int:
    """Everything that carries our marks and neither is nor descends from something known; not our ancestors."""
    marks = node.marks.environment()
    spare = known | _ancestors(os.getpid())
    return processes.kill_all(
        lambda: processes.with_descendants(
            {pid for pid in processes.members(marks) if not _below(pid, known)}, spare
        )
    )


def _ancestors(pid: int) -> set[int]:
    found = {pid}
    while pid > 1:
        state = processes.fields(pid)
        if state is None:
            break
        pid = state[1]
        found.add(pid)
    return found


def _below(pid: int, known: set[int]) -> bool:
    """Whether a process is, or descends from, one of the known."""
    while pid > 1:
        if pid in known:
            return True
        found = processes.fields(pid)
        if found is None:
            return False
        pid = found[1]
    return False


def _resume(node: Node, task: Task) -> None:
    """A start that had not begun begins now; a stop goes on where it was."""
    folder = task_folder(node.options.state_dir, task.task_id, task.token)
    if task.status is Status.STARTING and read_json(folder / "started.json") is None:
        assert task.order is not None
        node.start_again(task.order)
    elif task.status is Status.STOPPING and task.stop_grace_ms is not None:
        left_ms = max(0, (task.kill_at_ms or 0) - wall_ms())
        node.stop_again((task.task_id, task.token), min(left_ms, task.stop_grace_ms))
