"""The migrator of a simulated cell: its own core, beside the placer's state. It takes no time."""

from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.proposals import MigrationProposed
from penstock.simulator.services.simulated_proposer import SimulatedProposer
from penstock_services.migrator.core.migrator import Migrator


class SimulatedMigrator(SimulatedProposer[MigrationProposed]):
    """Implements `penstock.simulator.services.simulated_services.SimulatedService`."""

    def __init__(self) -> None:
        self.migrator = Migrator()
        super().__init__(self.migrator)

    def observe(self, state: CellState, sample: TelemetrySampled, now_ms: int) -> None:
        """See `SimulatedService`."""
        self.migrator.observe(state, sample, now_ms)
