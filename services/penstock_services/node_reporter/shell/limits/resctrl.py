"""Memory bandwidth caps by the kernel's resctrl (Intel MBA, AMD QoS): a group per capped task, with an `MB`
line in its `schemata`.

Source: the kernel's filesystems/resctrl.rst. A new thread of a task belongs to its creator's group; a group
is removed by `rmdir`, and its tasks then belong to the root group, which has no cap. The number of groups is
the processor's: often 8 or 16.

The unit of an `MB` line is not in `info`; the number that is no limit, which the root group has, tells it:
100 is percent (Intel), 2³² - 1 is MiB/s (a mount with `mba_MBps`), any other power of two an eighth of a GB/s
(AMD: 2,048, or what the processor states).
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell.limits.pinning import each_thread

logger = logging.getLogger(__name__)
ROOT = Path("/sys/fs/resctrl")
PERCENT = 100
MIB_S = 2**32 - 1
MB_S_PER_MIB_S = 1.048576
MB_S_PER_EIGHTH = 125.0


class Resctrl:
    """The groups of one node's tasks below `root`. `name`: unique among the reporters on this machine.
    `memory_mb_s`: bandwidth of the machine's memory; None: not known, so where the processor counts in units
    of bandwidth nothing can be capped."""

    def __init__(self, name: str, root: Path = ROOT, memory_mb_s: int | None = None) -> None:
        self._name = name
        self._root = root
        self._min = number_in(root / "info/MB/min_bandwidth")
        self._step = number_in(root / "info/MB/bandwidth_gran")
        self._memory_mb_s = memory_mb_s
        self._unlimited = set(_bandwidths(root / "schemata").values())
        self.problem = self._find_problem()
        """Why memory bandwidth cannot be capped here; empty: it can."""
        if self.problem and self._unlimited:
            logger.warning("this node cannot cap memory bandwidth: %s", self.problem)

    @property
    def usable(self) -> bool:
        """Whether memory bandwidth can be capped here."""
        return not self.problem

    def cap(self, task: str, shim: int, percent: int | None) -> str:
        """Caps everything below the task's shim, or lifts the cap; read back. Returns why that is not
        possible; empty: it is done.

        `percent`: of the bandwidth of each memory controller (L3 domain), whose part of the machine's is
        equal. A cap below the processor's minimum is raised to that.
        """
        group = self._root / f"{self._name}@{task}"
        if self.problem and percent is not None:
            return f"this node cannot cap memory bandwidth: {self.problem}"
        try:
            if percent is None:
                with suppress(FileNotFoundError):
                    group.rmdir()
                return ""
            group.mkdir(exist_ok=True)
            wanted = self._value(percent)
            _put(group / "schemata", "MB:" + ";".join(f"{domain}={wanted}" for domain in self._domains()))
            wrong = each_thread(shim, lambda thread: enter(group, thread))
        except OSError as error:
            return f"{group}: {error.strerror}; a processor has few such groups (info/MB/num_closids)"
        got = _bandwidths(group / "schemata")
        near = range(wanted, wanted + max(1, self._step or 1))
        if set(got) != set(self._domains()) or any(value not in near for value in got.values()):
            return f"{group}/schemata reads {got} after {wanted} was written"
        return wrong

    def _find_problem(self) -> str:
        if self._min is None or not self._unlimited or not os.access(self._root, os.W_OK):
            return "it has no resctrl with memory bandwidth allocation"
        [*others, unlimited] = sorted(self._unlimited)
        if others or not (unlimited in (PERCENT, MIB_S) or _is_power_of_two_above(PERCENT, unlimited)):
            return (
                f"the root group of {self._root} is capped itself ({others or unlimited}), so the unit of "
                "its schemata is not known"
            )
        if unlimited != PERCENT and self._memory_mb_s is None:
            return (
                "its resctrl takes units of bandwidth, not percent, and --memory-bandwidth-mb-s is not given"
            )
        return ""

    def _value(self, percent: int) -> int:
        """What the `MB` line has for each domain."""
        [unlimited] = self._unlimited
        wanted = percent
        if unlimited != PERCENT:
            assert self._memory_mb_s is not None
            unit_mb_s = MB_S_PER_MIB_S if unlimited == MIB_S else MB_S_PER_EIGHTH
            wanted = int(percent / 100 * self._memory_mb_s / len(self._domains()) / unit_mb_s)
        return min(max(wanted, self._min or 0, 1), unlimited)

    def sweep(self) -> None:
        """Removes groups whose tasks have ended."""
        remove_empty(self._root.glob(f"{self._name}@*"))

    def _domains(self) -> list[str]:
        return list(_bandwidths(self._root / "schemata"))


def _is_power_of_two_above(bound: int, number: int) -> bool:
    return number > bound and number & (number - 1) == 0


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
    """Domain → number, of the last `MB` line; empty where there is none."""
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
