"""Placer core with its ledger's chain, in memory: one event in, one valid record out (LAWs 2 and 3), without
IO.

For everything that drives the core without the placer's shell: the simulator, tests and benchmarks.
"""

from collections.abc import Callable
from functools import cache

from penstock.ledger.fold.evolve import answered, begin
from penstock.ledger.record.record import GENESIS, Draft, Head, write
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import TermStarted, TimerFired
from penstock.model.schema.event import Event
from penstock_services.placer.core.step import PlacerCore, Step

Sink = Callable[[bytes], object]


class Recorder:
    """One cell, initially empty. `sink` receives each record's bytes; a record counts as read back once it is
    written.

    `partition`: of the input topics, in which the inputs count as read. `stops_at_bugs`: exceptions of
    deciding are raised; a placer goes on.
    """

    def __init__(self, sink: Sink | None = None, partition: int = 0, *, stops_at_bugs: bool = True) -> None:
        self.core = PlacerCore(CellState())
        self.head: Head = GENESIS
        self._sink = sink
        self._partition = partition
        self._stops_at_bugs = stops_at_bugs

    @property
    def state(self) -> CellState:
        return self.core.state

    def record(self, event: Event, now_ms: int, event_id: str = "") -> Step:
        """Answers one input, timer or start of a term at this time, or at the ledger's if that is later.

        An input is the next one of its topic. `event_id` seeds the random generator; it has a default.
        """
        state, seq, term = self.core.state, self.head.seq + 1, self.head.term
        if now_ms < state.now_ms:
            now_ms = state.now_ms
        cause: dict[str, object]
        if isinstance(event, TimerFired):
            event_id, cause = f"timer-{event.timer_id}-{seq}", {"timer_id": event.timer_id}
        elif isinstance(event, TermStarted):
            term = event.term
            event_id, cause = f"term-{term}", {"placer_id": event.placer_id}
        else:
            place = _place(type(event), self._partition)
            topic, partition = place
            offset = state.positions.get(place, 0)
            event_id = event_id or f"{topic}-{offset}"
            answered(state, *place, offset, event_id)
            cause = {"topic": topic, "partition": partition, "offset": offset, "event_id": event_id}
        begin(state, seq, now_ms, term)
        step = self.core.step(event, event_id)
        if step.errors and self._stops_at_bugs:
            raise step.errors[0]
        draft = Draft(term, now_ms, cause, step.outcome, step.reason, step.facts, step.explanation)
        self.head, value = write(self.head, draft)
        if self._sink is not None:
            self._sink(value)
        return step


@cache
def _place(kind: type[Event], partition: int) -> tuple[str, int]:
    """(input topic, partition) of such events."""
    return str(kind.TOPIC), partition
