"""Simulated nodes of a cell: the node-reporter's own core handles orders; no process runs.

Orders are obeyed by the same rules as on a machine: tokens, predecessors, stops that overtake starts. Only
the actions differ: a spawn succeeds after `start_s`, a SIGTERM is obeyed when the program has saved and
`stop_s` later, a SIGKILL at once, and a request to save a checkpoint goes to the job model.
"""

import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.model.nouns.nodes import NodeSpec
from penstock.model.schema.event import Event
from penstock_services.node_reporter.core.actions import (
    AskToSave,
    CapBandwidth,
    Decision,
    Emit,
    KillAt,
    SetAffinity,
    Signal,
    Spawn,
)
from penstock_services.node_reporter.core.inputs import Done, Gone, GraceOver, Input, Outcome, Spawned
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import NodeState, Put


class Latency(NamedTuple):
    """Latencies of nodes in seconds."""

    start_s: float = 0.0
    stop_s: float = 0.0


Later = Callable[[float, str, Input], None]
"""(seconds from now, node id, input): feeds the input to the node at that time."""


class Programs(Protocol):
    """Reactions of the tasks' programs to signals."""

    def saving_s(self, task_id: str) -> float:
        """Seconds ≥ 0 for which the task's program would save after a SIGTERM now, before it ends."""

    def checkpoint(self, task_id: str) -> None:
        """The task was asked for a checkpoint."""

    def launching(self, task_id: str) -> None:
        """The task launches before it holds its GPUs alone."""

    def changed(self, task_id: str) -> None:
        """The task now has the cores and the cap of memory bandwidth that were decided for it."""


class SimulatedNodes:
    """All nodes of the cell. `later` schedules their future inputs."""

    def __init__(self, specs: Sequence[NodeSpec], latency: Latency, later: Later, programs: Programs) -> None:
        self._nodes = {
            spec.node_id: NodeState(
                spec.node_id, spec.boot_id, tuple(g.uuid for g in spec.gpus), cores=spec.cores
            )
            for spec in specs
        }
        self._caps = {spec.node_id: spec.bandwidth_cap for spec in specs}
        self._latency = latency
        self._later = later
        self._programs = programs
        self._pid = 1
        self.terminated: list[str] = []
        """Ids of tasks that have just got SIGTERM and no longer compute. The engine empties the list."""

    def feed(self, node_id: str, given: Input, now_ms: int) -> Sequence[Event]:
        """One input of a node's core; returns the events that it sends."""
        sent: list[Event] = []
        for decision in step(self._nodes[node_id], given):
            if isinstance(decision, Put):
                continue
            if isinstance(decision, Emit):
                sent.append(decision.event)
            else:
                self._act(node_id, decision, now_ms)
        if isinstance(given, Spawned):
            task = self._nodes[node_id].tasks.get(given.task_id)
            if task is not None and task.gated:
                self._programs.launching(given.task_id)
        return sent

    def _act(self, node_id: str, decision: Decision, now_ms: int) -> None:
        """Carries out a decision as the machine would, and schedules its report."""
        match decision:
            case Spawn(order=order):
                self._pid += 1
                at_ms = now_ms + round(self._latency.start_s * 1_000)
                spawned = Spawned(order.task_id, order.token, self._pid, at_ms, at_ms)
                self._later(self._latency.start_s, node_id, spawned)
            case Signal(task_id=task_id, token=token, number=signal.SIGTERM):
                self.terminated.append(task_id)
                stop_s = self._latency.stop_s + self._programs.saving_s(task_id)
                at_ms = now_ms + round(stop_s * 1_000)
                gone = Gone(task_id, token, Outcome(at_ms, signal=int(signal.SIGTERM)))
                self._later(stop_s, node_id, gone)
            case KillAt(task_id=task_id, token=token, at_ms=at_ms):
                grace_s = (at_ms - now_ms) / 1_000
                if grace_s < self._latency.stop_s + self._programs.saving_s(task_id):
                    self._later(grace_s, node_id, GraceOver(task_id, token))
            case SetAffinity(task_id=task_id, token=token, order_token=order_token):
                self._programs.changed(task_id)
                self._later(0.0, node_id, Done(task_id, token, order_token, "cores", "cpuset"))
            case CapBandwidth(task_id=task_id, token=token, order_token=order_token):
                self._programs.changed(task_id)
                by = self._caps[node_id]
                done = Done(task_id, token, order_token, "memory_bandwidth", "" if by == "none" else by)
                self._later(0.0, node_id, done)
            case AskToSave(task_id=task_id):
                self._programs.checkpoint(task_id)
            case Signal(task_id=task_id, token=token):
                gone = Gone(task_id, token, Outcome(now_ms, signal=int(signal.SIGKILL)))
                self._later(0.0, node_id, gone)
