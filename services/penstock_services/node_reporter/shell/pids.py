"""Process look-ups in /proc for the shim: start times, pids and descendants. Standard library only (see `confinement`)."""

import os
from collections import deque
from contextlib import suppress


def start_ticks(pid: int) -> int | None:
    """Start time of this process, in clock ticks since boot; with the pid it identifies one process. None: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def pid_of(pidfd: int) -> int:
    """A process's pid in the namespace of the mounted /proc, which may be another than the caller's."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def descendants(root: int) -> list[int]:
    """Living descendants of a process, by the parents in /proc; zombies are left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = deque([root])
    while queue:
        own = children.get(queue.popleft(), [])
        found += own
        queue.extend(own)
    return found


def catches(pid: int, number: int) -> bool:
    """Whether the process handles this signal."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
        return bool(caught >> (number - 1) & 1)
    return False
