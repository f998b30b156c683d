"""Wall clock: shells read it here, cores never do."""

import time
from collections.abc import Callable


def wall_ms() -> int:
    """Milliseconds since the Unix epoch, ≥ 0. May step backwards: callers that need order keep a maximum."""
    return time.time_ns() // 1_000_000


class LedgerClock:
    """The ledger's time as its writer stamps it: never backwards, and never standing still.

    Ideal: the wall clock. Departure: a wall clock that was ahead once (a bad battery, a wrong time server) has left
    its time in the ledger, and one that was set back lies behind it; until it has caught up, which may take years,
    time goes on from the last stamp by the monotonic clock. Otherwise no timer would fire meanwhile.
    """

    def __init__(
        self, last_ms: int, monotonic_s: Callable[[], float], wall: Callable[[], int] | None = None
    ) -> None:
        """`last_ms`: the latest time in the ledger. `wall`: a clock other than this machine's."""
        self._last_ms = float(last_ms)
        self._monotonic_s = monotonic_s
        self._wall_ms = wall or (lambda: wall_ms())
        self._stamp_s = monotonic_s()

    def now_ms(self, last_ms: int = 0) -> int:
        """The time for the next record; at least `last_ms`, the latest that the ledger shows by now."""
        stamp_s = self._monotonic_s()
        gone_on_ms = self._last_ms + (stamp_s - self._stamp_s) * 1_000
        self._last_ms, self._stamp_s = max(gone_on_ms, last_ms, self._wall_ms()), stamp_s
        return int(self._last_ms)
