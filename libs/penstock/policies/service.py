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
    since_ms = job.running_ms
    if since_ms is None:
        return job.attained_s
    return job.attained_s + (state.now_ms - max(since_ms, job.progress_ms)) / 1_000


def remaining_s(state: CellState, job: JobState) -> float:
    """Time that the job still needs, ≥ 0; infinite without a report and an estimated run time."""
    if job.remaining_s is not None:
        since_ms = job.running_ms
        if since_ms is None:
            return job.remaining_s
        if job.progress_ms > since_ms:
            since_ms = job.progress_ms
        left_s = job.remaining_s - (state.now_ms - since_ms) / 1_000
        return left_s if left_s > 0 else 0.0
    if job.estimate is None or job.estimate.run_ms is None:
        return inf
    left_s = job.estimate.run_ms / 1_000 - attained_s(state, job)
    return left_s if left_s > 0 else 0.0
