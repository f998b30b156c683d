"""The simulated cell: the placer's core with its ledger in memory,
and the orders that follow from its decisions."""

from collections.abc import Callable, Sequence
from time import perf_counter

from penstock.model.decisions.ledger_events import TermStarted, TimerFired
from penstock.model.decisions.orders import Order
from penstock.model.inputs.external_events import NodeJoined
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock_services.placer.core.orders import ORDERS
from penstock_services.placer.core.recorder import Recorder, Sink
from penstock_services.placer.core.step import Failure, PlacerCore, Step

PLACER_ID = "simulated"
Watch = Callable[[str, float], object]
"""Callback with an input's type and the real seconds of its decisions; they are never part of the ledger."""


class Cell(Recorder):
    """A cell in its first term."""

    def __init__(self, settings: PlacerSettings, sink: Sink | None = None) -> None:
        super().__init__(sink)
        self.record(TermStarted(term=1, placer_id=PLACER_ID, settings=settings), 0)

    def join(self, spec: NodeSpec) -> None:
        """A node joins at time 0."""
        self.record(NodeJoined(node=spec), 0)

    def fire(self, timer_id: str, now_ms: int) -> Step:
        """Fires one due timer."""
        return self.record(TimerFired(timer_id=timer_id), now_ms)

    def orders(self, step: Step) -> Sequence[Order]:
        """The orders to nodes that follow from this step."""
        state, seq = self.core.state, self.head.seq
        found: list[Order] = []
        for fact in step.facts:
            make = ORDERS.get(type(fact))
            if make is not None:
                found += make(state, fact, seq)
        return found

    def watch(self, note: Watch) -> None:
        """Measures every decision from now on."""
        self.core = _Watched(self.core, note)


class _Watched(PlacerCore):
    """A core whose steps are timed."""

    def __init__(self, core: PlacerCore, note: Watch) -> None:
        self.state, self.decider, self._note = core.state, core.decider, note

    def step(self, event: Event, event_id: str, failure: Failure | None = None) -> Step:
        began = perf_counter()
        step = super().step(event, event_id, failure)
        self._note(event.TYPE, perf_counter() - began)
        return step
