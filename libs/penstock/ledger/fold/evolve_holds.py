"""Fold of holds: a held job is outside the queue, like an unschedulable one, and its timers are dropped."""

from penstock.ledger.state.holds import Hold
from penstock.ledger.state.job.job_state import WAITING
from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import JobHoldRequested, JobReleaseRequested
from penstock.model.nouns.transitions import JobStatus


def job_held(state: CellState, fact: JobHoldRequested) -> None:
    """Drops its queue time-out, and the grace period if it is unschedulable."""
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
    """The job waits again, at its position by submission."""
    job = state.jobs[fact.job_id]
    job.commanded_seq = state.seq
    job.held = None
    if job.status is JobStatus.QUEUED:
        state.queue[job.order] = job.job_id
        job.queued_ms = state.now_ms
    state.change_log.add(job.job_id)
    job.version += 1
