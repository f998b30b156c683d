"""A simulated host: the node-reporter's ports `Host` and `Launcher` over a `Machine`."""

# clocks: all of it runs in virtual time

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.model.decisions.orders import HandOverCheckpoint, StartTask
from penstock.model.inputs.external_events import CheckpointFetched, GpuFaulted
from penstock.model.nouns.nodes import NodeSpec
from penstock.runtime.keys.node_keys import NodeKeys
from penstock_services.node_reporter.core.environment import task_environment
from penstock_services.node_reporter.shell.journal import Journal
from penstock_services.node_reporter.shell.ports import (
    Callbacks,
    Enforced,
    Exit,
    Key,
    NotStartable,
    ProgressStream,
    Started,
)
from tests.faults.laboratory.inputs.wire import keys_of
from tests.faults.laboratory.machines.checkpoints import FOLDER
from tests.faults.laboratory.machines.contention import caps_bandwidth, meter
from tests.faults.laboratory.machines.machine import Machine, TaskProcess
from tests.faults.laboratory.machines.process import Process
from tests.faults.rules.findings import Violation
from tests.support.node_reporter.meters import MetersWithoutContention

LONGEST_LAUNCH_S = 2.0
LONGEST_SLOW_LAUNCH_S = 45.0  # beyond the cell's time-out for launches
LOCK_PAUSE_S = 0.02


class SimulatedLauncher:
    """Starts tasks after a while. Adapter of `ports.Launcher`."""

    def __init__(self, machine: Machine, process: Process, spec: NodeSpec, callbacks: Callbacks) -> None:
        self.pid = 1
        self.closed = False
        self._machine = machine
        self._process = process
        self._callbacks = callbacks
        self._spec = spec
        """As this reporter found the machine."""
        self._launching: dict[Key, tuple[StartTask, float | None, bool]] = {}
        self._attached: dict[Key, float] = {}
        """Since when, in seconds."""
        machine.launcher = self

    def spawn(self, order: StartTask, until_s: float | None, *, gated: bool) -> None:
        self._process.step("before it asks its launcher")
        key = (order.task_id, order.token)
        self._launching[key] = (order, until_s, gated)
        longest_s = LONGEST_SLOW_LAUNCH_S if self._machine.slow_start else LONGEST_LAUNCH_S
        after_s = self._machine.world.within(0.01, longest_s)
        self._machine.world.at(after_s, lambda: self._launched(key))

    def launching(self) -> list[str]:
        """Jobs of which a task is about to start."""
        return [order.job_id for order, _, _ in self._launching.values()]

    def watched_s(self, key: Key) -> float:
        """For so long it has had this task's shim; 0 if it has not."""
        now_s = self._machine.world.now_s
        return now_s - self._attached.get(key, now_s)

    def _launched(self, key: Key) -> None:
        asked = self._launching.pop(key, None)
        if asked is None:
            return
        self._launch(*asked)
        started = self._machine.started.get(key)
        if started is not None:
            self._attached[key] = self._machine.world.now_s
            self._call(lambda: self._callbacks.started(key, started.pid, started.started_ms))
        if key not in self._machine.processes:
            self._attached[key] = self._machine.world.now_s
            self.gone(key)

    def _launch(self, order: StartTask, until_s: float | None, gated: bool) -> None:
        """With the GPUs that the environment names: what the program really gets."""
        visible = task_environment(order, self._spec, {}, {}, virtual=False)["CUDA_VISIBLE_DEVICES"]
        gpus = tuple(visible.split(",")) if visible else ()
        absent = set(gpus) - {gpu.uuid for gpu in self._spec.gpus}
        if absent:
            what = f"{order.task_id} starts on {absent}, which its reporter did not find"
            self._machine.world.fail(Violation("gpu", what))
        self._machine.launch(order, gpus, until_s, gated=gated)

    def attach(self, key: Key, shim: int, shim_start: int | None) -> bool:
        process = self._machine.processes.get(key)
        if (
            process is None
            or not process.shim_alive
            or (shim, shim_start) != (process.shim, self._machine.boots)
        ):
            return False
        self._attached[key] = self._machine.world.now_s
        return True

    def signal(self, key: Key, number: signal.Signals) -> None:
        self._process.step("before it signals a task")
        if key in self._attached:
            machine = self._machine
            machine.world.guarded(lambda: machine.signalled(machine, key[0]))
            machine.signal(key, number)

    def open_gate(self, key: Key) -> None:
        self._process.step("before it opens a gate")
        if key in self._attached:
            self._machine.open_gate(key)

    def gone(self, key: Key) -> None:
        """A shim has ended."""
        if self._attached.pop(key, None) is not None:
            self._call(lambda: self._callbacks.gone(key))

    def die(self) -> None:
        """As by SIGKILL; what it had taken starts all the same."""
        if not self.closed:
            self.close()
            self._machine.world.loop.call_soon(self._callbacks.lost, context=self._process.context)

    def close(self) -> None:
        """What shims have taken starts, the rest does not; the lock is free only then."""
        if self.closed:
            return
        self.closed = True
        launching, self._launching = self._launching, {}
        for asked in launching.values():
            if self._machine.world.rng.random() < 0.5:
                self._launch(*asked)
        if self._machine.launcher is self:
            self._machine.launcher = None

    def _call(self, callback: Callable[[], None]) -> None:
        if not self.closed and self._process.alive:
            self._machine.world.loop.call_soon(self._called, callback, context=self._process.context)

    def _called(self, callback: Callable[[], None]) -> None:
        if not self.closed and self._process.alive:
            callback()


class SimulatedMeters(MetersWithoutContention):
    """What a machine measures of its tasks. Adapter of `ports.Meters`; of pressure it has no triggers, so it
    is polled."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def _below(self, shim: int) -> TaskProcess | None:
        return next((found for found in self._machine.processes.values() if found.shim == shim), None)

    def use(self, shim: int) -> tuple[float, int]:
        process = self._below(shim)
        return (0.0, 0) if process is None else (self._machine.world.now_s - process.started_s, 200)

    def waits(self, shim: int) -> Mapping[int, int]:
        meter(self._machine)
        process = self._below(shim)
        return {} if process is None else {shim: int(process.used.waited_s * 1e9)}

    def traffic(self, key: Key | None) -> Mapping[str, int]:
        """Of the machine: of what runs there, so its counter goes back when a task ends."""
        machine = self._machine
        if not caps_bandwidth(machine.spec):
            return {}
        meter(machine)
        moved = [found.used.moved_mb for found in machine.processes.values() if key in (None, found.key)]
        return {"0": int(sum(moved) * 1e6)} if moved else {}

    def gpu(self, uuid: str) -> tuple[float, int] | None:
        return 50.0, 1_000 + len(uuid)

    def gpu_memory_of(self, shim: int, uuid: str) -> int | None:
        return None


class SimulatedHost:
    """A machine as one process of its node-reporter sees it. Adapter of `ports.Host`."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.spec = machine.spec
        self.meters = SimulatedMeters(machine)
        self._machine = machine
        self._process = process
        machine.disk.step = process.step
        process.at_death.append(self._died)

    def _died(self) -> None:
        machine = self._machine
        machine.disk.step = lambda what: None
        machine.checkpoints.handovers = None
        if machine.launcher is not None:
            machine.launcher.close()
        machine.locked = False

    async def lock(self) -> int:
        await self._process.gate("lock")
        while self._machine.locked:
            await asyncio.sleep(LOCK_PAUSE_S)
        self._machine.locked = True
        return 1

    def unlock(self, lock: int) -> None:
        del lock
        if self._process.alive:
            self._machine.locked = False

    def open_journal(self) -> Journal:
        return Journal(Path("journal"), self._machine.disk.connect)

    def keys(self) -> NodeKeys:
        return keys_of(self.spec.node_id)

    def launch(self, lock: int, callbacks: Callbacks) -> SimulatedLauncher:
        del lock
        return SimulatedLauncher(self._machine, self._process, self.spec, callbacks)

    def hand_over(self, orders: Mapping[str, HandOverCheckpoint]) -> None:
        self._machine.checkpoints.handovers = orders

    async def fetch(self, order: StartTask) -> CheckpointFetched | None:
        if order.code is not None:
            raise NotStartable(f"{order.task_id}: no job of the laboratory is sent with code")
        await self._process.gate("fetch")
        found = None
        if order.checkpoint and order.checkpoint_from is not None:
            source = order.checkpoint_from
            found = await self._machine.checkpoints.fetch(order, source, self._process)
        self._machine.checkpoints.prepare(order)
        return found

    def discard(self, order: StartTask) -> None:
        self._machine.checkpoints.discard(order)

    def checkpoints(self, order: StartTask) -> str:
        return "" if order.checkpoint is None else f"{FOLDER}/{order.job_id}"

    def contact(self) -> float | None:
        return self._machine.contact_s()

    def renew(self, contact_s: float, lease_s: float) -> None:
        self._process.step("before it notes contact")
        self._machine.contact = (self._machine.boots, contact_s)

    def started(self, key: Key) -> Started | None:
        return self._machine.started.get(key)

    def exit(self, key: Key) -> Exit | None:
        return self._machine.exits.get(key)

    def forget(self, key: Key) -> None:
        for records in (self._machine.started, self._machine.exits, self._machine.streams):
            records.pop(key, None)

    def end_task(self, key: Key) -> int:
        self._process.step("before it ends what is left of a task")
        process = self._machine.processes.get(key)
        if process is None:
            return 0
        self._machine.end(process)
        return 1

    def end_orphans(self, known: set[int]) -> int:
        orphans = [process for process in self._machine.processes.values() if process.shim not in known]
        for process in orphans:
            self._machine.end(process)
        return len(orphans)

    def ask_to_save(self, key: Key, *, by_sdk: bool) -> bool:
        self._process.step("before it asks a task to save")
        self._machine.signal(key, signal.SIGUSR1)
        return True

    def saves(self, key: Key) -> bool:
        return True

    def progress(self, key: Key) -> ProgressStream | None:
        stream = self._machine.streams.get(key)
        return None if stream is None else stream.of(self._process)

    def set_affinity(self, key: Key, cores: Sequence[int], cap_percent: int | None) -> Enforced | None:
        if self._machine.dies_pinning:
            self._machine.dies_pinning = False
            self._process.kill("before it pins a task")
        self._process.step("before it pins a task")
        done = self._machine.pin(key, tuple(cores))
        return None if done is None else Enforced("affinity") if done else Enforced("", "Invalid argument")

    def allow_gpus(self, key: Key, uuids: Sequence[str]) -> None:
        self._process.step("before it lets a task open its GPUs")

    def cap_bandwidth(self, key: Key, percent: int | None) -> Enforced | None:
        self._process.step("before it caps a task")
        done = self._machine.cap(key, percent)
        by = self._machine.spec.bandwidth_cap
        if done is None:
            return None
        return Enforced("", "it cannot cap bandwidth") if by == "none" else Enforced(by)

    def watch_gpus(self, deliver: Callable[[GpuFaulted], None]) -> None:
        self._machine.gpu_fault = deliver
