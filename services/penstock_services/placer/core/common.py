"""Short decisions that several stages share, and the cell's one timer for rescheduling."""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions import ledger_events
from penstock.model.decisions.ledger_events import TimerSubject
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.nouns.types import within_ms
from penstock.model.schema.event import Event

MAX_PLACEMENTS_PER_RECORD = 32  # keeps a record of single-task jobs under 64 KiB
RESCHEDULE = timer_id("cell", "place_more")
"""The timer by which a cell reschedules; a request for a plan, a continuation and a wake-up coalesce in
it."""


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
    before = [state.jobs[job_id].spec.grace_ms for job_id in job.after if job_id in state.jobs]
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
    note = next((task.note for task in job.tasks.values() if task.note), "")
    return ledger_events.JobEnded(job_id=job.job_id, outcome="succeeded", exit_code=0, reason=note)
