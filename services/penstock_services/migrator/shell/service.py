"""Main loop of the migrator service (`penstock.runtime.following.proposing`): reads losses from telemetry,
proposes moves.

After a restart it reads the retained telemetry of all attempts of the jobs that have not ended: categories
follow from that.
"""

from collections.abc import Iterator
from typing import Any

from penstock.clock import wall_ms
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.log.port import Log
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import MigrationProposed
from penstock.runtime.following.proposing import Evidence, Proposing, service_of
from penstock.runtime.following.telemetry import Sampled, TelemetryReader
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.migrator.core.migrator import Migrator, migrates

NAME = "migrator"


class Watcher(Proposing[Sampled, MigrationProposed]):
    """One attempt of one cell's migrator on one log."""

    def __init__(self, settings: Settings, log: Log, traces: Tracing, replica: Replica) -> None:
        self._migrator = Migrator()
        super().__init__(NAME, settings, log, traces, replica, self._migrator)

    def has_work(self, settings: PlacerSettings) -> bool:
        return migrates(settings)

    def telemetry(self) -> TelemetryReader:
        return TelemetryReader(self._log)

    def observe(self, state: CellState, report: Sampled, now_ms: int) -> None:
        """The sample's time is the log's timestamp, by the ledger's clock."""
        age_ms = max(0, wall_ms() - report.at_ms)
        self._migrator.observe(state, report.sample, max(0, now_ms - age_ms))

    def attributes(self, state: CellState, proposal: MigrationProposed) -> dict[str, Any]:
        return {
            "penstock.cause": proposal.cause,
            "penstock.reason": proposal.reason,
            "penstock.nodes": proposal.nodes,
            "penstock.jobs": (proposal.job_id,),
            "penstock.losses_observed": self._migrator.observed,
        }

    def evidence(self, proposal: MigrationProposed) -> Iterator[Evidence]:
        """The latest windows of the job's loss: it was to move after them, or its category, on which the
        move's required gain depends, follows from them."""
        for window in self._migrator.windows(proposal.job_id):
            found = {f"penstock.{name}": value for name, value in window._asdict().items()}
            began_ms, ended_ms = (found.pop(f"penstock.{name}") for name in ("began_ms", "ended_ms"))
            yield Evidence("loss_window", began_ms, ended_ms, {"penstock.job_id": proposal.job_id, **found})


run = service_of(NAME, Watcher)
