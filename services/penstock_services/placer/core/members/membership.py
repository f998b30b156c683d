"""Decisions when nodes join, leave, change or are drained: lost tasks, freezing of the cell, and jobs that
may run now."""

from collections.abc import Iterator

from penstock.cluster.capacity import never_fits
from penstock.ledger.state.index import bits
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock.model.nouns.types import MAX_GANG_TASKS, MAX_TEXT
from penstock.model.schema.event import Event
from penstock_services.placer.core.common import continuation, stop
from penstock_services.placer.core.members import silent_nodes
from penstock_services.placer.core.waiting.retries import Attempts

MAX_NODES_PER_RECORD = 16  # whose departure is accepted in one record
MAX_DRAINED_PER_RECORD = 32  # jobs stopped
MAX_RECONSIDERED_PER_RECORD = 256  # waiting jobs; the next record goes on


class Membership:
    """The decisions under one set of settings. Placements on freed capacity are not decided here."""

    def __init__(self, attempts: Attempts, settings: PlacerSettings) -> None:
        self._attempts = attempts
        self._settings = settings
        self._swept = -1
        """Capacity version at which `sweep_queue` last found no further job; only saves work."""

    def joined(self, state: CellState, event: external_events.NodeJoined) -> Iterator[Event]:
        """Tasks that the joining does not list as alive are dead:
        a node reports exits before it joins (LAW 5)."""
        node = state.nodes[event.node.node_id]
        alive = {task.task_id for task in event.tasks if task.task_id not in node.orphan_tasks}
        for task_id in [task_id for task_id in node.tasks if task_id not in alive]:
            task = state.jobs[node.tasks[task_id]].tasks[task_id]
            if node.rebooted or task.started_ms is not None:
                reason = "its node booted anew" if node.rebooted else "its node restarted without it"
                yield from self._attempts.lose(state, node, task_id, reason)
        yield from silent_nodes.answers_due(state, node, alive)
        yield from self.thaw(state)
        yield from self.reconsider(state)

    def left(self, state: CellState, event: external_events.NodeLeft) -> Iterator[Event]:
        node = state.nodes[event.node_id]
        if event.proof == "fenced":
            who = f"its node was fenced by {event.by}: {event.reason}" if event.by else "its node left"
            yield from self._attempts.accept_loss(state, node, who[:MAX_TEXT])
            yield from self.thaw(state)
            return
        if state.frozen:
            return
        if event.proof != "shutdown":
            missing, of = self._missing(state)
            if missing > of * self._settings.freeze_fraction and of > 1:
                yield ledger_events.CellFrozen(
                    reason=f"{missing} of {of} nodes left within the freeze window"
                )
                return
        why = silent_nodes.OUTLIVED if event.probe else "its node left"
        yield from self._attempts.accept_loss(state, node, why)

    def drain(self, state: CellState) -> Iterator[Event]:
        """Stops the jobs on nodes that are being drained, a bounded number per record; nothing while the cell
        is frozen."""
        if state.frozen:
            return
        stopped = 0
        for ordinal in bits(state.index.cordoned):
            node = state.node(ordinal)
            if node.cordon is None or not node.cordon.drain:
                continue
            for job in [state.jobs[job_id] for job_id in dict.fromkeys(node.tasks.values())]:
                if job.status is JobStatus.STOPPING:
                    continue
                if stopped == MAX_DRAINED_PER_RECORD:
                    yield continuation(state)
                    return
                yield ledger_events.JobPreempted(
                    job_id=job.job_id,
                    attempt=job.attempt,
                    by_job_id=None,
                    reason=f"{node.spec.node_id} is being drained",
                )
                yield from stop(state, job, "drained")
                stopped += 1

    def thaw(self, state: CellState) -> Iterator[Event]:
        """Enough nodes have returned: the cell thaws, and the departure of the others is accepted."""
        if not state.frozen or state.awaits_nodes():
            return
        missing, of = self._missing(state)
        if missing > of * self._settings.freeze_fraction:
            return
        yield ledger_events.CellThawed(reason=f"{of - missing} of {of} nodes are there")
        yield from self.accept_losses(state)
        if state.index.cordoned:
            yield continuation(state)  # jobs on draining nodes were not stopped meanwhile

    def _missing(self, state: CellState) -> tuple[int, int]:
        """(nodes that left within the window or are still awaited, those and the present nodes)."""
        since_ms = state.now_ms - self._settings.freeze_window_ms
        there = missing = 0
        for node in state.nodes.values():
            awaited = node.leaving and node.status is NodeStatus.SUSPECT
            missing += awaited or (node.leaving and not state.frozen and node.left_ms >= since_ms)
            there += not node.leaving
        return missing, missing + there

    def accept_losses(self, state: CellState) -> Iterator[Event]:
        """Of the nodes that left while the cell was frozen, a bounded number;
        a timer continues with the next ones."""
        index = state.index
        silent = index.known & ~index.placeable & ~index.gone
        left = [node for ordinal in bits(silent) if (node := state.node(ordinal)).leaving]
        lost = 0
        for number, node in enumerate(left):
            lost += len(node.tasks)
            if number == MAX_NODES_PER_RECORD or (number and lost > MAX_GANG_TASKS):
                yield continuation(state)
                return
            yield from self._attempts.accept_loss(state, node)

    def reconsider(self, state: CellState) -> Iterator[Event]:
        """The cell's capacity changed: jobs that fit no node before may fit now.
        A bounded number per record."""
        found = 0
        hopeless: set[tuple[object, ...]] = set()
        for job_id in list(state.unschedulable):
            demand = state.jobs[job_id].demand
            if (key := demand.key) in hopeless:
                continue
            if never_fits(state, demand) is not None:
                hopeless.add(key)
            else:
                yield ledger_events.JobFoundSchedulable(job_id=job_id)
                found += 1
                if found == MAX_RECONSIDERED_PER_RECORD:
                    yield continuation(state)
                    return

    def sweep_queue(self, state: CellState) -> Iterator[Event]:
        """A replanning policy tries no head of the queue:
        a job that can never run is found when the cell changes."""
        if self._swept == state.capacity_version:
            return
        fitting: set[tuple[object, ...]] = set()
        found = 0
        for job_id in list(state.queue.values()):
            job = state.jobs[job_id]
            if (key := job.demand_key) in fitting:
                continue
            reason = never_fits(state, job.demand)
            if reason is None:
                fitting.add(key)
                continue
            if found == MAX_RECONSIDERED_PER_RECORD:
                yield continuation(state)
                return
            found += 1
            yield from self._attempts.park(state, job, reason)
        self._swept = state.capacity_version
