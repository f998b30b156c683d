"""State machine of the migrator beside the fold of the ledger: when jobs' convergence is evaluated, and which
moves are proposed.

Its driver (the service's shell, or a simulation) folds the ledger and passes each fact after it was folded,
and each loss that it reads from telemetry:

    migrator.see(state, fact, now_ms)
    migrator.observe(state, sample, now_ms)
    while (proposal := migrator.next(state, now_ms)) is not None: ...  # send it
    migrator.due_ms(state)                       # call `next` again at that time, even without news

One proposal is under way at a time. A refused one is not repeated: the job asks again when its loss falls
still slower. Its state beside the ledger's are monitors, one for each job that has reported a loss. They
follow from the runs of the job's attempts, which the ledger's state has (`Progress.runs`), and from the
samples of these runs in the order of their times: whether a sample is read in time or after a restart is the
same.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import CoresDecided
from penstock.model.decisions.ledger_events import ProposalAnswered
from penstock.model.decisions.moves import JobConverged, MoveGivenUp
from penstock.model.inputs import external_events
from penstock.model.inputs.external_events import StepsMeasured, TelemetrySampled
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_TEXT
from penstock.model.proposals import ANSWER_WITHIN_MS, MigrationProposed
from penstock.model.schema.event import Event
from penstock.scheduling.acting.convergence import Category, LossWindow, Monitor
from penstock.scheduling.acting.crowding import Crowding
from penstock.scheduling.acting.migrate import PROPOSER, Migrate, Seen
from penstock.scheduling.profiles import known_profile

EARLY_MS = 1_000
"""A sample's time may be earlier than its run's beginning by the latency of the ledger's appends, at most by
so much."""


class _Watched:
    """A job's monitor, and the attempt whose run it has reached. Time between runs is left out."""

    __slots__ = ("attempt", "monitor")

    def __init__(self, monitor: Monitor, attempt: int) -> None:
        self.monitor = monitor
        self.attempt = attempt

    def advance(self, job: JobState, now_ms: int) -> None:
        """Ends the runs that were over at `now_ms`, with the evaluations that were due in them, and begins
        those that followed."""
        for run in job.progress.runs:
            if run.attempt < self.attempt:
                continue
            if run.began_ms > now_ms:
                return
            self._begin(run.attempt, run.began_ms)
            if run.ended_ms > now_ms:
                return
            self.monitor.look(run.ended_ms)
            self.monitor.pause(run.ended_ms)
        if job.status is JobStatus.RUNNING and job.running_ms is not None and job.running_ms <= now_ms:
            self._begin(job.attempt, job.running_ms)

    def _begin(self, attempt: int, began_ms: int) -> None:
        if attempt > self.attempt:
            self.attempt = attempt
            self.monitor.resume(began_ms)


class _Sent(NamedTuple):
    """A proposal that the placer has not answered yet."""

    proposal_id: str
    until_ms: int


def _stage(settings: PlacerSettings) -> Migrate | None:
    """None: under these settings no job is moved."""
    profile = known_profile(settings)
    return None if profile is None else profile.migrate


def migrates(settings: PlacerSettings) -> bool:
    """Whether there is anything for a migrator to do under these settings."""
    return _stage(settings) is not None


class Migrator:
    """`observed`: how many losses were used."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        """By job id."""
        self._behind: dict[str, None] = {}
        """Ids of jobs whose latest sample is of a run that is over: their monitors are to reach the present
        before anything else."""
        self._looks: list[tuple[int, str]] = []
        """(due at ms, job id); outdated entries are skipped."""
        self._asking: dict[str, None] = {}
        """Ids of jobs that may be moved, in the order of their requests."""
        self._changed = True
        """Whether a fact has come since the stage was last asked; a restart asks once."""
        self._sent: _Sent | None = None
        self._crowding = Crowding()
        self.observed = 0

    def categories(self) -> Mapping[str, Category]:
        """By job id, of jobs that have reported a loss."""
        return {job_id: watched.monitor.category for job_id, watched in self._watched.items()}

    def windows(self, job_id: str) -> Sequence[LossWindow]:
        """The latest evaluations of this job's loss, oldest first; none where it reported no loss."""
        watched = self._watched.get(job_id)
        return () if watched is None else tuple(watched.monitor.windows)

    def see(self, state: CellState, fact: Event, now_ms: int) -> None:
        """Takes a fact that has just been folded."""
        if (subject := CHANGES.get(type(fact))) is not None:
            self._changed = True
            job_id = subject(fact)
            self._crowding.changed(state, job_id, now_ms)
            self._follow(state, job_id, now_ms)
        elif isinstance(fact, ProposalAnswered):
            if self._sent is not None and (fact.proposer, fact.proposal_id) == (
                PROPOSER,
                self._sent.proposal_id,
            ):
                self._sent = None
                self._changed = self._changed or fact.verdict == "accepted" or bool(self._asking)
        elif isinstance(fact, StepsMeasured):
            self._crowding.measured(state, fact, now_ms)
            self._changed = True

    def _follow(self, state: CellState, job_id: str, now_ms: int) -> None:
        watched = self._watched.get(job_id)
        if watched is None:
            return
        job = state.jobs.get(job_id)
        if job is None:
            del self._watched[job_id]
            self._asking.pop(job_id, None)
            return
        if job.moves.converged_ms is not None:
            watched.monitor.pause(now_ms)
        else:
            watched.advance(job, now_ms)
        if job.status is not JobStatus.RUNNING or job.moves.converged_ms is not None:
            self._asking.pop(job_id, None)
        self._at(job_id, watched.monitor)

    def observe(self, state: CellState, sample: TelemetrySampled, at_ms: int) -> None:
        """Takes a sample of telemetry. `at_ms`: when the log took it, by the ledger's clock: no node's clock
        is trusted.

        A sample counts if its task's attempt ran at that time, also one that is over, of a job that has not
        ended. One of an earlier attempt that comes after a loss of a later one, or after its attempt's end,
        is ignored.
        """
        stage = _stage(state.settings)
        found = _run_of(state, sample, at_ms)
        if sample.loss is None or found is None or stage is None or found[0].moves.converged_ms is not None:
            return
        job, attempt, began_ms = found
        at_ms = max(at_ms, began_ms)
        watched = self._watched.get(job.job_id)
        if watched is None:
            watched = self._watched[job.job_id] = _Watched(stage.monitor(), attempt)
        if attempt < watched.attempt:
            return
        self.observed += 1
        due_ms = watched.monitor.due_ms
        watched.advance(job, at_ms)
        asks = watched.monitor.observe(sample.loss, at_ms)
        if watched.monitor.category is not Category.CONVERGED:
            self._asking.pop(job.job_id, None)
        elif asks and job.status is JobStatus.RUNNING and attempt == job.attempt:
            self._asks(job.job_id)
        if job.status is JobStatus.RUNNING and attempt == job.attempt:
            if watched.monitor.due_ms != due_ms:
                self._at(job.job_id, watched.monitor)
        else:
            self._behind[job.job_id] = None

    def _catch_up(self, state: CellState, now_ms: int) -> None:
        behind, self._behind = self._behind, {}
        for job_id in behind:
            self._follow(state, job_id, now_ms)

    def _asks(self, job_id: str) -> None:
        self._asking[job_id] = None
        self._changed = True

    def _at(self, job_id: str, monitor: Monitor) -> None:
        if monitor.due_ms is not None:
            heapq.heappush(self._looks, (monitor.due_ms, job_id))

    def due_ms(self, state: CellState) -> int | None:
        """Ledger time from which `next` has something to do; None: nothing before another input."""
        if state.frozen or _stage(state.settings) is None:
            return None
        if self._behind:
            return state.now_ms
        while self._looks:
            at_ms, job_id = self._looks[0]
            watched = self._watched.get(job_id)
            if watched is not None and watched.monitor.due_ms == at_ms:
                break
            heapq.heappop(self._looks)
        look_ms = self._looks[0][0] if self._looks else None
        if not self._changed or not state.holding:
            return look_ms
        ask_ms = state.now_ms if self._sent is None else self._sent.until_ms
        return ask_ms if look_ms is None else min(look_ms, ask_ms)

    def next(self, state: CellState, now_ms: int) -> MigrationProposed | None:
        """Evaluates the losses that are due, and returns a proposal. `now_ms`: the ledger's time, which goes
        on without records."""
        while (due_ms := self.due_ms(state)) is not None and due_ms <= now_ms:
            if self._behind:
                self._catch_up(state, now_ms)
            elif self._looks and self._looks[0][0] <= now_ms:
                _, job_id = heapq.heappop(self._looks)
                watched = self._watched[job_id]
                if watched.monitor.look(now_ms):
                    self._asks(job_id)
                self._at(job_id, watched.monitor)
            elif (proposal := self._propose(state, now_ms)) is not None:
                return proposal
        return None

    def _propose(self, state: CellState, now_ms: int) -> MigrationProposed | None:
        stage = _stage(state.settings)
        assert stage is not None, "else nothing would be due"
        asking, self._asking = list(self._asking), {}
        self._changed, self._sent = False, None
        found = stage.migrations(state, Seen(now_ms, self.categories(), self._crowding, asking))
        if not found:
            return None
        first = found[0]
        if len(found) > 1:
            self._changed = True
        self._asking = {job_id: None for job_id in asking if job_id != first.job_id}
        proposal = MigrationProposed(
            proposal_id=f"migration-{state.seq}",
            proposer=PROPOSER,
            job_id=first.job_id,
            nodes=first.nodes,
            reason=first.reason[:MAX_TEXT],
            cause=first.cause,
        )
        self._sent = _Sent(proposal.proposal_id, now_ms + ANSWER_WITHIN_MS)
        return proposal


def _run_of(state: CellState, sample: TelemetrySampled, at_ms: int) -> tuple[JobState, int, int] | None:
    """The job of the sample's task, and the attempt and the beginning of its run. None: it did not run at
    that time, or the ledger's state does not have that run any more."""
    if sample.task_id is None:
        return None
    job_id, *rest = sample.task_id.rsplit(".", 2)
    job = state.jobs.get(job_id)
    if job is None or len(rest) != 2 or not rest[0].isdecimal():
        return None
    attempt, began_ms = int(rest[0]), None
    if attempt == job.attempt and job.status is JobStatus.RUNNING:
        began_ms = job.running_ms if sample.task_id in job.tasks else None
    else:
        runs = (run.began_ms for run in job.progress.runs if run.attempt == attempt and at_ms <= run.ended_ms)
        began_ms = next(runs, None)
    return None if began_ms is None or at_ms < began_ms - EARLY_MS else (job, attempt, began_ms)


def _job_of_task(fact: Any) -> str:
    return str(fact.task_id).rsplit(".", 2)[0]


def _job(fact: Any) -> str:
    return str(fact.job_id)


CHANGES: Mapping[type[Event], Callable[[Any], str]] = MappingProxyType(
    {
        external_events.TaskStarted: _job_of_task,
        external_events.TaskExited: _job_of_task,
        ledger_events.TaskLost: _job_of_task,
        ledger_events.StopDecided: _job,
        ledger_events.JobRequeued: _job,
        ledger_events.JobEnded: _job,
        CoresDecided: _job,
        JobConverged: _job,
        MoveGivenUp: _job,
    }
)
"""Ledger events after which a job's losses are evaluated or not, or moves may come out differently → the
function that gives its job id."""
