"""The placer's core with its ledger in memory: one input in, one valid record out (LAW 2 and 3)."""

from collections.abc import Callable, Iterator
from itertools import count

from penstock.cluster.nouns import NodeSpec
from penstock.events.base import Event
from penstock.events.doors import NodeJoined
from penstock.events.facts import (
    Order,
    PlacementDecided,
    PlacerSettings,
    StopDecided,
    TermStarted,
    TimerFired,
)
from penstock.ledger.evolve import begin
from penstock.ledger.record import GENESIS, Draft, Head, write
from penstock.ledger.state import CellState
from penstock.placer.core.orders import start_orders, stop_orders
from penstock.placer.core.step import PlacerCore, Step

PLACER_ID = "simulated"
Sink = Callable[[bytes], object]


class Cell:
    """`sink`: takes each record's bytes. A record counts as read back as soon as it is written."""

    def __init__(self, settings: PlacerSettings, sink: Sink | None = None) -> None:
        self.core = PlacerCore(CellState())
        self.head: Head = GENESIS
        self._sink = sink
        self._offsets: dict[str, Iterator[int]] = {}
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
        topic = str(event.TOPIC)
        offset = next(self._offsets.setdefault(topic, count()))
        self.state.positions[topic, 0] = offset + 1
        event_id = f"{topic}-{offset}"
        cause: dict[str, object] = {"topic": topic, "partition": 0, "offset": offset, "event_id": event_id}
        return self._record(event, event_id, cause, now_ms, self.head.term)

    def fire(self, timer_id: str, now_ms: int) -> Step:
        """One due timer."""
        event_id = f"timer-{timer_id}-{self.head.seq + 1}"
        return self._record(
            TimerFired(timer_id=timer_id), event_id, {"timer_id": timer_id}, now_ms, self.head.term
        )

    def take_over(self, state: CellState) -> None:
        """A new placer, from the state that it has folded: a new term (LAW 3)."""
        assert state.seq == self.head.seq, f"folded to {state.seq}, the ledger ends at {self.head.seq}"
        self.core = PlacerCore(state)
        number = self.head.term + 1
        term = TermStarted(term=number, placer_id=PLACER_ID, settings=state.settings)
        self._record(term, f"term-{number}", {"placer_id": PLACER_ID}, state.now_ms, number)

    def orders(self, step: Step) -> Iterator[Order]:
        """What this step asks of the nodes."""
        for fact in step.facts:
            if isinstance(fact, PlacementDecided):
                yield from start_orders(self.state, fact.job_id, self.head.seq)
            elif isinstance(fact, StopDecided):
                yield from stop_orders(self.state, fact.job_id, self.head.seq)

    def _record(self, event: Event, event_id: str, cause: dict[str, object], now_ms: int, term: int) -> Step:
        now_ms = max(now_ms, self.state.now_ms)
        begin(self.state, self.head.seq + 1, now_ms, term)
        step = self.core.step(event, event_id)
        draft = Draft(term, now_ms, cause, step.outcome, step.reason, step.facts, step.explanation)
        self.head, value = write(self.head, draft)
        if self._sink is not None:
            self._sink(value)
        return step
