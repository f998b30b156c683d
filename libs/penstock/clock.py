"""Wall clock and boot-time clock: shells read them here, cores never do; and the ledger's time, for its
writer and for readers."""

import time
from collections.abc import Callable

TRUSTED_STEP_MS = 60_000  # time servers correct by less; beyond it a wall clock is taken as wrong
SLEW = 0.001  # how much faster than the boot-time clock at most; crystals differ by a tenth of it
MAX_AGE_MS = 30 * 86_400_000  # of a record that a reader finds: beyond it one of two clocks is wrong


def wall_ms() -> int:
    """Milliseconds since the Unix epoch, ≥ 0. May step backwards: callers that need order keep a maximum."""
    return time.time_ns() // 1_000_000


def boot_s() -> float:
    """Seconds since this machine booted, time asleep included; no time server sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LedgerClock:
    """The ledger's time as its writer stamps it: it never goes backwards nor stands still, and follows the
    time since boot.

    Ideal: the wall clock. Departure: a wall clock may be wrong by years (a bad battery, a wrong time server),
    and a step forward would fire every deadline. So time goes on from `start_ms` by the boot-time clock, and
    follows a wall clock that is a little ahead no faster than `SLEW`.
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
        """How far the wall clock is ahead at the latest reading; 0: by `TRUSTED_STEP_MS` at most."""

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


class ReadersClock:
    """The ledger's time as a reader extrapolates it: the latest record's time plus the time since that record
    was read.

    Ideal: the placer's own clock, which goes on while nothing is recorded. Departure: a reader has only the
    records, and its own time since boot. A record that was in the log before the reader started has an
    unknown age when it is read; until the first record that is read as it is written, the wall clock less the
    log's stamp is taken as that age, if it is between 0 and `MAX_AGE_MS`.
    """

    def __init__(
        self, elapsed_s: Callable[[], float] | None = None, wall: Callable[[], int] | None = None
    ) -> None:
        """`elapsed_s`, `wall`: other clocks than this machine's."""
        self._elapsed_s = elapsed_s or (lambda: boot_s())
        self._wall_ms = wall or (lambda: wall_ms())
        self._read_ms: float | None = None
        self._read_s = 0.0

    def read(self, record_ms: int, stamp_ms: int | None = None) -> None:
        """The latest record's time.
        `stamp_ms`: the log's stamp of a record that was there before the reader started."""
        age_ms = 0 if stamp_ms is None else self._wall_ms() - stamp_ms
        self._read_ms = record_ms + (age_ms if 0 <= age_ms <= MAX_AGE_MS else 0)
        self._read_s = self._elapsed_s()

    def now_ms(self) -> int:
        """The ledger's time now; the wall clock's before the first record."""
        if self._read_ms is None:
            return self._wall_ms()
        return int(self._read_ms + (self._elapsed_s() - self._read_s) * 1_000)
