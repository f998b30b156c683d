"""Token bucket: a bound on how often something happens that allows bursts and has no lifetime maximum."""


class TokenBucket:
    """Starts full. `per_s`: tokens that come back each second; `burst`: as many as it holds."""

    __slots__ = ("_at_s", "_burst", "_left", "_per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._at_s: float | None = None

    def take(self, now_s: float) -> bool:
        """Whether there is a token at this time; it is gone then. A clock that was set back brings none."""
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self._left = min(self._burst, self._left + self._per_s * passed_s)
        if self._left < 1:
            return False
        self._left -= 1
        return True
