"""Event loop of a service that folds the ledger, reads telemetry and proposes: the contention-guard and the
migrator.

Its whole state follows from the log. After any failure it folds the ledger and reads the retained telemetry
from the start (crash-only). A proposal that was sent twice is answered once, and no service waits for the
answer.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from penstock.clock import wall_ms
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.log.open import open_log
from penstock.log.port import Log, Partition, Reader, Record
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import Proposal
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.runtime.crash_only import crash_only
from penstock.runtime.failpoints import hit
from penstock.runtime.following.amended_log import AmendedLog, Repairs
from penstock.runtime.following.ledger_follower import BATCH_MS, LedgerFollower
from penstock.runtime.following.proposals import ProposalWriter
from penstock.runtime.following.snapshots import load_replica
from penstock.runtime.race import cancelled
from penstock.runtime.service import Run
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Attributes, Tracing, tracing

LOG = logging.getLogger(__name__)

AFTER_BUG_S = 1.0
"""Pause after an attempt that raised, unless news comes:
also a core that stays due must not use a processor."""

Report = TypeVar("Report")
"""A report read from telemetry."""
ReportOut = TypeVar("ReportOut", covariant=True)
Sent = TypeVar("Sent", bound=Proposal)
SentOut = TypeVar("SentOut", bound=Proposal, covariant=True)


class Core(Protocol[SentOut]):
    """State machine of the service, beside the fold of the ledger."""

    observed: int
    """Number of reports that counted."""

    def see(self, state: CellState, fact: Event, now_ms: int) -> None:
        """Takes an event that has just been folded."""
        ...

    def next(self, state: CellState, now_ms: int) -> SentOut | None:
        """The next proposal; None: nothing to propose now. What is due is not due any more if the work on it
        raises: each event, report or timer leads to one attempt."""
        ...

    def due_ms(self, state: CellState) -> int | None:
        """Ledger time from which `next` may have a proposal without a further event; None: never."""
        ...


class Telemetry(Protocol[ReportOut]):
    """Reads the telemetry topic. Not for concurrent use."""

    async def begin(self) -> Sequence[ReportOut]:
        """The retained reports; call it once, before `read`. Raises `LogError`."""
        ...

    async def read(self) -> Sequence[ReportOut]:
        """Waits for more reports; cancelling it loses none. Raises `LogError`."""
        ...

    async def close(self) -> None:
        """Frees all resources; idempotent."""
        ...


class Evidence(NamedTuple):
    """What a proposal rests on, over a time of the ledger: a span below the proposal's own."""

    name: str
    start_ms: int
    end_ms: int
    attributes: Attributes


class Proposing(ABC, Generic[Report, Sent]):
    """One attempt of one cell's service on one log. `name`: the service's;
    in names of failpoints with underscores."""

    def __init__(
        self, name: str, settings: Settings, log: Log, traces: Tracing, replica: Replica, core: Core[Sent]
    ) -> None:
        self._name, self._log, self._traces, self._core = name, log, traces, core
        self._ledger = Partition(Topic.LEDGER, settings.cell_index)
        self._proposals = ProposalWriter(settings, log, traces, f"/penstock/{name}")
        self._pause_s = 0.0
        """The fewest seconds until the next attempt, unless news comes."""
        self._follower = LedgerFollower(
            log, name, replica, lambda state, fact: core.see(state, fact, state.now_ms)
        )

    @abstractmethod
    def has_work(self, settings: PlacerSettings) -> bool:
        """Whether the service has work under these settings; telemetry is read only then."""

    @abstractmethod
    def telemetry(self) -> Telemetry[Report]:
        """A reader of the telemetry from the beginning."""

    @abstractmethod
    def observe(self, state: CellState, report: Report, now_ms: int) -> None:
        """Takes a report, at the ledger's time `now_ms`."""

    @abstractmethod
    def attributes(self, state: CellState, proposal: Sent) -> dict[str, Any]:
        """Attributes of the proposal's span, beside the common ones."""

    def evidence(self, proposal: Sent) -> Iterable[Evidence]:
        """What the proposal rests on; empty: its attributes hold all of it."""
        return ()

    async def work(self, ready: asyncio.Event) -> None:
        """Runs until the settings change whether the service has work (`has_work`)."""
        reader = self._log.reader({self._ledger: self._follower.offset}, batch_ms=BATCH_MS)
        telemetry: Telemetry[Report] | None = None
        try:
            end = (await self._log.end_offsets([self._ledger]))[self._ledger]
            while reader.position(self._ledger) < end:
                await self._follower.fold(await reader.read(), new=False)
            LOG.info("folded the ledger to seq %d", self._follower.seq)
            has_work = self.has_work(self._state.settings)
            if has_work:
                telemetry = self.telemetry()
                self._take(await telemetry.begin())
                LOG.info("read %d reports of running tasks", self._core.observed)
            ready.set()
            await self._follow(reader, telemetry, has_work)
        finally:
            await reader.close()
            if telemetry is not None:
                await telemetry.close()

    @property
    def _state(self) -> CellState:
        return self._follower.state

    async def _follow(self, reader: Reader, telemetry: Telemetry[Report] | None, has_work: bool) -> None:
        reading: asyncio.Future[list[Record]] = asyncio.ensure_future(reader.read())
        telemetry_read: asyncio.Future[Sequence[Report]] | None = (
            None if telemetry is None else asyncio.ensure_future(telemetry.read())
        )
        try:
            while self.has_work(self._state.settings) == has_work:
                while (proposal := self._next()) is not None:
                    await self._send(proposal)
                pending: list[asyncio.Future[Any]] = (
                    [reading] if telemetry_read is None else [reading, telemetry_read]
                )
                due_ms = self._core.due_ms(self._state)
                timeout_s = self._follower.until_s(due_ms)
                if timeout_s is not None:
                    timeout_s = max(timeout_s, self._pause_s)
                await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    await self._follower.fold(reading.result(), new=True)
                    reading = asyncio.ensure_future(reader.read())
                if telemetry is not None and telemetry_read is not None and telemetry_read.done():
                    self._take(telemetry_read.result())
                    telemetry_read = asyncio.ensure_future(telemetry.read())
        finally:
            await cancelled([reading] if telemetry_read is None else [reading, telemetry_read])

    def _take(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self.observe(self._state, report, self._follower.clock.now_ms())

    def _next(self) -> Sent | None:
        self._pause_s = 0.0
        try:
            return self._core.next(self._state, self._follower.clock.now_ms())
        except Exception:  # a bug in a policy costs its proposals: every job runs on as it is
            LOG.exception("nothing is proposed at seq %d", self._state.seq)
            self._pause_s = AFTER_BUG_S
            return None

    async def _send(self, proposal: Sent) -> None:
        """Raises `LogError`."""
        began_ms = wall_ms()
        place = self._name.replace("-", "_")
        hit(f"{place}.proposed")
        await self._proposals.write(proposal)
        hit(f"{place}.sent")
        attributes = {
            "penstock.profile": self._state.settings.profile,
            "penstock.ledger_seq": self._state.seq,
            **self.attributes(self._state, proposal),
        }
        LOG.info("%s: %s", proposal.proposal_id, attributes)
        about = proposal.proposer, proposal.proposal_id
        self._traces.plan(*about, began_ms, wall_ms(), attributes)
        for name, start_ms, end_ms, found in self.evidence(proposal):
            self._traces.span(name, self._traces.plan_context(*about), start_ms, end_ms, found)


_Attempt = Callable[[Log, Tracing, Replica, asyncio.Event], Coroutine[Any, Any, None]]
"""(log, traces, the cell's replica, ready) → one attempt's work."""


async def run_attempts(
    name: str,
    settings: Settings,
    stop: asyncio.Event,
    attempt: _Attempt,
    log: Log | None,
    ready: asyncio.Event | None,
) -> None:
    """Crash-only attempts on one log until `stop` is set; see penstock.runtime.service. `log`: None: opened
    and closed here. The topics must exist.

    Raises `NotAllowed`, `ConfigurationError`.
    """
    opened = await open_log(settings.log_url, name, settings.archive).start() if log is None else log
    used, is_ready = AmendedLog.over(opened), ready or asyncio.Event()
    repairs = Repairs(name, used, settings.cell_index)
    try:
        async with tracing(name, settings) as traces:

            async def once() -> None:
                await attempt(used, traces, await load_replica(settings, used), is_ready)

            await crash_only(name, lambda: repairs.attempt(once, is_ready), stop)
    finally:
        if log is None:
            await used.close()


def service_of(name: str, proposing: Callable[[Settings, Log, Tracing, Replica], Proposing[Any, Any]]) -> Run:
    """A service's entry. The topics must exist; it raises `NotAllowed`, `ConfigurationError`. `proposing`:
    one attempt."""

    async def run(
        settings: Settings,
        stop: asyncio.Event,
        *,
        log: Log | None = None,
        ready: asyncio.Event | None = None,
    ) -> None:
        async def attempt(used: Log, traces: Tracing, replica: Replica, is_ready: asyncio.Event) -> None:
            await proposing(settings, used, traces, replica).work(is_ready)

        await run_attempts(name, settings, stop, attempt, log, ready)

    return run
