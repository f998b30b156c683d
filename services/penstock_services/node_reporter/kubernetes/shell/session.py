"""Session of a cluster's reporter: reads, steps of the core, writes; from an empty memory to its end.

After any failure the next session begins with nothing but two lists (`core.reporter`).
"""

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, NamedTuple

from msgspec.structs import asdict

from penstock.backoff import retry
from penstock.clock import wall_ms
from penstock.errors import ConfigurationError, LogError
from penstock.log.dead_letters import dead_letter
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition, Record
from penstock.model.decisions.orders import Order
from penstock.model.inputs.external_events import NodeJoined, OrderRefused, TaskExited
from penstock.model.schema.errors import EventError
from penstock.model.schema.topics import NODE_PARTITIONS, Topic
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.crash_only import crash_only
from penstock.runtime.service import Run
from penstock.runtime.settings import Settings
from penstock_services.node_reporter.core.actions import Emit, Note
from penstock_services.node_reporter.core.state import Context
from penstock_services.node_reporter.kubernetes.core import messages, reporter
from penstock_services.node_reporter.kubernetes.core.facts import CLOSED_LABEL
from penstock_services.node_reporter.kubernetes.core.messages import (
    End,
    RaiseFence,
    Reported,
    Watched,
    Wrote,
)
from penstock_services.node_reporter.kubernetes.core.objects import Node, Pod
from penstock_services.node_reporter.kubernetes.core.state import ReporterState
from penstock_services.node_reporter.kubernetes.options import ClusterOptions
from penstock_services.node_reporter.kubernetes.shell.api import ApiServer, Query
from penstock_services.node_reporter.kubernetes.shell.fence import raise_term
from penstock_services.node_reporter.kubernetes.shell.reflector import (
    Broken,
    Changed,
    Listed,
    Reflector,
    Resumed,
)
from penstock_services.node_reporter.kubernetes.shell.writer import Writer
from penstock_services.node_reporter.shell.link.outbox import Counter, id_of_report

SERVICE = "node-reporter"
MAX_BATCH = 500  # messages of one append, as the outbox of a machine's reporter
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # between attempts to append, as there
LOST_AFTER_S = 10.0
"""Of broken connections in a row, before nothing is started through this API server: a restart of one takes
2 to 8 s (`infra.devservers.kubernetes`)."""

logger = logging.getLogger(__name__)


class Said(NamedTuple):
    """A message on its way to the log, and the task whose end it is."""

    message: Message
    end: tuple[str, int] | None


class Session:
    """See the module's docstring. Everything runs on one event loop."""

    def __init__(self, options: ClusterOptions, settings: Settings, log: Log, api: ApiServer) -> None:
        self._options, self._log, self._api = options, log, api
        self._nodes = Partition(Topic.NODES, settings.cell_index)
        self._orders = [Partition(Topic.ORDERS, index) for index in range(NODE_PARTITIONS)]
        self._own = f"{options.cluster}/".encode()
        self._counter = Counter(0)
        self._state: ReporterState
        self._inputs: deque[messages.Input] = deque()
        self._something = asyncio.Event()
        self._said: deque[Said] = deque()
        self._to_say = asyncio.Event()
        self._joined = asyncio.Event()
        self._writer = Writer(api, self._wrote)
        self._broken: dict[str, str] = {}
        """Kind of objects → why its connection is broken now."""
        self._lost: asyncio.TimerHandle | None = None
        """Since a connection broke; it calls when that has lasted."""

    async def live(self, ready: asyncio.Event | None) -> None:
        """Works until cancelled or until something fails."""
        try:
            self._state, actions = reporter.begin(self._options.core())
            for action in actions:
                await self._begin(action)
            positions = await self._log.end_offsets(self._orders)
            async with asyncio.TaskGroup() as group:
                selector: Query = [("labelSelector", self._options.nodes)] if self._options.nodes else ()
                group.create_task(
                    self._watch("nodes", Reflector(self._api, "/api/v1/nodes", Node, _version, selector))
                )
                group.create_task(self._watch("pods", Reflector(self._api, "/api/v1/pods", Pod, _version)))
                group.create_task(self._say())
                group.create_task(self._apply(ready))
                group.create_task(self._read_orders(positions))
        finally:
            if self._lost is not None:
                self._lost.cancel()
            await self._writer.close()

    async def _begin(self, action: messages.Action) -> None:
        if isinstance(action, RaiseFence):
            found = await raise_term(self._api, self._options.namespace, action.above, action.own)
            kind = messages.FenceRaised if found.raised else messages.FenceLost
            self._later(kind(found.term, wall_ms()))
        else:
            self._act(action)

    # ------------------------------------------------------------------------------------------ inputs

    def _later(self, given: messages.Input) -> None:
        self._inputs.append(given)
        self._something.set()

    def _wrote(self, found: Wrote) -> None:
        if found.outcome in ("refused", "unknown"):
            logger.warning("%s/%s: %s", found.write.namespace, found.write.name, found.text)
        self._later(found)

    async def _watch(self, what: Literal["nodes", "pods"], reflector: Reflector[Any]) -> None:
        async with aclosing(reflector.follow()) as news:  # type: ignore[type-var]
            async for found in news:
                now_ms = wall_ms()
                match found:
                    case Listed(objects):
                        self._answers(what)
                        self._later(messages.Listed(tuple(objects), what, now_ms))
                    case Changed(kind, changed):
                        self._later(messages.Watched(kind, changed, now_ms))
                    case Resumed():
                        self._answers(what)
                    case Broken(why):
                        self._breaks(what, why)

    def _breaks(self, what: str, why: str) -> None:
        if self._broken.get(what) != why:
            logger.warning("the watch of %s broke: %s; trying again", what, why)
        self._broken[what] = why
        if self._lost is None:
            loop = asyncio.get_running_loop()
            self._lost = loop.call_later(
                LOST_AFTER_S, lambda: self._later(messages.ConnectionLost(why, wall_ms()))
            )

    def _answers(self, what: str) -> None:
        if self._broken.pop(what, None) is None or self._broken:
            return
        assert self._lost is not None, "set with the first that broke"
        lasted = self._lost.when() <= asyncio.get_running_loop().time()
        self._lost.cancel()
        self._lost = None
        logger.info("the API server answers again")
        if lasted:
            self._later(messages.ConnectionRestored(wall_ms()))

    async def _read_orders(self, positions: dict[Partition, int]) -> None:
        """Nothing is obeyed before the log has the joinings: the placer repeats what came before."""
        await self._joined.wait()
        reader = self._log.reader(positions)
        try:
            while True:
                for record in await reader.read():
                    if record.key is None or record.key.startswith(self._own):
                        self._take(record)
        finally:
            await reader.close()

    def _take(self, record: Record) -> None:
        try:
            envelope = from_wire(record.headers, record.value, Topic.ORDERS)
        except EventError as error:
            self._put(Said(dead_letter(record, SERVICE, error.reason, str(error)), None))
            return
        order = envelope.data
        if isinstance(order, Order) and order.node_id.encode().startswith(self._own):
            correlation = envelope.correlation_id or getattr(order, "job_id", None)
            context = Context(envelope.traceparent, correlation)
            self._later(messages.OrderRead(order, wall_ms(), context))

    # ----------------------------------------------------------------------------------------- actions

    async def _apply(self, ready: asyncio.Event | None) -> None:
        """Steps of the core. Raises `ConfigurationError` when another reporter has taken over."""
        while True:
            await self._something.wait()
            self._something.clear()
            while self._inputs:
                for action in reporter.step(self._state, *self._next()):
                    if isinstance(action, RaiseFence):
                        await self._begin(action)
                    else:
                        self._act(action)
            if len(self._state.listed) == 2 and not self._said:
                self._joined.set()
            if ready is not None and self._joined.is_set():
                ready.set()

    def _next(self) -> list[messages.Input]:
        """The next input, or all watch events up to the next other one."""
        found = [self._inputs.popleft()]
        while isinstance(found[0], Watched) and self._inputs and isinstance(self._inputs[0], Watched):
            found.append(self._inputs.popleft())
        return found

    def _act(self, action: messages.Action) -> None:
        match action:
            case Emit():
                self._put(self._message(action))
            case Note(text):
                logger.warning("%s", text)
            case End(why):
                raise ConfigurationError(f"{why}; run one reporter for cluster {self._options.cluster}")
            case RaiseFence():
                raise AssertionError("awaited by the caller")
            case _:
                self._writer.write(action)

    def _message(self, emit: Emit) -> Said:
        event = self._counter.count(emit.event)
        if isinstance(event, NodeJoined) and (why := event.node.labels.get(CLOSED_LABEL)):
            logger.warning("node %s takes no job: %s", event.node.node_id, why)
        node_id = getattr(event, "node_id", None) or event.node.node_id  # type: ignore[attr-defined]
        id_ = id_of_report(event, emit.name, node_id)
        headers, value = to_wire(
            Envelope(
                id=id_,
                source=f"/penstock/{SERVICE}/{node_id}",
                time_ms=wall_ms(),
                data=event,
                **asdict(emit.context),
            )
        )
        end = (event.task_id, event.token) if isinstance(event, TaskExited | OrderRefused) else None
        return Said(Message(self._nodes, value, headers, node_id.encode()), end)

    def _put(self, said: Said) -> None:
        self._said.append(said)
        self._to_say.set()

    async def _say(self) -> None:
        """Appends in order, each until the log has acknowledged it."""
        while True:
            await self._to_say.wait()
            batch = [self._said[index] for index in range(min(MAX_BATCH, len(self._said)))]
            if not batch:
                self._to_say.clear()
                continue
            await retry(
                partial(self._log.append, [said.message for said in batch]),
                (LogError,),
                first_s=FIRST_PAUSE_S,
                longest_s=LONGEST_PAUSE_S,
                on_failure=lambda error, _: logger.warning("events wait for the log: %s", error),
            )
            for said in batch:
                self._said.popleft()
                if said.end is not None:
                    self._later(Reported(*said.end, wall_ms()))
            if not self._said:
                self._something.set()


def _version(found: Node | Pod) -> str:
    return found.metadata.resource_version


def runner(options: ClusterOptions) -> Run:
    """The service's entry (see `penstock.runtime.service`) for one cluster."""

    async def run(
        settings: Settings, stop: asyncio.Event, *, log: Log | None = None, ready: asyncio.Event | None = None
    ) -> None:
        own = await open_log(settings.log_url, SERVICE).start() if log is None else None
        used = own or log
        assert used is not None, "opened above where the caller has none"

        async def attempt() -> None:
            api = await ApiServer.open(options.kubeconfig, options.context)
            try:
                await Session(options, settings, used, api).live(ready)
            finally:
                await api.close()

        try:
            await crash_only(SERVICE, attempt, stop)
        finally:
            if own is not None:
                await own.close()

    return run
