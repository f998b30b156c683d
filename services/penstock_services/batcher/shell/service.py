"""Main loop of the batcher service: fold the ledger, ask the core whether a plan is due, plan in a worker
process, append the proposal.

It holds no state beside the ledger's. After any failure it folds anew and plans anew (crash-only): a plan
that was sent twice has the same id, and the placer answers the second as it answered the first. No job waits
for it longer than a window lasts.
"""

import asyncio
import logging
from typing import Any

from penstock.clock import wall_ms
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.log.port import Log, Partition, Reader
from penstock.model.proposals import PlanProposed
from penstock.model.schema.topics import Topic
from penstock.runtime.failpoints import hit
from penstock.runtime.following.ledger_follower import BATCH_MS, LedgerFollower
from penstock.runtime.following.proposals import ProposalWriter
from penstock.runtime.following.proposing import run_attempts
from penstock.runtime.race import cancelled
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.phases import MAX_NAMED
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.batcher.core.batcher import Batcher, Work, plans
from penstock_services.batcher.shell.worker import Worker

LOG = logging.getLogger(__name__)

SOURCE = "/penstock/batcher"
WARM_WITHIN_S = 10.0  # else it serves without a warm worker: the first plan may come too late


class Planner:
    """One attempt of one cell's batcher on one log."""

    def __init__(
        self, settings: Settings, log: Log, traces: Tracing, worker: Worker, replica: Replica
    ) -> None:
        self._log, self._traces, self._worker = log, traces, worker
        self._ledger = Partition(Topic.LEDGER, settings.cell_index)
        self._proposals = ProposalWriter(settings, log, traces, SOURCE)
        self._batcher = Batcher()
        self._follower = LedgerFollower(log, "batcher", replica, lambda state, fact: self._batcher.see(fact))

    @property
    def _state(self) -> CellState:
        return self._follower.state

    async def work(self, ready: asyncio.Event) -> None:
        """For ever: folds records as they come, and plans meanwhile."""
        end = (await self._log.end_offsets([self._ledger]))[self._ledger]
        reader = self._log.reader({self._ledger: self._follower.offset}, batch_ms=BATCH_MS)
        try:
            while self._follower.offset < end:
                await self._follower.fold(await reader.read(), new=False)
            LOG.info("folded the ledger to seq %d", self._follower.seq)
            if plans(self._state.settings):
                await asyncio.wait({self._worker.warm_up()}, timeout=WARM_WITHIN_S)
            ready.set()
            await self._follow(reader)
        finally:
            self._worker.close()
            await reader.close()

    async def _follow(self, reader: Reader) -> None:
        reading = asyncio.ensure_future(reader.read())
        planning: asyncio.Future[None] | None = None
        try:
            while True:
                if plans(self._state.settings):
                    self._worker.warm_up()
                if planning is None and (work := self._next()) is not None:
                    planning = asyncio.ensure_future(self._plan(work))
                pending: list[asyncio.Future[Any]] = [reading] if planning is None else [reading, planning]
                due_ms = self._batcher.due_ms(self._state) if planning is None else None
                timeout_s = self._follower.until_s(due_ms)
                await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    await self._follower.fold(reading.result(), new=True)
                    reading = asyncio.ensure_future(reader.read())
                if planning is not None and planning.done():
                    planning.result()
                    planning = None
        finally:
            await cancelled([reading] if planning is None else [reading, planning])

    def _next(self) -> Work | None:
        try:
            return self._batcher.next(self._state, self._follower.clock.now_ms())
        except Exception:  # a bug in a policy costs the plan: waiting jobs are placed without one
            LOG.exception("nothing can be asked at seq %d", self._state.seq)
            return None

    async def _plan(self, work: Work) -> None:
        """Solves, proposes, and writes the plan's span. Raises `LogError`."""
        began_ms = wall_ms()
        hit("batcher.question_asked")
        try:
            answer = await self._worker.solve(work)
            solved_ms = wall_ms()
            proposal = self._batcher.answered(self._state, work, answer)
        except Exception:  # as above
            LOG.exception("the plan of seq %d is lost", work.seq)
            self._batcher.failed(work)
            return
        hit("batcher.plan_solved")
        if proposal is None:
            LOG.debug("nothing to propose at seq %d", work.seq)
            return
        await self._proposals.write(proposal)
        hit("batcher.plan_sent")
        self._trace(work, proposal, began_ms, solved_ms)

    def _trace(self, work: Work, proposal: PlanProposed, began_ms: int, solved_ms: int) -> None:
        jobs = [job.job_id for unit in proposal.units for job in unit.jobs]
        LOG.info("%s: %d units, %d stops", proposal.proposal_id, len(proposal.units), len(proposal.stops))
        self._traces.plan(
            proposal.proposer,
            proposal.proposal_id,
            began_ms,
            wall_ms(),
            {
                "penstock.profile": work.settings.profile,
                "penstock.ledger_seq": work.seq,
                "penstock.solve_ms": solved_ms - began_ms,
                "penstock.units": len(proposal.units),
                "penstock.groups": sum(unit.kind == "group" for unit in proposal.units),
                "penstock.stops": len(proposal.stops),
                "penstock.jobs": tuple(jobs[:MAX_NAMED]),
            },
        )


async def run(
    settings: Settings,
    stop: asyncio.Event,
    *,
    log: Log | None = None,
    ready: asyncio.Event | None = None,
    worker: Worker | None = None,
) -> None:
    """Works until `stop` is set; see penstock.runtime.service. The topics must exist. `worker`: in which
    plans are computed. Raises `NotAllowed`, `ConfigurationError`."""
    worker = worker or Worker()

    async def attempt(used: Log, traces: Tracing, replica: Replica, is_ready: asyncio.Event) -> None:
        await Planner(settings, used, traces, worker, replica).work(is_ready)

    try:
        await run_attempts("batcher", settings, stop, attempt, log, ready)
    finally:
        worker.close()
