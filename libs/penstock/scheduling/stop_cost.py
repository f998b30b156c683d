"""Cost of a preemption: the run time in s that a job loses by a stop.

It is the job's save, its next launch, and the work since its checkpoint where a save does not fit into its
grace period.
"""

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState

LOSES_MS = 3_600_000  # so much work a job that does not save may repeat, because it is stopped for others


def saves_in_time(job: JobState) -> bool:
    """Whether the job's usual save fits into its grace period; for a job that has not saved yet this is
    assumed."""
    return job.saving.checkpoint is None or job.saving.checkpoint.usual_save_ms <= job.spec.grace_ms


def saved_s(job: JobState) -> float:
    """Ledger time in s up to which the running attempt's work is saved."""
    assert job.running_ms is not None, job.job_id
    return max(job.running_ms, 0 if job.saving.checkpoint is None else job.saving.checkpoint.at_ms) / 1_000


def fixed_cost_s(job: JobState) -> float:
    """The time-independent cost of stopping the job, ≥ 0: its usual save where it saves in time, and a launch
    as long as its last.

    Ideal: for every job, with all its work where it does not save. Departure: stopping a job that does not
    specify how it saves, or does not run yet, costs nothing, as in the sources of the orders: their published
    times are based on that.
    """
    if job.running_ms is None or not job.saves:
        return 0.0
    launch_ms = 0 if job.placed_ms is None else job.running_ms - job.placed_ms
    if job.saving.checkpoint is None or not saves_in_time(job):
        return launch_ms / 1_000
    return (launch_ms + job.saving.checkpoint.usual_save_ms) / 1_000


def loses(job: JobState) -> bool:
    """Whether a stop would lose the work since its checkpoint, so that its cost rises as it runs."""
    return job.running_ms is not None and job.saves and not saves_in_time(job)


def stop_cost_s(state: CellState, job: JobState) -> float:
    """The cost of stopping a running job now, ≥ 0: `fixed_cost_s`, and the work since its checkpoint if a
    save does not fit into its grace period."""
    if not job.saves:
        return 0.0
    lost_s = state.now_ms / 1_000 - saved_s(job) if loses(job) else 0.0
    return fixed_cost_s(job) + lost_s
