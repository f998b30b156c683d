"""One node at work: orders and exits go through the core, into the journal, and only then are acted on.

A `Node` lives from one recovery to the next. Whatever breaks what it rests on (journal, launcher, its position
in the log) ends it with an exception; `run` then recovers from disk, as after a crash: one path.
"""

import asyncio
import hashlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from penstock.cluster.nouns import NodeSpec
from penstock.events.base import Event
from penstock.events.doors import NodeJoined, NodeLeft, RunningTask
from penstock.events.envelope import MAX_ID_BYTES, Envelope, from_wire, to_wire
from penstock.events.errors import EventError
from penstock.events.facts import Order, StartTask
from penstock.events.topics import Topic, node_partition
from penstock.kernel import failpoints
from penstock.kernel.clock import wall_ms
from penstock.kernel.dead_letters import dead_letter
from penstock.kernel.log import Log, Message, Partition, Record
from penstock.kernel.settings import Settings
from penstock.kernel.task_logs import log_path
from penstock.node_reporter.core import machine
from penstock.node_reporter.core.environment import base_environment, task_environment
from penstock.node_reporter.core.state import Context, Forget, NodeState, Put
from penstock.node_reporter.options import Options
from penstock.node_reporter.shell import processes
from penstock.node_reporter.shell.exits import lost_outcome, outcome_of, sweep_task
from penstock.node_reporter.shell.folders import make_folder, make_task_folder, memory_cap, remove_folder
from penstock.node_reporter.shell.journal import Journal, Pending
from penstock.node_reporter.shell.outbox import Outbox
from penstock.node_reporter.shell.spawner import Key, LauncherLost, Marks, Spawner, task_folder
from penstock.node_reporter.shell.tuning import set_affinity

SERVICE = "node-reporter"
SKIPPED_ORDERS = 1_000  # of other nodes, before the position is written down without an order of our own
LEAVE_TIMEOUT_S = 10.0  # for the log to take the last events of a draining node
SWEEP_PAUSE_S = 5.0  # between attempts to end what SIGKILL did not end

logger = logging.getLogger(__name__)


def event_id(node_id: str, *parts: object) -> str:
    """Derived from the cause, so that a repeat is recognisable; hashed when too long for an envelope."""
    text = "/".join(str(part) for part in (node_id, *parts))
    return text if len(text.encode()) <= MAX_ID_BYTES else hashlib.sha256(text.encode()).hexdigest()


class Node:
    """See the module's docstring. Everything runs on one event loop; nothing is used concurrently."""

    def __init__(
        self, options: Options, settings: Settings, spec: NodeSpec, log: Log, journal: Journal, lock: int
    ) -> None:
        self.options = options
        self.spec = spec
        self.log = log
        self.journal = journal
        self.state: NodeState = journal.load(spec.node_id, spec.boot_id, len(spec.gpus))
        self.marks = Marks(spec.node_id, str(options.state_dir))
        self.orders = Partition(Topic.ORDERS, node_partition(spec.node_id))
        self._nodes = Partition(Topic.NODES, settings.cell_index)
        self._base = base_environment(os.environ, _interpreter_folder()) | self.marks.environment()
        self._loop = asyncio.get_running_loop()
        self._inputs: list[machine.Input] = []
        self._something = asyncio.Event()
        self._launcher_lost = False
        self._asked: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._sweeps: set[asyncio.Task[None]] = set()
        self._nothing_lives = asyncio.Event()
        self._skipped = 0
        self.outbox = Outbox(journal, log, self._on_sent)
        self.spawner = Spawner(
            lock, self.marks, started=self._on_started, gone=self._on_gone, lost=self._on_lost
        )

    # ---------------------------------------------------------------------------------------- one door

    def feed(
        self, inputs: Sequence[machine.Input], *, durable: bool, numbers: Mapping[str, int] | None = None,
        messages: Sequence[tuple[str, Message]] = (),
    ) -> None:  # fmt: skip
        """Decides, writes down, acts; in this order. `durable`: waits for the disk in between."""
        decisions = [decision for given in inputs for decision in machine.step(self.state, given)]
        changes = [decision for decision in decisions if isinstance(decision, Put | Forget)]
        events = [self._message(emit) for emit in decisions if isinstance(emit, machine.Emit)]
        if changes or events or messages or numbers:
            self.journal.write(changes, [*events, *messages], numbers or {}, durable=durable)
        if durable:
            failpoints.hit("node.token_written")
        if events or messages:
            self.outbox.notify()
        for decision in decisions:
            if not isinstance(decision, Put | machine.Emit):
                self._act(decision)
        if not self.state.tasks:
            self._nothing_lives.set()

    def _act(self, decision: machine.Action | Forget) -> None:
        match decision:
            case machine.Spawn(order):
                self._spawn(order)
            case machine.Signal(task_id, token, number):
                self.spawner.signal((task_id, token), number)
            case machine.KillAt(task_id, token, at_ms):
                self._kill_at((task_id, token), at_ms)
            case machine.SetAffinity(task_id, token, cores):
                set_affinity(task_folder(self.options.state_dir, task_id, token), cores)
            case machine.Note(text):
                logger.warning("%s", text)
            case Forget(task_id, token):
                remove_folder(task_folder(self.options.state_dir, task_id, token))

    def emit(self, *events: tuple[str, Event]) -> None:
        """Writes events that follow from no order; each with the rest of its id."""
        messages = [self._envelope(event_id(self.spec.node_id, name), event) for name, event in events]
        self.journal.write([], messages, {}, durable=False)
        self.outbox.notify()

    def _message(self, emit: machine.Emit) -> tuple[str, Message]:
        event = emit.event
        kind = event.TYPE.rpartition(".")[2]
        task_id, token = getattr(event, "task_id", ""), getattr(event, "token", "")
        return self._envelope(event_id(self.spec.node_id, task_id, token, kind), event, emit.context)

    def _envelope(self, id_: str, event: Event, context: Context | None = None) -> tuple[str, Message]:
        known = context or Context()
        headers, value = to_wire(
            Envelope(
                id=id_,
                source=f"/penstock/{SERVICE}/{self.spec.node_id}",
                time_ms=wall_ms(),
                data=event,
                traceparent=known.traceparent,
                causation_id=known.causation_id,
                correlation_id=known.correlation_id,
            )
        )
        return id_, Message(self._nodes, value, headers, self.spec.node_id.encode())

    # -------------------------------------------------------------------------------------- beginnings

    def _spawn(self, order: StartTask) -> None:
        """Asks the launcher for one task. A folder that cannot be made leaves it to recovery (`JournalFailed`)."""
        options = self.options
        self._asked.add((order.task_id, order.token))
        folder = make_task_folder(task_folder(options.state_dir, order.task_id, order.token))
        place = order.place
        request = {
            "task_id": order.task_id,
            "token": order.token,
            "folder": str(folder),
            "log": str(log_path(options.log_dir, order.job_id, order.task_id)),
            "log_limit": options.log_limit_mib << 20,
            "argv": list(order.command),
            "env": task_environment(order, self.spec, self._base, virtual=options.virtual_gpus is not None)
            | {"PENSTOCK_PHASE_FILE": str(folder / "phases")},
            "cwd": order.workdir or str(make_folder(folder / "work")),
            **memory_cap(options, place),
            "cores": real_cores(place.cores),
        }
        self.spawner.spawn(request)

    def _on_started(self, key: Key, pid: int, started_ms: int) -> None:
        failpoints.hit("node.task_spawned")
        self._later(machine.Spawned(*key, pid, started_ms, wall_ms()))

    def _kill_at(self, key: Key, at_ms: int) -> None:
        old = self._timers.pop(key, None)
        if old is not None:
            old.cancel()
        delay_s = max(0, at_ms - wall_ms()) / 1_000
        self._timers[key] = self._loop.call_later(delay_s, lambda: self._later(machine.GraceOver(*key)))

    # -------------------------------------------------------------------------------------------- ends

    def _on_gone(self, key: Key) -> None:
        failpoints.hit("node.exit_noticed")
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        outcome = outcome_of(task_folder(self.options.state_dir, *key), self._order(key))
        if outcome is not None:
            self._later(machine.Gone(*key, outcome))
            return
        sweep = self._loop.create_task(self._sweep(key))
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)

    async def _sweep(self, key: Key) -> None:
        """The shim was killed: ends what is left of its task, however long that takes, before saying so."""
        while True:
            try:
                folder = task_folder(self.options.state_dir, *key)
                count = await asyncio.to_thread(sweep_task, folder, self.marks, key)
            except processes.Immortal as error:
                logger.error("task %s: %s; its GPUs stay taken", key[0], error)
                await asyncio.sleep(SWEEP_PAUSE_S)
            else:
                self._later(machine.Gone(*key, lost_outcome(count, wall_ms())))
                return

    def _order(self, key: Key) -> StartTask | None:
        task = self.state.tasks.get(key[0])
        return task.order if task is not None and task.token == key[1] else None

    def _later(self, given: machine.Input) -> None:
        """For callbacks, which have nobody to raise to: `_apply` takes it from here."""
        self._inputs.append(given)
        self._something.set()

    def _on_lost(self) -> None:
        self._launcher_lost = True
        self._something.set()

    async def _apply(self) -> None:
        """Feeds what the callbacks gathered. Raises what makes this life end."""
        while True:
            await self._something.wait()
            self._something.clear()
            if self._launcher_lost:
                raise LauncherLost("the launcher ended")
            inputs, self._inputs = self._inputs, []
            self.feed(inputs, durable=False)

    # ---------------------------------------------------------------------------------- orders and life

    async def live(self, start: int) -> None:
        """Reads orders from offset `start` until cancelled. Raises what ended this life."""
        workers = [self.outbox.run(), self._apply(), self._read_orders(start)]
        await _first_of([self._loop.create_task(worker) for worker in workers])

    async def drain(self) -> None:
        """Stops all tasks, says that the node leaves for good, and waits for the log to have it."""
        await _first_of(
            [self._loop.create_task(work) for work in (self.outbox.run(), self._apply(), self._leave())]
        )

    async def _leave(self) -> None:
        self._nothing_lives.clear()
        self.feed([machine.Drain(wall_ms(), self.options.drain_grace_ms)], durable=True)
        await self._nothing_lives.wait()
        left = NodeLeft(node_id=self.spec.node_id, boot_id=self.spec.boot_id, proof="shutdown")
        self.emit((f"left/{self.journal.number('incarnation', 0)}", left))
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await self.outbox.drained()

    def start_again(self, order: StartTask) -> None:
        """After recovery: a task whose start was decided on, but never begun."""
        if (order.task_id, order.token) not in self._asked:
            self._spawn(order)

    def stop_again(self, key: Key, left_ms: int) -> None:
        """After recovery: SIGTERM may not have been sent; SIGKILL comes when the grace is over."""
        self.spawner.signal(key, signal.SIGTERM)
        self._kill_at(key, wall_ms() + left_ms)

    def join(self) -> None:
        """Says what this node is and what is (or is about to be) alive on it."""
        number = self.journal.number("incarnation", 0) + 1
        tasks = sorted(self.state.tasks.values(), key=lambda task: task.task_id)
        running = tuple(RunningTask(task_id=task.task_id, token=task.token) for task in tasks)
        joined = NodeJoined(node=self.spec, tasks=running)
        name = event_id(self.spec.node_id, "joined", self.spec.boot_id, number)
        self.feed([], durable=True, numbers={"incarnation": number}, messages=[self._envelope(name, joined)])

    def close(self) -> None:
        """Lets go of launcher, timers and journal; tasks run on."""
        self.spawner.close()
        for timer in self._timers.values():
            timer.cancel()
        for sweep in self._sweeps:
            sweep.cancel()
        self.journal.close()

    async def _read_orders(self, start: int) -> None:
        reader = self.log.reader({self.orders: start})
        try:
            while True:
                records = await reader.read()
                failpoints.hit("node.order_read")
                self._take(records, reader.position(self.orders))
        finally:
            await reader.close()

    def _take(self, records: Sequence[Record], position: int) -> None:
        """All orders of one read, with one wait for the disk."""
        inputs: list[machine.Input] = []
        bad: list[tuple[str, Message]] = []
        own = self.spec.node_id.encode()
        for record in records:
            if record.key is not None and record.key != own:
                continue
            try:
                envelope = from_wire(record.headers, record.value, Topic.ORDERS)
            except EventError as error:
                bad.append((f"dead/{record.offset}", dead_letter(record, SERVICE, error.reason, str(error))))
                continue
            order = envelope.data
            if isinstance(order, Order) and order.node_id == self.spec.node_id:
                correlation = envelope.correlation_id or getattr(order, "job_id", None)
                context = Context(envelope.traceparent, envelope.id, correlation)
                inputs.append(machine.OrderRead(order, wall_ms(), context))
        self._skipped += len(records)
        if inputs or bad or self._skipped >= SKIPPED_ORDERS:
            self._skipped = 0
            self.feed(inputs, durable=bool(inputs), numbers={"next_offset": position}, messages=bad)

    def _on_sent(self, events: list[Pending]) -> None:
        ends = [event.id.rpartition("/")[2] for event in events]
        if "started" in ends:
            failpoints.hit("node.start_reported")
        if "exited" in ends:
            failpoints.hit("node.exit_reported")


def real_cores(cores: Sequence[int]) -> list[int]:
    """Cores as this machine has them: a virtual node may count more than there are."""
    usable = sorted(os.sched_getaffinity(0))
    return sorted({usable[core % len(usable)] for core in cores})


def _interpreter_folder() -> str | None:
    """The virtual environment's programs, when the reporter runs in one."""
    return None if sys.prefix == sys.base_prefix else f"{sys.prefix}/bin"


async def _first_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Runs until the first of them ends, raises what it raised, and leaves none behind."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
