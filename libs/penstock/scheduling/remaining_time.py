"""Attained and remaining run time of a job, by the ledger.

Ideal: the job reports them (`WorkProgressed`). Departures, for jobs that do not report the remaining time:
the estimator's answer from their steps (`EtaEstimated`); else the estimated run time less the time since all
tasks run. A member of a group is slower than alone, as its plan predicts; `remaining_s` is its remaining time
when running alone. Seconds as real numbers, since thresholds are compared with them.
"""

from math import inf
from typing import Protocol

from penstock.ledger.derived.speed import slowed_ms
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import Estimate

ROUNDING = 1e-9  # gains, and relative differences of sums of times, up to this may be rounding errors alone


def attained_s(state: CellState, job: JobState) -> float:
    """Run time of the job, all attempts together, ≥ 0."""
    progress, since_ms = job.progress, job.running_ms
    if progress.attained_s is None:
        return received_s(state, job)
    if since_ms is None:
        return progress.attained_s
    return progress.attained_s + (state.now_ms - max(since_ms, progress.at_ms)) / 1_000


def received_s(state: CellState, job: JobState) -> float:
    """Time for which the job has had its resources, all attempts together, ≥ 0, by the ledger's clock: unlike
    `attained_s` it never falls, also where a job that was stopped had not reported what it had done since its
    start."""
    running_ms = job.running_ms
    return (job.progress.served_ms + (0 if running_ms is None else state.now_ms - running_ms)) / 1_000


def remaining_s(state: CellState, job: JobState) -> float:
    """Remaining time of the job, ≥ 0; infinite without a report, an answer or an estimated run time."""
    if (progress := job.progress).remaining_s is not None:
        since_ms = job.running_ms
        if since_ms is None:
            return progress.remaining_s
        if progress.at_ms > since_ms:
            since_ms = progress.at_ms
        left_s = progress.remaining_s - (state.now_ms - since_ms - slowed_ms(job, state.now_ms)) / 1_000
        return left_s if left_s > 0 else 0.0
    if (eta := progress.eta) is not None:
        left_ms = eta.left_ms.middle - eta.passed_ms(job.running_ms, state.now_ms)
        left_ms += slowed_ms(job, state.now_ms)
        return left_ms / 1_000 if left_ms > 0 else 0.0
    if (estimate := job.estimate) is None or estimate.run_ms is None:
        return inf
    run_ms = _shaped_ms(job, estimate) if estimate.options else estimate.run_ms
    left_s = (run_ms + slowed_ms(job, state.now_ms)) / 1_000 - attained_s(state, job)
    return left_s if left_s > 0 else 0.0


def ends_s(job: JobState) -> float | None:
    """Ledger time in s at which a running job's remaining time will be 0 at its present speed, unless it
    reports again; None while it does not run.

    Consistent with `remaining_s`, and infinite where that is. It is compared, so equal inputs give bitwise
    equal results.
    """
    running_ms, pace = job.running_ms, job.pace
    if running_ms is None:
        return None
    end_s = _ends_alone_s(job, running_ms)
    if pace.speed == 1.0:
        return end_s + pace.slowed_ms / 1_000 if pace.slowed_ms else end_s
    since_ms = max(pace.since_ms, running_ms)
    return (end_s + (pace.slowed_ms - (1.0 - pace.speed) * since_ms) / 1_000) / pace.speed


def _ends_alone_s(job: JobState, running_ms: int) -> float:
    """As `ends_s`, if sharing GPUs had never delayed the job."""
    since_ms = max(running_ms, job.progress.at_ms)
    if (progress := job.progress).remaining_s is not None:
        return progress.remaining_s + since_ms / 1_000
    if (eta := progress.eta) is not None:
        return (eta.left_ms.middle + max(eta.at_ms, running_ms)) / 1_000
    if (estimate := job.estimate) is None or estimate.run_ms is None:
        return inf
    run_ms = _shaped_ms(job, estimate) if estimate.options else estimate.run_ms
    if progress.attained_s is not None:
        return (run_ms + since_ms) / 1_000 - progress.attained_s
    return (run_ms + since_ms - progress.served_ms) / 1_000


def _shaped_ms(job: JobState, estimate: Estimate) -> float:
    """Run time with the attempt's workers, of a moldable job whose steps are known."""
    found = estimate.run_ms_with(job.workers, job.spec.fewest_workers)
    return inf if found is None else found


class Key(Protocol):
    """Sort key, ≥ 0; the smallest runs first. `cost_s` is subtracted from the time that the job needs, down
    to 0."""

    def __call__(self, state: CellState, job: JobState, cost_s: float = 0.0) -> float: ...


def gpus_of(job: JobState) -> int:
    """GPUs of the whole gang. Only for jobs with an estimate."""
    assert job.estimate is not None, f"{job.job_id} has no estimate yet"
    return job.workers * job.estimate.worker.gpus
