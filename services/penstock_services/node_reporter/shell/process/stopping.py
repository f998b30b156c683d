"""Stop of a task: which of its processes get SIGTERM, in which order. Standard library only (see
`confinement`).

Ideal: the process that saves gets SIGTERM and everything else ends with it. Departures, since jobs come in
wrappers (a script, `| tee`, `torchrun`) that may end, forward or ignore the signal:

1. Processes that have registered to save get it first, and alone: what they need (loaders, other ranks, the
   reader of their output) stays.
2. When these have ended, or where there are none, all others get it, except readers of their output and
   copies of a process that handles the signal, such as its loaders.
3. At last these, too. Nobody gets it twice, and each step waits until those before have ended.

The caller kills the remaining processes when the grace is over.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock_services.node_reporter.shell.process.pids import Process
from penstock_services.node_reporter.shell.process.savers import Savers

SETTLE_S = 0.3
"""Time in which the remaining processes may end by themselves: a script prints its last line, `tee`
empties its pipe. A Python interpreter takes 10 to 50 ms to end."""


def next_told(processes: Sequence[Process], registered: Savers) -> list[int]:
    """Pids of the processes that get SIGTERM now, among those that have not got it."""
    saving = [process.pid for process in processes if process.pid in registered.saving]
    if saving:
        return saving
    parents = {process.pid: process for process in processes}
    return [
        process.pid
        for process in processes
        if not _reads_output(process, processes)
        and not is_copy(process, parents.get(process.parent), signal.SIGTERM)
    ] or [process.pid for process in processes]


def _reads_output(process: Process, processes: Sequence[Process]) -> bool:
    """Whether it reads what others print, like `tee`: it ends when they have ended."""
    return (
        bool(process.reads)
        and not process.catches(signal.SIGTERM)
        and any(process.reads in other.writes for other in processes if other is not process)
    )


def is_copy(process: Process, parent: Process | None, number: int) -> bool:
    """Whether a process that handles the signal has forked it, such as a loader: it inherits the handler,
    and is ended by its parent."""
    return (
        parent is not None
        and parent.command == process.command
        and process.catches(number)
        and parent.catches(number)
    )


class Stop:
    """The stop of one task, from its request on. `processes`: of the task; `registered`: to save."""

    def __init__(
        self,
        poll: select.poll,
        processes: Callable[[], Sequence[Process]],
        registered: Callable[[], Savers],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`poll`: gets descriptors of the processes that are waited for; `clock`: monotonic seconds."""
        self._poll = poll
        self._processes, self._registered, self._clock = processes, registered, clock
        self._waits: dict[int, int] = {}
        """pidfd → pid of those whose end the next ones wait for."""
        self._due_s: float | None = self._clock()
        """When the next ones get SIGTERM; None: once those have ended."""

    def left_s(self) -> float | None:
        """Time until `turn` has something to do; None: until a descriptor is ready."""
        return None if self._due_s is None else max(0.0, self._due_s - self._clock())

    def ended(self, descriptor: int) -> None:
        """A process that is waited for has ended, if the descriptor is its."""
        if self._waits.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            if not self._waits:
                self._due_s = self._clock() + SETTLE_S

    def turn(self) -> None:
        """Sends SIGTERM to the next ones, if it is time."""
        if self._due_s is None or self._clock() < self._due_s:
            return
        told = next_told(self._processes(), self._registered())
        for pid in told:
            self._tell(pid)
        self._due_s = None if self._waits or not told else self._clock() + SETTLE_S

    def _tell(self, pid: int) -> None:
        """Sends SIGTERM, and waits for the end of the process;
        nothing if it has ended, or is another user's."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return
        self._waits[descriptor] = pid
        self._poll.register(descriptor, select.POLLIN)
        with suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
