"""Memory bandwidth monitoring by the kernel's resctrl (Intel MBM, AMD QoS): bytes that the machine, and each
task, have moved.

Source: the kernel's filesystems/resctrl.rst. A task whose bandwidth is capped has a group with counters of
its own (`resctrl`); another one gets a monitoring group, of which the processor has few (RMIDs; each cap
needs one, too). A new thread of a task belongs to its creator's group.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell.limits.pinning import each_thread
from penstock_services.node_reporter.shell.limits.resctrl import ROOT, enter, number_in, remove_empty

TOTAL = "mbm_total_bytes"


class TrafficMonitor:
    """The counters below `root`. `name`: unique among the reporters on this machine."""

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self._name = name
        self._root = root
        self.usable = TOTAL in _text(root / "info/L3_MON/mon_features").split()
        """Whether memory traffic is counted here."""
        caps = [number_in(root / f"info/{kind}/num_closids") or 0 for kind in ("MB", "L3")]
        self._max_groups = (number_in(root / "info/L3_MON/num_rmids") or 0) - max(1, *caps)
        """Leaves a counter for the root group and for each cap."""
        self._followed: dict[str, int] = {}
        """Task → shim, of those with a monitoring group."""
        self._capped: set[str] = set()
        """Those of them that had another group at the last read."""

    def follow(self, task: str, shim: int) -> None:
        """Counts the traffic of everything below the task's shim, if a counter is free."""
        if not self.usable or len(self._followed) >= self._max_groups:
            return
        with suppress(OSError):
            self._monitoring(task).mkdir(exist_ok=True)
            self._followed[task] = shim
            if not self._control(task).exists():
                self._enter(task)

    def forget(self, task: str) -> None:
        """Frees its counter. Idempotent."""
        self._followed.pop(task, None)
        self._capped.discard(task)
        with suppress(OSError):
            self._monitoring(task).rmdir()

    def sweep(self) -> None:
        """Frees counters of tasks that have ended."""
        if self.usable:
            remove_empty((self._root / "mon_groups").glob(f"{self._name}@*"))

    def of_task(self, task: str) -> Mapping[str, int]:
        """Bytes by counter; empty: not available, now or at all. A change of counters means another group."""
        if not self.usable:
            return {}
        if (control := self._control(task)).exists():
            self._capped.add(task)
            return _counters([control])
        if task not in self._followed:
            return {}
        if task in self._capped:  # its cap was lifted: it is in the root group now
            self._capped.discard(task)
            with suppress(OSError):
                self._enter(task)
        return _counters([self._monitoring(task)])

    def of_machine(self) -> Mapping[str, int]:
        """Bytes by counter: of the root group, which includes its monitoring groups, and of each capped one.
        Empty: as `of_task`."""
        if not self.usable:
            return {}
        capped = [group for group in sorted(self._root.iterdir()) if (group / "mon_data").is_dir()]
        return _counters([self._root, *capped])

    def _enter(self, task: str) -> None:
        group = self._monitoring(task)
        each_thread(self._followed[task], lambda thread: enter(group, thread))

    def _control(self, task: str) -> Path:
        return self._root / f"{self._name}@{task}"

    def _monitoring(self, task: str) -> Path:
        return self._root / "mon_groups" / f"{self._name}@{task}"


def _counters(groups: Iterable[Path]) -> dict[str, int]:
    """Empty where one of them has no number: `Unavailable`, `Error` or `Unassigned`,
    or its group was just removed."""
    found: dict[str, int] = {}
    for group in groups:
        for file in sorted(group.glob(f"mon_data/mon_L3_*/{TOTAL}")):
            count = number_in(file)
            if count is None:
                return {}
            found[f"{group.parent.name}/{group.name}/{file.parent.name}"] = count
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
