"""Watchdog of one task's lease, inside its shim: a timer of the boot-time clock, which goes on while the
machine sleeps.

Standard library only (see `confinement`). The reporter writes its contact with the log into a file, which the
shim reads when the timer fires. If the lease is over by then, the task ends, even if the reporter is cut off,
hangs or is dead.
"""

import ctypes
import math
import os
import time

TFD_TIMER_ABSTIME = 1  # <sys/timerfd.h>
TFD_CLOEXEC = os.O_CLOEXEC
NS_PER_S = 1_000_000_000
MAX_BYTES = 256  # of the file with the latest contact: three numbers

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def boot_s() -> float:
    """Seconds since this machine booted, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_contact_s(path: str) -> float:
    """The latest contact written by a reporter, s of the boot-time clock; -inf: none that can be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return float(os.read(descriptor, MAX_BYTES).split()[0])
        finally:
            os.close(descriptor)
    except (OSError, ValueError, IndexError):
        return -math.inf


class BootTimer:
    """`fd` becomes readable at a time of the boot-time clock. Raises OSError."""

    def __init__(self) -> None:
        self.fd = _libc.timerfd_create(time.CLOCK_BOOTTIME, TFD_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, until_s: float | None) -> None:
        """`None`: never."""
        ns = 0 if until_s is None else max(1, int(until_s * NS_PER_S))
        timer = _Timer(_Timespec(0, 0), _Timespec(*divmod(ns, NS_PER_S)))
        if _libc.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, ctypes.byref(timer), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")


class LeaseWatch:
    """`fd` becomes readable when the lease may have ended; `over` tests whether it has, and sets the timer
    anew if not."""

    def __init__(self, path: str, lease_s: float, until_s: float) -> None:
        """`until_s`: the end of the lease when the task was ordered. Raises OSError."""
        self._path, self._lease_s, self._until_s = path, lease_s, until_s
        self._timer = BootTimer()
        self.fd = self._timer.fd
        self._timer.set(until_s)

    def over(self) -> bool:
        """By the clock and the latest contact."""
        self._until_s = max(self._until_s, read_contact_s(self._path) + self._lease_s)
        if self._until_s <= boot_s():
            return True
        self._timer.set(self._until_s)
        return False
