"""State machine of the migrator beside the fold of the ledger: when jobs' convergence is evaluated, and which moves are proposed.

Its driver (the service's shell, or a simulation) folds the ledger and passes each fact after it was folded, and each loss
that it reads from telemetry:

    migrator.see(state, fact, now_ms)
    migrator.observe(state, sample, now_ms)
    while (proposal := migrator.next(state, now_ms)) is not None: ...  # send it
    migrator.due_ms(state)                       # call `next` again at that time, even without news

One proposal is under way at a time. A refused one is not repeated: the job asks again when its loss falls still slower. Its state
beside the ledger's are monitors, one for each job that has reported a loss, and these follow from telemetry.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model import external_events, ledger_events
from penstock.model.adjustments import CoresDecided
from penstock.model.event import Event
from penstock.model.external_events import StepsMeasured, TelemetrySampled
from penstock.model.ledger_events import ProposalAnswered
from penstock.model.moves import JobConverged, MoveGivenUp
from penstock.model.proposals import ANSWER_WITHIN_MS, MigrationProposed
from penstock.model.settings import PlacerSettings
from penstock.model.transitions import JobStatus
from penstock.model.types import MAX_TEXT
from penstock.policies.convergence import Category, LossWindow, Monitor
from penstock.policies.crowding import Crowding
from penstock.policies.migrate import PROPOSER, Migrate, Seen
from penstock.policies.profiles import known_profile


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
        self._monitors: dict[str, Monitor] = {}
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
        return {job_id: monitor.category for job_id, monitor in self._monitors.items()}

    def windows(self, job_id: str) -> Sequence[LossWindow]:
        """The latest evaluations of this job's loss, oldest first; none where it reported no loss."""
        monitor = self._monitors.get(job_id)
        return () if monitor is None else tuple(monitor.windows)

    def see(self, state: CellState, fact: Event, now_ms: int) -> None:
        """Takes a fact that has just been folded."""
        if isinstance(fact, ProposalAnswered):
            if self._sent is not None and (fact.proposer, fact.proposal_id) == (
                PROPOSER,
                self._sent.proposal_id,
            ):
                self._sent = None
                self._changed = self._changed or fact.verdict == "accepted" or bool(self._asking)
        elif isinstance(fact, StepsMeasured):
            self._crowding.measured(state, fact, now_ms)
            self._changed = True
        elif (subject := CHANGES.get(type(fact))) is not None:
            self._changed = True
            job_id = subject(fact)
            self._crowding.changed(state, job_id, now_ms, getattr(fact, "node_id", ""))
            self._follow(state, job_id, now_ms)

    def _follow(self, state: CellState, job_id: str, now_ms: int) -> None:
        monitor = self._monitors.get(job_id)
        if monitor is None:
            return
        job = state.jobs.get(job_id)
        if job is None:
            del self._monitors[job_id]
            self._asking.pop(job_id, None)
        elif job.status is not JobStatus.RUNNING or job.converged_ms is not None:
            monitor.pause(now_ms)
            self._asking.pop(job_id, None)
        else:
            monitor.resume(now_ms)
            self._at(job_id, monitor)

    def observe(self, state: CellState, sample: TelemetrySampled, now_ms: int) -> None:
        """Takes a sample of telemetry, at the reader's time: no other machine's clock is trusted. Samples of a task that does not run are ignored."""
        stage = _stage(state.settings)
        job = _running(state, sample)
        if sample.loss is None or job is None or stage is None or job.converged_ms is not None:
            return
        monitor = self._monitors.get(job.job_id)
        if monitor is None:
            monitor = self._monitors[job.job_id] = stage.monitor()
        self.observed += 1
        if monitor.observe(sample.loss, now_ms):
            self._asks(job.job_id)
        self._at(job.job_id, monitor)

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
        while self._looks:
            at_ms, job_id = self._looks[0]
            monitor = self._monitors.get(job_id)
            if monitor is not None and monitor.due_ms == at_ms:
                break
            heapq.heappop(self._looks)
        look_ms = self._looks[0][0] if self._looks else None
        ask_ms = None
        if self._changed and state.holding:
            ask_ms = state.now_ms if self._sent is None else self._sent.until_ms
        found = [at_ms for at_ms in (look_ms, ask_ms) if at_ms is not None]
        return min(found, default=None)

    def next(self, state: CellState, now_ms: int) -> MigrationProposed | None:
        """Evaluates the losses that are due, and returns a proposal. `now_ms`: the ledger's time, which goes on without records."""
        while (due_ms := self.due_ms(state)) is not None and due_ms <= now_ms:
            if self._looks and self._looks[0][0] <= now_ms:
                _, job_id = heapq.heappop(self._looks)
                monitor = self._monitors[job_id]
                if monitor.look(now_ms):
                    self._asks(job_id)
                self._at(job_id, monitor)
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


def _running(state: CellState, sample: TelemetrySampled) -> JobState | None:
    """The job of the sample's task, if that belongs to its present attempt and the whole gang runs."""
    if sample.task_id is None:
        return None
    job = state.jobs.get(sample.task_id.rsplit(".", 2)[0])
    if job is None or job.status is not JobStatus.RUNNING or sample.task_id not in job.tasks:
        return None
    return job


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
"""Ledger events after which a job's losses are evaluated or not, or moves may come out differently → the function that gives its job id."""
