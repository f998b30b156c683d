"""Dispatcher of orders and trace spans that follow from valid records (LAW 4).

Ideal: orders leave only for records that were read back as valid. On Kafka this holds. Departure: a log with
compare-and-append (penstock.log.port) takes record and orders in one commit, which fails as a whole unless
the record follows the last valid one: there the commit is the proof (decision 19).
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence

from penstock.clock import wall_ms
from penstock.errors import NotAllowed
from penstock.ledger.state.state import CellState
from penstock.log.port import Log, Message, Partition
from penstock.model.decisions.ledger_events import PlacementExplanation
from penstock.model.decisions.orders import HandOverCheckpoint, Order, StartTask, TaskOrder
from penstock.model.nouns.token import seq_of, token_of
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, signed_bytes, to_wire
from penstock.runtime.failpoints import hit
from penstock.runtime.keys.node_keys import PlacerKeys, operators_code
from penstock.runtime.settings import Settings
from penstock_services.placer.core.orders import (
    Notice,
    notices_of,
    orders_of,
    outstanding,
    outstanding_notices,
    refusals,
)
from penstock_services.placer.shell.ledger_trace import LedgerTrace

logger = logging.getLogger(__name__)

MAX_QUEUED_BATCHES = 64  # batches of orders that wait for the log; beyond, reading back waits


class Dispatcher:
    """Derives orders in ledger order and sends them in that order."""

    def __init__(
        self,
        log: Log,
        state: CellState,
        settings: Settings,
        ledger_trace: LedgerTrace,
        keys: PlacerKeys,
        operator: bytes | None,
    ) -> None:
        """`operator`: the key that signs records of gateway and placer about nodes; None: there is none."""
        self._keys = keys
        self._operator = operator
        self._log = log
        self._state = state
        self._cell = settings.cell
        self._nodes = Partition(Topic.NODES, settings.cell_index)
        self._trace = ledger_trace
        self._batch: list[Message] = []
        self._batches: asyncio.Queue[list[Message]] = asyncio.Queue(maxsize=MAX_QUEUED_BATCHES)

    async def repeat_outstanding(self, seq: int) -> None:
        """At the start of a term: repeats every unanswered order (it may never have been sent)."""
        up_to = token_of(self._state.epoch, seq)
        orders = [*outstanding(self._state, list(self._state.nodes), up_to), *refusals(self._state, up_to)]
        await self._append([self._message(order) for order in orders])
        await self._notify(list(map(self._notice, outstanding_notices(self._state, orders))))

    def take(
        self,
        seq: int,
        now_ms: int,
        facts: Sequence[Event],
        explanation: Iterable[PlacementExplanation],
    ) -> None:
        """One valid record, in ledger order."""
        self._trace.read_back(seq, now_ms, facts, explanation)
        if not self._log.conditional:
            self._batch += self.orders(seq, facts)

    def orders(self, seq: int, facts: Sequence[Event]) -> list[Message]:
        """Messages that follow from the record `seq`, whose facts are the last that were folded: orders, then
        notices for the nodes' topic."""
        messages: list[Message] = []
        notices: list[Message] = []
        for fact in facts:
            found = orders_of(self._state, fact, seq)
            messages += map(self._message, found)
            notices += map(self._notice, notices_of(self._state, fact, found))
        return messages + notices

    def _notice(self, event: Notice) -> Message:
        """A probe is identified by its token, which also names the record that decided it."""
        envelope = Envelope(
            id=f"{event.TYPE}-{event.node_id}-{event.probe}",
            source="/penstock/placer",
            time_ms=wall_ms(),
            data=event,
            causation_id=f"ledger-{self._cell}-{seq_of(event.probe)}",
        )
        headers, value = to_wire(envelope)
        if self._operator is not None:
            data = signed_bytes(self._cell, envelope.id, envelope.type, value)
            headers = (*headers, operators_code(self._operator, data))
        return Message(self._nodes, value, headers, event.node_id.encode())

    def _message(self, order: Order) -> Message:
        if isinstance(order, HandOverCheckpoint):  # one record may place several jobs
            return self._addressed(
                order, f"order-{order.token}-{order.TYPE}-{order.job_id}", None, order.job_id
            )
        if not isinstance(order, TaskOrder):
            return self._addressed(order, f"order-{order.token}-{order.TYPE}", None, None)
        job_id = order.task_id.rsplit(".", 2)[0]
        traces = self._trace.traces
        starts = isinstance(order, StartTask)
        parent = traces.decided(job_id, seq_of(order.token)) if starts else traces.start_job_trace(job_id)
        return self._addressed(order, f"order-{order.token}-{order.task_id}", parent, job_id)

    def _addressed(self, order: Order, id_: str, traceparent: str | None, job_id: str | None) -> Message:
        """Addressed to its node's partition."""
        headers, value = to_wire(
            Envelope(
                id=id_,
                source="/penstock/placer",
                time_ms=wall_ms(),
                data=order,
                traceparent=traceparent,
                causation_id=f"ledger-{self._cell}-{seq_of(order.token)}",
                correlation_id=job_id,
            )
        )
        place = Partition(Topic.ORDERS, node_partition(order.node_id))
        return Message(place, value, (*headers, self._keys.header), order.node_id.encode())

    async def flush(self) -> None:
        """Passes the messages collected by `take` to the sender;
        waits while `MAX_QUEUED_BATCHES` are waiting."""
        if self._batch:
            batch, self._batch = self._batch, []
            await self._batches.put(batch)

    async def send(self) -> None:
        """Sends the batches one after another, for ever."""
        while True:
            messages = await self._batches.get()
            while not self._batches.empty():
                messages += self._batches.get_nowait()
            notices = [message for message in messages if message.partition.topic == Topic.NODES]
            await self._append([message for message in messages if message.partition.topic != Topic.NODES])
            hit("placer.orders_sent")
            await self._notify(notices)  # once the probes are in the log

    async def _append(self, messages: list[Message]) -> None:
        if messages:
            await self._log.append(messages)

    async def _notify(self, notices: list[Message]) -> None:
        """Without the right to write there nothing is proven, and everything else goes on."""
        try:
            await self._append(notices)
        except NotAllowed as error:
            logger.error(
                "silent nodes keep their jobs until they are fenced: %s; "
                "grant the right with --rights of infra.kafka",
                error,
            )
