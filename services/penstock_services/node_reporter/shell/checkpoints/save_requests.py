"""Requests to save a checkpoint, to the processes of a task that save: those registered with the SDK, or of a
job that saves by itself those that handle the signal."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.process.pids import processes_below
from penstock_services.node_reporter.shell.process.savers import SAVERS, ask, savers
from penstock_services.node_reporter.shell.process.stopping import is_copy


def ask_to_save(started: Started, folder: Path, *, by_sdk: bool) -> bool:
    """As `ports.Host.ask_to_save`; unhandled, SIGUSR1 would kill. `folder`: of the task."""
    path = str(folder / SAVERS)
    registered = ask(path).saving
    asked = False
    for pid in registered or (() if by_sdk else set(_handling(started, signal.SIGUSR1))):
        with suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                if not registered or pid in savers(path).saving:  # after opening: the pid cannot be reused
                    signal.pidfd_send_signal(descriptor, signal.SIGUSR1)
                    asked = True
            finally:
                os.close(descriptor)
    return asked


def _handling(started: Started, number: int) -> Iterator[int]:
    found = processes_below(started.shim)
    parents = {process.pid: process for process in found}
    for process in found:
        if process.catches(number) and not is_copy(process, parents.get(process.parent), number):
            yield process.pid
