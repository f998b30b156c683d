"""Alarm of a cell that does not go on (LAW 7): a job waits beside free resources though nothing is under way, or no placer answers what was acknowledged.

The cell is looked at after records, at most once in `SETTLES_S`, and at submissions that nobody answers. One alarm at a time: the first that is found.
"""

import asyncio
import logging

from penstock.errors import one_line
from penstock.model.types import Value
from penstock.policies.liveness import Stall, Undelaying, stalled
from penstock.runtime.race import first_of
from penstock_services.gateway.shell.follower import Follower

logger = logging.getLogger(__name__)

SETTLES_S = 1.0
"""From "possible" to "ordered": longer is an alarm."""


class Alarm(Value, frozen=True, kw_only=True):
    """Why the cell does not go on."""

    job_id: str
    """The first job that it keeps waiting."""
    cause: str
    remedy: str
    since_ms: int
    """The ledger's time at which the alarm was raised."""


class Alarms:
    """`current`: the alarm that stands; None: the cell goes on."""

    def __init__(self, follower: Follower) -> None:
        self.current: Alarm | None = None
        self._follower = follower
        self._undelaying = Undelaying()

    async def watch(self) -> None:
        """Looks at the cell after each change, until cancelled."""
        unanswered = ""
        while True:
            changed = self._follower.next_change()
            found = self._found(unanswered)
            if (found is None) is not (self.current is None):
                self._tell(found)
            unanswered = self._unanswered()
            looks_again = bool(unanswered) and self.current is None
            await first_of(changed.wait(), timeout_s=SETTLES_S if looks_again else None)
            await asyncio.sleep(SETTLES_S)

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
        try:
            stall = stalled(state, self._undelaying)
        except Exception as error:  # noqa: BLE001 - a policy's bug is the answer
            stall = Stall("", (), f"a policy fails: {one_line(error)}")
        if stall is None:
            return None
        return Alarm(
            job_id=stall.job_id,
            cause=f"it waits though it fits on {', '.join(sorted(set(stall.nodes)))}: {stall.cause}"
            if stall.nodes
            else stall.cause,
            remedy="restart the placer; keep its log and the ledger for a report",
            since_ms=now_ms,
        )

    def _unanswered(self) -> str:
        return next(iter(self._follower.pending), "")

    def _tell(self, found: Alarm | None) -> None:
        if found is not None:
            logger.warning("alarm: job %s: %s; %s", found.job_id, found.cause, found.remedy)
        elif self.current is not None:
            logger.info("the cell goes on; the alarm about job %s is over", self.current.job_id)
        self.current = found
