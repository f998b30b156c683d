"""Token bucket: a rate limit that allows bursts and has no lifetime maximum."""


class TokenBucket:
    """Starts full. `per_s`: tokens added each second; `burst`: capacity."""

    __slots__ = ("_at_s", "_burst", "_left", "_per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Takes a token if there is one at this time. A clock that was set back adds none."""
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self._left = min(self._burst, self._left + self._per_s * passed_s)
        if self._left < 1:
            return False
        self._left -= 1
        return True
