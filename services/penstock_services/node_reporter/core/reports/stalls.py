"""Sampling filter of stall measurements (waiting for cores): during a stall those that differ, and one at its
end.

Ideal: the kernel's trigger fires when tasks begin to wait, and again when they wait no more. Departure:
pressure stall triggers signal the begin alone, so a window without one ends it. Nothing is published for a
task, or a node, that does not wait.
"""

WINDOW_S = 2.0  # of the trigger; as long as those of `penstock.scheduling.acting.telemetry_windows`
LEAST_PERCENT = 10.0  # of the time; the trigger's threshold
MIN_CHANGE_POINTS = 10.0  # as for utilisation
REPEAT_S = 10.0  # during an unchanged stall, so that each window of samples shows it


class StallFilter:
    """Of one task, or of the node."""

    __slots__ = ("_last", "_last_s")

    def __init__(self) -> None:
        self._last: float | None = None
        """The last published value; None: it does not wait."""
        self._last_s = 0.0

    @property
    def waits(self) -> bool:
        return self._last is not None

    def passes(self, percent: float, now_s: float) -> bool:
        """Whether this measurement is published; then it counts as published. `now_s`: monotonic."""
        if percent < LEAST_PERCENT:
            over, self._last = self._last is not None, None
            return over
        last = self._last
        if last is not None and abs(percent - last) < MIN_CHANGE_POINTS and now_s - self._last_s < REPEAT_S:
            return False
        self._last, self._last_s = percent, now_s
        return True
