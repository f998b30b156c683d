"""Main loop of the contention-guard service (`penstock.runtime.following.proposing`): reads windows of
telemetry, proposes cores and caps of memory bandwidth."""

import logging
from collections.abc import Sequence
from typing import Any

from penstock.errors import LogError
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.log.port import Log
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import CoresProposed
from penstock.runtime.following.proposing import Proposing, service_of
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock.scheduling.acting.telemetry_windows import NodeWindow
from penstock_services.contention_guard.core.guard import Adjusting, ContentionGuard, guards
from penstock_services.contention_guard.shell.faust_windows import FaustWindows
from penstock_services.contention_guard.shell.windows import LogWindows, Windows

LOG = logging.getLogger(__name__)

NAME = "contention-guard"
KAFKA = "kafka://"


class EitherWindows:
    """A `Windows` with a fallback: the first reader, or the second where the first fails at its begin."""

    def __init__(self, first: Windows, second: Windows) -> None:
        self._used, self._second = first, second

    async def begin(self) -> Sequence[NodeWindow]:
        try:
            return await self._used.begin()
        except LogError as error:
            LOG.warning("telemetry is read without Faust: %s", error)
            await self._used.close()
            self._used = self._second
            return await self._used.begin()

    async def read(self) -> Sequence[NodeWindow]:
        return await self._used.read()

    async def close(self) -> None:
        await self._used.close()


class Watcher(Proposing[NodeWindow, Adjusting]):
    """One attempt of one cell's contention-guard on one log."""

    def __init__(self, settings: Settings, log: Log, traces: Tracing, replica: Replica) -> None:
        self._settings = settings
        self._guard = ContentionGuard()
        super().__init__(NAME, settings, log, traces, replica, self._guard)

    def has_work(self, settings: PlacerSettings) -> bool:
        return guards(settings)

    def telemetry(self) -> Windows:
        """On Kafka by Faust, in a process of its own; on the embedded log by the log's own reader."""
        own = LogWindows(self._log)
        if not self._settings.log_url.startswith(KAFKA):
            return own
        return EitherWindows(FaustWindows(self._settings.log_url, self._settings.cell_index), own)

    def observe(self, state: CellState, report: NodeWindow, now_ms: int) -> None:
        self._guard.observe(state, report, now_ms)

    def attributes(self, state: CellState, proposal: Adjusting) -> dict[str, Any]:
        wanted = (
            {"penstock.cores": proposal.cores}
            if isinstance(proposal, CoresProposed)
            else {"penstock.memory_bandwidth_percent": proposal.memory_bandwidth_percent or 100}
        )
        return {
            "penstock.cause": proposal.cause,
            "penstock.reason": proposal.reason,
            "penstock.task": proposal.task_id,
            "penstock.jobs": (proposal.task_id.rsplit(".", 2)[0],),
            "penstock.windows_observed": self._guard.observed,
            **wanted,
            **self._guard.seen_of(state, proposal.task_id),
        }


run = service_of(NAME, Watcher)
