"""Ports of the node-reporter: the machine under it, its launcher of tasks and a task's progress stream.

`linux.py`, `spawner.py` and `fifo.py` are the real adapters; the fault laboratory of the tests has simulated
ones. Decisions, the journal's contents and the order of recovery are above these ports, so both run the same
code.
"""

from collections.abc import Callable, Mapping, Sequence
from signal import Signals
from typing import NamedTuple, Protocol

import msgspec

from penstock.errors import PenstockError
from penstock.model.decisions.adjustments import Enforcement
from penstock.model.decisions.orders import HandOverCheckpoint, StartTask
from penstock.model.inputs.external_events import CheckpointFetched, GpuFaulted
from penstock.model.nouns.nodes import NodeSpec
from penstock.runtime.keys.node_keys import NodeKeys
from penstock_services.node_reporter.shell.journal import Journal

Key = tuple[str, int]
"""Task id and token."""


class LauncherLost(PenstockError):
    """The launcher ended: which requests it had taken is known only after a new start (the lock)."""


class JoinStale(PenstockError):
    """The cell knows a later joining of this node: the next session joins above it."""


class OtherMachine(PenstockError):
    """Another node has this node's id or one of its GPUs."""


class NotStartable(PenstockError):
    """A task cannot be started on this node; the text has the reason and the remedy."""


class SecretMissing(NotStartable):
    """It asks for a secret that this node does not have, or cannot use."""


class Immortal(PenstockError):
    """Processes that SIGKILL did not end in time (uninterruptible sleep):
    their resources may not be given out."""


class Started(msgspec.Struct, frozen=True):
    """`started.json` of a task, written before its program runs."""

    task_id: str
    token: int
    shim: int
    """Pid of the task's shim."""
    shim_start: int | None
    """Start time of that process in clock ticks since boot."""
    pid: int
    """Pid of the program; also its session id."""
    started_ms: int
    exits: str = "none"
    """The proof of its end, see `confinement.Confinement`."""
    groups: tuple[str, ...] = ()
    """Its cgroups."""


class Failure(msgspec.Struct, frozen=True):
    """Why a program could not be started: at which stage,
    with which errno. `cause`: by `programs.cause_of`."""

    stage: str
    errno: int
    cause: str = ""


class Exit(msgspec.Struct, frozen=True):
    """`exit.json` of a task, written after the last of its processes was reaped."""

    started_ms: int
    exited_ms: int
    exit_code: int | None
    signal: int | None
    cpu_ms: int
    max_rss_kib: int
    oom: bool = False
    """Its cgroup counted an OOM kill, of any process;
    a program may go on without that process and succeed."""
    failure: Failure | None = None
    unpacked_ns: int = 0
    """Time after all of its code was unpacked, by the clock of its folder's file system;
    0: none was. See `code`."""
    lapsed: bool = False
    """It was ended because its lease ended."""
    left: int = 0
    """Processes that its program left running,
    or that a stop did not end within the grace; they were killed."""
    pids: bool = False
    """The kernel refused it a process or thread beyond its limit;
    a program may go on without that and succeed."""
    exhausted: tuple[str, str] = ("", "")
    """Memory that its last lines report as exhausted, and the name of that error;
    empty: none. See `last_lines`."""


class Enforced(NamedTuple):
    """Result of an adjustment. `by` is empty where it is not possible; then `detail` has the reason."""

    by: Enforcement
    detail: str = ""


class Callbacks(NamedTuple):
    """Reports of a launcher, on the event loop."""

    started: Callable[[Key, int, int], None]
    """(key, pid, started_ms): the program runs (its exec succeeded)."""
    gone: Callable[[Key], None]
    """The shim has ended: there is an `exit.json`, or it was killed."""
    lost: Callable[[], None]
    """The launcher itself ended."""


class Launcher(Protocol):
    """Starts tasks and watches their shims."""

    @property
    def pid(self) -> int: ...

    def spawn(self, order: StartTask, until_s: float | None, *, gated: bool) -> None:
        """Asks for one task. `gated`: it stops at its gate until that is opened, and can open no GPU where
        devices are enforced. `until_s`: the end of its lease, by the boot-time clock, at which it is ended
        unless contact was recorded (`Host.renew`) before; None: it has no lease. Raises `NotStartable`, and
        `JournalFailed` when its folder cannot be created."""
        ...

    def attach(self, key: Key, shim: int, shim_start: int | None) -> bool:
        """Watches a shim that runs already. False: it has ended."""
        ...

    def signal(self, key: Key, number: Signals) -> None:
        """SIGTERM: the task is stopped (`stopping`). SIGKILL: to every process of the task."""
        ...

    def open_gate(self, key: Key) -> None:
        """Lets a task that was started gated go on. Idempotent."""
        ...

    def close(self) -> None:
        """Closes the launcher; tasks and shims stay. Idempotent."""
        ...


class ProgressStream(Protocol):
    """Progress output of one task. Bytes wait in the stream until they are read."""

    def read(self) -> bytes:
        """The waiting bytes, at most 64 KiB; b"" if there are none."""
        ...

    def watch(self, readable: Callable[[], None]) -> None:
        """Calls `readable` on the event loop whenever there are bytes."""
        ...

    def unwatch(self) -> None: ...

    def close(self) -> None: ...


class Pressure(NamedTuple):
    """Pressure of the processor: how long some thread has waited for a core.
    Source: the kernel's accounting/psi.rst."""

    waited_us: int
    """In total."""
    avg10: float
    """Percent of the last 10 s, a moving average."""


class PressureTrigger(Protocol):
    """Fires when threads of a group of tasks, or of the machine, have waited for cores:
    `core.stalls.LEAST_PERCENT` of the last window."""

    def watch(self, fired: Callable[[], None]) -> None:
        """Calls `fired` on the event loop, at most once a window, during the stall."""
        ...

    def read(self) -> Pressure | None:
        """None: the group was removed."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Meters(Protocol):
    """Measurements of one machine and its tasks."""

    def use(self, shim: int) -> tuple[float, int]:
        """CPU seconds used by, and resident MiB of, everything below a shim."""
        ...

    def gpu(self, uuid: str) -> tuple[float, int] | None:
        """Utilisation in percent and used MiB of the GPU with this UUID; None where it cannot be measured."""
        ...

    def gpu_memory_of(self, shim: int, uuid: str) -> int | None:
        """MiB of the GPU with this UUID that processes below a shim hold;
        None where it cannot be measured."""
        ...

    def pressure(self, groups: Sequence[str] | None) -> PressureTrigger | None:
        """Of the task with these cgroups; `groups` None: of the machine. None: not available."""
        ...

    def waits(self, shim: int) -> Mapping[int, int]:
        """Thread → ns for which it has waited for a core, of everything below a shim."""
        ...

    def traffic(self, key: Key | None) -> Mapping[str, int]:
        """Bytes by memory controller that this followed task has moved, or the machine (None). Empty: not
        available, now or at all."""
        ...

    def follow_traffic(self, key: Key, shim: int) -> None:
        """Counts the traffic of everything below this shim, if a counter is free."""
        ...

    def forget_traffic(self, key: Key) -> None:
        """Frees its counter. Idempotent."""
        ...


class Host(Protocol):
    """One machine, from a boot to the next."""

    @property
    def spec(self) -> NodeSpec: ...

    @property
    def meters(self) -> Meters: ...

    async def lock(self) -> int:
        """Takes the state folder's lock. Its holder can rely on it: no more task starts without a
        `started.json`.

        Raises `JournalFailed` when the folder cannot be made, `ConfigurationError` when another reporter has
        it.
        """
        ...

    def unlock(self, lock: int) -> None: ...

    def open_journal(self) -> Journal:
        """Raises `JournalFailed`."""
        ...

    def keys(self) -> NodeKeys:
        """The machine's own keys, created once:
        the cell identifies the node by them. Raises `JournalFailed`."""
        ...

    def launch(self, lock: int, callbacks: Callbacks) -> Launcher: ...

    async def fetch(self, order: StartTask) -> CheckpointFetched | None:
        """Fetches the code of this task, creates its job's folder of checkpoints and fetches the one to
        resume at. Returns the result of the latter; None: it need not be fetched. Raises `NotStartable`. May
        be cancelled."""
        ...

    def hand_over(self, orders: Mapping[str, HandOverCheckpoint]) -> None:
        """Job → the node that may fetch its checkpoint;
        from now on, as the mapping is at the time of each request."""
        ...

    def checkpoints(self, order: StartTask) -> str:
        """The job's folder of checkpoints; "": it has none."""
        ...

    def discard(self, order: StartTask) -> None:
        """Removes the job's folder of checkpoints, unless an operator named its place. May block."""
        ...

    def contact(self) -> float | None:
        """The last contact with the log in this boot, by the boot-time clock, s; None: not known."""
        ...

    def renew(self, contact_s: float, lease_s: float) -> None:
        """Records contact, for the shims that watch the leases of running tasks, and the longest of these.
        Raises `JournalFailed`."""
        ...

    def started(self, key: Key) -> Started | None:
        """None: never begun, or lost when the machine went down."""
        ...

    def exit(self, key: Key) -> Exit | None:
        """None: it still runs, or its shim was killed."""
        ...

    def forget(self, key: Key) -> None:
        """Removes a task's records, except its own output."""
        ...

    def end_task(self, key: Key) -> int:
        """Kills the remaining processes of a task whose shim was killed; returns how many.
        May block. Raises `Immortal`."""
        ...

    def end_orphans(self, known: set[int]) -> int:
        """Kills this reporter's processes that are neither one of `known` (pids) nor below one; returns how
        many. Raises `Immortal`."""
        ...

    def ask_to_save(self, key: Key, *, by_sdk: bool) -> bool:
        """Asks the processes of a task that save checkpoints to save now; `by_sdk`: those that have
        registered, no others. False: none does; the first one that registers later is asked then."""
        ...

    def saves(self, key: Key) -> bool:
        """Whether a process of the task has registered to save."""
        ...

    def progress(self, key: Key) -> ProgressStream | None:
        """None: the task has removed or replaced it."""
        ...

    def set_affinity(self, key: Key, cores: Sequence[int], cap_percent: int | None) -> Enforced | None:
        """Pins every thread of a task's processes, adapts a cap of this percentage to its new cores, and
        reads both back. None: the task has ended."""
        ...

    def allow_gpus(self, key: Key, uuids: Sequence[str]) -> None:
        """A task that was started gated may open these GPUs from now on. Idempotent. Raises OSError."""
        ...

    def cap_bandwidth(self, key: Key, percent: int | None) -> Enforced | None:
        """Caps the memory bandwidth of a task's processes, or lifts the cap, and reads it back. None: the
        task has ended."""
        ...

    def watch_gpus(self, deliver: Callable[[GpuFaulted], None]) -> None:
        """Calls `deliver` on the running event loop for each fault of a GPU, as long as the process lives."""
        ...
