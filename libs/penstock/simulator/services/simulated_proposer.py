"""Adapter of a simulated cell to the core of a service that proposes: the core reads the placer's state, and
takes no time."""

from typing import Generic, TypeVar

from penstock.ledger.state.state import CellState
from penstock.model.proposals import Proposal
from penstock.runtime.following.proposing import Core
from penstock_services.placer.core.step import Step

Sent = TypeVar("Sent", bound=Proposal)


class SimulatedProposer(Generic[Sent]):
    """All of `penstock.simulator.services.simulated_services.SimulatedService` but `observe`."""

    def __init__(self, core: Core[Sent]) -> None:
        self._core = core

    def see(self, state: CellState, step: Step) -> None:
        """See `SimulatedService`."""
        if step.outcome == "committed":
            see, now_ms = self._core.see, state.now_ms
            for fact in step.facts:
                see(state, fact, now_ms)

    def next_s(self, state: CellState) -> float | None:
        """See `SimulatedService`."""
        due_ms = self._core.due_ms(state)
        return None if due_ms is None else due_ms / 1_000

    def due(self, state: CellState, now_s: float, now_ms: int) -> Sent | None:
        """See `SimulatedService`."""
        return self._core.next(state, now_ms)
