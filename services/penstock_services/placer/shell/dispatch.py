"""The dispatcher: orders, and spans of the trace, that follow from valid records (LAW 4).

Ideal: orders leave only for records that were read back as valid. So it is on Kafka. Departure: a log with
compare-and-append (penstock.log.port) takes record and orders in one commit, which fails as a whole unless the record
follows on the last valid one: there the commit is the proof (decision 19).
"""

import asyncio
from collections.abc import Iterable, Sequence

from penstock.clock import wall_ms
from penstock.ledger.state import CellState
from penstock.log.port import Log, Message, Partition
from penstock.model.envelope import Envelope, to_wire
from penstock.model.event import Event
from penstock.model.ledger_events import PlacementExplanation
from penstock.model.orders import Order, StartTask, TaskOrder
from penstock.model.token import seq_of, token_of
from penstock.model.topics import Topic, node_partition
from penstock.runtime.failpoints import hit
from penstock.runtime.settings import Settings
from penstock_services.placer.core.orders import orders_of, outstanding
from penstock_services.placer.shell.ledger_trace import LedgerTrace

MAX_QUEUED_BATCHES = 64  # batches of orders that wait for the log; beyond, reading back waits


class Dispatcher:
    """Derives orders in ledger order and sends them in that order."""

    def __init__(self, log: Log, state: CellState, settings: Settings, ledger_trace: LedgerTrace) -> None:
        self._log = log
        self._state = state
        self._cell = settings.cell
        self._trace = ledger_trace
        self._batch: list[Message] = []
        self._batches: asyncio.Queue[list[Message]] = asyncio.Queue(maxsize=MAX_QUEUED_BATCHES)

    async def repeat_outstanding(self, seq: int) -> None:
        """At the start of a term: whatever was ordered and not answered (its orders may never have been sent)."""
        messages = [
            self._message(order)
            for order in outstanding(self._state, list(self._state.nodes), token_of(self._state.epoch, seq))
        ]
        if messages:
            await self._log.append(messages)

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
        """The orders that follow from the record `seq`, whose facts are the last that were folded."""
        return [self._message(order) for fact in facts for order in orders_of(self._state, fact, seq)]

    def _message(self, order: Order) -> Message:
        if not isinstance(order, TaskOrder):
            return self._addressed(order, f"order-{order.token}-{order.TYPE}", None, None)
        job_id = order.task_id.rsplit(".", 2)[0]
        traces = self._trace.traces
        starts = isinstance(order, StartTask)
        parent = traces.decided(job_id, seq_of(order.token)) if starts else traces.start_job_trace(job_id)
        return self._addressed(order, f"order-{order.token}-{order.task_id}", parent, job_id)

    def _addressed(self, order: Order, id_: str, traceparent: str | None, job_id: str | None) -> Message:
        """To its node's partition."""
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
        return Message(place, value, headers, order.node_id.encode())

    async def flush(self) -> None:
        """Hands what `take` gathered to the sender; waits while `MAX_QUEUED_BATCHES` are waiting."""
        if self._batch:
            batch, self._batch = self._batch, []
            await self._batches.put(batch)

    async def send(self) -> None:
        """Sends the batches one after another, for ever."""
        while True:
            messages = await self._batches.get()
            while not self._batches.empty():
                messages += self._batches.get_nowait()
            await self._log.append(messages)
            hit("placer.orders_sent")
