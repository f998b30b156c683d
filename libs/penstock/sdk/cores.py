"""Number of CPU cores that a running script may use, with a callback on changes, to resize thread pools.

Penstock changes the cores of running tasks by their affinity and cpuset, and the kernel moves their threads
at once; only the sizes of pools are left to the program. Ideal: the change interrupts. Departure: pools are
resized between two iterations, where no thread uses them, so the affinity is read there, once a second at
most.
"""

import os
import time
from collections.abc import Callable

from penstock.sdk.reporter.lines import FIFO

LOOK_EVERY_S = 1.0


def cores() -> int:
    """Number of cores that the calling thread may use now: its affinity, on Linux."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


class Watch:
    """Compares the number of cores with the last one. `clock`: monotonic seconds; `count`: cores now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, count: Callable[[], int] = cores) -> None:
        self._clock = clock
        self._count = count
        self._callbacks: list[Callable[[int], object]] = []
        self._known = 0
        self._looked_s = 0.0

    def add(self, callback: Callable[[int], object]) -> None:
        """As `on_cores`."""
        if not self._callbacks:
            self._known, self._looked_s = self._count(), self._clock()
        self._callbacks.append(callback)
        callback(self._known)

    def look(self) -> None:
        """As `look`."""
        if not self._callbacks:
            return
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s, found = now_s, self._count()
        if found != self._known:
            self._known = found
            for callback in self._callbacks:
                callback(found)


_WATCH = Watch()
look = _WATCH.look
"""Runs the callbacks if the number of cores has changed; `progress` and `iteration` call it. For scripts that
call neither."""


def on_cores(callback: Callable[[int], object]) -> None:
    """Calls `callback` with the number of cores: now, and between iterations after each change, in the thread
    that iterates.

    `on_cores(torch.set_num_threads)`, `on_cores(numba.set_num_threads)`; a pool of one's own is replaced.
    Exceptions of `callback` are raised in the script. Does nothing outside of Penstock, where the number of
    cores is the user's choice.
    """
    if os.environ.get(FIFO):
        _WATCH.add(callback)
