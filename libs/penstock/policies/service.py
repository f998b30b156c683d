"""How long a job has run and how long it still needs, as far as the ledger knows.

Ideal: the job reports it (`WorkProgressed`). Departure, for jobs that never report: the time since all of its tasks
run, and the estimate of its run time less that. Seconds, real: thresholds are judged on them.
"""

from math import inf

from penstock.ledger.state import CellState, JobState


def attained_s(state: CellState, job: JobState) -> float:
    """Time that the job has run, all attempts together, ≥ 0."""
    if job.attained_s is None:
        running_ms = job.running_ms
        return (job.served_ms + (0 if running_ms is None else state.now_ms - running_ms)) / 1_000
    return job.attained_s + _since(state, job, job.progress_ms) / 1_000


def remaining_s(state: CellState, job: JobState) -> float:
    """Time that the job still needs, ≥ 0; infinite without a report and an estimated run time."""
    if job.remaining_s is not None:
        if job.running_ms is None or job.progress_ms == state.now_ms:
            return job.remaining_s
        left_s = job.remaining_s - _since(state, job, job.progress_ms) / 1_000
        return left_s if left_s > 0 else 0.0
    if job.estimate is None or job.estimate.run_ms is None:
        return inf
    left_s = job.estimate.run_ms / 1_000 - attained_s(state, job)
    return left_s if left_s > 0 else 0.0


def _since(state: CellState, job: JobState, progress_ms: int) -> int:
    """Run time in the current attempt after `progress_ms`. The ledger's time never goes back."""
    running_ms = job.running_ms
    if running_ms is None:
        return 0
    return state.now_ms - (running_ms if running_ms > progress_ms else progress_ms)
