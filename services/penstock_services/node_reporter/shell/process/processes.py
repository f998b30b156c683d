"""Process table by /proc: which processes are alive, which are this reporter's,
and killing until none is left."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import psutil

from penstock_services.node_reporter.shell.ports import Immortal
from penstock_services.node_reporter.shell.process.pids import start_ticks

KILL_ROUNDS = 200
KILL_PAUSE_S = 0.01


def fields(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent and session id of a process; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return rest[0].decode(), int(rest[1]), int(rest[3])


def living() -> dict[int, tuple[str, int, int]]:
    """Pid → `fields` of every process that has not ended; zombies count as ended."""
    return {
        pid: found for pid in psutil.pids() if (found := fields(pid)) is not None and found[0] not in "ZX"
    }


def ancestors(pid: int) -> set[int]:
    """The process itself and everything above it."""
    found = {pid}
    while pid > 1 and (state := fields(pid)) is not None:
        pid = state[1]
        found.add(pid)
    return found


def is_alive(pid: int, ticks: int | None) -> bool:
    """Whether this very process (pid and start time) still runs; a zombie does not."""
    found = fields(pid)
    return found is not None and found[0] not in "ZX" and ticks is not None and start_ticks(pid) == ticks


def open_pidfd(pid: int, ticks: int | None) -> int | None:
    """A descriptor of this very process; None when it has ended. The caller closes it."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return None
    if ticks is not None and not is_alive(pid, ticks):  # after opening: the pid cannot be reused
        os.close(descriptor)
        return None
    return descriptor


def kill_all(find: Callable[[], set[int]]) -> int:
    """SIGKILLs what `find` returns until it returns nothing; returns how many there were.

    Blocks for at most KILL_ROUNDS × KILL_PAUSE_S; then raises `Immortal`.
    """
    seen: set[int] = set()
    for _ in range(KILL_ROUNDS):
        found = find()
        if not found:
            return len(seen)
        seen |= found
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_PAUSE_S)
    raise Immortal(f"processes {sorted(find())} do not die; this needs a look at the machine")


def with_descendants(roots: set[int], spare: set[int]) -> set[int]:
    """These processes and all living ones below them, without the spared and those below the spared."""
    table = living()
    chosen: set[int] = set()
    more = (roots & table.keys()) - spare
    while more:
        chosen |= more
        more = {pid for pid, found in table.items() if found[1] in more} - chosen - spare
    return chosen


def below(root: int) -> Iterator[int]:
    """Processes below this one, without it. Reads no others;
    of those that start or end meanwhile some may be missing."""
    queue = [root]
    while queue:
        pid = queue.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    queue += map(int, file.read().split())
            if pid != root:
                yield pid


def members(marks: Mapping[str, str], session: int | None = None) -> set[int]:
    """Living processes whose environment has all these marks, or that are in this session."""
    found: set[int] = set()
    for pid, (_, _, own_session) in living().items():
        with suppress(psutil.Error):  # it has ended, or its environment may not be read
            if pid != os.getpid() and (
                own_session == session or marks.items() <= psutil.Process(pid).environ().items()
            ):
                found.add(pid)
    return found
