"""Cleanup of orphan processes: training processes that outlived their node-reporter are ended, each proven to be ours.

A node-reporter stops its tasks before it ends. Departure from that ideal: one that was killed could not; its
tasks' guardians then live on (that is how a restarted reporter finds them again), and when all of Penstock
ends on this machine they must be ended here.
"""

import ctypes
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
WAIT_S = 2.0  # for guardians to reap what they killed
POLL_S = 0.02


def end_leftover_tasks(nodes: Path) -> int:
    """Ends every task whose guardian is alive and waits until it is gone; returns how many there were."""
    found = set(_guardians(nodes))
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)  # the guardian kills every process of its task, then ends itself
    deadline_s = time.monotonic() + WAIT_S
    while _guardians_alive(nodes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return len(found)


def adopt_orphans() -> None:
    """From now on whatever our children leave behind becomes ours: a container's process 1 may reap nothing."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans() -> None:
    """Reaps everything that has ended. To be called last: no other code may still wait for a child of ours."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _guardians_alive(nodes: Path) -> bool:
    return next(_guardians(nodes), None) is not None


def _guardians(nodes: Path) -> Iterator[int]:
    """Process ids of living guardians, from their state files: pid and start time name one process."""
    for path in nodes.glob("*/**/started.json"):
        if (path.parent / "exit.json").exists():
            continue
        with suppress(OSError, ValueError, KeyError):
            started = json.loads(path.read_text())
            if started["shim_start"] is not None and _start_ticks(started["shim"]) == started["shim_start"]:
                yield int(started["shim"])


def _start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot of a living process; None: gone, or only waiting to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
