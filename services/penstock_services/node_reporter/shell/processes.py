"""Processes by /proc: which are alive, which are ours, and killing until nothing is left."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from penstock_services.node_reporter.shell.launcher import start_ticks
from penstock_services.node_reporter.shell.ports import Immortal

KILL_ROUNDS = 200
KILL_PAUSE_S = 0.01


def pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def fields(pid: int) -> tuple[str, int, int] | None:
    """State letter, parent and session id of a process; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return rest[0].decode(), int(rest[1]), int(rest[3])


def ancestors(pid: int) -> set[int]:
    """The process itself and everything above it."""
    found = {pid}
    while pid > 1:
        state = fields(pid)
        if state is None:
            break
        pid = state[1]
        found.add(pid)
    return found


def below(pid: int, known: set[int]) -> bool:
    """Whether a process is, or descends from, one of the known."""
    while pid > 1:
        if pid in known:
            return True
        found = fields(pid)
        if found is None:
            return False
        pid = found[1]
    return False


def environment(pid: int) -> Mapping[str, str]:
    """The environment that a process was started with; empty when it is gone or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


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
    if ticks is not None and not is_alive(
        pid, ticks
    ):  # looked at after opening: no other can have slipped in
        os.close(descriptor)
        return None
    return descriptor


def has_ended(pidfd: int) -> bool:
    """Whether the descriptor's process has ended; never waits."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill_all(find: Callable[[], set[int]]) -> int:
    """SIGKILLs what `find` returns until it returns nothing; how many there were.

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
    """These processes and everything below them that is alive, without the spared and what is below those."""
    parents = {pid: found for pid in pids() if (found := fields(pid)) is not None and found[0] not in "ZX"}
    chosen = {pid for pid in roots if pid in parents and pid not in spare}
    grown = True
    while grown:
        below = {
            pid
            for pid, found in parents.items()
            if found[1] in chosen and pid not in chosen and pid not in spare
        }
        grown = bool(below)
        chosen |= below
    return chosen


def members(marks: Mapping[str, str], session: int | None = None) -> set[int]:
    """Living processes whose environment has all these marks, or that are in this session."""
    found: set[int] = set()
    for pid in pids():
        state = fields(pid)
        if state is None or state[0] in "ZX" or pid == os.getpid():
            continue
        if session is not None and state[2] == session:
            found.add(pid)
            continue
        names = environment(pid)
        if all(names.get(name) == value for name, value in marks.items()):
            found.add(pid)
    return found
