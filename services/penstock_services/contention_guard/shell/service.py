"""The contention-guard's loop: fold the ledger, read windows of telemetry, ask the core, append its proposals.

It holds nothing that the log does not have. After any failure it folds anew, and reads what telemetry retains (crash-only). A proposal that was
sent twice is answered once, and no service waits for a contention-guard.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.clock import wall_ms
from penstock.errors import LogError
from penstock.ledger.replica import Replica
from penstock.ledger.state import CellState
from penstock.log.open import open_log
from penstock.log.port import Log, Partition, Reader, Record
from penstock.model.event import Event
from penstock.model.proposals import CoresProposed
from penstock.model.topics import Topic
from penstock.policies.telemetry_windows import NodeWindow
from penstock.runtime.crash_only import crash_only
from penstock.runtime.failpoints import hit
from penstock.runtime.ledger_follower import LedgerFollower
from penstock.runtime.proposals import ProposalWriter
from penstock.runtime.settings import Settings
from penstock.runtime.snapshots import load_replica
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock_services.contention_guard.core.guard import Adjusting, ContentionGuard, guards
from penstock_services.contention_guard.shell.faust_windows import FaustWindows
from penstock_services.contention_guard.shell.windows import LogWindows, Windows

LOG = logging.getLogger(__name__)

SOURCE = "/penstock/contention-guard"
KAFKA = "kafka://"
BATCH_MS = 20  # under load a poll costs more than the records that it brings; after idle nothing waits


def new_windows(settings: Settings, log: Log) -> Windows:
    """On Kafka by Faust, in a process of its own; on the embedded log by the log's own reader."""
    if settings.log_url.startswith(KAFKA):
        return FaustWindows(settings.log_url, settings.cell_index)
    return LogWindows(log)


class Watcher:
    """One attempt of one cell's contention-guard on one log."""

    def __init__(self, settings: Settings, log: Log, traces: Tracing, replica: Replica) -> None:
        self._settings, self._log, self._traces = settings, log, traces
        self._ledger = Partition(Topic.LEDGER, settings.cell_index)
        self._proposals = ProposalWriter(settings, log, traces, SOURCE)
        self._guard = ContentionGuard()
        self._follower = LedgerFollower(replica, self._see)

    @property
    def _state(self) -> CellState:
        return self._follower.state

    def _see(self, state: CellState, fact: Event) -> None:
        self._guard.see(state, fact, state.now_ms)

    async def work(self, ready: asyncio.Event) -> None:
        """Until the profile begins or ceases to have a guard: telemetry is only read where the profile uses it."""
        reader = self._log.reader({self._ledger: self._follower.offset}, batch_ms=BATCH_MS)
        windows: Windows | None = None
        try:
            await self._catch_up(reader)
            LOG.info("folded the ledger to seq %d", self._follower.seq)
            hears = guards(self._state.settings)
            if hears:
                windows = new_windows(self._settings, self._log)
                try:
                    found = await windows.begin()
                except LogError as error:
                    if isinstance(windows, LogWindows):
                        raise
                    LOG.warning("telemetry is read without Faust: %s", error)
                    await windows.close()
                    windows = LogWindows(self._log)
                    found = await windows.begin()
                self._hear(found)
                LOG.info("read %d windows of telemetry", self._guard.heard)
            ready.set()
            await self._follow(reader, windows, hears)
        finally:
            await reader.close()
            if windows is not None:
                await windows.close()

    async def _catch_up(self, reader: Reader) -> None:
        end = (await self._log.end_offsets([self._ledger]))[self._ledger]
        while reader.position(self._ledger) < end:
            self._follower.fold(await reader.read(), new=False)

    async def _follow(self, reader: Reader, windows: Windows | None, hears: bool) -> None:
        reading: asyncio.Future[list[Record]] = asyncio.ensure_future(reader.read())
        hearing: asyncio.Future[Sequence[NodeWindow]] | None = (
            None if windows is None else asyncio.ensure_future(windows.read())
        )
        try:
            while guards(self._state.settings) == hears:
                while (proposal := self._next()) is not None:
                    await self._send(proposal)
                pending: list[asyncio.Future[Any]] = [reading] if hearing is None else [reading, hearing]
                await asyncio.wait(pending, timeout=self._due_in_s(), return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    self._follower.fold(reading.result(), new=True)
                    reading = asyncio.ensure_future(reader.read())
                if windows is not None and hearing is not None and hearing.done():
                    self._hear(hearing.result())
                    hearing = asyncio.ensure_future(windows.read())
        finally:
            unfinished: list[asyncio.Future[Any]] = [reading] if hearing is None else [reading, hearing]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def _hear(self, windows: Iterable[NodeWindow]) -> None:
        now_ms = self._follower.clock.now_ms()
        for window in windows:
            self._guard.hear(self._state, window, now_ms)

    def _due_in_s(self) -> float | None:
        """Until the core wants to be asked although nothing happens."""
        due_ms = self._guard.due_ms(self._state)
        return None if due_ms is None else max(0.0, (due_ms - self._follower.clock.now_ms()) / 1_000)

    def _next(self) -> Adjusting | None:
        try:
            return self._guard.next(self._state, self._follower.clock.now_ms())
        except Exception:  # a bug in a policy costs its proposals: every job runs on with what it has
            LOG.exception("nothing is proposed at seq %d", self._state.seq)
            return None

    async def _send(self, proposal: Adjusting) -> None:
        """Raises `LogError`."""
        began_ms = wall_ms()
        hit("contention_guard.proposed")
        await self._proposals.write(proposal)
        hit("contention_guard.sent")
        LOG.info("%s: %s: %s", proposal.proposal_id, proposal.task_id, proposal.reason)
        wanted = (
            {"penstock.cores": proposal.cores}
            if isinstance(proposal, CoresProposed)
            else {"penstock.memory_bandwidth_percent": proposal.memory_bandwidth_percent or 100}
        )
        self._traces.plan(
            proposal.proposer,
            proposal.proposal_id,
            began_ms,
            wall_ms(),
            {
                "penstock.profile": self._state.settings.profile,
                "penstock.ledger_seq": self._state.seq,
                "penstock.cause": proposal.cause,
                "penstock.reason": proposal.reason,
                "penstock.task": proposal.task_id,
                "penstock.jobs": (proposal.task_id.rsplit(".", 2)[0],),
                "penstock.windows_heard": self._guard.heard,
                **wanted,
                **self._guard.seen_of(self._state, proposal.task_id),
            },
        )


async def run(
    settings: Settings,
    stop: asyncio.Event,
    *,
    log: Log | None = None,
    ready: asyncio.Event | None = None,
) -> None:
    """Works until `stop` is set; see penstock.runtime.service. The topics must exist. Raises `NotAllowed`, `ConfigurationError`."""
    used = (
        await open_log(settings.log_url, "contention-guard", settings.archive).start() if log is None else log
    )
    ready = ready or asyncio.Event()
    try:
        async with tracing("contention-guard", settings) as traces:

            async def attempt() -> None:
                replica = await load_replica(settings, used)
                await Watcher(settings, used, traces, replica).work(ready)

            await crash_only("contention-guard", attempt, stop)
    finally:
        if log is None:
            await used.close()
