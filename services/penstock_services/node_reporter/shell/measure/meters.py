"""Linux adapter of `ports.Meters`, the measurements of tasks: /proc, NVML,
pressure stall information, resctrl."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pynvml

from penstock.model.nouns.nodes import Measures
from penstock.runtime.files.task_logs import file_name
from penstock_services.node_reporter.shell.limits.cgroups import Cgroups
from penstock_services.node_reporter.shell.limits.pressure import CPU, MACHINE, Trigger, arm
from penstock_services.node_reporter.shell.measure.inventory import BYTES_PER_MIB, memory_of
from penstock_services.node_reporter.shell.measure.resctrl_monitor import TrafficMonitor
from penstock_services.node_reporter.shell.ports import Key
from penstock_services.node_reporter.shell.process import processes

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SCHEDSTAT = Path("/proc/self/schedstat")


class LinuxMeters:
    """`virtual`: the GPUs are virtual. `memory_mb_s`: bandwidth of the machine's memory; None: the operator
    has not stated it."""

    def __init__(
        self, cgroups: Cgroups, monitor: TrafficMonitor, *, virtual: bool, memory_mb_s: int | None
    ) -> None:
        self._cgroups = cgroups
        self._monitor = monitor
        self._virtual = virtual
        self._memory_mb_s = memory_mb_s

    @property
    def measures(self) -> Measures:
        """The measurements that the node announces."""
        contention: Literal["pressure", "schedstat", "none"] = "none"
        if self._cgroups.has_pressure:
            contention = "pressure"
        elif SCHEDSTAT.exists():
            contention = "schedstat"
        return Measures(
            contention=contention,
            memory_bandwidth="resctrl" if self._monitor.usable else "none",
            memory_mb_s=self._memory_mb_s if self._monitor.usable else None,
        )

    def use(self, shim: int) -> tuple[float, int]:
        """Reads no other process than those below the shim."""
        ticks = pages = 0
        for pid in processes.below(shim):
            with suppress(OSError):
                with open(f"/proc/{pid}/stat", "rb") as stat:
                    fields = stat.read().rpartition(b")")[2].split()
                ticks += sum(map(int, fields[11:15]))
                pages += int(fields[21])
        return ticks / TICKS_PER_S, pages * PAGE_BYTES // BYTES_PER_MIB

    def gpu(self, uuid: str) -> tuple[float, int] | None:
        if self._virtual:
            return None
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            percent = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            return percent, pynvml.nvmlDeviceGetMemoryInfo(handle).used // BYTES_PER_MIB
        except pynvml.NVMLError:
            return None

    def gpu_memory_of(self, shim: int, uuid: str) -> int | None:
        return None if self._virtual else memory_of(set(processes.below(shim)), uuid)

    def pressure(self, groups: Sequence[str] | None) -> Trigger | None:
        if groups is None:
            return arm(MACHINE)
        group = self._cgroups.pressure_of(groups)
        return None if group is None else arm(group / CPU)

    def waits(self, shim: int) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for pid in processes.below(shim):
            with suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with suppress(OSError), open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                        found[int(thread)] = int(file.read().split()[1])
        return found

    def traffic(self, key: Key | None) -> Mapping[str, int]:
        return self._monitor.of_machine() if key is None else self._monitor.of_task(_name(key))

    def follow_traffic(self, key: Key, shim: int) -> None:
        self._monitor.follow(_name(key), shim)

    def forget_traffic(self, key: Key) -> None:
        self._monitor.forget(_name(key))


def _name(key: Key) -> str:
    """Name of the task's folder, and of its group where its bandwidth is capped."""
    return f"{file_name(key[0])}@{key[1]}"
