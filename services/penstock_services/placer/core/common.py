"""Short decisions that several stages share, explanations of placements without a policy's scores, and the
cell's one timer for rescheduling."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.cluster.reasons import refusals
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.job.moves import Move
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions import ledger_events
from penstock.model.decisions.ledger_events import Candidate, PlacementExplanation, TimerSubject
from penstock.model.decisions.moves import Moved
from penstock.model.nouns.token import seq_of
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.nouns.types import MAX_GANG_TASKS, TaskPlacement, within_ms
from penstock.model.schema.event import Event

MAX_PLACEMENTS_PER_RECORD = 32  # keeps a record of single-task jobs under 64 KiB
MAX_TASKS_PER_RECORD = MAX_GANG_TASKS  # placed at once: a record of the largest gang stays under 1 MB
RESCHEDULE = timer_id("cell", "place_more")
"""The timer by which a cell reschedules; a request for a plan, a continuation and a wake-up coalesce in
it."""

Explain = Callable[[PlacementExplanation], None]
"""Receives the explanations of placements, in their order."""


class RecordSpace:
    """How much of a record its placements take; the first one may be of any size."""

    __slots__ = ("placed", "tasks")

    def __init__(self) -> None:
        self.placed = self.tasks = 0

    def holds(self, tasks: int) -> bool:
        """Whether the record has space for a further job of so many tasks."""
        if self.placed == MAX_PLACEMENTS_PER_RECORD:
            return False
        return not self.placed or self.tasks + tasks <= MAX_TASKS_PER_RECORD

    def add(self, tasks: int) -> None:
        """The record has a further job."""
        self.placed += 1
        self.tasks += tasks


def timer(
    state: CellState, subject: str, kind: Any, after_ms: int, attempt: int = 0
) -> ledger_events.TimerSet:
    """A timer for `subject`, `after_ms` from the ledger's now."""
    return ledger_events.TimerSet(
        timer_id=timer_id(subject, kind),
        at_ms=within_ms(state.now_ms + after_ms),
        about=TimerSubject(kind=kind, id=subject, attempt=attempt),
    )


def request_plan(state: CellState) -> Iterator[ledger_events.TimerSet]:
    """One plan for all inputs of the same time; nothing if it is already requested."""
    requested = state.timers.get(RESCHEDULE)
    if requested is None or requested.at_ms > state.now_ms:
        yield wake_up(state, state.now_ms)


def continuation(state: CellState) -> ledger_events.TimerSet:
    """The record is full: the rest follows at once in another one."""
    return wake_up(state, state.now_ms)


def wake_up(state: CellState, at_ms: int) -> ledger_events.TimerSet:
    """Reschedule at this time, even without an event before."""
    return timer(state, "cell", "place_more", at_ms - state.now_ms)


def stop(state: CellState, job: JobState, reason: Any, detail: str = "") -> Iterator[Event]:
    """With the job's own grace between SIGTERM and SIGKILL; nodes that can be probed have to answer."""
    yield ledger_events.StopDecided(
        job_id=job.job_id,
        attempt=job.attempt,
        reason=reason,
        grace_ms=job.spec.grace_ms,
        detail=detail,
    )
    yield from stop_deadline(state, job)


def launches_early(state: CellState, job: JobState, after: Sequence[str]) -> bool:
    """Whether a job that is placed after these launches before they have ended."""
    return bool(after) and job.spec.prelaunch and state.settings.prelaunch_wait_ms > 0


def start_deadline(state: CellState, job: JobState) -> ledger_events.TimerSet:
    """Time by which all nodes must have answered the orders to start it; where it starts after other jobs,
    these may take their grace before, or the time for which it waits for their end."""
    before = [state.jobs[job_id].spec.grace_ms for job_id in job.succession.after if job_id in state.jobs]
    if (late := state.timers.get(timer_id(job.job_id, "predecessor_timeout"))) is not None:
        before.append(late.at_ms - state.now_ms)
    after_ms = state.settings.launch_timeout_ms + max(before, default=0)
    return timer(state, job.job_id, "launch_timeout", after_ms, job.attempt)


def stop_deadline(state: CellState, job: JobState) -> Iterator[Event]:
    """Time by which all nodes must have answered the orders to stop it; nothing where none of them can be
    probed."""
    stopping = (task for task in job.tasks.values() if task.status is TaskStatus.STOPPING)
    if any(state.nodes[task.place.node_id].leases for task in stopping):
        after_ms = job.spec.grace_ms + state.settings.launch_timeout_ms
        yield timer(state, job.job_id, "stop_timeout", after_ms, job.attempt)


def succeeded(job: JobState) -> ledger_events.JobEnded:
    """Every worker has exited 0, and no task of the job runs any more. The reason is what a node has said
    of that, if any has."""
    note = next((task.exit.note for task in job.tasks.values() if task.exit.note), "")
    return ledger_events.JobEnded(job_id=job.job_id, outcome="succeeded", exit_code=0, reason=note)


def explained(
    state: CellState,
    job: JobState,
    tasks: Sequence[TaskPlacement],
    proposer: str,
    reason: str,
    moved: Moved | None = None,
) -> PlacementExplanation:
    """The requested nodes are the only candidate. Of a move also why the other nodes were not candidates.
    `proposer`: empty for the profile."""
    need, models = job.demand.worker, job.demand.where
    fitting = state.index.candidates(need, models)
    rejected: dict[str, int] = {}
    if moved is not None:
        fitting |= state.nodes[tasks[0].node_id].bit  # nodes reserved for it, or held by it, are free
        refused = refusals(state.index, need, models, fitting)
        rejected = {why.value: nodes.bit_count() for why, nodes in refused.items() if nodes}
    return PlacementExplanation(
        job_id=job.job_id,
        profile=state.settings.profile,
        candidates=(Candidate(nodes=tuple(place.node_id for place in tasks), score=0.0),),
        margin=None,
        feasible=fitting.bit_count(),
        rejected=rejected,
        proposer=proposer,
        reason=reason,
        moved=moved,
    )


def leaving(state: CellState, job: JobState) -> Moved:
    """The present placement of a running job that is to be moved."""
    nodes = tuple(task.place.node_id for task in job.tasks.values())
    return Moved(seq=state.seq, attempt=job.attempt, nodes=nodes)


class Stopped:
    """Cost of a moved job's stop. Created when its end is proven, read when it is placed again."""

    def __init__(self, state: CellState, job: JobState, move: Move) -> None:
        self._nodes = tuple(task.place.node_id for task in job.tasks.values())
        self._stop_ms = max(0, state.now_ms - move.at_ms)
        ran_ms = 0 if job.running_ms is None else max(0, move.at_ms - job.running_ms)
        self._worked_ms = job.saving.kept_ms + ran_ms

    def moved(self, job: JobState, move: Move) -> Moved:
        """With the work that the next attempt repeats: the work done when the move was decided, less that in
        its checkpoint."""
        found = job.saving.checkpoint
        unknown = job.spec.checkpoint == "signal" and found is None
        saved = None if found is None or not job.saving.kept_ms else found.iteration
        return Moved(
            seq=seq_of(move.token),
            attempt=move.attempt,
            nodes=self._nodes,
            stop_ms=self._stop_ms,
            lost_ms=None if unknown else max(0, self._worked_ms - job.saving.kept_ms),
            resumes_at=saved,
        )
