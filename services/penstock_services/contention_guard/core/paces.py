"""Telemetry of nodes and their tasks: present pressure, and the speed of trainings relative to their best
with the same cores."""

from dataclasses import dataclass, field

from penstock.scheduling.acting.eliminator import FALLS
from penstock.scheduling.acting.settling import Settling, Speed
from penstock.scheduling.acting.telemetry_windows import NodeWindow, TaskWindow

UNSETTLED = 3
"""Number of different reports from which on their slowest counts as a training's speed before one has
settled; a job's first steps take other times."""


@dataclass(slots=True)
class Slowest:
    """The slowest of the different reports of a speed that has not settled: below it a training whose steps
    vary is slow too."""

    speed: Speed | None = None
    reports: int = 0

    def observe(self, found: Speed) -> None:
        """A report that differs from the one before. What is slower by `FALLS` is no such report but a loss,
        once there are enough."""
        if self.speed is None or self.speed.by_steps != found.by_steps:
            self.speed, self.reports = found, 1
        elif self.reports < UNSETTLED or found.per_s > (1 - FALLS) * self.speed.per_s:
            self.speed, self.reports = min(self.speed, found), self.reports + 1

    @property
    def known(self) -> Speed | None:
        """None: too few reports."""
        return self.speed if self.reports >= UNSETTLED else None


@dataclass(slots=True)
class Pace:
    """One running task."""

    settling: Settling = field(default_factory=Settling)
    """With its present cores."""
    best: Speed | None = None
    """The greatest speed that settled with these cores."""
    slowest: Slowest = field(default_factory=Slowest)
    """With these cores."""
    latest_ms: int = -1
    """Begin of the latest window that had a speed."""
    stalled: float | None = None
    traffic: float | None = None

    def observe(self, begin_ms: int, window: TaskWindow, now_ms: int) -> None:
        """A window that is not older than those before."""
        if window.cpu_stalled_percent is not None:
            self.stalled = window.cpu_stalled_percent
        if window.memory_bandwidth_percent is not None:
            self.traffic = window.memory_bandwidth_percent
        self._learn(now_ms)
        before = self.settling.speed
        changed = self.settling.observe(begin_ms, window, now_ms)
        if changed and self.settling.speed is not None:
            self.slowest.observe(self.settling.speed)
        if self.settling.speed is not before:
            self.latest_ms = begin_ms

    def _learn(self, now_ms: int) -> None:
        settled = self.settling.settled(now_ms)
        if settled is None:
            return
        if self.best is None or self.best.by_steps != settled.by_steps or settled.per_s > self.best.per_s:
            self.best = settled

    def begin(self, after_ms: int) -> None:
        """It has other cores from now on."""
        self.settling, self.slowest = Settling(after_ms), Slowest()
        self.best, self.latest_ms = None, -1

    def clock_came_back(self, begin_ms: int) -> None:
        """Windows from this one on are newer than all before."""
        self.settling.clock_came_back(begin_ms)
        self.latest_ms = min(self.latest_ms, begin_ms - 1)

    def counts_ms(self, node: "Node") -> int:
        """Ledger time from which on its speed is measured after the latest change on its node: at once where
        a window arrived since, else when it would have reported another speed. 0: at once."""
        speed = self.settling.speed
        return 0 if self.latest_ms > node.after_ms or speed is None else node.changed_ms + speed.quiet_ms

    def lost(self, node: "Node", now_ms: int) -> float | None:
        """Part of its best speed that it has lost, 0 – 1, since the latest change on its node. None: not
        known (yet)."""
        self._learn(now_ms)
        speed = self.settling.speed
        if speed is None or now_ms < self.counts_ms(node):
            return None
        known_per_s = (
            one.per_s
            for one in (self.best, self.slowest.known)
            if one is not None and one.by_steps == speed.by_steps
        )
        best_per_s = max(known_per_s, default=0.0)
        return max(0.0, 1 - speed.per_s / best_per_s) if best_per_s > 0 else None


@dataclass(slots=True)
class Node:
    """One node. A value holds until the next one: nodes send only changes."""

    bandwidth: float | None = None
    stalled: float | None = None
    latest_ms: int = -1
    """Begin of the latest window, in the log's time."""
    after_ms: int = -1
    """Windows that begin by then precede the latest change of the tasks beside its trainings."""
    changed_ms: int = 0
    """Ledger time of that change."""
    calm_since_ms: int | None = None
    """Since when no resource is short; None: one is short, or nothing is known."""
    releases: int = 0
    """How often jobs were released while trainings ran on."""

    def observe(self, window: NodeWindow) -> None:
        """A window that is not older than those before."""
        self.latest_ms = window.begin_ms
        if window.cpu_stalled_percent is not None:
            self.stalled = window.cpu_stalled_percent
        if window.memory_bandwidth_percent is not None:
            self.bandwidth = window.memory_bandwidth_percent

    def clock_came_back(self, begin_ms: int) -> None:
        """Windows from this one on are newer than all before."""
        self.latest_ms = min(self.latest_ms, begin_ms - 1)
        self.after_ms = min(self.after_ms, begin_ms - 1)
