"""Fold of slowdowns: run time that members of a group have lost to interleaving, by the speeds that their
plan predicts (`penstock.model.decisions.groups.Turns`).

Counted since the job last reported, or the estimator last answered, the remaining time; else since its first
start.
"""

from penstock.ledger.state.job.job_state import JobState


def slowed_ms(job: JobState, now_ms: int) -> float:
    """Run time lost compared with running alone, in ms;
    negative where the group is predicted to be faster."""
    if job.speed == 1.0 or job.running_ms is None:
        return job.slowed_ms
    return job.slowed_ms + (1.0 - job.speed) * max(0, now_ms - max(job.speed_ms, job.running_ms))


def set_speed(job: JobState, speed: float, now_ms: int) -> None:
    """Sets the job's speed from now on, relative to running alone."""
    job.slowed_ms = slowed_ms(job, now_ms)
    job.speed, job.speed_ms = speed, now_ms


def left_is_known(job: JobState, now_ms: int) -> None:
    """Resets the count: the job's remaining time was reported or estimated as of now."""
    job.slowed_ms, job.speed_ms = 0.0, now_ms
