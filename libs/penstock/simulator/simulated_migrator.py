"""The migrator of a simulated cell: its own core, beside the placer's state. It takes no time."""

from penstock.ledger.state import CellState
from penstock.model.external_events import TelemetrySampled
from penstock.model.proposals import MigrationProposed
from penstock_services.migrator.core.migrator import Migrator
from penstock_services.placer.core.step import Step


class SimulatedMigrator:
    """Implements `penstock.simulator.simulated_services.SimulatedService`."""

    def __init__(self) -> None:
        self.migrator = Migrator()

    def see(self, state: CellState, step: Step) -> None:
        """See `SimulatedService`."""
        if step.outcome == "committed":
            for fact in step.facts:
                self.migrator.see(state, fact, state.now_ms)

    def observe(self, state: CellState, sample: TelemetrySampled, now_ms: int) -> None:
        """See `SimulatedService`."""
        self.migrator.observe(state, sample, now_ms)

    def next_s(self, state: CellState) -> float | None:
        """See `SimulatedService`."""
        due_ms = self.migrator.due_ms(state)
        return None if due_ms is None else due_ms / 1_000

    def due(self, state: CellState, now_s: float, now_ms: int) -> MigrationProposed | None:
        """See `SimulatedService`."""
        return self.migrator.next(state, now_ms)
