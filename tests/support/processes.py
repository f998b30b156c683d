"""Processes that tests have started, found by what they carry: command, environment or working directory."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.support.waiting import LOOK_S, left_s

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
    """Those that neither this process nor a descendant of it holds, and that do nothing for so long.

    Who is about to end may wait for a processor or a disk on a busy machine.
    """
    idle_since_s = time.monotonic()  # clock: it goes on while they wait for what a busy machine lacks
    while True:
        own = {child.pid for child in psutil.Process().children(recursive=True)}
        left = {pid: command for pid, command in processes_with(*needles).items() if pid not in own}
        now_s = time.monotonic()  # clock: of what is idle, as above
        if any(_busy(pid) for pid in left):
            idle_since_s = now_s
        if not left or now_s - idle_since_s > within_s or left_s() <= 0:
            return [f"{pid}: {command}" for pid, command in left.items()]
        time.sleep(LOOK_S)  # clock: between two looks


def _busy(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except psutil.NoSuchProcess:
        return True  # it has just ended


def processor_s(pid: int) -> float:
    """Processor time so far of all processes below this one."""
    times = [child.cpu_times() for child in psutil.Process(pid).children(recursive=True)]
    return sum(each.user + each.system for each in times)
