"""Token bucket that limits how often a reader reads: the first record after an idle moment is never delayed.

Ideal: the reader knows whether more records are about to come. Departure: a token bucket estimates it from
the rate of recent reads. Each read takes a token, one token comes back per `batch_ms`; without a token the
reader gathers until the next one is due. A few hops in quick succession (one job on a quiet system) thus pass
undelayed, a steady stream is read once per `batch_ms`. A reader with a long interval is not urgent: it passes
fewer hops undelayed (at least one), and so leaves more CPU to urgent readers.
"""

from collections.abc import Callable

BURST_READS = 8  # may follow each other undelayed: more than the hops of one job through one service
BURST_MS = 48  # bound on BURST_READS × interval: with a long interval fewer reads follow undelayed
NEARLY = 1e-6  # of a token: a shorter wait is below the resolution of a clock in doubles, and would never end


class TokenBucket:
    """Token bucket over reads. `now_s` is a monotonic clock in seconds."""

    __slots__ = ("_burst", "_interval_s", "_now_s", "_stamp_s", "_tokens")

    def __init__(self, batch_ms: int, now_s: Callable[[], float]) -> None:
        self._interval_s = batch_ms / 1000
        self._now_s = now_s
        self._burst = max(1.0, min(BURST_READS, BURST_MS / batch_ms)) if batch_ms > 0 else 1.0
        self._tokens = self._burst
        self._stamp_s = now_s()

    def delay_s(self) -> float:
        """Seconds to gather before the next read may return, ≥ 0."""
        if self._interval_s <= 0:
            return 0.0
        self._refill()
        missing = 1 - self._tokens
        return missing * self._interval_s if missing > NEARLY else 0.0

    def took(self) -> None:
        """To be called when a read returned records."""
        if self._interval_s > 0:
            self._refill()
            self._tokens = max(0.0, self._tokens - 1)

    def _refill(self) -> None:
        now_s = self._now_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._stamp_s) / self._interval_s)
        self._stamp_s = now_s
