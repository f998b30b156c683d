"""Wall clock and boot-time clock: shells read them here, cores never do; and the ledger's time, made of both."""

import time
from collections.abc import Callable

TRUSTED_STEP_MS = 60_000  # time servers correct by less; beyond it a wall clock is taken as wrong
SLEW = 0.001  # so much faster than the boot-time clock at most; crystals differ by a tenth of it


def wall_ms() -> int:
    """Milliseconds since the Unix epoch, ≥ 0. May step backwards: callers that need order keep a maximum."""
    return time.time_ns() // 1_000_000


def boot_s() -> float:
    """Seconds since this machine booted, time asleep included; no time server sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LedgerClock:
    """The ledger's time as its writer stamps it: never backwards, never standing still, never ahead of what passed.

    Ideal: the wall clock. Departure: a wall clock may be wrong by years (a bad battery, a wrong time server), and a step
    forward would fire every deadline. So time goes on from `start_ms` by the boot-time clock, and follows a wall clock
    that is a little ahead no faster than `SLEW`.
    """

    def __init__(
        self,
        start_ms: int,
        elapsed_s: Callable[[], float] | None = None,
        wall: Callable[[], int] | None = None,
    ) -> None:
        """`elapsed_s`, `wall`: other clocks than this machine's."""
        self._last_ms = float(start_ms)
        self._elapsed_s = elapsed_s or (lambda: boot_s())
        self._wall_ms = wall or (lambda: wall_ms())
        self._stamp_s = self._elapsed_s()
        self.wall_ahead_ms = 0
        """By how much the wall clock is ahead at the latest reading; 0: by nothing that matters."""

    def now_ms(self, last_ms: int = 0) -> int:
        """The time for the next record; at least `last_ms`, the latest that the ledger shows by now."""
        stamp_s = self._elapsed_s()
        passed_ms = (stamp_s - self._stamp_s) * 1_000
        now_ms = max(self._last_ms + passed_ms, last_ms)
        ahead_ms = self._wall_ms() - now_ms
        self.wall_ahead_ms = int(ahead_ms) if ahead_ms > TRUSTED_STEP_MS else 0
        if 0 < ahead_ms <= TRUSTED_STEP_MS:
            now_ms += min(ahead_ms, passed_ms * SLEW)
        self._last_ms, self._stamp_s = now_ms, stamp_s
        return int(now_ms)
