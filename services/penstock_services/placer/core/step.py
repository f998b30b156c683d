"""One input in, one record's content out (LAW 2): guard, fold, decide, fold each decision at once."""

from collections.abc import Sequence

import msgspec

from penstock.ledger.evolve import evolve
from penstock.ledger.state import CellState
from penstock.model.event import Event
from penstock.model.ledger_events import PlacementExplanation, TermStarted
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.core.guard import refusal


class Step(msgspec.Struct, frozen=True, gc=False):
    """The content of the record that answers one input."""

    outcome: str
    reason: str | None
    facts: Sequence[Event]
    explanation: Sequence[PlacementExplanation]


class PlacerCore:
    """The pure placer: a state and the decider of the current term's settings."""

    def __init__(self, state: CellState) -> None:
        self.state = state
        self.decider = Decider(state.settings)

    def step(self, event: Event, event_id: str) -> Step:
        """Answers one input. The caller has set the state's seq, time and term (`begin`).

        Own decisions are folded here: waiting to read them back would place twice.
        """
        state = self.state
        reason = refusal(state, event)
        if reason is not None:
            return Step("rejected", reason, (), ())
        evolve(state, event)
        if isinstance(event, TermStarted):
            self.decider = Decider(state.settings)
        folded = [event]
        for decision in self.decider.decide(state, event, event_id):
            evolve(state, decision)
            folded.append(decision)
        return Step("committed", None, folded, self.decider.explanations)
