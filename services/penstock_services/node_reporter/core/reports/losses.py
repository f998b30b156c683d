"""Sampling filter of a running task's losses: publishes those that may matter for its convergence, at growing
intervals.

Ideal: every loss that a script reports. Departure: a script reports in every iteration, and categories of
convergence are evaluated seconds apart (`penstock.scheduling.acting.convergence`), where even the smallest
gains count. A loss is published where it differs from the last published one, and enough time has passed
since that; so a long job's samples grow with the logarithm of its time, and are bounded.
"""

from math import isfinite

LEAST_MS = 5_000  # a sixth of the interval at which losses are evaluated
GROWTH = 0.01  # of the time since the first: a month has 850 samples
MAX_LOSSES = 1_024  # per task, even if its clock is wrong


class LossFilter:
    """Of one task."""

    __slots__ = ("_first_ms", "_last", "_last_ms", "published")

    def __init__(self) -> None:
        self.published = 0
        self._first_ms = self._last_ms = 0
        self._last = 0.0

    def passes(self, loss: float, now_ms: int) -> bool:
        """Whether it is published; then it counts as published. A loss that is not finite never is."""
        if not isfinite(loss):
            return False
        if not self.published:
            self._first_ms = now_ms
            return self._publish(loss, now_ms)
        if now_ms < self._last_ms:  # the node's clock was set back
            self._first_ms = self._last_ms = now_ms
        least_ms = max(LEAST_MS, GROWTH * (now_ms - self._first_ms))
        if now_ms - self._last_ms < least_ms or loss == self._last or self.published >= MAX_LOSSES:
            return False
        return self._publish(loss, now_ms)

    def _publish(self, loss: float, now_ms: int) -> bool:
        self._last, self._last_ms = loss, now_ms
        self.published += 1
        return True
