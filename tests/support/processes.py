"""Processes that tests have started, found by what they carry: command, environment or working directory."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

DEAD = (b"Z", b"X")


def processes_with(*needles: bytes) -> Mapping[int, str]:
    """Living processes but this one that carry any of these: number and command line."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            state = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[0]
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            text = command + Path(f"/proc/{name}/environ").read_bytes()
            text += os.readlink(f"/proc/{name}/cwd").encode()
        except OSError:
            continue
        if state not in DEAD and any(needle in text for needle in needles):
            found[int(name)] = command.replace(bytes(1), b" ").decode(errors="replace")
    return found


def orphans_with(*needles: bytes, within_s: float) -> list[str]:
    """Those that neither this process nor a descendant of it holds, and that live on for so long."""
    deadline = time.monotonic() + within_s
    while True:
        own = {child.pid for child in psutil.Process().children(recursive=True)}
        left = [f"{pid}: {command}" for pid, command in processes_with(*needles).items() if pid not in own]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def processor_s(pid: int) -> float:
    """Processor time so far of all processes below this one."""
    times = [child.cpu_times() for child in psutil.Process(pid).children(recursive=True)]
    return sum(each.user + each.system for each in times)
