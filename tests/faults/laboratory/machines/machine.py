"""A machine: its processes, its disk and its clock. It runs what it is asked to and records what really
happened.

`Machine` is the truth that the judge looks at; `host` shows it to the node-reporter's shell. Tasks live and
die here whether or not a node-reporter watches.
"""

import errno
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.external_events import GpuFaulted
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock_services.node_reporter.shell.ports import Exit, Failure, Immortal, Key, Started
from tests.faults.laboratory.inputs.jobs import SimulatedJob
from tests.faults.laboratory.machines.checkpoints import Checkpoints, awaits_rank_0
from tests.faults.laboratory.machines.contention import Used, slowdown
from tests.faults.laboratory.machines.disk import Disk
from tests.faults.laboratory.machines.process import Clock, Service
from tests.faults.laboratory.machines.streams import Stream
from tests.faults.laboratory.world import World
from tests.support.virtual_time import EPOCH_MS

if TYPE_CHECKING:
    from tests.faults.laboratory.machines.host import SimulatedLauncher

RANK_PAUSE_S = 0.01  # between the ends of a gang's workers
CHECKPOINTED = 0.9  # of the work of an attempt that was stopped
STEPS_EVERY_S = 2.0
LOSS_EVERY_S = 5.5  # a little more than the node lets pass
SAVES_AT = 0.7  # of the time of an attempt: then its script reports the last phase
TRAINS_ON = 0.15  # of those that had: they had only saved a checkpoint
WATCHED_S = 5.0  # after so long a launcher has passed on every signal that it was asked for
SHIM_WAKES_S = 0.01
PIN_REFUSED = 0.03
RSS_KIB = 200 * 1_024


@dataclass(slots=True)
class Program:
    """What all attempts of one job share: how far it is, how often it failed by itself."""

    job: SimulatedJob
    done_s: float = 0.0
    saves: dict[str, None] = field(default_factory=dict)
    """Names of the checkpoints that were ever whole."""
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


@dataclass(slots=True, eq=False)
class TaskProcess:
    """A task's program and, above it, its shim."""

    order: StartTask
    shim: int
    started_s: float
    started_ms: int
    gpus: tuple[str, ...]
    """UUIDs that its environment names."""
    cores: tuple[int, ...] = ()
    """On which all its threads run."""
    percent: int | None = None
    """Of the memory bandwidth; None: it has no cap."""
    used: Used = field(default_factory=Used)
    loose: bool = False
    """The kernel refused the latest change of its cores."""
    resumed: str = ""
    """The checkpoint at which it went on; empty: it began at 0."""
    gated: bool = False
    """It launches, and waits for its GPUs."""
    signalled: bool = False
    """Its shim was asked to send a signal."""
    terminated: bool = False
    shim_alive: bool = True
    immortal_until_s: float = 0.0
    """In uninterruptible sleep until then: SIGKILL waits."""

    @property
    def key(self) -> Key:
        return self.order.task_id, self.order.token


class Machine:
    """One node's hardware. Callbacks: `starting` before each program starts, `signalled` before each signal
    to a task, `unstopped` when a program ends by itself that its reporter should have stopped, `adjusted`
    after each change of a program's `cores` or memory `bandwidth`."""

    def __init__(
        self,
        world: World,
        spec: NodeSpec,
        clock: Clock,
        programs: dict[str, Program],
        starting: Callable[["Machine", TaskProcess], None],
        signalled: Callable[["Machine", str], None],
        unstopped: Callable[["Machine", TaskProcess], None],
        adjusted: Callable[["Machine", TaskProcess, str], None],
    ) -> None:
        self.world = world
        self.spec = spec
        self.clock = clock
        self.disk = Disk()
        self.up = True
        self.destroyed = False
        self.unproven = False
        """It is destroyed, and no operator confirms it."""
        self.silent = False
        """Its reporter has died for good."""
        self.boots = 1
        self.processes: dict[Key, TaskProcess] = {}
        self.launched: set[Key] = set()
        """Every start whose program came as far as its gate, of all boots."""
        self.pulled: list[Gpu] = []
        """GPUs that were taken out."""
        self.broken: dict[str, None] = {}
        """UUIDs of GPUs that broke since the last boot or repair."""
        self.repaired = False
        """Since its last fault its operator has repaired its GPUs."""
        self.started: dict[Key, Started] = {}
        self.exits: dict[Key, Exit] = {}
        self.streams: dict[Key, Stream] = {}
        self.contact: tuple[int, float] | None = None
        """Boot and time, by the boot-time clock, of the last contact that a reporter has noted."""
        self.launcher: SimulatedLauncher | None = None
        """Of the reporter that holds the state folder's lock."""
        self.locked = False
        self.checkpoints = Checkpoints(self)
        self.others: Callable[[], Mapping[str, Machine]] = dict
        """All machines, by node."""
        self._programs = programs
        self._starting = starting
        self.signalled = signalled
        self._unstopped = unstopped
        self._adjusted = adjusted
        self.reports_losses = False
        """Whether every other program reports how its loss falls."""
        self.reports_steps = False
        """Whether programs report their step times; those of every third one never settle."""
        self.slow_start = False
        self.dies_pinning = False
        """Its reporter is killed when it next changes a task's cores."""
        self.gpu_fault: Callable[[GpuFaulted], None] | None = None
        """Reports a fault to the reporter that runs."""
        self._pids = 100

    @property
    def node_id(self) -> str:
        return self.spec.node_id

    def wall_ms(self) -> int:
        """By this machine's clock, which no kernel sets to before 1970."""
        return max(0, EPOCH_MS + int(self.world.now_s * 1_000) + self.clock.error_ms)

    def boot_s(self) -> float:
        """By this machine's boot-time clock."""
        return self.world.now_s * self.clock.rate

    def contact_s(self) -> float | None:
        """Time of the last contact that a reporter of this boot has noted, by the boot-time clock."""
        boot, contact_s = self.contact or (0, None)
        return contact_s if boot == self.boots else None

    # ---------------------------------------------------------------------------------- programs

    def launch(
        self, order: StartTask, gpus: tuple[str, ...], until_s: float | None, *, gated: bool = False
    ) -> None:
        """The shim starts the program with these GPUs (UUIDs), or writes down why it cannot. `until_s`: its
        lease at first.

        `gated`: it launches, and uses none of them before its gate is open.
        """
        key = (order.task_id, order.token)
        if not self.up or key in self.started or key in self.exits:
            return
        program = self._programs[order.job_id]
        now_ms = self.wall_ms()
        if program.job.kind == "missing":
            program.own_failures[order.token] = None
            self.exits[key] = Exit(now_ms, now_ms, None, None, 0, 0, False, Failure("exec", errno.ENOENT))
            return
        if until_s is not None and self._lease_end_s(order, until_s) <= self.boot_s():
            self.exits[key] = Exit(now_ms, now_ms, None, signal.SIGKILL, 0, 0, lapsed=True)
            return
        self._pids += 2
        process = TaskProcess(order, self._pids, self.world.now_s, now_ms, gpus, order.place.cores)
        process.resumed = self.checkpoints.prepared.pop(key, "")
        process.gated = gated
        self.launched.add(key)
        if not gated:
            self.world.guarded(lambda: self._starting(self, process))
        self.started[key] = Started(*key, self._pids, self.boots, self._pids + 1, now_ms)
        self.processes[key] = process
        if until_s is not None:
            self._watch_lease(process, until_s)
        stream = self.streams[key] = Stream()
        if gated:
            stream.write(b"launch\nready\n")
        else:
            self._trains(process)

    def open_gate(self, key: Key) -> None:
        """By the shim, if it lives: the program uses its GPUs from now on."""
        process = self.processes.get(key)
        if process is not None and process.shim_alive and process.gated:
            process.gated = False
            self.world.guarded(lambda: self._starting(self, process))
            self._trains(process)

    def _trains(self, process: TaskProcess) -> None:
        order, stream = process.order, self.streams[process.key]
        stream.write(b"train\nnot a line\n")
        after_s = self._ends_after_s(self._programs[order.job_id], order)
        if self.reports_losses and ord(order.job_id[-1]) % 2:
            self._reports_loss(process, stream, 1.0)
        if self.reports_steps:
            stream.write(b'{"steps": {"done": 1}}\n')
            self._reports_steps(process, stream, 0)
        if after_s is not None:
            self.world.at(after_s / 2, lambda: stream.write(b'{"steps": {"done": 1, "total": 2}}\n'))
            if self._programs[order.job_id].job.says_save:
                self.world.at(SAVES_AT * after_s, lambda: stream.write(b"save\n"))
                if self.world.happens(TRAINS_ON):
                    self.world.at((1 + SAVES_AT) / 2 * after_s, lambda: stream.write(b"train\n"))
            self.world.at(after_s, lambda: self._ends(process))

    def _reports_loss(self, process: TaskProcess, stream: Stream, loss: float) -> None:
        """Every few seconds while it lives, always less and less than before."""
        if self.processes.get(process.key) is not process:
            return
        stream.write(b'{"loss": {"done": 1, "loss": %f}}\n' % loss)
        self.world.at(LOSS_EVERY_S, lambda: self._reports_loss(process, stream, 0.4 * loss))

    def _reports_steps(self, process: TaskProcess, stream: Stream, number: int) -> None:
        """Every few seconds while it lives, faster with more cores."""
        if self.processes.get(process.key) is not process:
            return
        cores = max(1, len(process.cores))
        step_ms = 100 / min(cores, 3) * (1 + (number % 2 if ord(process.order.job_id[-1]) % 3 == 0 else 0))
        step_ms *= slowdown(self, process)
        line = {"window": {"steps": 10, "step_ms": step_ms, "cores": cores}}
        stream.write(f"{json.dumps(line)}\n".encode())
        self.world.at(STEPS_EVERY_S, lambda: self._reports_steps(process, stream, number + 1))

    def _lease_end_s(self, order: StartTask, until_s: float) -> float:
        """As the shim knows it, from its request and what the reporter has noted since."""
        contact_s = self.contact_s()
        return until_s if contact_s is None else max(until_s, contact_s + order.lease_ms / 1_000)

    def lease_ends(self, share: float) -> bool:
        """Whether this share of some task's lease has passed since contact: then its reporter may stop all of
        them."""
        leases = [found.order.lease_ms for found in self.processes.values() if found.order.lease_ms]
        passed_s = self.boot_s() - (self.contact_s() or 0.0)
        return bool(leases) and passed_s >= share * min(leases) / 1_000

    def _watch_lease(self, process: TaskProcess, until_s: float) -> None:
        """By the shim: when its lease ends, the task does."""
        if self.processes.get(process.key) is not process or not process.shim_alive:
            return
        until_s = self._lease_end_s(process.order, until_s)
        if until_s > self.boot_s():
            after_s = (until_s - self.boot_s()) / self.clock.rate
            self.world.at(after_s + SHIM_WAKES_S, lambda: self._watch_lease(process, until_s))
        else:
            self.world.trace(f"{self.node_id} ends {process.key}: its lease is over")
            self._exit(process, signal_number=signal.SIGKILL, lapsed=True)

    @staticmethod
    def _ends_after_s(program: Program, order: StartTask) -> float | None:
        """None: it does not end by itself."""
        if order.place.role == "ps" or program.job.kind == "hangs":
            return None
        left_s = max(0.05, program.job.duration_s - program.done_s) + RANK_PAUSE_S * order.place.rank
        if order.place.rank == 0 and program.fails_now(order.token):
            return min(left_s, 5.0)
        return left_s

    def _ends(self, process: TaskProcess) -> None:
        """By itself."""
        if self.processes.get(process.key) is not process or process.terminated:
            return
        order = process.order
        if self._should_be_stopped(process):
            self._unstopped(self, process)
        program = self._programs[order.job_id]
        if order.place.rank == 0 and program.fails_now(order.token):
            program.own_failures[order.token] = None
            if program.job.kind == "hungry":
                self._exit(process, signal_number=signal.SIGKILL, oom=True)
            else:
                self._exit(process, code=1)
            return
        program.good.setdefault(order.token, {})[order.place.rank] = None
        self._exit(process, code=0)

    def _should_be_stopped(self, process: TaskProcess) -> bool:
        """Whether a reporter that has watched it for long, on a sound disk, wrote down its stop and sent no
        signal."""
        if process.signalled or not process.shim_alive or self.disk.full or self.disk.sync_fails:
            return False
        if awaits_rank_0(process.order, self.node_id, (one.order for one in self.processes.values())):
            return False
        watched_s = 0.0 if self.launcher is None else self.launcher.watched_s(process.key)
        return watched_s >= WATCHED_S and self.disk.has_stop(*process.key)

    def signal(self, key: Key, number: signal.Signals) -> None:
        """By the shim, if it lives."""
        process = self.processes.get(key)
        if process is None or not process.shim_alive:
            return
        if number is signal.SIGUSR1 or number is signal.SIGTERM:
            self.checkpoints.save(process, self._programs[process.order.job_id].saves)
        if number is signal.SIGUSR1:
            return
        process.signalled = True
        job = self._programs[process.order.job_id].job
        if number is signal.SIGKILL:
            left_s = max(0.0, process.immortal_until_s - self.world.now_s)
            self.world.at(left_s, lambda: self._exit(process, signal_number=number))
        elif number is signal.SIGTERM and not job.stubborn and not process.terminated:
            process.terminated = True
            code, by = (0, None) if job.polite else (None, number)
            self.world.at(job.stop_s, lambda: self._exit(process, code=code, signal_number=by))

    def pin(self, key: Key, cores: tuple[int, ...]) -> bool | None:
        """Other cores for a running program. False: the kernel refuses; None: it has ended."""
        process = self.processes.get(key)
        if process is None or not process.shim_alive:
            return None
        process.loose = self.world.happens(PIN_REFUSED)
        self.world.trace(f"{self.node_id} pins {key} to {cores}{', refused' if process.loose else ''}")
        if not process.loose:
            process.cores = cores
            self.world.guarded(lambda: self._adjusted(self, process, "cores"))
        return not process.loose

    def cap(self, key: Key, percent: int | None) -> bool | None:
        """As `pin`, of its memory bandwidth."""
        process = self.processes.get(key)
        if process is None or not process.shim_alive:
            return None
        if self.spec.bandwidth_cap == "none":
            return False
        self.world.trace(f"{self.node_id} caps {key} at {percent} %")
        process.percent = percent
        self.world.guarded(lambda: self._adjusted(self, process, "bandwidth"))
        return True

    def kill_shim(self, key: Key, immortal_s: float) -> None:
        """The kernel kills a guardian; the program goes with it, or something of it is left for so long."""
        process = self.processes[key]
        process.shim_alive = False
        process.immortal_until_s = self.world.now_s + immortal_s
        if immortal_s == 0.0:
            self._leave(process)
        self._gone(key)

    def end(self, process: TaskProcess) -> None:
        """SIGKILL to a process without a shim. Raises `Immortal`."""
        if process.immortal_until_s > self.world.now_s:
            raise Immortal(f"{process.key} does not die")
        self._leave(process)

    def _exit(
        self,
        process: TaskProcess,
        *,
        code: int | None = None,
        signal_number: int | None = None,
        oom: bool = False,
        lapsed: bool = False,
    ) -> None:
        """The end of a process, on the disk before anybody is called."""
        if self.processes.get(process.key) is not process:
            return
        self._leave(process)
        if not process.shim_alive:
            return
        cpu_ms = round((self.world.now_s - process.started_s) * 1_000)
        exited_ms = max(process.started_ms, self.wall_ms())
        number = None if signal_number is None else int(signal_number)
        self.exits[process.key] = Exit(
            process.started_ms, exited_ms, code, number, cpu_ms, RSS_KIB, oom, lapsed=lapsed
        )
        self._gone(process.key)

    def _gone(self, key: Key) -> None:
        if self.launcher is not None:
            self.launcher.gone(key)

    def _leave(self, process: TaskProcess) -> None:
        del self.processes[process.key]
        program = self._programs[process.order.job_id]
        if process.order.place.rank == 0:
            ran_s = self.world.now_s - process.started_s
            program.done_s = min(program.job.duration_s, program.done_s + CHECKPOINTED * ran_s)

    # --------------------------------------------------------------------------------------- GPUs

    def pull_gpu(self) -> None:
        """A GPU is taken out of the running machine; what runs on it hangs until its own end. One stays."""
        gpus = list(self.spec.gpus)
        if len(gpus) > 1:
            self.pulled.append(gpus.pop(int(self.world.rng.integers(len(gpus)))))
        self._renumber(gpus)

    def put_gpus_back(self) -> None:
        """Into any slots of the bus."""
        gpus = list(self.spec.gpus)
        while self.pulled:
            gpus.insert(int(self.world.rng.integers(len(gpus) + 1)), self.pulled.pop())
        self._renumber(gpus)

    def shuffle_gpus(self) -> None:
        """The driver was reloaded, or its operator changed CUDA_DEVICE_ORDER: another order on the bus."""
        gpus = self.spec.gpus
        self._renumber([gpus[int(index)] for index in self.world.rng.permutation(len(gpus))])

    def repair_gpus(self) -> None:
        """Without a boot: the operator restarts the reporter with the option for it."""
        self.broken, self.repaired = {}, True

    def _renumber(self, gpus: list[Gpu]) -> None:
        numbered = tuple(structs.replace(gpu, index=index) for index, gpu in enumerate(gpus))
        self.spec = structs.replace(self.spec, gpus=numbered)
        self.world.trace(f"{self.node_id} has the GPUs {', '.join(gpu.uuid for gpu in numbered)}")

    # -------------------------------------------------------------------------------------- power

    def go_down(self, *, power_loss: bool) -> None:
        """Every process dies. A power loss also takes what the disk did not have yet."""
        self.up = False
        self.launcher, self.locked = None, False
        for process in list(self.processes.values()):
            self._leave(process)
        if power_loss:
            self.disk.lose_power(self.world.rng)
            for key in list(self.started):  # written without a sync
                if self.world.rng.random() < 0.3:
                    del self.started[key]
        self.world.trace(f"{self.node_id} {'loses power' if power_loss else 'reboots'}")

    def lose_disk(self) -> None:
        """A new disk: journal and folders are gone."""
        self.disk.versions = []
        self.contact = None
        self.started, self.exits, self.streams = {}, {}, {}
        self.checkpoints.lose()
        self.world.trace(f"{self.node_id} has a new disk")

    def come_up(self) -> None:
        """A new boot."""
        self.up = True
        self.boots += 1
        self.broken = {}
        self.spec = structs.replace(self.spec, boot_id=f"{self.node_id}-b{self.boots}")
        self.world.trace(f"{self.node_id} boots as {self.spec.boot_id}")


class Node:
    """A machine and its node-reporter."""

    def __init__(self, machine: Machine, reporter: Service, drains: bool) -> None:
        self.machine = machine
        self.reporter = reporter
        self.drains = drains
        """On SIGTERM it stops its tasks and leaves for good, instead of leaving them running."""

    def power_off(self, *, power_loss: bool) -> None:
        self.machine.go_down(power_loss=power_loss)
        self.reporter.enabled = False
        self.reporter.kill("its machine is down")

    def power_on(self) -> None:
        """Nothing, if it runs or is no more."""
        if not self.machine.up and not self.machine.destroyed:
            self.machine.come_up()
            self.reporter.enabled = True
            self.reporter.world.at(self.reporter.world.delay_s(), self.reporter.start)
