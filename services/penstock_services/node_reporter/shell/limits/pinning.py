"""CPU affinity of all threads of a task: every thread of every process below its shim, set and read back."""

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from penstock_services.node_reporter.shell.process.processes import below

MAX_ROUNDS = 100


def pin(shim: int, cores: Collection[int]) -> str:
    """Lets all threads below the shim run on these cores alone, and reads it back. Returns why that is not
    possible; empty: it is done."""
    wanted = set(cores)

    def pinned(thread: int) -> bool:
        if os.sched_getaffinity(thread) == wanted:
            return False
        os.sched_setaffinity(thread, wanted)
        return True

    return each_thread(shim, pinned)


def cores_of(shim: int) -> int:
    """Number of cores that a process below the shim may use, the most of any; at least 1."""
    found = [1]
    for pid in below(shim):
        with suppress(ProcessLookupError):
            found.append(len(os.sched_getaffinity(pid)))
    return max(found)


def each_thread(shim: int, change: Callable[[int], bool]) -> str:
    """Calls `change` on every thread below the shim until a whole round changes none: a later thread inherits
    from its creator.

    `change`: whether there was something to do; may raise OSError. Returns the obstacle; empty: none.
    """
    for _ in range(MAX_ROUNDS):
        changed = 0
        for pid in below(shim):
            try:
                threads = os.listdir(f"/proc/{pid}/task")
            except FileNotFoundError:
                continue
            for thread in threads:
                try:
                    changed += change(int(thread))
                except ProcessLookupError:
                    continue
                except OSError as error:
                    return f"process {pid}: {error.strerror}"
        if not changed:
            return ""
    return f"after {MAX_ROUNDS} rounds {changed} threads were still otherwise"


def real_cores(cores: Sequence[int]) -> list[int]:
    """This machine's core numbers: a virtual node may have more cores than the machine."""
    usable = sorted(os.sched_getaffinity(0))
    return sorted({usable[core % len(usable)] for core in cores})
