"""The batcher of a simulated cell, with simulated planning time;
it plans after all other events of a moment."""

from time import perf_counter

from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.proposals import PlanProposed
from penstock_services.batcher.core.batcher import Batcher, Work, plans, solve
from penstock_services.placer.core.step import Step


class SimulatedBatcher:
    """`planning_s`: from a request for a plan to the plan, ≥ 0; None: the real computing time, so that runs
    do not repeat."""

    def __init__(self, planning_s: float | None = 0.0) -> None:
        self._batcher = Batcher()
        self._planning_s = planning_s
        self._under_way: tuple[float, Work, object] | None = None
        """End of the planning, its input and its result."""
        self.planned = 0
        """Number of plans computed."""
        self.planning_s = 0.0
        """Real time spent on planning."""

    def see(self, state: CellState, step: Step) -> None:
        """See `SimulatedService`."""
        if step.outcome == "committed":
            for fact in step.facts:
                self._batcher.see(fact)

    def observe(self, state: CellState, sample: TelemetrySampled, now_ms: int) -> None:
        """Does nothing: the batcher reads no telemetry."""

    def next_s(self, state: CellState) -> float | None:
        """See `SimulatedService`."""
        if self._under_way is not None:
            return self._under_way[0]
        due_ms = self._batcher.due_ms(state) if plans(state.settings) else None
        return None if due_ms is None else due_ms / 1_000

    def due(self, state: CellState, now_s: float, now_ms: int) -> PlanProposed | None:
        """See `SimulatedService`."""
        while True:
            if self._under_way is None:
                if (work := self._batcher.next(state, now_ms)) is None:
                    return None
                began_s = perf_counter()
                answer = solve(work)
                took_s = perf_counter() - began_s
                self.planned, self.planning_s = self.planned + 1, self.planning_s + took_s
                ends_s = now_s + (took_s if self._planning_s is None else self._planning_s)
                self._under_way = (ends_s, work, answer)
            ends_s, work, answer = self._under_way
            if ends_s > now_s:
                return None
            self._under_way = None
            proposal = self._batcher.answered(state, work, answer)
            if proposal is not None:
                return proposal
