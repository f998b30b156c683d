"""Time that a thread has waited for a core: runnable, while others had the cores (schedstat of proc(5)).

Ideal: only the waits caused by other jobs. Departure: the kernel does not tell who had the core, so waits
behind the job's own threads count, too,
where it has more of them than cores.
"""

import os
from contextlib import suppress

SCHEDSTAT = "/proc/thread-self/schedstat"
MAX_BYTES = 128  # three numbers: ns on a core, ns waited for one, number of times


class CoreWaits:
    """Of the thread that makes it; a call reads the seconds so far, in 2 µs. 0 always where the kernel does
    not count."""

    def __init__(self, path: str = SCHEDSTAT) -> None:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._last_s = 0.0

    def __call__(self) -> float:
        if self._descriptor is not None:
            try:
                self._last_s = int(os.pread(self._descriptor, MAX_BYTES, 0).split()[1]) / 1e9
            except (OSError, ValueError, IndexError):
                self._descriptor = None
        return self._last_s
