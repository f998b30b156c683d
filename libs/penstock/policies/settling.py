"""When the speed of a running training has settled: two reports in a row that agree.

A probe of a number of cores ends when speed and utilisation have settled, not after a fixed time: a job with steps of 50 ms is known after seconds, one
with steps of a minute after minutes. Source: CODA §VI-F, whose probes last 90 s each.
"""

from typing import NamedTuple

from penstock.policies.telemetry_windows import Latest, TaskWindow

AGREES = 0.05
"""Reports whose values are apart by no more than this part of the greater one agree."""
AGREES_POINTS = 5.0
"""Likewise of utilisation, in percent of a GPU."""
MAX_REPORTS = 12
"""A task whose reports do not agree within so many never settles: its steps are of several kinds."""


class Speed(NamedTuple):
    """How fast a task runs."""

    per_s: float
    """Iterations per second; of a task that reports no steps its GPU utilisation in percent. ≥ 0."""
    by_steps: bool


def speed_of(window: TaskWindow) -> tuple[Latest, Speed] | None:
    """The latest report of a task in a window, and its speed; None: it has none."""
    if (step := window.step_ms) is not None:
        return (step, Speed(1_000 / step.value, by_steps=True)) if step.value > 0 else None
    if (used := window.gpu_utilisation_percent) is not None:
        return used, Speed(used.value, by_steps=False)
    return None


class Settling:
    """Of one task under the same conditions. `after_ms`: windows that begin by then, in the log's time, are of before, and ignored."""

    def __init__(self, after_ms: int = -1) -> None:
        self._after_ms = after_ms
        self._latest: Latest | None = None
        self._last: Speed | None = None
        self._used: float | None = None
        self.settled: Speed | None = None
        """The mean of the latest two reports that agreed. None: there were none yet."""
        self.reports = 0
        """Since two agreed last."""

    @property
    def gave_up(self) -> bool:
        """Whether it reports and does not settle."""
        return self.settled is None and self.reports >= MAX_REPORTS

    def hear(self, begin_ms: int, window: TaskWindow) -> bool:
        """A window, or more of one that was heard before. Whether two reports agree that have not been compared before."""
        found = speed_of(window)
        if found is None or begin_ms <= self._after_ms:
            return False
        latest, speed = found
        if self._latest is not None and latest <= self._latest:
            return False
        used = window.gpu_utilisation_percent
        before, used_before = self._last, self._used
        self._latest, self._last, self._used = latest, speed, None if used is None else used.value
        self.reports += 1
        if before is None or not _agree(before, speed) or not _agree_points(used_before, self._used):
            return False
        self.settled = Speed((before.per_s + speed.per_s) / 2, speed.by_steps)
        self.reports = 0
        return True


def _agree(one: Speed, other: Speed) -> bool:
    if one.by_steps != other.by_steps:
        return False
    if one.by_steps:
        return abs(one.per_s - other.per_s) <= AGREES * max(one.per_s, other.per_s)
    return abs(one.per_s - other.per_s) <= AGREES_POINTS


def _agree_points(one: float | None, other: float | None) -> bool:
    return one is None or other is None or abs(one - other) <= AGREES_POINTS
