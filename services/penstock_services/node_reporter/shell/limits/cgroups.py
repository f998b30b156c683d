"""Control groups of tasks: memory caps, cores, devices, pressure stall information, and the proof of an end
where there is no PID namespace.

A task's groups are folders named after node and shim under a *root* per purpose, in the hierarchy of cgroup
v2 or of v1. A shim creates them before it has a task, and removes them at the end; an order sets their
limits.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError
from penstock.model.nouns.types import TaskPlacement
from penstock_services.node_reporter.shell.limits import pressure
from penstock_services.node_reporter.shell.ports import Immortal

BYTES_PER_MIB = 1 << 20
DATA_SLACK_MIB = 1_024
"""RLIMIT_DATA counts memory that is reserved but never touched (thread stacks of 8 MiB, BLAS buffers of 32
MiB per thread), a memory cap counts used memory; so this much more is allowed."""
UNIFIED = "unified"
MEMORY = "memory"
CPUSET = "cpuset"
PROCESSOR = "cpu"
QUOTA_V1, QUOTA_V2 = "cpu.cfs_quota_us", "cpu.max"
PIDS, PIDS_LIMIT = "pids", "pids.max"
PIDS_PERCENT = 15
"""A task's part of the processes and threads that the machine can have.
Source: DefaultTasksMax of systemd-system.conf(5)."""
PIDS_BOUNDS = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")
DEVICES = "devices"
GPU_MAJOR = 195
"""Major number of /dev/nvidia0 … Source: the kernel's admin-guide/devices.txt;
a GPU's minor number is NVML's."""
DISKS = "b *:* rwm"
CAPS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}
"""File with the cap in bytes (v2, v1) → file with the line `oom_kill COUNT`."""
OOM_KILLS, PIDS_REFUSED = "oom_kill", ("pids.events", "max")
KILL_ROUNDS = 200
KILL_PAUSE_S = 0.01


def own_groups(mounts: str, memberships: str) -> dict[str, Path]:
    """Hierarchy (`unified` or a v1 controller) → this process's own group there; from
    /proc/self/{mountinfo,cgroup}."""
    paths: dict[str, str] = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(",") if controllers else [UNIFIED], path)
    found: dict[str, Path] = {}
    for line in mounts.splitlines():
        fields, _, filesystem = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = filesystem.split(" ", 2)
        names = {"cgroup2": {UNIFIED}, "cgroup": set(options.split(","))}.get(kind, set())
        for name in names & paths.keys():
            path = paths[name]
            inside = (
                path[len(root) :]
                if root != "/" and f"{path}/".startswith(f"{root}/")
                else path
                if root == "/"
                else ""
            )
            found[name] = Path(point) / inside.strip("/")
    return found


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


def gives(root: Path | None, file: str, works: Callable[[Path], bool] = _writable) -> bool:
    """Whether groups can be created in this one, and have this file in working order."""
    if root is None:
        return False
    trial = root / f"penstock-trial-{os.getpid()}"
    try:
        trial.mkdir(exist_ok=True)
    except OSError:
        return False
    try:
        return works(trial / file)
    finally:
        with suppress(OSError):
            trial.rmdir()


def most_pids() -> int:
    """A task's limit of processes and threads, by the machine's own bounds."""
    return min(int(Path(path).read_text()) for path in PIDS_BOUNDS) * PIDS_PERCENT // 100


class Cgroups:
    """The groups of one node's tasks. `given`: the folder of `--cgroup`. Raises `ConfigurationError` if it is
    not usable.

    `name`: unique among the reporters on this machine.
    """

    def __init__(self, name: str, given: Path | None) -> None:
        own = own_groups(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        self.name = name
        unified = given or own.get(UNIFIED)
        self.unified = unified if gives(unified, "cgroup.kill") else None
        """Root of the groups that prove a task's end."""
        self.proves_ends = False
        self._pressure = unified if gives(unified, pressure.CPU, pressure.triggers) else None
        candidates = [given] if given else [own.get(MEMORY), own.get(UNIFIED)]
        self._memory = next(
            ((root, cap) for root in candidates for cap in CAPS if root is not None and gives(root, cap)),
            None,
        )
        if given is not None and self._memory is None:
            raise ConfigurationError(
                f"--cgroup: {given} gives its groups no memory cap; delegate a cgroup v2 folder and write "
                "+memory +cpuset +cpu into its "
                "cgroup.subtree_control, or a folder of the memory hierarchy of v1"
            )

        cpuset = own.get(CPUSET) or unified
        self._cpuset = cpuset if gives(cpuset, "cpuset.cpus") else None
        processor = own.get(PROCESSOR)
        self.quota_v1 = processor if gives(processor, QUOTA_V1) else None
        self.quota_v2 = unified if gives(unified, QUOTA_V2) else None
        """Roots of groups that have quotas of processor time, in v1 and v2. See `cpu_quota`."""
        roots = [given] if given else [own.get(PIDS), own.get(UNIFIED)]
        self._pids = next((root for root in roots if gives(root, PIDS_LIMIT)), None)
        self._devices = own[DEVICES] if gives(own.get(DEVICES), "devices.deny") else None
        self.gpu_minors: Mapping[str, int] | None = {}
        """Minor device number by UUID, of every GPU of the node; None where they are not known."""

    @property
    def keeps_cores(self) -> bool:
        return self._cpuset is not None

    @property
    def keeps_devices(self) -> bool:
        return self._devices is not None and self.gpu_minors is not None

    @property
    def limits_processes(self) -> bool:
        return self._pids is not None

    @property
    def caps_memory(self) -> bool:
        """True: a cap holds for all processes of a task together; False: for each."""
        return self._memory is not None

    @property
    def has_pressure(self) -> bool:
        """Whether the kernel reports per task whether threads wait for cores."""
        return self._pressure is not None

    def pressure_of(self, groups: Iterable[str]) -> Path | None:
        """The task's group with pressure stall information; None: there is none."""
        return next((group for group in map(Path, groups) if group.parent == self._pressure), None)

    @property
    def watched(self) -> str:
        """The root from which `remove_watched` removes groups; "": none."""
        return "" if self._pressure is None else str(self._pressure)

    def remove_watched(self, groups: Iterable[str]) -> None:
        """Removes the group of an ended task after its shim's end. In a thread: with a trigger it takes some
        20 ms."""
        if (group := self.pressure_of(groups)) is not None:
            with suppress(OSError):
                group.rmdir()

    def plan(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """The roots, each with the settings
        of a new group there before any process may enter it. See `Confinement.groups`."""
        found: dict[str, list[tuple[str, str]]] = {str(root): [] for root in self._roots()}
        if (
            self._cpuset is not None and (self._cpuset / "cpuset.mems").exists()
        ):  # v1; in v2 empty files inherit
            for name in ("cpuset.cpus", "cpuset.mems"):
                found[str(self._cpuset)].append((name, (self._cpuset / name).read_text().strip()))
        if self._devices is not None:
            found[str(self._devices)].append(("devices.deny", DISKS))
        return [(root, [pair for pair in settings if pair[1]]) for root, settings in found.items()]

    def request(self, place: TaskPlacement, cores: Sequence[int], gpus: Collection[str]) -> dict[str, Any]:
        """The launcher's fields `data_limit` (bytes, 0: none), `settings`, `oom`, `pids`, `oom_first` and
        `ended_by`.

        `oom` and `pids`: (root, file, key) of the kernel's count of OOM kills, and of processes that were
        refused.

        `oom_first`: where the machine runs out of memory, the kernel kills this task before those within
        their promise.

        `cores`: this machine's core numbers; `gpus`: UUIDs of those that the task may open.
        """
        settings: list[tuple[str, str, str]] = []
        fields: dict[str, Any] = {
            "data_limit": 0,
            "settings": settings,
            "oom": None,
            "pids": None,
            "ended_by": None,
        }
        cap_mib = place.cap_mib
        fields["oom_first"] = cap_mib > place.host_memory_mib
        if self.proves_ends:
            fields["ended_by"] = str(self.unified)
        if cap_mib and self._memory is not None:
            root, cap = self._memory
            settings.append((str(root), cap, str(cap_mib * BYTES_PER_MIB)))
            fields["oom"] = (str(root), CAPS[cap], OOM_KILLS)
        elif cap_mib:
            fields["data_limit"] = (cap_mib + DATA_SLACK_MIB) * BYTES_PER_MIB
        if self._pids is not None:
            settings.append((str(self._pids), PIDS_LIMIT, str(most_pids())))
            fields["pids"] = (str(self._pids), *PIDS_REFUSED)
        if cores and self._cpuset is not None:
            settings.append((str(self._cpuset), "cpuset.cpus", ",".join(map(str, cores))))
        if self._devices is not None:
            others = [minor for uuid, minor in (self.gpu_minors or {}).items() if uuid not in gpus]
            settings += [
                (str(self._devices), "devices.deny", f"c {GPU_MAJOR}:{minor} rwm") for minor in others
            ]
        return fields

    def set_cores(self, groups: Iterable[str], cores: Sequence[int]) -> None:
        """Gives a running task other cores, where a cgroup enforces them. Raises OSError."""
        for group in groups:
            if Path(group).parent == self._cpuset:
                (Path(group) / "cpuset.cpus").write_text(",".join(map(str, cores)))

    def allow_gpus(self, groups: Iterable[str], uuids: Iterable[str]) -> None:
        """Lets a running task open these GPUs, where a cgroup enforces devices.
        A missing group had an ended task."""
        minors = [minor for uuid in uuids if (minor := (self.gpu_minors or {}).get(uuid)) is not None]
        for group in groups if self.keeps_devices else ():
            if Path(group).parent == self._devices:
                with suppress(FileNotFoundError):
                    for minor in minors:
                        (Path(group) / "devices.allow").write_text(f"c {GPU_MAJOR}:{minor} rwm")

    def sweep(self) -> None:
        """Removes groups that killed shims left behind; groups with a living task stay."""
        for root in self._roots():
            for group in root.glob(f"{self.name}@*"):
                with suppress(OSError):
                    group.rmdir()

    def end(self, groups: Iterable[str]) -> int:
        """Kills the remaining processes in a task's groups and removes them;
        returns how many. Raises `Immortal`."""
        return sum(self._end(Path(group)) for group in groups)

    def _roots(self) -> list[Path]:
        memory = None if self._memory is None else self._memory[0]
        roots = [
            self.unified if self.proves_ends else None,
            memory,
            self._cpuset,
            self._devices,
            self._pressure,
            self.quota_v2,
            self._pids,
        ]
        return [root for root in dict.fromkeys(roots) if root is not None]

    def _end(self, group: Path) -> int:
        seen: set[str] = set()
        for _ in range(KILL_ROUNDS):
            with suppress(OSError):
                (group / "cgroup.kill").write_text("1")
            try:
                left = (group / "cgroup.procs").read_text().split()
                group.rmdir()  # refused while a process is in it, a zombie of its own excepted
            except FileNotFoundError:
                return len(seen)
            except OSError:
                seen |= set(left)
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(KILL_PAUSE_S)
            else:
                return len(seen)
        raise Immortal(f"processes {left} of {group} do not die; this needs a look at the machine")
