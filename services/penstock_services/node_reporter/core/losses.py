"""Which losses of a running task are published: those that may matter for its convergence, at growing distances.

Ideal: every loss that a script reports. Departure: a script reports in every iteration, and categories of convergence are judged by looks
that are seconds apart (`penstock.policies.convergence`). A loss is published where enough time has passed since the last one, and where it
differs from that by more than noise; so a long job's samples grow with the logarithm of its time, and are bounded.
"""

from math import isfinite

LEAST_MS = 5_000  # a sixth of the interval at which losses are looked at
GROWTH = 0.01  # of the time since the first: a month has 850 samples
RESOLUTION = 0.001  # of the range seen so far: a tenth of the threshold below which a job converges
MAX_LOSSES = 1_024  # per task, whatever its clock does


class LossFilter:
    """Of one task."""

    __slots__ = ("_first_ms", "_high", "_last", "_last_ms", "_low", "published")

    def __init__(self) -> None:
        self.published = 0
        self._first_ms = self._last_ms = 0
        self._last = self._low = self._high = 0.0

    def passes(self, loss: float, now_ms: int) -> bool:
        """Whether it is published; it counts as published then. A loss that is not finite never is."""
        if not isfinite(loss):
            return False
        if not self.published:
            self._first_ms, self._low, self._high = now_ms, loss, loss
            return self._publish(loss, now_ms)
        self._low, self._high = min(self._low, loss), max(self._high, loss)
        if now_ms < self._last_ms:  # the node's clock was set back
            self._first_ms = self._last_ms = now_ms
        since_ms = now_ms - self._last_ms
        if since_ms < max(LEAST_MS, GROWTH * (now_ms - self._first_ms)) or self.published >= MAX_LOSSES:
            return False
        if abs(loss - self._last) <= RESOLUTION * (self._high - self._low):
            return False
        return self._publish(loss, now_ms)

    def _publish(self, loss: float, now_ms: int) -> bool:
        self._last, self._last_ms = loss, now_ms
        self.published += 1
        return True
