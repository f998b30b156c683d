"""Steady-state detection for the speed of a running training job: after a report, no different one has
arrived for a while.

A probe of a core count ends when speed and utilisation have settled, not after a fixed time: a job with steps
of 50 ms is measured after seconds, one with steps of a minute after minutes. Source: CODA §VI-F, whose probes
last 90 s each. Nodes publish changes only, so silence means no change. Steps that vary all the time are
measured by their mean: the speed has settled when the means of four reports and of the four before agree.
"""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from penstock.model.nouns.types import MAX_MS
from penstock.scheduling.acting.telemetry_windows import WINDOW_MS, TaskWindow

AGREES = 0.05
"""A report whose speed differs by less than this fraction
from the latest one's does not count as a change."""
AGREES_POINTS = 10.0
"""The same for utilisation, in percent of a GPU."""
QUIET = 3
"""For so many windows, and steps, no change may arrive until a speed has settled: the windows of the SDK and
of the node are two seconds each."""
OF_A_MEAN = 4
"""Number of changed reports in a mean."""
MAX_REPORTS = 16
"""A task with so many changes in a row never settles: its steps become longer and longer,
or vary without pattern."""


class Speed(NamedTuple):
    """Speed of a task."""

    per_s: float
    """Iterations per second; for a task that reports no steps its GPU utilisation in percent. ≥ 0."""
    by_steps: bool

    @property
    def quiet_ms(self) -> int:
        """How long no change may arrive until the speed has settled."""
        steps_ms = QUIET * 1_000 / self.per_s if self.by_steps else 0.0
        return QUIET * WINDOW_MS + int(min(steps_ms, MAX_MS))


def speed_of(window: TaskWindow) -> Speed | None:
    """Speed of the latest report in a window; None: it has none."""
    if (step := window.step_ms) is not None:
        return Speed(1_000 / step.value, by_steps=True) if step.value > 0 else None
    used = window.gpu_utilisation_percent
    return None if used is None else Speed(used.value, by_steps=False)


class Settling:
    """Detector for one task under constant conditions. `after_ms`: windows that begin by then, in the log's
    time, are older, and ignored."""

    def __init__(self, after_ms: int = -1) -> None:
        self._after_ms = after_ms
        self._used: float | None = None
        self._since_ms = 0
        """When the latest change arrived, by the reader's clock."""
        self.speed: Speed | None = None
        """The latest reported speed. None: no report."""
        self.news = 0
        self._recent: deque[Speed] = deque(maxlen=2 * OF_A_MEAN)

    def clock_came_back(self, begin_ms: int) -> None:
        """Windows from this one on are newer than all before
        (`penstock.scheduling.acting.telemetry_windows.clock_came_back`)."""
        self._after_ms = min(self._after_ms, begin_ms - 1)

    @property
    def gave_up(self) -> bool:
        """Whether the task reports but does not settle."""
        return self.news >= MAX_REPORTS

    @property
    def due_ms(self) -> int | None:
        """When it will have settled unless a change arrives; None: no report."""
        return None if self.speed is None else self._since_ms + self.speed.quiet_ms

    def settled(self, now_ms: int) -> Speed | None:
        """The settled speed; None: not yet settled."""
        if self.due_ms is None:
            return None
        return self.speed if now_ms >= self.due_ms else self._steady()

    def _steady(self) -> Speed | None:
        """The mean of the latest changed reports, if it agrees with the mean of those before."""
        if len(self._recent) < 2 * OF_A_MEAN:
            return None
        before, after = mean(list(self._recent)[:OF_A_MEAN]), mean(list(self._recent)[OF_A_MEAN:])
        return mean(self._recent) if agree(before, after) else None

    def observe(self, begin_ms: int, window: TaskWindow, now_ms: int) -> bool:
        """Takes a window, or an update of an earlier one. Returns whether it contains a change."""
        found = speed_of(window)
        if found is None or begin_ms <= self._after_ms:
            return False
        used = None if window.gpu_utilisation_percent is None else window.gpu_utilisation_percent.value
        if self.speed is not None and self.speed.by_steps and not found.by_steps:
            found = self.speed  # a window without steps
        same = self.speed is not None and agree(self.speed, found) and _agree_points(self._used, used)
        if not same and self.settled(now_ms) is not None:
            self.news = 0
            self._recent.clear()
        self.speed, self._used = found, self._used if used is None else used
        if same:
            return False
        self._since_ms = now_ms
        self.news += 1
        if self._recent and self._recent[-1].by_steps != found.by_steps:
            self._recent.clear()
        self._recent.append(found)
        return True


def mean(speeds: Collection[Speed]) -> Speed:
    """Mean of at least one report of one kind: for iterations per second the harmonic mean, which is the mean
    of iteration times."""
    if not next(iter(speeds)).by_steps:
        return Speed(sum(one.per_s for one in speeds) / len(speeds), by_steps=False)
    return Speed(len(speeds) / sum(1 / one.per_s for one in speeds), by_steps=True)


def agree(one: Speed, other: Speed) -> bool:
    """Whether two reports have the same speed within the tolerance."""
    if one.by_steps != other.by_steps:
        return False
    if one.by_steps:
        return abs(one.per_s - other.per_s) < AGREES * max(one.per_s, other.per_s)
    return abs(one.per_s - other.per_s) < AGREES_POINTS


def _agree_points(one: float | None, other: float | None) -> bool:
    return one is None or other is None or abs(one - other) < AGREES_POINTS
