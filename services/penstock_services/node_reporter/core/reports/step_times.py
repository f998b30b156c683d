"""Sampling filter of a running task's step times: publishes those that differ, a second apart, at a rate
sustainable for months.

Ideal: each window of a training whose speed changes under contention. Departure: a script may be hostile, or
its steps vary all the time; so a step time is published where it differs from the last published one by
`CHANGE`, or the task had another number of cores then, and a token bucket bounds the rest. A step time that
is left out is soon replaced: the SDK repeats its latest step time (`penstock.sdk.progress`), and it is
compared with the published one.
"""

from math import isfinite

from penstock_services.node_reporter.core.reports.rates import TokenBucket

CHANGE = 0.05  # of the last published one; the SDK writes no line for smaller changes
LEAST_MS = 1_000
BURST = 30  # a minute of the SDK's windows
PER_S = 0.1  # sustained rate: a job of a month whose steps vary all the time has 260,000 samples
MS_PER_S = 1_000


class StepFilter:
    """Of one task."""

    __slots__ = ("_bucket", "_cores", "_last", "_last_ms")

    def __init__(self) -> None:
        self._bucket = TokenBucket(PER_S, BURST)
        self._last = 0.0
        self._last_ms = 0
        self._cores = 0

    def passes(self, step_ms: float, now_ms: int, cores: int = 0) -> bool:
        """Whether it is published; then it counts as published. One that is not finite or not positive never
        is. `cores`: of the script at that time; 0: not known."""
        if not isfinite(step_ms) or step_ms <= 0:
            return False
        if self._last:
            if now_ms < self._last_ms:  # the node's clock was set back
                self._last_ms = now_ms
            same = cores == self._cores and abs(step_ms - self._last) < CHANGE * self._last
            if same or now_ms - self._last_ms < LEAST_MS:
                return False
        if not self._bucket.take(now_ms / MS_PER_S):
            return False
        self._last, self._last_ms, self._cores = step_ms, now_ms, cores
        return True
