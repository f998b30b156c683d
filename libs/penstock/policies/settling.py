"""When the speed of a running training has settled: a report came, and for a while none that differs.

A probe of a number of cores ends when speed and utilisation have settled, not after a fixed time: a job with steps of 50 ms is known after seconds, one
with steps of a minute after minutes. Source: CODA §VI-F, whose probes last 90 s each. Nodes publish what changes, so silence means that nothing did.
Steps that vary all the time are measured by their mean: it has settled when that of four reports is that of the four before.
"""

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from penstock.policies.telemetry_windows import WINDOW_MS, TaskWindow

AGREES = 0.05
"""A report whose speed is apart by less than this part of the latest one's is no news."""
AGREES_POINTS = 10.0
"""Likewise of utilisation, in percent of a GPU."""
QUIET_MS = 3 * WINDOW_MS
"""So long no news come, and for three steps, until a speed has settled: the windows of the SDK and of the node are two seconds each."""
QUIET_STEPS = 3
MAX_STEPS_MS = 1e10  # of so many steps; longer ones settle sooner
OF_A_MEAN = 4
"""News of which a mean is taken."""
MAX_REPORTS = 16
"""A task with so many news in a row never settles: its steps become longer and longer, or are of all kinds."""


class Speed(NamedTuple):
    """How fast a task runs."""

    per_s: float
    """Iterations per second; of a task that reports no steps its GPU utilisation in percent. ≥ 0."""
    by_steps: bool

    @property
    def quiet_ms(self) -> int:
        """How long no news come until it has settled."""
        steps_ms = QUIET_STEPS * 1_000 / self.per_s if self.by_steps else 0.0
        return QUIET_MS + int(min(steps_ms, MAX_STEPS_MS))


def speed_of(window: TaskWindow) -> Speed | None:
    """Of the latest report in a window; None: it has none."""
    if (step := window.step_ms) is not None:
        return Speed(1_000 / step.value, by_steps=True) if step.value > 0 else None
    used = window.gpu_utilisation_percent
    return None if used is None else Speed(used.value, by_steps=False)


class Settling:
    """Of one task under the same conditions. `after_ms`: windows that begin by then, in the log's time, are of before, and ignored."""

    def __init__(self, after_ms: int = -1) -> None:
        self._after_ms = after_ms
        self._used: float | None = None
        self._since_ms = 0
        """When the latest news came, by the reader's clock."""
        self.speed: Speed | None = None
        """The latest reported. None: nothing was."""
        self.news = 0
        self._recent: deque[Speed] = deque(maxlen=2 * OF_A_MEAN)

    @property
    def gave_up(self) -> bool:
        """Whether it reports and does not settle."""
        return self.news >= MAX_REPORTS

    @property
    def due_ms(self) -> int | None:
        """When it will have settled unless news come; None: nothing was reported."""
        return None if self.speed is None else self._since_ms + self.speed.quiet_ms

    def settled(self, now_ms: int) -> Speed | None:
        """None: not yet."""
        if self.due_ms is None:
            return None
        return self.speed if now_ms >= self.due_ms else self._steady()

    def _steady(self) -> Speed | None:
        """The mean of the latest news, if it is that of those before."""
        if len(self._recent) < 2 * OF_A_MEAN:
            return None
        before, after = mean(list(self._recent)[:OF_A_MEAN]), mean(list(self._recent)[OF_A_MEAN:])
        return mean(self._recent) if agree(before, after) else None

    def hear(self, begin_ms: int, window: TaskWindow, now_ms: int) -> bool:
        """A window, or more of one that was heard before. Whether it has news."""
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
    """Of reports of one kind, one at least: of iterations per second the harmonic one, which is that of the time that they take."""
    if not next(iter(speeds)).by_steps:
        return Speed(sum(one.per_s for one in speeds) / len(speeds), by_steps=False)
    return Speed(len(speeds) / sum(1 / one.per_s for one in speeds), by_steps=True)


def agree(one: Speed, other: Speed) -> bool:
    """Whether two reports are of the same speed."""
    if one.by_steps != other.by_steps:
        return False
    if one.by_steps:
        return abs(one.per_s - other.per_s) < AGREES * max(one.per_s, other.per_s)
    return abs(one.per_s - other.per_s) < AGREES_POINTS


def _agree_points(one: float | None, other: float | None) -> bool:
    return one is None or other is None or abs(one - other) < AGREES_POINTS
