"""Memory bandwidth caps by the kernel's resctrl (Intel MBA, AMD QoS): a group per capped task, with an `MB` line in its `schemata`.

Source: the kernel's filesystems/resctrl.rst. A new thread of a task belongs to its creator's group; a group is removed by `rmdir`, and its
tasks then belong to the root group, which has no cap. The number of groups is the processor's: often 8 or 16.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell.pinning import each_thread

ROOT = Path("/sys/fs/resctrl")
UNCAPPED = 100


class Resctrl:
    """The groups of one node's tasks below `root`. `name`: unique among the reporters on this machine."""

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self._name = name
        self._root = root
        self._min = number_in(root / "info/MB/min_bandwidth")
        self._step = number_in(root / "info/MB/bandwidth_gran")
        self.usable = self._min is not None and bool(self._domains()) and os.access(root, os.W_OK)
        """Whether memory bandwidth can be capped here."""

    def cap(self, task: str, shim: int, percent: int | None) -> str:
        """Caps everything below the task's shim, or lifts the cap; read back. Returns why that is not possible; empty: it is done.

        A cap below the processor's minimum is raised to that.
        """
        if not self.usable:
            return "this node cannot cap memory bandwidth: it has no resctrl with memory bandwidth allocation"
        group = self._root / f"{self._name}@{task}"
        try:
            if percent is None:
                with suppress(FileNotFoundError):
                    group.rmdir()
                return ""
            group.mkdir(exist_ok=True)
            wanted = max(percent, self._min or 0)
            _put(group / "schemata", "MB:" + ";".join(f"{domain}={wanted}" for domain in self._domains()))
            wrong = each_thread(shim, lambda thread: enter(group, thread))
        except OSError as error:
            return f"{group}: {error.strerror}; a processor has few such groups (info/MB/num_closids)"
        got = _bandwidths(group / "schemata")
        near = range(wanted, wanted + max(1, self._step or 1))
        if set(got) != set(self._domains()) or any(value not in near for value in got.values()):
            return f"{group}/schemata reads {got} after {wanted} was written"
        return wrong

    def sweep(self) -> None:
        """Removes groups whose tasks have ended."""
        if self.usable:
            remove_empty(self._root.glob(f"{self._name}@*"))

    def _domains(self) -> list[str]:
        return list(_bandwidths(self._root / "schemata"))


def enter(group: Path, thread: int) -> bool:
    """Moves the thread into the group; returns whether that was needed. Raises OSError."""
    if str(thread) in (group / "tasks").read_text().split() if (group / "tasks").exists() else False:
        return False
    _put(group / "tasks", str(thread))
    return True


def remove_empty(groups: Iterable[Path]) -> None:
    """Removes groups without tasks."""
    for group in groups:
        with suppress(OSError):
            if not (group / "tasks").read_text().strip():
                group.rmdir()


def _bandwidths(path: Path) -> dict[str, int]:
    """Domain → percent, of the last `MB` line; empty where there is none."""
    try:
        lines = re.findall(r"^\s*MB:(.*)$", path.read_text(), re.MULTILINE)
    except OSError:
        return {}
    pairs: Iterator[list[str]] = (pair.split("=", 1) for pair in lines[-1].split(";")) if lines else iter(())
    return {domain.strip(): int(value) for domain, value in pairs}


def number_in(path: Path) -> int | None:
    """The number that is the file's whole content; None where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _put(path: Path, line: str) -> None:
    with open(path, "a") as file:  # the kernel handles each write by itself, at any offset
        file.write(f"{line}\n")
