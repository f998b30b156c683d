"""The migrator's loop: fold the ledger, hear losses from telemetry, ask the core, append its proposals.

It holds nothing that the log does not have. After any failure it folds anew, and hears anew what the running tasks have reported
(crash-only): categories follow from that. A proposal that was sent twice is answered once, and no service waits for a migrator.
"""

import asyncio
import logging
from collections.abc import Callable

from penstock.clock import wall_ms
from penstock.ledger.replica import Replica
from penstock.ledger.state import CellState
from penstock.log.open import open_log
from penstock.log.port import Log, Partition, Reader, Record
from penstock.model.codec import decode
from penstock.model.errors import EventError
from penstock.model.event import Event, wire_type
from penstock.model.external_events import TelemetrySampled
from penstock.model.proposals import MigrationProposed
from penstock.model.topics import NODE_PARTITIONS, Topic
from penstock.runtime.crash_only import crash_only
from penstock.runtime.failpoints import hit
from penstock.runtime.ledger_follower import LedgerFollower
from penstock.runtime.proposals import ProposalWriter
from penstock.runtime.settings import Settings
from penstock.runtime.snapshots import load_replica
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock_services.migrator.core.migrator import Migrator, migrates

LOG = logging.getLogger(__name__)

SOURCE = "/penstock/migrator"
BATCH_MS = 20  # under load a poll costs more than the records that it brings; after idle nothing waits
SAMPLED = wire_type(TelemetrySampled).encode()


class Watcher:
    """One attempt of one cell's migrator on one log."""

    def __init__(self, settings: Settings, log: Log, traces: Tracing, replica: Replica) -> None:
        self._log, self._traces = log, traces
        self._ledger = Partition(Topic.LEDGER, settings.cell_index)
        self._proposals = ProposalWriter(settings, log, traces, SOURCE)
        self._telemetry = [Partition(Topic.TELEMETRY, index) for index in range(NODE_PARTITIONS)]
        self._migrator = Migrator()
        self._follower = LedgerFollower(replica, self._see)
        self._unreadable = 0
        """Records of telemetry that are none, or not ours."""

    @property
    def _state(self) -> CellState:
        return self._follower.state

    def _see(self, state: CellState, fact: Event) -> None:
        self._migrator.see(state, fact, state.now_ms)

    async def work(self, ready: asyncio.Event) -> None:
        """Until the profile begins or ceases to move jobs: telemetry is only read where the profile uses it."""
        reader = self._log.reader({self._ledger: self._follower.offset}, batch_ms=BATCH_MS)
        readers = [reader]
        try:
            await self._catch_up(
                reader, self._ledger, lambda records: self._follower.fold(records, new=False)
            )
            LOG.info("folded the ledger to seq %d", self._follower.seq)
            hears = migrates(self._state.settings)
            telemetry: Reader | None = None
            if hears:
                begin = await self._log.begin_offsets(self._telemetry)
                telemetry = self._log.reader(begin, batch_ms=BATCH_MS)
                readers.append(telemetry)
                for partition in self._telemetry:
                    await self._catch_up(telemetry, partition, self._hear)
                LOG.info("heard %d losses of running tasks", self._migrator.heard)
            ready.set()
            await self._follow(reader, telemetry, hears)
        finally:
            for one in readers:
                await one.close()

    async def _catch_up(
        self, reader: Reader, partition: Partition, take: Callable[[list[Record]], None]
    ) -> None:
        """Reads what the partition has now; what comes of others meanwhile is taken, too."""
        end = (await self._log.end_offsets([partition]))[partition]
        while reader.position(partition) < end:
            take(await reader.read())

    async def _follow(self, reader: Reader, telemetry: Reader | None, hears: bool) -> None:
        reading: asyncio.Future[list[Record]] = asyncio.ensure_future(reader.read())
        hearing = None if telemetry is None else asyncio.ensure_future(telemetry.read())
        try:
            while migrates(self._state.settings) == hears:
                while (proposal := self._next()) is not None:
                    await self._send(proposal)
                pending = [reading] if hearing is None else [reading, hearing]
                await asyncio.wait(pending, timeout=self._due_in_s(), return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    self._follower.fold(reading.result(), new=True)
                    reading = asyncio.ensure_future(reader.read())
                if telemetry is not None and hearing is not None and hearing.done():
                    self._hear(hearing.result())
                    hearing = asyncio.ensure_future(telemetry.read())
        finally:
            unfinished = [reading] if hearing is None else [reading, hearing]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    def _hear(self, records: list[Record]) -> None:
        """Samples, at the times at which the log took them: nodes' clocks may jump."""
        for record in records:
            if (sample := self._sample(record)) is None:
                continue
            age_ms = max(0, wall_ms() - record.timestamp_ms)
            self._migrator.hear(self._state, sample, max(0, self._follower.clock.now_ms() - age_ms))

    def _sample(self, record: Record) -> TelemetrySampled | None:
        """None: another kind of event, or nothing that can be read; telemetry is looked at only, so it is counted and passed over."""
        if dict(record.headers).get("ce_type") != SAMPLED:
            return None
        try:
            found = decode(SAMPLED.decode(), record.value)
        except EventError as error:
            self._unreadable += 1
            LOG.warning("telemetry %s@%d: %s", record.partition, record.offset, error)
            return None
        return found if isinstance(found, TelemetrySampled) else None

    def _due_in_s(self) -> float | None:
        """Until the core wants to be asked although nothing happens."""
        due_ms = self._migrator.due_ms(self._state)
        return None if due_ms is None else max(0.0, (due_ms - self._follower.clock.now_ms()) / 1_000)

    def _next(self) -> MigrationProposed | None:
        try:
            return self._migrator.next(self._state, self._follower.clock.now_ms())
        except Exception:  # a bug in a policy costs its proposals: every job runs on where it is
            LOG.exception("nothing is proposed at seq %d", self._state.seq)
            return None

    async def _send(self, proposal: MigrationProposed) -> None:
        """Raises `LogError`."""
        began_ms = wall_ms()
        hit("migrator.proposed")
        await self._proposals.write(proposal)
        hit("migrator.sent")
        LOG.info("%s: %s to %s: %s", proposal.proposal_id, proposal.job_id, proposal.nodes, proposal.reason)
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
                "penstock.nodes": proposal.nodes,
                "penstock.jobs": (proposal.job_id,),
                "penstock.losses_heard": self._migrator.heard,
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
    used = await open_log(settings.log_url, "migrator", settings.archive).start() if log is None else log
    ready = ready or asyncio.Event()
    try:
        async with tracing("migrator", settings) as traces:

            async def attempt() -> None:
                replica = await load_replica(settings, used)
                await Watcher(settings, used, traces, replica).work(ready)

            await crash_only("migrator", attempt, stop)
    finally:
        if log is None:
            await used.close()
