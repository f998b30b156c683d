"""Seats of proposing services in a simulated cell: each has the service's own core, beside the placer's state.

A service folds the ledger's bytes itself. A seat reads the placer's state instead, which is the same at the moment at which it reads, and
takes no time to fold. Seats act once nothing else is left at a moment, so a moment has one answer for all that has happened in it.
"""

from collections.abc import Sequence
from typing import Protocol

from penstock.ledger.state import CellState
from penstock.model.event import Event
from penstock.model.external_events import TelemetrySampled
from penstock.model.settings import PlacerSettings
from penstock.simulator.batcher_seat import BatcherSeat
from penstock.simulator.guard_seat import GuardSeat
from penstock.simulator.migrator_seat import MigratorSeat
from penstock_services.batcher.core.batcher import plans
from penstock_services.contention_guard.core.guard import guards
from penstock_services.migrator.core.migrator import migrates
from penstock_services.placer.core.step import Step


class Seat(Protocol):
    """One service."""

    def see(self, state: CellState, step: Step) -> None:
        """A record that was folded."""
        ...

    def hear(self, state: CellState, sample: TelemetrySampled, now_ms: int) -> None:
        """A sample of telemetry."""
        ...

    def next_s(self, state: CellState) -> float | None:
        """When it has something to do, though nothing else happens; never before the present. None: nothing."""
        ...

    def due(self, state: CellState, now_s: float, now_ms: int) -> Event | None:
        """What it proposes now; None: nothing at this moment."""
        ...


def seats_for(settings: PlacerSettings, planning_s: float | None) -> Sequence[Seat]:
    """Of the services that have anything to do under these settings; `planning_s` as `BatcherSeat`."""
    found: list[Seat] = []
    if plans(settings):
        found.append(BatcherSeat(planning_s))
    if migrates(settings):
        found.append(MigratorSeat())
    if guards(settings):
        found.append(GuardSeat())
    return found
