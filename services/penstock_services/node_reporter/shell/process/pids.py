"""Process look-ups in /proc for the shim: start times, pids and descendants.
Standard library only (see `confinement`)."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

STDIN, OUTPUTS = 0, (1, 2)


class Process(NamedTuple):
    """One process of a task, as /proc shows it."""

    pid: int
    """In the caller's namespace."""
    parent: int
    """Likewise; 0: outside of it."""
    caught: int
    """Signals that it handles: bit n - 1 is signal n."""
    command: bytes
    """Its command line, arguments separated by zero bytes."""
    reads: str
    """The pipe that is its standard input; empty: another file."""
    writes: frozenset[str]
    """The pipes that are its standard output and error."""

    def catches(self, number: int) -> bool:
        return bool(self.caught >> (number - 1) & 1)


def start_ticks(pid: int) -> int | None:
    """Start time of this process, in clock ticks since boot; with the pid it identifies one process. None: no
    such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def pid_of(pidfd: int) -> int:
    """A process's pid in the namespace of the mounted /proc, which may be another than the caller's."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def _living() -> Iterator[tuple[int, list[bytes]]]:
    """Each process but zombies: its pid, and the fields of its stat from the state on."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                yield int(name), fields


def members(session: int) -> list[int]:
    """Living processes of this session; zombies are left out. Pids as in the mounted /proc."""
    return [pid for pid, fields in _living() if int(fields[3]) == session]


def descendants(root: int) -> list[int]:
    """Living descendants of a process, by the parents in /proc; zombies are left out. Pids as in the
    mounted /proc."""
    children: dict[int, list[int]] = {}
    for pid, fields in _living():
        children.setdefault(int(fields[1]), []).append(pid)
    found: list[int] = []
    queue = deque([root])
    while queue:
        own = children.get(queue.popleft(), [])
        found += own
        queue.extend(own)
    return found


def processes_below(root: int) -> list[Process]:
    """Living descendants of a process, parents first. `root`: as in the mounted /proc."""
    level = len(_status("self").get("NSpid", "0").split())
    found = {pid: status for pid in descendants(root) if (status := _status(str(pid)))}
    own = {pid: int(status["NSpid"].split()[level - 1]) for pid, status in found.items()}
    return [
        Process(
            own[pid],
            own.get(int(status["PPid"]), 0),
            int(status["SigCgt"], 16),
            _command(pid),
            next(_pipes(pid, (STDIN,)), ""),
            frozenset(_pipes(pid, OUTPUTS)),
        )
        for pid, status in found.items()
    ]


def _status(pid: str) -> dict[str, str]:
    """Fields of /proc/PID/status; empty: it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        return {name: text.strip() for name, _, text in (line.partition(":") for line in file)}
    return {}


def _command(pid: int) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def _pipes(pid: int, descriptors: tuple[int, ...]) -> Iterator[str]:
    for number in descriptors:
        with suppress(OSError):
            if (name := os.readlink(f"/proc/{pid}/fd/{number}")).startswith("pipe:"):
                yield name
