"""Alarm of a cell that does not go on (LAW 7), or whose decisions follow from more than its ledger.

A job waits beside free resources though nothing is under way; no placer answers what was acknowledged, or no
estimator what was submitted; a decider that starts from a snapshot decides records otherwise than they stand;
or a reader of the ledger has another state than the placer. The cell is looked at after records, at most once
in `SETTLES_S`, and at submissions that nobody answers; decisions are repeated once in `FRESH_EVERY` records.
One alarm at a time: the first that is found.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.errors import one_line
from penstock.ledger.state.job.job_state import JobState
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Value
from penstock.runtime.race import all_of, first_of
from penstock.scheduling.liveness import Stall, Undelaying, stalled
from penstock_services.gateway.shell.replica.differences import Differences
from penstock_services.gateway.shell.replica.follower import Follower

logger = logging.getLogger(__name__)

FRESH_EVERY = 20_000  # records: as often as there is a new snapshot
FRESH_RECORDS = 500  # decided again after it, in a worker: 0.13 s in a cell of 16 nodes
ESTIMATED_WITHIN_MS = 60_000  # a sound estimator takes milliseconds, and seconds to start
SETTLES_S = 1.0
"""From "possible" to "ordered": longer is an alarm."""


class Alarm(Value, frozen=True, kw_only=True):
    """Why the cell does not go on."""

    job_id: str
    """The first job that waits; empty: the alarm is about decisions or states."""
    cause: str
    remedy: str
    since_ms: int
    """The ledger's time at which the alarm was raised."""


class Alarms:
    """`current`: the alarm that stands; None: the cell goes on."""

    def __init__(
        self,
        follower: Follower,
        decides_again: Callable[[], Awaitable[Mapping[str, Any]]],
        differences: Differences,
    ) -> None:
        """`decides_again`: the report of a replay by a fresh decider, from the newest snapshot on."""
        self.current: Alarm | None = None
        self._decides_again = decides_again
        self._differences = differences
        self._stale: Alarm | None = None
        self._follower = follower
        self._undelaying = Undelaying()

    async def watch(self) -> None:
        """Until cancelled."""
        await all_of(self._watch_progress(), self._watch_decisions(), self._differences.follow())

    async def _watch_progress(self) -> None:
        """Looks at the cell after each change."""
        unanswered = ""
        while True:
            changed = self._follower.next_change()
            found = self._found(unanswered)
            if (found is None) is not (self.current is None):
                self._tell(found)
            unanswered = self._unanswered()
            looks_again = self.current is None and bool(unanswered or self._unestimated())
            await first_of(changed.wait(), timeout_s=SETTLES_S if looks_again else None)
            await asyncio.sleep(SETTLES_S)

    async def _watch_decisions(self) -> None:
        """Has a fresh decider repeat some decisions, each time when so many more records were read."""
        while True:
            due = (self._follower.state.seq // FRESH_EVERY + 1) * FRESH_EVERY
            while self._follower.state.seq < due:
                await self._follower.next_change().wait()
            await self._repeat()

    async def _repeat(self) -> None:
        try:
            report = await self._decides_again()
        except Exception as error:  # noqa: BLE001 - the check failed, and the cell goes on
            logger.warning("decisions could not be repeated by a fresh decider: %s", one_line(error))
            return
        first = next(iter(report["differences"]), None)
        self._stale = (
            None
            if first is None
            else Alarm(
                job_id="",
                cause=f"a fresh decider decides record {first['seq']} otherwise (its {first['field']}): "
                "decisions rest on more than the ledger, "
                "or another version has taken them",
                remedy="`penstock replay --fresh` shows the records; restart the placer, and report it if "
                "one version has decided them",
                since_ms=self._follower.now_ms(),
            )
        )

    def _found(self, unanswered: str) -> Alarm | None:
        """`unanswered`: job that was acknowledged before the last look."""
        state, now_ms = self._follower.state, self._follower.now_ms()
        if unanswered and unanswered == self._unanswered():
            return Alarm(
                job_id=unanswered,
                cause="it was acknowledged, and no placer has answered it",
                remedy="look at the placer's log: is one running for this cell?",
                since_ms=now_ms,
            )
        job = self._unestimated()
        if job is not None and now_ms - job.submitted_ms > ESTIMATED_WITHIN_MS:
            return Alarm(
                job_id=job.job_id,
                cause="no estimator has answered its submission, and no job is placed without an estimate",
                remedy="look at the estimator's log: is one running for this cell?",
                since_ms=now_ms,
            )
        try:
            stall = stalled(state, self._undelaying)
        except Exception as error:  # noqa: BLE001 - a policy's bug is the answer
            stall = Stall("", (), f"a policy fails: {one_line(error)}")
        if stall is None:
            return self._stale or self._other_states(now_ms)
        return Alarm(
            job_id=stall.job_id,
            cause=f"it waits though it fits on {', '.join(sorted(set(stall.nodes)))}: {stall.cause}"
            if stall.nodes
            else stall.cause,
            remedy="restart the placer; keep its log and the ledger for a report",
            since_ms=now_ms,
        )

    def _other_states(self, now_ms: int) -> Alarm | None:
        found = self._differences.standing()
        if not found:
            return None
        return Alarm(
            job_id="",
            cause="another state than the placer's, seen first at ledger record "
            f"{min(found.values())}: {', '.join(found)}",
            remedy="restart what differs, or the placer where all readers do, and keep the ledger for a "
            "report; where it comes back, the snapshots have the wrong state: `penstock projections rebuild`",
            since_ms=now_ms,
        )

    def _unanswered(self) -> str:
        return next(iter(self._follower.pending), "")

    def _unestimated(self) -> JobState | None:
        """The oldest job that waits for its first estimate and for nothing else. O(jobs)."""
        jobs = self._follower.state.jobs.values()
        waits = JobStatus.SUBMITTED
        return next(
            (job for job in jobs if job.status is waits and job.estimate is None and job.held is None), None
        )

    def _tell(self, found: Alarm | None) -> None:
        if found is not None:
            logger.warning("alarm: %s: %s; %s", found.job_id or "the cell", found.cause, found.remedy)
        elif self.current is not None:
            logger.info("the cell goes on; the alarm about %s is over", self.current.job_id or "the cell")
        self.current = found
