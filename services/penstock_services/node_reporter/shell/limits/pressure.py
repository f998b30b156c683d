"""Triggers on pressure stall information (PSI): the kernel wakes this process when threads have waited for
cores, without cost while none waits.

Source: the kernel's accounting/psi.rst: `some STALL WINDOW` in µs, written into `cpu.pressure` of a cgroup v2
or /proc/pressure/cpu; the descriptor must stay open, and becomes ready for POLLPRI at most once a window.
Without CAP_SYS_RESOURCE a window is a multiple of 2 s.
"""

import asyncio
import os
import re
import select
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.core.reports.stalls import LEAST_PERCENT, WINDOW_S
from penstock_services.node_reporter.shell.ports import Pressure

CPU = "cpu.pressure"
"""File of a cgroup v2."""
MACHINE = Path("/proc/pressure/cpu")
US_PER_S = 1_000_000
TRIGGER = f"some {round(LEAST_PERCENT / 100 * WINDOW_S * US_PER_S)} {round(WINDOW_S * US_PER_S)}\0".encode()
SOME = re.compile(rb"^some avg10=([0-9.]+) .*total=([0-9]+)$", re.MULTILINE)
MAX_BYTES = 512


class Trigger:
    """An armed trigger. Adapter of `ports.PressureTrigger`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # asyncio does not wait for POLLPRI, but an epoll descriptor is readable when one of its own is ready.
        # One each: reading an
        # event consumes it, so that an epoll descriptor with several could not tell which trigger fired.
        self._ready = select.epoll()
        self._ready.register(descriptor, select.EPOLLPRI | select.EPOLLERR)
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, fired: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ready.fileno(), self._fire, fired)

    def _fire(self, fired: Callable[[], None]) -> None:
        self._ready.poll(0)
        fired()

    def read(self) -> Pressure | None:
        try:
            found = SOME.search(os.pread(self._descriptor, MAX_BYTES, 0))
        except OSError:  # ENODEV: the group was removed
            return None
        return None if found is None else Pressure(int(found[2]), float(found[1]))

    def close(self) -> None:
        """The kernel waits for some 20 ms when its last descriptor is closed, so that happens in a thread
        beside the event loop."""
        if self._ready.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._ready.fileno())
        self._ready.close()
        if self._loop is not None:
            self._loop.run_in_executor(None, os.close, self._descriptor)
        else:
            os.close(self._descriptor)


def arm(path: Path) -> Trigger | None:
    """None where there is no such file, PSI is off, or triggers are not allowed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        os.write(descriptor, TRIGGER)
        return Trigger(descriptor)
    os.close(descriptor)
    return None


def triggers(path: Path) -> bool:
    """Whether one can be armed there, by trying."""
    trigger = arm(path)
    if trigger is None:
        return False
    trigger.close()
    return True
