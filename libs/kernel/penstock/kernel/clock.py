"""The one door to the wall clock: shells read it here, cores never do."""

import time


def wall_ms() -> int:
    """Milliseconds since the Unix epoch, ≥ 0. May step backwards: callers that need order keep a maximum."""
    return time.time_ns() // 1_000_000
