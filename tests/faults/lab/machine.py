"""A machine: its processes, its disk and its clock. It runs what it is told and remembers what really happened.

Processes live and die here whether or not a node-reporter watches. The judge hears of every start.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from penstock.model.external_events import NodeJoined
from penstock.model.ledger_events import StartTask
from penstock.model.types import NodeSpec, Usage
from penstock_services.node_reporter.core.machine import Outcome
from penstock_services.node_reporter.core.state import NodeState
from tests.faults.lab.jobs import LabJob
from tests.faults.lab.log import Record
from tests.faults.lab.world import Clock, World

Key = tuple[str, int]
"""Task id, token."""
RANK_PAUSE_S = 0.01  # between the ends of a gang's workers
KEEPS = 0.9  # of the work of an attempt that was stopped: the last checkpoint


@dataclass(slots=True)
class Program:
    """What all attempts of one job share: how far it is, how often it failed by itself."""

    job: LabJob
    done_s: float = 0.0
    own_failures: dict[int, None] = field(default_factory=dict)
    """Tokens of attempts that ended by the program's own fault."""
    good: dict[int, dict[int, None]] = field(default_factory=dict)
    """Token → ranks of workers that exited 0 by themselves."""

    def fails_now(self, token: int) -> bool:
        """Whether this attempt is to fail by itself."""
        if self.job.kind in ("bad", "hungry"):
            return True
        return self.job.kind == "flaky" and (
            token in self.own_failures or len(self.own_failures) < self.job.fails
        )


@dataclass(slots=True)
class Process:
    order: StartTask
    pid: int
    started_s: float
    started_ms: int
    terminated: bool = False

    @property
    def key(self) -> Key:
        return self.order.task_id, self.order.token


@dataclass(slots=True)
class Folder:
    """What a task's shim left on the disk."""

    started: tuple[int, int] | None = None
    """(pid, started ms)"""
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """The journal as of one write."""

    state: NodeState
    outbox: tuple[tuple[int, Record], ...]
    next_offset: int
    incarnation: int
    said: int


class Machine:
    """One node's hardware. `started` is told before each program starts: (machine, order)."""

    def __init__(
        self,
        world: World,
        spec: NodeSpec,
        clock: Clock,
        programs: dict[str, Program],
        started: Callable[["Machine", StartTask], None],
    ) -> None:
        self.world = world
        self.spec = spec
        self.clock = clock
        self.up = True
        self.destroyed = False
        self.boots = 1
        self.processes: dict[Key, Process] = {}
        self.folders: dict[Key, Folder] = {}
        self.written: list[Written] = []
        """Versions of the journal since the disk had everything; the first is on the disk."""
        self.stops_read: dict[str, None] = {}
        """Task ids that some stop order named: who may be signalled."""
        self.noticed: Callable[[Key], None] = lambda key: None
        """Told of each end of a process, if somebody watches."""
        self._programs = programs
        self._started = started
        self._pids = 100
        self._joined_ms = 0
        """The latest joining that its disk forgot."""

    @property
    def node_id(self) -> str:
        return self.spec.node_id

    # ---------------------------------------------------------------------------------- programs

    def launch(self, order: StartTask) -> Folder:
        """The shim starts the program, or writes down why it cannot."""
        key = (order.task_id, order.token)
        folder = self.folders.setdefault(key, Folder())
        if folder.started is not None or folder.outcome is not None:
            return folder
        program = self._programs[order.job_id]
        now_ms = self.clock.wall_ms()
        if program.job.kind == "missing":
            program.own_failures[order.token] = None
            folder.outcome = Outcome(now_ms, failure="cannot execute 'train': no such file")
            return folder
        self._started(self, order)
        self._pids += 1
        folder.started = (self._pids, now_ms)
        process = Process(order, self._pids, self.world.now_s, now_ms)
        self.processes[key] = process
        after_s = self._ends_after_s(program, order)
        if after_s is not None:
            self.world.at(after_s, lambda: self._ends(process))
        return folder

    @staticmethod
    def _ends_after_s(program: Program, order: StartTask) -> float | None:
        """None: it does not end by itself."""
        if order.place.role == "ps" or program.job.kind == "hangs":
            return None
        left_s = max(0.05, program.job.duration_s - program.done_s) + RANK_PAUSE_S * order.place.rank
        if order.place.rank == 0 and program.fails_now(order.token):
            return min(left_s, 5.0)
        return left_s

    def _ends(self, process: Process) -> None:
        """By itself."""
        if self.processes.get(process.key) is not process or process.terminated:
            return
        order = process.order
        program = self._programs[order.job_id]
        if order.place.rank == 0 and program.fails_now(order.token):
            program.own_failures[order.token] = None
            if program.job.kind == "hungry":
                self._write(process, signal=int(signal.SIGKILL), out_of_memory=True)
            else:
                self._write(process, exit_code=1)
            return
        program.good.setdefault(order.token, {})[order.place.rank] = None
        self._write(process, exit_code=0)

    def signal(self, key: Key, number: signal.Signals) -> None:
        """To the process, if there is one."""
        process = self.processes.get(key)
        if process is None:
            return
        job = self._programs[process.order.job_id].job
        if number is signal.SIGKILL:
            self._write(process, signal=int(number))
        elif not job.stubborn and not process.terminated:
            process.terminated = True
            self.world.at(job.stop_s, lambda: self._obeyed(process, job))

    def _obeyed(self, process: Process, job: LabJob) -> None:
        if self.processes.get(process.key) is not process:
            return
        if job.polite:
            self._write(process, exit_code=0)
        else:
            self._write(process, signal=int(signal.SIGTERM))

    def kill_shim(self, key: Key) -> None:
        """The kernel kills a guardian, and its program with it: nobody can say how it ended."""
        self._leave(self.processes[key])
        self.noticed(key)

    def _write(
        self,
        process: Process,
        *,
        exit_code: int | None = None,
        signal: int | None = None,
        out_of_memory: bool = False,
    ) -> None:
        """The end of a process, on the disk before anybody is told."""
        self._leave(process)
        ran_ms = round((self.world.now_s - process.started_s) * 1_000)
        self.folders[process.key].outcome = Outcome(
            exited_ms=max(process.started_ms, self.clock.wall_ms()),
            started_ms=process.started_ms,
            exit_code=exit_code,
            signal=signal,
            out_of_memory=out_of_memory,
            usage=Usage(cpu_ms=ran_ms, host_memory_mib=200),
        )
        self.noticed(process.key)

    def _leave(self, process: Process) -> None:
        del self.processes[process.key]
        program = self._programs[process.order.job_id]
        if process.order.place.rank == 0:
            ran_s = self.world.now_s - process.started_s
            program.done_s = min(program.job.duration_s, program.done_s + KEEPS * ran_s)

    # -------------------------------------------------------------------------------------- power

    def go_down(self, *, power_loss: bool) -> None:
        """Every process dies. A power loss also takes what the disk did not have yet."""
        self.up = False
        self.noticed = lambda key: None
        for process in list(self.processes.values()):
            self._leave(process)
        if power_loss and self.written:
            kept = int(self.world.rng.integers(1, len(self.written) + 1))
            self.written = self.written[:kept]
        self.world.tell(f"{self.node_id} {'loses power' if power_loss else 'reboots'}")

    def lose_disk(self) -> None:
        """A new disk: journal and folders are gone."""
        if self.written:
            self._joined_ms = max(self._joined_ms, self.written[-1].incarnation)
        self.written = []
        self.folders = {}
        self.world.tell(f"{self.node_id} has a new disk")

    def set_clock(self) -> None:
        """A machine with a new disk tells its joinings apart by its clock alone, so that may not lie behind them."""
        self.clock.wrong_ms += max(0, self._joined_ms + 1 - self.clock.wall_ms())

    def come_up(self) -> None:
        """A new boot."""
        self.up = True
        self.boots += 1
        self.spec = msgspec.structs.replace(self.spec, boot_id=f"{self.node_id}-b{self.boots}")
        self.world.tell(f"{self.node_id} boots as {self.spec.boot_id}")

    def joined(self, event: NodeJoined) -> None:
        """For the story."""
        tasks = ", ".join(task.task_id for task in event.tasks)
        self.world.tell(f"{self.node_id} joins as {event.incarnation} with [{tasks}]")
