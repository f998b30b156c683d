"""Session of a node: orders and exits go through the core, into the journal, and only then are acted on.

A `Node` lives from one recovery to the next. A failure of its journal, its launcher or its position
in the log ends it with an exception; `run` then recovers from disk, as after a crash: one path.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec.structs import asdict, replace

from penstock.clock import wall_ms
from penstock.log.dead_letters import dead_letter
from penstock.log.port import Log, Message, Partition, Record
from penstock.model.decisions.orders import Order, ProbeNode, StartTask
from penstock.model.inputs.external_events import (
    CheckpointFetched,
    GpuFaulted,
    NodeLeft,
    StepsMeasured,
    TelemetrySampled,
)
from penstock.model.schema.errors import EventError
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, from_wire, signed_bytes, to_wire
from penstock.runtime import failpoints
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.node_reporter.core import machine
from penstock_services.node_reporter.core.actions import (
    Action,
    Carried,
    Discard,
    Emit,
    KillAt,
    Note,
    OpenGate,
    Signal,
    Spawn,
)
from penstock_services.node_reporter.core.gpu_shares import promised_mib
from penstock_services.node_reporter.core.inputs import (
    Drain,
    Faulted,
    Gone,
    GraceOver,
    Input,
    OrderRead,
    Outcome,
    Spawned,
    Stepped,
)
from penstock_services.node_reporter.core.joining import Fence, JoinAgain, joining
from penstock_services.node_reporter.core.reports.progress import ProgressParser, Report
from penstock_services.node_reporter.core.state import NO_CONTEXT, Change, Context, Forget, NodeState, Put
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.adjustments import carry_out
from penstock_services.node_reporter.shell.journal import Journal, Outgoing
from penstock_services.node_reporter.shell.link.outbox import Counter, Outbox, event_id, id_of_report
from penstock_services.node_reporter.shell.link.samples import Samples
from penstock_services.node_reporter.shell.measure.progress_reader import ProgressReader
from penstock_services.node_reporter.shell.measure.sampler import Sampler
from penstock_services.node_reporter.shell.measure.spans import TaskSpans
from penstock_services.node_reporter.shell.ports import (
    Callbacks,
    Host,
    JoinStale,
    Key,
    LauncherLost,
    NotStartable,
    OtherMachine,
)
from penstock_services.node_reporter.shell.process.exits import (
    end_remaining,
    lost_outcome,
    merged,
    outcome_of,
)
from penstock_services.node_reporter.shell.task_setup.fetches import Fetches
from penstock_services.node_reporter.shell.watchdogs.lease import Lease, LeaseLapsed, concerns

SERVICE = "node-reporter"
SKIPPED_ORDERS = 1_000  # of other nodes, before the position is recorded without an order for this node
LEAVE_TIMEOUT_S = 10.0  # for the append of a draining node's last events

logger = logging.getLogger(__name__)


class Node:
    """See the module's docstring. Everything runs on one event loop; nothing is used concurrently."""

    def __init__(
        self,
        options: Options,
        settings: Settings,
        host: Host,
        log: Log,
        journal: Journal,
        lock: int,
        traces: Tracing,
    ) -> None:
        spec = host.spec
        self.options = options
        self.host = host
        self.spec = spec
        self.log = log
        self.journal = journal
        self.state: NodeState = journal.load(spec)
        self.orders = Partition(Topic.ORDERS, node_partition(spec.node_id))
        self._nodes = Partition(Topic.NODES, settings.cell_index)
        self._cell = settings.cell
        self._keys = host.keys()
        self.state.public_key = self._keys.public_key
        host.hand_over(self.state.handovers)
        self._loop = asyncio.get_running_loop()
        self._inputs: list[Input | Outgoing | Emit] = []
        self._something = asyncio.Event()
        self._launcher_lost = False
        self._asked: set[Key] = set()
        self._fetches = Fetches(host, self._later, self._on_fetched, self._something.set)
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._sweeps: set[asyncio.Task[None]] = set()
        self._nothing_lives = asyncio.Event()
        self._counter = Counter(journal.number("said", 0))
        self._join_id = ""
        self._joined = asyncio.Event()
        self._skipped = 0
        self._samples = Samples(log, spec.node_id, self._envelope)
        publish, memory_mb_s = self._samples.publish, options.memory_bandwidth_mb_s
        promised = partial(promised_mib, self.state)
        self._sampler = Sampler(spec.node_id, host.meters, publish, self._kill, promised, memory_mb_s)
        self._progress = ProgressReader(self._on_progress)
        self._spans = TaskSpans(traces, spec.node_id)
        self.lease = Lease(self.state, host, log, self.orders, self._joined, self._spawn)
        self.outbox = Outbox(journal, log, self._on_sent)
        self.launcher = host.launch(lock, Callbacks(self._on_started, self._on_gone, self._on_lost))

    # ------------------------------------------------------------------------------------------- feed

    def feed(
        self,
        given: Sequence[Input | Outgoing | Emit],
        *,
        durable: bool,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """Decides, journals, acts; in this order. `durable`: waits for the disk in between."""
        changes: list[Change] = []
        outgoing: list[Outgoing] = []
        actions: list[Action | Forget] = []
        for item in given:
            if isinstance(item, Outgoing):
                outgoing.append(item)
                continue
            for decision in [item] if isinstance(item, Emit) else machine.step(self.state, item):
                if isinstance(decision, Emit):
                    outgoing.append(self._message(decision))
                    continue
                if isinstance(decision, Change):
                    changes.append(decision)
                if not isinstance(decision, Change) or isinstance(decision, Forget):
                    actions.append(decision)
        if changes or outgoing or numbers:
            counted = {"said": self._counter.latest} if outgoing else {}
            self.journal.write(changes, outgoing, {**counted, **(numbers or {})}, durable=durable)
        if durable:
            failpoints.hit("node.token_written")
        if outgoing:
            self.outbox.notify()
        for action in actions:
            self._act(action)
        if not self.state.tasks:
            self._nothing_lives.set()
        for change in changes:
            if isinstance(change, Put):
                self.lease.changed(change.task)

    def follow(self, key: Key) -> None:
        """A task runs: reads its progress and measures it."""
        started, order = self.host.started(key), self._order(key)
        if started is not None and order is not None:
            folder, shared = self.host.checkpoints(order), self.options.checkpoint_shared
            leads = order.place.rank == 0
            parser = ProgressParser(self.spec.node_id, *key, leads=leads, checkpoints=folder, shared=shared)
            self._progress.follow(key, self.host.progress(key), parser)
            gpus = dict(zip(order.place.gpus, order.gpu_uuids, strict=True))
            self._sampler.follow(key, started.shim, gpus, order.gpu_memory_limit_mib > 0, started.groups)

    def _act(self, decision: Action | Forget) -> None:
        match decision:
            case Spawn(order):
                self._spawn(order)
            case Signal(task_id, token, number):
                if not self._fetches.stop((task_id, token)):
                    self.launcher.signal((task_id, token), number)
            case OpenGate(task_id, token):
                self._open((task_id, token))
            case KillAt(task_id, token, at_ms):
                self._kill_at((task_id, token), at_ms)
            case Carried():
                if (found := carry_out(self.host, decision)) is not None:
                    self._later(found)
            case Discard(order):
                self._loop.run_in_executor(None, self.host.discard, order)
            case Note(text):
                logger.warning("%s", text)
            case JoinAgain(above):
                self.journal.write([], [], {"incarnation": above}, durable=True)
                raise JoinStale(f"this node's joining {self.state.incarnation} is not above {above}")
            case Fence(why):
                raise OtherMachine(f"node {self.spec.node_id}: {why}")
            case Forget(task_id, token):
                self.host.forget((task_id, token))

    def _message(self, emit: Emit) -> Outgoing:
        event = emit.event
        id_ = id_of_report(event, emit.name, self.spec.node_id, self.spec.boot_id)
        if isinstance(event, GpuFaulted):
            return self._envelope(id_, event)
        context = replace(emit.context, traceparent=self._spans.on_event(event, emit.context))
        return self._envelope(id_, event, context)

    def _envelope(self, id_: str, event: Event, context: Context = NO_CONTEXT) -> Outgoing:
        headers, value = to_wire(
            Envelope(
                id=id_,
                source=f"/penstock/{SERVICE}/{self.spec.node_id}",
                time_ms=wall_ms(),
                data=(event := self._counter.count(event)),
                **asdict(context),
            )
        )
        if event.TOPIC == Topic.NODES:
            data = signed_bytes(self._cell, id_, wire_type(type(event)), value)
            headers = (*headers, *self._keys.proofs(data))
        return Outgoing(id_, Message(self._nodes, value, headers, self.spec.node_id.encode()))

    def _spawn(self, order: StartTask) -> None:
        """Asks the launcher for one task, once the lease allows. A folder that cannot be created is left to
        recovery (`JournalFailed`)."""
        key = (order.task_id, order.token)
        if self._order(key) is None:  # it was dropped together with its predecessor
            return
        self._asked.add(key)
        if not self.lease.admits(order):
            return
        if self._fetches.needs(order):
            self._fetches.begin(order)
            return
        self._spans.asked(key)
        try:
            gated = self.state.tasks[order.task_id].gated
            self.launcher.spawn(order, self.lease.until_s(order), gated=gated)
        except NotStartable as error:
            self._later(Gone(*key, Outcome(exited_ms=wall_ms(), failure=str(error))))

    def _open(self, key: Key) -> None:
        """A task gets its GPUs. A task whose device group cannot be changed runs without them, and reports
        that itself."""
        order = self._order(key)
        try:
            self.host.allow_gpus(key, () if order is None else order.gpu_uuids)
        except OSError as error:
            logger.error("task %s: its group does not let it open its GPUs: %s", key[0], error)
        self.launcher.open_gate(key)

    def _on_fetched(self, came: CheckpointFetched) -> None:
        task = self.state.find(came.task_id)
        self._later(Emit(came, NO_CONTEXT if task is None else task.context))

    def _on_started(self, key: Key, pid: int, started_ms: int) -> None:
        failpoints.hit("node.task_spawned")
        self.follow(key)
        self._later(Spawned(*key, pid, started_ms, wall_ms()))

    def _kill_at(self, key: Key, at_ms: int) -> None:
        old = self._timers.pop(key, None)
        if old is not None:
            old.cancel()
        delay_s = max(0, at_ms - wall_ms()) / 1_000
        self._timers[key] = self._loop.call_later(delay_s, lambda: self._later(GraceOver(*key)))

    def _on_gone(self, key: Key) -> None:
        failpoints.hit("node.exit_noticed")
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        exhausted = self._progress.forget(key)
        sampled, over, limit_mib = self._sampler.forget(key)
        outcome = outcome_of(self.host.exit(key), self._order(key), exhausted, over, limit_mib)
        if outcome is not None:
            self._later(Gone(*key, replace(outcome, usage=merged(outcome.usage, sampled))))
            return
        sweep = self._loop.create_task(self._sweep(key))
        self._sweeps.add(sweep)
        sweep.add_done_callback(self._sweeps.discard)

    def _kill(self, key: Key) -> None:
        self.launcher.signal(key, signal.SIGKILL)

    async def _sweep(self, key: Key) -> None:
        """The shim was killed: ends the remaining processes of its task, however long that takes, before it
        is reported."""
        count = await end_remaining(self.host, key)
        self._later(Gone(*key, lost_outcome(count, wall_ms())))

    def _on_progress(self, key: Key, report: Report) -> None:
        task = self.state.find(key[0])
        if task is not None and task.lent and isinstance(report.event, StepsMeasured | TelemetrySampled):
            self._later(Stepped(*key))
        if isinstance(report.event, TelemetrySampled):
            self._samples.publish(report.event)
            return
        self._later(Emit(report.event, NO_CONTEXT if task is None else task.context, report.name))

    async def _report_faults(self, faults: "asyncio.Queue[GpuFaulted]") -> None:
        while True:
            fault = await faults.get()
            logger.error("GPU %s: %s %d", fault.uuid, fault.fault, fault.code)
            self.feed([Faulted(fault)], durable=True)

    def _order(self, key: Key) -> StartTask | None:
        task = self.state.tasks.get(key[0])
        return task.order if task is not None and task.token == key[1] else None

    def _later(self, given: Input | Outgoing | Emit) -> None:
        """For callbacks, whose exceptions would be lost: `_apply` takes it from here."""
        self._inputs.append(given)
        self._something.set()

    def _on_lost(self) -> None:
        self._launcher_lost = True
        self._something.set()

    async def _apply(self) -> None:
        """Feeds the inputs from the callbacks. Raises the error that ends this session."""
        while True:
            await self._something.wait()
            self._something.clear()
            if self._launcher_lost:
                raise LauncherLost("the launcher ended")
            inputs, self._inputs = self._inputs, []
            self.feed(inputs, durable=False)
            for order in self._fetches.ready:
                self._spawn(order)
            self._fetches.ready.clear()

    # ---------------------------------------------------------------------------------- orders

    async def live(self, start: int, faults: "asyncio.Queue[GpuFaulted]") -> None:
        """Reads orders from offset `start`, and faults, until cancelled. Raises the error that ended this
        session."""
        await first_of(
            self.outbox.run(),
            self._apply(),
            self._read_orders(start),
            self._report_faults(faults),
            self.lease.keep(),
        )

    async def drain(self) -> None:
        """Stops all tasks, reports that the node leaves for good, and waits for the log's acknowledgement."""
        await first_of(self.outbox.run(), self._apply(), self._leave())

    async def fence(self) -> None:
        """Stops all tasks, for a machine that may not be this node, or whose lease is over; returns when they
        are proven dead."""
        self._give_up_held()
        await first_of(self.outbox.run(), self._apply(), self._stop_all())

    def _give_up_held(self) -> None:
        outcome = Outcome(wall_ms(), lost="its lease ended before it could start")
        self.feed([Gone(*key, outcome) for key in self.lease.give_up()], durable=False)

    def _answer_probe(self) -> None:
        """Joins again, with all living tasks, which run on. Raises `LeaseLapsed` when the answer comes too
        late for them."""
        self._give_up_held()
        if self.lease.lapsed():
            raise LeaseLapsed("a probe was read after the lease")
        self._joined.clear()
        self.join()

    async def _stop_all(self) -> None:
        self._nothing_lives.clear()
        self.feed([Drain(wall_ms(), self.options.drain_grace_ms)], durable=True)
        never_begun = Outcome(wall_ms())
        self.feed([Gone(*key, never_begun) for key in self.lease.give_up_held()], durable=False)
        await self._nothing_lives.wait()

    async def _leave(self) -> None:
        await self._stop_all()
        number = self.journal.number("incarnation", 0)
        left = NodeLeft(
            node_id=self.spec.node_id, boot_id=self.spec.boot_id, proof="shutdown", incarnation=number
        )
        name = event_id(self.spec.node_id, "left", number)
        self.feed([self._envelope(name, left)], durable=False)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self.outbox.drained()
        except TimeoutError:
            logger.warning("the log cannot be reached: unsent events wait in the journal for the next start")

    def start_again(self, order: StartTask) -> None:
        """After recovery: a task whose start was decided, but never begun."""
        if (order.task_id, order.token) not in self._asked:
            self._spawn(order)

    def stop_again(self, key: Key, left_ms: int, *, told: bool) -> None:
        """After recovery: if it is `told` to end, SIGTERM may not have been sent; SIGKILL comes when the
        grace is over."""
        if told:
            self.launcher.signal(key, signal.SIGTERM)
        self._kill_at(key, wall_ms() + left_ms)

    def join(self) -> None:
        """Reports the node's resources and the tasks that are (or are about to be) alive on it."""
        # Above the last one even if the journal is new: then this machine's own clock has moved on.
        number = max(self.journal.number("incarnation", 0) + 1, wall_ms())
        self.state.incarnation = number
        joined = joining(self.state, self.spec, self._keys.public_key)
        self._join_id = event_id(self.spec.node_id, "joined", self.spec.boot_id, number)
        self.feed([self._envelope(self._join_id, joined)], durable=True, numbers={"incarnation": number})

    def close(self) -> None:
        """Closes launcher, timers and journal; tasks run on."""
        self.launcher.close()
        for timer in self._timers.values():
            timer.cancel()
        self._fetches.close()
        for task in self._sweeps:
            task.cancel()
        self._samples.close()
        self._sampler.close()
        self._progress.close()
        self.journal.close()

    async def _read_orders(self, start: int) -> None:
        """Obeys nothing before the log has acknowledged the join: a join that is sent again later would deny
        a newer task."""
        await self._joined.wait()
        reader = self.log.reader({self.orders: start})
        self.lease.taken(start)
        try:
            while True:
                await self._joined.wait()
                records = await reader.read()
                failpoints.hit("node.order_read")
                self._take(records, reader.position(self.orders))
                self.lease.taken(reader.position(self.orders))
        finally:
            await reader.close()

    def _take(self, records: Sequence[Record], position: int) -> None:
        """Processes all orders of one read, with one wait for the disk."""
        inputs: list[Input | Outgoing | Emit] = []
        orders = 0
        probed = False
        own = self.spec.node_id.encode()
        for record in records:
            if record.key is not None and record.key != own:
                continue
            try:
                envelope = from_wire(record.headers, record.value, Topic.ORDERS)
            except EventError as error:
                letter = dead_letter(record, SERVICE, error.reason, str(error))
                inputs.append(Outgoing(event_id(self.spec.node_id, "dead", record.offset), letter))
                continue
            order = envelope.data
            if isinstance(order, ProbeNode):
                probed = probed or concerns(self.state, order)
            elif isinstance(order, Order) and order.node_id == self.spec.node_id:
                self._keys.meet(record.headers)
                correlation = envelope.correlation_id or getattr(order, "job_id", None)
                context = Context(envelope.traceparent, correlation)
                inputs.append(OrderRead(order, wall_ms(), context))
                orders += 1
        self._skipped += len(records)
        if inputs or self._skipped >= SKIPPED_ORDERS:
            self._skipped = 0
            self.feed(inputs, durable=orders > 0, numbers={"next_offset": position})
        if probed:
            self._answer_probe()

    def _on_sent(self, events: list[Outgoing]) -> None:
        if not self._joined.is_set() and any(event.id == self._join_id for event in events):
            self._joined.set()
            self.lease.wake()
        ends = [event.id.rpartition("/")[2] for event in events]
        if "started" in ends:
            failpoints.hit("node.start_reported")
        if "exited" in ends:
            failpoints.hit("node.exit_reported")
