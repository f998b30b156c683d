"""Proposing services of a simulated cell: each is an adapter that runs the service's own core on the placer's
state.

A service folds the ledger's bytes itself. A simulated one reads the placer's state instead, which is equal at
that moment and takes no time to fold. They act after all other events of a moment, so that a moment has one
answer for all its events.
"""

from collections.abc import Sequence
from typing import Protocol

from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock.simulator.services.simulated_batcher import SimulatedBatcher
from penstock.simulator.services.simulated_guard import SimulatedGuard
from penstock.simulator.services.simulated_migrator import SimulatedMigrator
from penstock_services.batcher.core.batcher import plans
from penstock_services.contention_guard.core.guard import guards
from penstock_services.migrator.core.migrator import migrates
from penstock_services.placer.core.step import Step


class SimulatedService(Protocol):
    """One service."""

    def see(self, state: CellState, step: Step) -> None:
        """Takes a record that was folded."""
        ...

    def observe(self, state: CellState, sample: TelemetrySampled, now_ms: int) -> None:
        """Takes a telemetry sample."""
        ...

    def next_s(self, state: CellState) -> float | None:
        """Time of its next proposal without a further event, not before the present; None: none."""
        ...

    def due(self, state: CellState, now_s: float, now_ms: int) -> Event | None:
        """Its next proposal at this moment; None: there is none."""
        ...


def simulated_services(settings: PlacerSettings, planning_s: float | None) -> Sequence[SimulatedService]:
    """The services that are active under these settings; `planning_s` as in `SimulatedBatcher`."""
    found: list[SimulatedService] = []
    if plans(settings):
        found.append(SimulatedBatcher(planning_s))
    if migrates(settings):
        found.append(SimulatedMigrator())
    if guards(settings):
        found.append(SimulatedGuard())
    return found
