"""Cleanup of orphan processes: ends training processes that outlived their node-reporter, each proven to be
Penstock's.

A node-reporter stops its tasks before it ends. Departure from that ideal: a killed node-reporter could not;
its tasks' shims then live on (so that a restarted reporter finds them again), and when all of Penstock ends
on this machine they must be ended here.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.process.processes import is_alive
from penstock_services.node_reporter.shell.process.records import read_record

WAIT_S = 2.0  # for shims to reap the processes that they killed
POLL_S = 0.02


def end_leftover_tasks(nodes: Path) -> int:
    """Ends every task whose shim is alive and waits until it is gone; returns how many there were."""
    found = set(_shims(nodes))
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)  # the shim kills every process of its task, then ends itself
    deadline_s = time.monotonic() + WAIT_S
    while any(_shims(nodes)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return len(found)


def reap_orphans() -> None:
    """Reaps every ended child. To be called last:
    no other code may still wait for a child of this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _shims(nodes: Path) -> Iterator[int]:
    """Process ids of living shims, from their state files: pid and start time name one process."""
    for path in nodes.glob("*/**/started.json"):
        started = read_record(path, Started)
        if (
            started is not None
            and not (path.parent / "exit.json").exists()
            and is_alive(started.shim, started.shim_start)
        ):
            yield started.shim
