"""Starts of jobs that a bounded pass or plan did not reach,
where they delay nobody (`penstock.scheduling.liveness`)."""

from collections.abc import Callable, Collection, Iterator

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.schema.event import Event
from penstock.scheduling.liveness import Undelaying, strict
from penstock.scheduling.stages.protocols import Choose, Profile
from penstock_services.placer.core.common import MAX_PLACEMENTS_PER_RECORD, continuation
from penstock_services.placer.core.plans.units import first_fit

Try = Callable[[CellState, JobState, Choose | None], Iterator[Event]]
"""The facts of one placement, if the job fits; the choice in place of the place stage's, if any."""


class Behind:
    """Of one decider. `attempt`: tries to place one job."""

    def __init__(self, settings: PlacerSettings, profile: Profile, attempt: Try) -> None:
        self._strict = strict(settings, profile)
        self._attempt = attempt
        self._undelaying = Undelaying()
        self._first_fit = first_fit(profile.name)

    def start(
        self, state: CellState, tried: set[str], failed: Collection[str], choose: Choose | None = None
    ) -> Iterator[Event]:
        """`tried`: jobs that the pass has tried already; grows. `failed`: jobs on which the policy has failed
        in this record; it grows meanwhile. In strict order only where nothing runs.

        Where nothing runs no end is awaited: a job that the policy has refused starts by first fit.
        """
        if self._strict and state.holding:
            return
        placed, again = False, set[str]()
        for _ in range(MAX_PLACEMENTS_PER_RECORD):
            passed = tried if state.holding else again
            if state.holding and state.planned:
                passed = passed | state.planned.keys()
            found = self._undelaying.first(state, passed.union(failed) if failed else passed)
            if found is None:
                return
            job, _ = found
            refused = job.job_id in tried
            (again if refused else tried).add(job.job_id)
            yield from self._attempt(state, job, self._first_fit if refused else choose)
            placed = placed or job.status is JobStatus.LAUNCHING
        if placed:
            yield continuation(state)
