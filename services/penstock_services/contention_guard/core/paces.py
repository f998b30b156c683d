"""What was heard of nodes and their tasks: present pressure, and how fast trainings run beside their best with the same cores."""

from dataclasses import dataclass, field

from penstock.policies.settling import Settling, Speed, speed_of
from penstock.policies.telemetry_windows import NodeWindow, TaskWindow


@dataclass(slots=True)
class Pace:
    """One running task."""

    after_ms: int = -1
    """Windows that begin by then are of before its cores were changed."""
    settling: Settling = field(default_factory=Settling)
    best: Speed | None = None
    """The greatest that settled with these cores."""
    now: Speed | None = None
    now_ms: int = -1
    """Begin of the window that had it."""
    stalled: float | None = None
    traffic: float | None = None

    def hear(self, begin_ms: int, window: TaskWindow) -> None:
        """A window that is not older than those before."""
        if window.cpu_stalled_percent is not None:
            self.stalled = window.cpu_stalled_percent
        if window.memory_bandwidth_percent is not None:
            self.traffic = window.memory_bandwidth_percent
        if begin_ms <= self.after_ms or (found := speed_of(window)) is None:
            return
        self.now, self.now_ms = found[1], begin_ms
        self.settling.hear(begin_ms, window)
        if (settled := self.settling.settled) is None:
            return
        if self.best is None or self.best.by_steps != settled.by_steps or settled.per_s > self.best.per_s:
            self.best = settled

    def lost(self, after_ms: int) -> float | None:
        """Part of its best speed that it has lost, 0 – 1, by what was heard of windows that begin after `after_ms`. None: not known."""
        if self.best is None or self.now is None or self.now_ms <= after_ms:
            return None
        if self.best.by_steps != self.now.by_steps or self.best.per_s <= 0:
            return None
        return max(0.0, 1 - self.now.per_s / self.best.per_s)


@dataclass(slots=True)
class Node:
    """One node. A value holds until another one comes: nodes send what changes."""

    bandwidth: float | None = None
    stalled: float | None = None
    heard_ms: int = -1
    """Begin of the latest window, in the log's time."""
    after_ms: int = -1
    """Windows that begin by then are of before the latest change of what runs beside its trainings."""
    changed_ms: int = 0
    """When that was, in the ledger's time."""
    calm_since_ms: int | None = None
    """Since when nothing is short; None: something is, or nothing is known."""
    releases: int = 0
    """How often jobs were let go while trainings ran on."""

    def hear(self, window: NodeWindow) -> None:
        """A window that is not older than those before."""
        self.heard_ms = window.begin_ms
        if window.cpu_stalled_percent is not None:
            self.stalled = window.cpu_stalled_percent
        if window.memory_bandwidth_percent is not None:
            self.bandwidth = window.memory_bandwidth_percent
