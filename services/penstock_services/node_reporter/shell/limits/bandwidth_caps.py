"""Caps on the memory bandwidth of tasks, by the best mechanism that the machine has: resctrl, else quotas of
processor time."""

from penstock.model.nouns.nodes import BandwidthCap
from penstock_services.node_reporter.shell.limits.cgroups import Cgroups
from penstock_services.node_reporter.shell.limits.cpu_quota import CpuQuota
from penstock_services.node_reporter.shell.limits.pinning import cores_of
from penstock_services.node_reporter.shell.limits.resctrl import Resctrl
from penstock_services.node_reporter.shell.ports import Enforced, Started


class BandwidthCaps:
    """The caps of one node's tasks. `protected`: tasks can't write the files of cgroups. `memory_mb_s`:
    bandwidth of the machine's memory; None: not known."""

    def __init__(self, groups: Cgroups, memory_mb_s: int | None, *, protected: bool) -> None:
        self._resctrl = Resctrl(groups.name, memory_mb_s=memory_mb_s)
        self._quota = CpuQuota(groups.name, groups.quota_v1, groups.quota_v2)
        self.mechanism: BandwidthCap = (
            "resctrl" if self._resctrl.usable else "cpu_quota" if protected and self._quota.usable else "none"
        )

    def cap(self, task: str, started: Started, percent: int | None) -> Enforced:
        """Caps everything below the task's shim, or lifts the cap, whichever mechanism set it; read back.
        `task`: the name of its folder. `percent`: of the node's memory bandwidth, or of the time of the
        task's present cores."""
        quota = self.mechanism == "cpu_quota"
        wrong = ""
        if quota or percent is None:
            wrong = self._quota.cap(task, started.shim, started.groups, cores_of(started.shim), percent)
        if not quota or percent is None:
            wrong = wrong or self._resctrl.cap(task, started.shim, percent)
        return Enforced("" if wrong else "cpu_quota" if quota else "resctrl", wrong)

    def cores_changed(self, task: str, started: Started, percent: int | None) -> str:
        """Adapts the cap to the task's new cores. Returns why that is not possible; empty: it is done."""
        if self.mechanism != "cpu_quota" or percent is None:
            return ""
        return self.cap(task, started, percent).detail

    def sweep(self) -> None:
        """Removes groups whose tasks have ended."""
        self._resctrl.sweep()
        self._quota.sweep()
