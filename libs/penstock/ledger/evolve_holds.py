"""The fold of holds: a job that is held stands beside the queue, as an unschedulable one, and no clock runs against it."""

from penstock.ledger.holds import Hold
from penstock.ledger.job_state import WAITING
from penstock.ledger.state import CellState
from penstock.model.external_events import JobHoldRequested, JobReleaseRequested
from penstock.model.transitions import JobStatus


def job_held(state: CellState, fact: JobHoldRequested) -> None:
    """Neither its queue time-out nor the grace of one that fits nowhere goes on."""
    job = state.jobs[fact.job_id]
    job.commanded_seq = state.seq
    job.held = Hold(fact.by, fact.reason, state.now_ms, fact.tenant is None)
    job.unschedulable = ""
    state.unschedulable.pop(job.job_id, None)
    state.timers.pop(f"{job.job_id}:unschedulable", None)
    if job.status in WAITING:
        state.timers.pop(f"{job.job_id}:queue_timeout", None)
    state.queue.pop(job.order, None)
    state.change_log.add(job.job_id)
    job.version += 1


def job_released(state: CellState, fact: JobReleaseRequested) -> None:
    """It waits at its place by submission."""
    job = state.jobs[fact.job_id]
    job.commanded_seq = state.seq
    job.held = None
    if job.status is JobStatus.QUEUED:
        state.queue[job.order] = job.job_id
        job.queued_ms = state.now_ms
    state.change_log.add(job.job_id)
    job.version += 1
