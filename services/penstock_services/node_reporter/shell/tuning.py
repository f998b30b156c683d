"""Changing running tasks: which cores they may use."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell import processes
from penstock_services.node_reporter.shell.spawner import read_json

logger = logging.getLogger(__name__)


def set_affinity(folder: Path, cores: Sequence[int]) -> None:
    """Pins every thread of a task's processes; threads started later inherit it from their creators."""
    started = read_json(folder / "started.json")
    if started is None or not processes.is_alive(started["shim"], started["shim_start"]):
        return
    usable = sorted(os.sched_getaffinity(0))
    chosen = {usable[core % len(usable)] for core in cores}
    for pid in processes.with_descendants({started["pid"]}, set()):
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), chosen)
