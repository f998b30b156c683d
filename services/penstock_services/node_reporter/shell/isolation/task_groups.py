"""Cgroups of one task, in its shim's hands: entered in advance, limited by the order, removed at the end.
Standard library only (see `confinement`)."""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from penstock_services.node_reporter.shell.isolation.confinement import Confinement
from penstock_services.node_reporter.shell.isolation.whole_files import put

KILL_PAUSE_S = 0.005  # between kills while the last processes die


class TaskGroups:
    """`paths`: root → the task's own group there."""

    def __init__(self, plan: Confinement) -> None:
        self.paths: dict[str, str] = {}
        self._plan = plan
        self._failure: OSError | None = None

    def enter(self, leader: int, shim: int) -> None:
        """Puts the leader into groups of its own: in advance, since that waits for a grace period of the
        kernel (11 ms)."""
        try:
            for root, settings in self._plan.groups:
                group = f"{root}/{self._plan.name}@{shim}"
                os.makedirs(group, exist_ok=True)
                self.paths[root] = group
                for name, value in (*settings, ("cgroup.procs", str(leader))):
                    put(f"{group}/{name}", value)
        except OSError as error:
            self._failure = error

    def limit(self, settings: Sequence[tuple[str, str, str]]) -> dict[str, Any] | None:
        """Gives the groups the limits of this task; returns the failure, if that is refused."""
        try:
            if self._failure is not None:
                raise self._failure
            for root, name, value in settings:
                put(f"{self.paths[root]}/{name}", value)
        except OSError as error:
            return {"stage": "cgroup", "errno": error.errno}
        return None

    def remove(self, but: str = "") -> None:
        """All but the one in this root."""
        for root, group in self.paths.items():
            with contextlib.suppress(OSError):
                if root != but:
                    os.rmdir(group)

    def empty(self, root: str | None) -> None:
        """Where a group proves the end: kills its processes until the kernel reports none there."""
        group = self.paths.get(root or "")
        while group:
            with open(f"{group}/cgroup.events") as file:
                if "populated 0" in file.read().splitlines():
                    return
            put(f"{group}/cgroup.kill", "1")
            time.sleep(KILL_PAUSE_S)

    def count(self, source: tuple[str, str, str] | None) -> int:
        """The number in the line `KEY COUNT` of a file of (root, file, key);
        0: the kernel has not counted."""
        if source is None:
            return 0
        root, name, key = source
        with contextlib.suppress(OSError, KeyError), open(f"{self.paths[root]}/{name}") as file:
            return int(dict(line.split() for line in file).get(key, 0))
        return 0
