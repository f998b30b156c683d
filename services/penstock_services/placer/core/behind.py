"""Starts of jobs that a bounded pass or plan did not reach, where they delay nobody
(`penstock.policies.liveness`)."""

from collections.abc import Callable, Iterator

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.event import Event
from penstock.model.settings import PlacerSettings
from penstock.model.transitions import JobStatus
from penstock.policies.base import Choose, Profile
from penstock.policies.liveness import Undelaying, strict
from penstock_services.placer.core.common import MAX_PLACEMENTS_PER_RECORD, continuation

Try = Callable[[CellState, JobState, Choose | None], Iterator[Event]]
"""The facts of one placement, if the job fits; the choice in place of the place stage's, if any."""


class Behind:
    """Of one decider. `attempt`: tries to place one job."""

    def __init__(self, settings: PlacerSettings, profile: Profile, attempt: Try) -> None:
        self._strict = strict(settings, profile)
        self._attempt = attempt
        self._undelaying = Undelaying()

    def start(self, state: CellState, tried: set[str], choose: Choose | None = None) -> Iterator[Event]:
        """`tried`: jobs that the pass has tried already; grows. In strict order only where nothing runs: then
        no end is awaited."""
        if self._strict and state.holding:
            return
        placed = False
        for _ in range(MAX_PLACEMENTS_PER_RECORD):
            found = self._undelaying.first(state, tried | state.planned.keys() if state.planned else tried)
            if found is None:
                return
            job, _ = found
            tried.add(job.job_id)
            yield from self._attempt(state, job, choose)
            placed = placed or job.status is JobStatus.LAUNCHING
        if placed:
            yield continuation(state)
