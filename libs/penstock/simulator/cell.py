"""The placer's core with its ledger in memory: one input in, one valid record out (LAW 2 and 3)."""

from collections.abc import Callable, Sequence
from time import perf_counter

from penstock.ledger.evolve import begin
from penstock.ledger.record import GENESIS, Draft, Head, write
from penstock.ledger.state import CellState
from penstock.model.event import Event
from penstock.model.external_events import NodeJoined
from penstock.model.ledger_events import (
    Order,
    PlacementDecided,
    PlacerSettings,
    StopDecided,
    TermStarted,
    TimerFired,
)
from penstock.model.topics import Topic
from penstock.model.types import NodeSpec
from penstock_services.placer.core.orders import start_orders, stop_orders
from penstock_services.placer.core.step import PlacerCore, Step

PLACER_ID = "simulated"
TOPICS = {topic: topic.value for topic in Topic}
Sink = Callable[[bytes], object]
Watch = Callable[[str, float], object]
"""Takes note of an input's type and of the real seconds that its decisions took; never part of the ledger."""


class Cell:
    """`sink`: takes each record's bytes. A record counts as read back as soon as it is written."""

    def __init__(self, settings: PlacerSettings, sink: Sink | None = None) -> None:
        self.core = PlacerCore(CellState())
        self.head: Head = GENESIS
        self._sink = sink
        self._offsets: dict[str, int] = {}
        self.watch: Watch | None = None
        term = TermStarted(term=1, placer_id=PLACER_ID, settings=settings)
        self._record(term, "term-1", {"placer_id": PLACER_ID}, 0, 1)

    @property
    def state(self) -> CellState:
        return self.core.state

    def join(self, spec: NodeSpec) -> None:
        """A node joins at time 0."""
        self.feed(NodeJoined(node=spec), 0)

    def feed(self, event: Event, now_ms: int) -> Step:
        """One input record of the event's topic."""
        assert event.TOPIC is not None, event.TYPE
        topic = TOPICS[event.TOPIC]
        offset = self._offsets.get(topic, 0)
        self._offsets[topic] = self.core.state.positions[topic, 0] = offset + 1
        event_id = f"{topic}-{offset}"
        cause: dict[str, object] = {"topic": topic, "partition": 0, "offset": offset, "event_id": event_id}
        return self._record(event, event_id, cause, now_ms, self.head.term)

    def fire(self, timer_id: str, now_ms: int) -> Step:
        """One due timer."""
        event_id = f"timer-{timer_id}-{self.head.seq + 1}"
        fired = TimerFired(timer_id=timer_id)
        return self._record(fired, event_id, {"timer_id": timer_id}, now_ms, self.head.term)

    def orders(self, step: Step) -> Sequence[Order]:
        """What this step asks of the nodes."""
        found: Sequence[Order] = ()
        for fact in step.facts:
            if isinstance(fact, PlacementDecided):
                found = (*found, *start_orders(self.state, fact.job_id, self.head.seq))
            elif isinstance(fact, StopDecided):
                found = (*found, *stop_orders(self.state, fact.job_id, self.head.seq))
        return found

    def _record(self, event: Event, event_id: str, cause: dict[str, object], now_ms: int, term: int) -> Step:
        state = self.core.state
        now_ms = max(now_ms, state.now_ms)
        begin(state, self.head.seq + 1, now_ms, term)
        step = self.core.step(event, event_id) if self.watch is None else self._watched(event, event_id)
        draft = Draft(term, now_ms, cause, step.outcome, step.reason, step.facts, step.explanation)
        self.head, value = write(self.head, draft)
        if self._sink is not None:
            self._sink(value)
        return step

    def _watched(self, event: Event, event_id: str) -> Step:
        began = perf_counter()
        step = self.core.step(event, event_id)
        assert self.watch is not None
        self.watch(event.TYPE, perf_counter() - began)
        return step
