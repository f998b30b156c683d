"""Pre-scheduling (Liquid §6.1): jobs are ordered to launch where running jobs are about to end, and return to
the queue where these do not.

The order names the jobs that are to end before (`PlacementDecided.after`); the node starts the process and
gives it its GPUs when those are proven dead. A wrong prediction costs a bounded wait: until
`predecessor_timeout`, or until the predecessor reports that it trains on.
"""

from collections.abc import Iterator

from penstock.ledger.derived.succession import awaited, followers
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.inputs.external_events import TaskPhaseChanged
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_TEXT, TaskPlacement
from penstock.model.schema.event import Event
from penstock.scheduling.make_room.prelaunch import look_ahead
from penstock.scheduling.stages.protocols import Profile
from penstock_services.placer.core.common import (
    Explain,
    explained,
    launches_early,
    start_deadline,
    stop,
    timer,
)

ENDING = timer_id("cell", "ending")
"""The timer at which a running job is so near its end that the next one may launch."""
MAX_AT_ONCE = 32  # in one record


def begin(state: CellState, profile: Profile, explain: Explain) -> Iterator[Event]:
    """Jobs that launch now, and the timer for the next. Nothing under profiles without pre-scheduling, or
    where no job may launch."""
    if not profile.prelaunch or not state.prelaunching or state.in_window:
        return
    for _ in range(MAX_AT_ONCE):
        ahead = look_ahead(state, profile)
        if ahead.placed is None:
            break
        yield from _order(
            state, ahead.placed.job, ahead.placed.tasks, ahead.placed.after, ahead.late_ms, explain
        )
    else:
        ahead = ahead._replace(wake_ms=state.now_ms + 1)
    known = state.timers.get(ENDING)
    if ahead.wake_ms is not None and (known is None or known.at_ms != ahead.wake_ms):
        yield timer(state, "cell", "ending", ahead.wake_ms - state.now_ms)


def _order(
    state: CellState,
    job: JobState,
    tasks: tuple[TaskPlacement, ...],
    after: tuple[str, ...],
    late_ms: int,
    explain: Explain,
) -> Iterator[Event]:
    why = f"prelaunched after {', '.join(after)}: it has its GPUs when that has ended there"
    explain(explained(state, job, tasks, "", why[:MAX_TEXT]))
    yield PlacementDecided(
        job_id=job.job_id,
        attempt=job.attempt + 1,
        tasks=tasks,
        after=after,
        prelaunch=launches_early(state, job, after),
    )
    yield timer(state, job.job_id, "predecessor_timeout", late_ms - state.now_ms, job.attempt)
    yield start_deadline(state, job)


def late(state: CellState, job: JobState) -> Iterator[Event]:
    """Its predecessors have not ended in time. A predecessor that is being stopped is about to end."""
    if job.status is JobStatus.LAUNCHING and _waits(state, job):
        yield from stop(state, job, "predecessor_late")


def phase_changed(state: CellState, event: TaskPhaseChanged) -> Iterator[Event]:
    """Jobs that wait for a job that trains on, though it was about to end, return to the queue."""
    job = state.jobs[state.nodes[event.node_id].tasks[event.task_id]]
    if event.phase != "save" and job.succession.false_ends:
        for other_id in followers(state, job):
            yield from late(state, state.jobs[other_id])


def _waits(state: CellState, job: JobState) -> bool:
    return any(state.jobs[other_id].status is not JobStatus.STOPPING for other_id in awaited(state, job))
