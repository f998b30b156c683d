"""Processes that tests have started, found by what they carry: command, environment or working directory."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

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
        own = _descendants()
        left = [f"{pid}: {command}" for pid, command in processes_with(*needles).items() if pid not in own]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _descendants() -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(
                    Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1]
                )
            except OSError:
                continue
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return own
