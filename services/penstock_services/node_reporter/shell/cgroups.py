"""Control groups of tasks: memory caps, and the proof of an end where there is no PID namespace.

A task's groups are folders named after node, task and token under a *root* per purpose, in the hierarchy of cgroup v2 or
in one of v1. They are made here before the task starts; its leader enters them; its shim removes them at the end.
"""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError
from penstock.model.types import TaskPlacement
from penstock.runtime.task_logs import file_name
from penstock_services.node_reporter.shell.journal import JournalFailed
from penstock_services.node_reporter.shell.ports import Immortal, Key

BYTES_PER_MIB = 1 << 20
DATA_SLACK_MIB = 1_024
"""RLIMIT_DATA counts memory that is reserved but never touched (thread stacks of 8 MiB, BLAS buffers of 32 MiB
per thread), a memory cap means what is used; so much more is therefore allowed."""
UNIFIED = "unified"
MEMORY = "memory"
CAPS = {"memory.max": "memory.events", "memory.limit_in_bytes": "memory.oom_control"}
"""File with the cap in bytes (v2, v1) → file with the line `oom_kill COUNT`."""
KILL_ROUNDS = 200
KILL_PAUSE_S = 0.01


def own_groups(mounts: str, memberships: str) -> dict[str, Path]:
    """Hierarchy (`unified` or a v1 controller) → this process's own group there; from /proc/self/{mountinfo,cgroup}."""
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
                path[len(root) :] if root != "/" and path.startswith(root) else path if root == "/" else ""
            )
            found[name] = Path(point) / inside.strip("/")
    return found


def gives(root: Path | None, file: str) -> bool:
    """Whether groups can be made in this one, and have this file."""
    if root is None:
        return False
    trial = root / f"penstock-trial-{os.getpid()}"
    try:
        trial.mkdir(exist_ok=True)
    except OSError:
        return False
    try:
        return os.access(trial / file, os.W_OK)
    finally:
        with suppress(OSError):
            trial.rmdir()


class Cgroups:
    """The groups of one node's tasks. `given`: the folder of `--cgroup`. Raises `ConfigurationError` if that is no use."""

    def __init__(self, node_id: str, given: Path | None) -> None:
        own = own_groups(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
        self._node_id = node_id
        unified = given or own.get(UNIFIED)
        self.unified = unified if gives(unified, "cgroup.kill") else None
        """Where ends can be proven."""
        self.proves_ends = False
        candidates = [given] if given else [own.get(MEMORY), own.get(UNIFIED)]
        self._memory = next(
            ((root, cap) for root in candidates for cap in CAPS if root is not None and gives(root, cap)),
            None,
        )
        if given is not None and self._memory is None:
            raise ConfigurationError(
                f"--cgroup: {given} gives its groups no memory cap; delegate a cgroup v2 folder and write +memory into its "
                "cgroup.subtree_control, or a folder of the memory hierarchy of v1"
            )

    @property
    def caps_memory(self) -> bool:
        """Of all processes of a task together; else of each."""
        return self._memory is not None

    def request(self, place: TaskPlacement, key: Key) -> dict[str, Any]:
        """The launcher's fields `data_limit` (bytes, 0: none), `groups`, `oom` and `ended_by`. Raises `JournalFailed`."""
        groups: list[str] = []
        fields: dict[str, Any] = {"data_limit": 0, "groups": groups, "oom": None, "ended_by": None}
        if self.proves_ends and self.unified is not None:
            fields["ended_by"] = str(self._make(self.unified, key, {}))
            groups.append(fields["ended_by"])
        if place.host_memory_mib and self._memory is not None:
            root, cap = self._memory
            made = self._make(root, key, {cap: str(place.host_memory_mib * BYTES_PER_MIB)})
            fields["oom"] = str(made / CAPS[cap])
            if str(made) not in groups:
                groups.append(str(made))
        elif place.host_memory_mib:
            fields["data_limit"] = (place.host_memory_mib + DATA_SLACK_MIB) * BYTES_PER_MIB
        return fields

    def end(self, key: Key) -> int:
        """Kills what is left in a task's groups and removes them; how many processes. Raises `Immortal`."""
        roots = [self.unified, None if self._memory is None else self._memory[0]]
        return sum(self._end(root / self._name(key)) for root in dict.fromkeys(roots) if root is not None)

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

    def _make(self, root: Path, key: Key, settings: Mapping[str, str]) -> Path:
        group = root / self._name(key)
        try:
            group.mkdir(exist_ok=True)
            for name, value in settings.items():
                (group / name).write_text(value)
        except OSError as error:
            raise JournalFailed(f"cgroup {group} cannot be set up: {error}") from error
        return group

    def _name(self, key: Key) -> str:
        return f"{file_name(self._node_id)}@{file_name(key[0])}@{key[1]}"
