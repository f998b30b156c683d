"""Fold of slowdowns: run time that members of a group have lost to interleaving, by the speeds that their
plan predicts (`penstock.model.decisions.groups.Turns`).

Counted since the job last reported, or the estimator last answered, the remaining time; else since its first
start.
"""

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.job.progress import Pace


def slowed_ms(job: JobState, now_ms: int) -> float:
    """Run time lost compared with running alone, in ms;
    negative where the group is predicted to be faster."""
    pace = job.pace
    if pace.speed == 1.0 or job.running_ms is None:
        return pace.slowed_ms
    return pace.slowed_ms + (1.0 - pace.speed) * max(0, now_ms - max(pace.since_ms, job.running_ms))


def set_speed(job: JobState, speed: float, now_ms: int) -> None:
    """Sets the job's speed from now on, relative to running alone."""
    job.pace = Pace(speed, now_ms, slowed_ms(job, now_ms))


def left_is_known(job: JobState, now_ms: int) -> None:
    """Resets the count: the job's remaining time was reported or estimated as of now."""
    job.pace = Pace(job.pace.speed, now_ms)
