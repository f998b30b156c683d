"""A node-reporter over its lives: the real core, a journal that may lose its tail, recovery as on a machine.

What the shell of the node-reporter does around its core is done here turn by turn (`node.py`, `recovery.py` there):
decide, write down, only then act. A death may come before the write, after it, or in the middle of acting.
"""

import signal
from collections.abc import Sequence
from copy import copy

from penstock.model.event import Event
from penstock.model.external_events import NodeJoined, NodeLeft, RunningTask
from penstock.model.ledger_events import StartTask, StopTask
from penstock.model.topics import Topic
from penstock_services.node_reporter.core import machine as core
from penstock_services.node_reporter.core.state import Forget, NodeState, Put, Status, Task, check
from tests.faults.lab.judge import Judge
from tests.faults.lab.log import Append, Log, wire
from tests.faults.lab.machine import Key, Machine, Written
from tests.faults.lab.world import Life, Loop

MAX_ORDERS_PER_TURN = 8
MAX_SENT_PER_TURN = 8
LONGEST_PAUSE_S = 40.0
LONGEST_SPAWN_S = 2.0
DRAIN_GRACE_MS = 5_000
JOIN = "joined"
"""How the ids of joinings begin."""


class Reporter:
    """The service of one node, life after life."""

    def __init__(self, log: Log, machine: Machine, judge: Judge) -> None:
        self.log = log
        self.machine = machine
        self.judge = judge
        self.lives = 0
        self.work: _Work | None = None

    @property
    def alive(self) -> bool:
        return self.work is not None and self.work.life.alive

    def start(self) -> None:
        """Nothing, if it lives or its machine is down."""
        if self.machine.up and not self.alive:
            self.lives += 1
            self.machine.set_clock()
            self.work = _Work(self)

    def died(self) -> None:
        world = self.machine.world
        world.at(0.05 if world.calm else world.within(0.05, LONGEST_PAUSE_S), self.start)

    def machine_died(self) -> None:
        """It goes with its machine; the next boot starts it."""
        if self.work is not None:
            self.work.life.alive = False
            self.work.leave()


class _Work:
    """One life, from recovery to death."""

    def __init__(self, service: Reporter) -> None:
        self._service = service
        self._machine, self._log, self._judge = service.machine, service.log, service.judge
        self._world = service.machine.world
        machine = self._machine
        self.life = Life(self._world, f"reporter of {machine.node_id}", self._died)
        self._orders = self._log.partition(Topic.ORDERS, machine.node_id)
        self._nodes = self._log.partition(Topic.NODES)
        spec = machine.spec
        if not machine.written:
            empty = NodeState(spec.node_id, spec.boot_id, len(spec.gpus))
            machine.written = [Written(empty, (), self._orders.end, 0, 0)]
        written = machine.written[-1]
        machine.written = [written]
        self._state = _copied(written.state)
        self._state.boot_id = spec.boot_id
        self._inputs: list[core.Input] = []
        self._launching: dict[Key, StartTask] = {}
        self._join_said = -1
        self._joined = self._draining = self._drained = False
        self._in_flight: Append | None = None
        self._in_flight_to = 0
        self.reading = Loop(self.life, self._read, "reading orders")
        self._applying = Loop(self.life, self._apply, "applying what happened")
        self.sending = Loop(self.life, self._send, "sending events")
        self._log.read(self.reading, self._orders)
        machine.noticed = self._on_gone
        self._recover()
        if self.life.alive:
            self.join()

    def _died(self) -> None:
        self.leave()
        self._service.died()

    def leave(self) -> None:
        """What was on its way may arrive, or not; the machine runs on unwatched."""
        machine = self._machine
        machine.noticed = lambda key: None
        if self._in_flight is not None:
            self._log.cut_off(self._in_flight)
        launching, self._launching = self._launching, {}
        for order in launching.values():
            if machine.up and self._world.rng.random() < 0.5:
                machine.launch(order)  # the launcher had taken it: the lock is free only when it runs

    # ---------------------------------------------------------------------------------------- one door

    def _feed(
        self,
        given: Sequence[core.Input | Event],
        *,
        durable: bool,
        next_offset: int | None = None,
        incarnation: int | None = None,
    ) -> None:
        """Decides, writes down, acts; may die in between."""
        actions: list[core.Action | Forget] = []
        events: list[Event] = []
        for item in given:
            if isinstance(item, Event):
                events.append(item)
                continue
            for decision in core.step(self._state, item):
                if isinstance(decision, core.Emit):
                    events.append(decision.event)
                elif not isinstance(decision, Put):
                    actions.append(decision)
        check(self._state)
        if self.life.may_crash("before its journal is written"):
            return
        self._write(events, durable=durable, next_offset=next_offset, incarnation=incarnation)
        if events:
            self.sending.kick()
        for action in actions:
            if self.life.may_crash("its journal is written, it has yet to act"):
                return
            self._act(action)
        if self._draining and not self._drained and not self._state.tasks:
            self._say_goodbye()

    def _write(
        self, events: Sequence[Event], *, durable: bool, next_offset: int | None, incarnation: int | None
    ) -> None:
        machine = self._machine
        last = machine.written[-1]
        outbox, said = last.outbox, last.said
        for event in events:
            said += 1
            name = f"{JOIN if event.TYPE == NodeJoined.TYPE else machine.node_id}/{said}"
            record = wire(event, name, f"/penstock/node-reporter/{machine.node_id}", machine.clock.wall_ms())
            outbox = (*outbox, (said, record))
        written = Written(
            _copied(self._state),
            outbox,
            last.next_offset if next_offset is None else next_offset,
            last.incarnation if incarnation is None else incarnation,
            said,
        )
        machine.written = [written] if durable else [*machine.written, written]

    def _act(self, action: "core.Action | Forget") -> None:
        machine = self._machine
        match action:
            case core.Spawn(order):
                self._spawn(order)
            case core.Signal(task_id, token, number):
                self._judge.signalled(machine, task_id)
                machine.signal((task_id, token), number)
            case core.KillAt(task_id, token, at_ms):
                self._kill_after((task_id, token), at_ms - machine.clock.wall_ms())
            case Forget(task_id, token):
                machine.folders.pop((task_id, token), None)
            case _:
                pass

    def _kill_after(self, key: Key, after_ms: int) -> None:
        self._world.at(max(0, after_ms) / 1_000, lambda: self._later(core.GraceOver(*key)))

    def _later(self, given: core.Input) -> None:
        if self.life.alive:
            self._inputs.append(given)
            self._applying.kick()

    def _apply(self) -> None:
        inputs, self._inputs = self._inputs, []
        if inputs:
            self._feed(inputs, durable=False)

    # ----------------------------------------------------------------------------------------- programs

    def _spawn(self, order: StartTask) -> None:
        key = (order.task_id, order.token)
        self._launching[key] = order
        self._world.at(self._world.within(0.01, LONGEST_SPAWN_S), lambda: self._launched(key))

    def _launched(self, key: Key) -> None:
        order = self._launching.pop(key, None)
        if order is None or not self.life.alive:
            return
        folder = self._machine.launch(order)
        if folder.started is not None:
            self._later(core.Spawned(*key, *folder.started, self._machine.clock.wall_ms()))
        if folder.outcome is not None:
            self._later(core.Gone(*key, folder.outcome))

    def _on_gone(self, key: Key) -> None:
        outcome = self._machine.folders[key].outcome
        self._later(core.Gone(*key, outcome if outcome is not None else self._lost()))

    def _lost(self) -> core.Outcome:
        return core.Outcome(
            self._machine.clock.wall_ms(), signal=int(signal.SIGKILL), lost="its guardian was killed"
        )

    # ----------------------------------------------------------------------------------------- recovery

    def _recover(self) -> None:
        """As `penstock_services.node_reporter.shell.recovery`: who waited, who ended meanwhile, who still lives."""
        boot_id = self._machine.spec.boot_id
        for task in self._state.waiting():
            if task.boot_id != boot_id:
                outcome = core.Outcome(
                    self._machine.clock.wall_ms(), lost="the node was booted anew before it could start"
                )
                self._feed([core.Gone(task.task_id, task.token, outcome)], durable=True)
        for task in self._state.live():
            if self.life.alive:
                self._recover_task(task)
        if not self.life.alive:
            return
        for task in self._state.live():
            key = (task.task_id, task.token)
            if task.status is Status.STARTING and key not in self._machine.processes:
                if key not in self._launching and task.order is not None:
                    self._spawn(task.order)
            elif task.status is Status.STOPPING and task.stop_grace_ms is not None:
                left_ms = max(0, (task.kill_at_ms or 0) - self._machine.clock.wall_ms())
                self._machine.signal(key, signal.SIGTERM)
                self._kill_after(key, min(left_ms, task.stop_grace_ms))

    def _recover_task(self, task: Task) -> None:
        machine = self._machine
        key = (task.task_id, task.token)
        folder = machine.folders.get(key)
        started = folder.started if folder is not None else None
        outcome = folder.outcome if folder is not None else None
        if outcome is None and task.boot_id != machine.spec.boot_id:
            outcome = core.Outcome(machine.clock.wall_ms(), lost="the node was booted anew while it ran")
        elif outcome is None and started is None and task.status is not Status.STARTING:
            outcome = self._lost()
        elif outcome is None and started is not None:
            if key in machine.processes:
                self._feed_started(task, started)
                return
            outcome = self._lost()
        if outcome is not None:
            if started is not None and not outcome.failure:
                self._feed_started(task, started)
            if self.life.alive:
                self._feed([core.Gone(*key, outcome)], durable=False)

    def _feed_started(self, task: Task, started: tuple[int, int]) -> None:
        if task.status is Status.STARTING:
            now_ms = self._machine.clock.wall_ms()
            self._feed([core.Spawned(task.task_id, task.token, *started, now_ms)], durable=False)

    def join(self) -> None:
        """Says what this node is and what is (or is about to be) alive on it."""
        machine = self._machine
        number = max(machine.written[-1].incarnation + 1, machine.clock.wall_ms())
        self._state.incarnation = number
        tasks = sorted(self._state.tasks.values(), key=lambda task: task.task_id)
        running = tuple(RunningTask(task_id=task.task_id, token=task.token) for task in tasks)
        event = NodeJoined(node=machine.spec, tasks=running, incarnation=number)
        machine.joined(event)
        self._join_said = machine.written[-1].said + 1
        self._feed([event], durable=True, incarnation=number)

    # ------------------------------------------------------------------------------------ in and out

    def say(self, event: Event) -> None:
        """Something that the machine's hardware told."""
        if self.life.alive:
            self._feed([event], durable=False)

    def _read(self) -> None:
        """Obeys nothing before the log has acknowledged the join."""
        if not self._joined or self._draining:
            return
        offset = self._machine.written[-1].next_offset
        most = int(self._world.rng.integers(1, MAX_ORDERS_PER_TURN + 1))
        inputs: list[core.Input] = []
        for record in self._orders.records[offset : offset + most]:
            order = record.value
            self._judge.order_read(self._machine, order)
            if isinstance(order, StopTask):
                self._machine.stops_read[order.task_id] = None
            inputs.append(core.OrderRead(order, self._machine.clock.wall_ms()))
        if inputs:
            self._feed(inputs, durable=True, next_offset=offset + len(inputs))
            if self.life.alive and offset + len(inputs) < self._orders.end:
                self.reading.kick()

    def _send(self) -> None:
        """The oldest events that the log has not acknowledged; one append at a time."""
        outbox = self._machine.written[-1].outbox
        if self._in_flight is not None or not outbox:
            return
        most = int(self._world.rng.integers(1, MAX_SENT_PER_TURN + 1))
        batch = outbox[:most]
        self._in_flight_to = batch[-1][0]
        self._in_flight = self._log.append(
            self.life.name, self._nodes, [record for _, record in batch], self._sent
        )

    def _sent(self) -> None:
        self._in_flight = None
        if not self.life.alive or self.life.may_crash("before it notes what the log has"):
            return
        machine = self._machine
        last = machine.written[-1]
        outbox = tuple(item for item in last.outbox if item[0] > self._in_flight_to)
        written = Written(last.state, outbox, last.next_offset, last.incarnation, last.said)
        machine.written = [*machine.written, written]
        if not self._joined and self._in_flight_to >= self._join_said:
            self._joined = True
            self.reading.kick()
        self.sending.kick()
        if self._drained and not outbox:
            self._world.tell(f"{machine.node_id} has left")
            self.life.alive = False
            self.leave()
            self._service.died()

    def drain(self) -> None:
        """Stops all tasks, says that the node leaves, ends; it will be started again."""
        if self._joined and not self._draining:
            self._draining = True
            self._machine.stops_read |= dict.fromkeys(self._state.tasks)
            self._feed([core.Drain(self._machine.clock.wall_ms(), DRAIN_GRACE_MS)], durable=True)

    def _say_goodbye(self) -> None:
        self._drained = True
        spec = self._machine.spec
        number = self._machine.written[-1].incarnation
        left = NodeLeft(node_id=spec.node_id, boot_id=spec.boot_id, proof="shutdown", incarnation=number)
        self._feed([left], durable=False)


def _copied(state: NodeState) -> NodeState:
    """Rows are frozen values, so copying the tables is enough."""
    found = copy(state)
    found.gpu_tokens = dict(state.gpu_tokens)
    found.tasks = dict(state.tasks)
    found.ended = dict(state.ended)
    return found
