"""Quotas of processor time (cgroup controller `cpu`), which bound the memory traffic of a task where the
processor cannot: a task that runs for a tenth of the time moves about a tenth.

Source: the kernel's admin-guide/cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst (v1). In v2 the file is
in the task's own group. In v1 a group is created with the first cap, and removed when that is lifted: groups
get equal parts of a core, so a task without a cap stays in the reporter's group.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell.limits.cgroups import QUOTA_V1, QUOTA_V2
from penstock_services.node_reporter.shell.limits.pinning import each_thread
from penstock_services.node_reporter.shell.limits.resctrl import enter, remove_empty

PERIOD_US = 100_000
"""The kernel's default."""
UNLIMITED_V1 = "-1"


class CpuQuota:
    """The quotas of one node's tasks. `name`: unique among the reporters on this machine. `v1`, `v2`: roots
    of groups that have quotas, in the hierarchies of v1 and v2; None: there is none."""

    def __init__(self, name: str, v1: Path | None, v2: Path | None) -> None:
        self._name, self._v1, self._v2 = name, v1, v2

    @property
    def usable(self) -> bool:
        """Whether quotas can be set here."""
        return self._v1 is not None or self._v2 is not None

    def cap(self, task: str, shim: int, groups: Iterable[str], cores: int, percent: int | None) -> str:
        """Limits everything below the task's shim to `percent` of the time of so many cores, or lifts the
        limit; read back. Returns why that is not possible; empty: it is done.

        `groups`: the task's cgroups.
        """
        quota_us = None if percent is None else PERIOD_US * cores * percent // 100
        if self._v1 is not None:
            return self._cap_v1(self._v1, self._v1 / f"{self._name}@{task}", shim, quota_us)
        group = next((group for group in map(Path, groups) if group.parent == self._v2), None)
        if group is None and percent is None:
            return ""
        if group is None:
            return "this node has no cgroup for the processor time of its tasks"
        return _put(group / QUOTA_V2, f"{'max' if quota_us is None else quota_us} {PERIOD_US}")

    def _cap_v1(self, root: Path, group: Path, shim: int, quota_us: int | None) -> str:
        try:
            if quota_us is None:
                if not group.exists():
                    return ""
                wrong = _put(group / QUOTA_V1, UNLIMITED_V1) or each_thread(
                    shim, lambda thread: enter(root, thread)
                )
                with suppress(OSError):
                    group.rmdir()
                return wrong
            group.mkdir(exist_ok=True)
        except OSError as error:
            return f"{group}: {error.strerror}"
        wrong = _put(group / "cpu.cfs_period_us", str(PERIOD_US)) or _put(group / QUOTA_V1, str(quota_us))
        return wrong or each_thread(shim, lambda thread: enter(group, thread))

    def sweep(self) -> None:
        """Removes groups whose tasks have ended."""
        if self._v1 is not None:
            remove_empty(self._v1.glob(f"{self._name}@*"))


def _put(path: Path, value: str) -> str:
    """Writes the file and reads it back. Returns why it has another value; empty: it has this one."""
    try:
        with open(os.open(path, os.O_WRONLY), "w") as file:
            file.write(value)
        got = path.read_text().strip()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if got == value else f"{path} reads {got} after {value} was written"
