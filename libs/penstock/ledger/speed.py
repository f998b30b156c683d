"""Fold of slowdowns: how much time members of a group have lost to taking turns, by the speeds that their plan predicts (`penstock.model.groups.Turns`).

Counted since the job last said, or the estimator last answered, what is left of it; else since its first start.
"""

from penstock.ledger.job_state import JobState


def slowed_ms(job: JobState, now_ms: int) -> float:
    """What it would have done more alone, in ms; negative where it is predicted to be faster."""
    if job.speed == 1.0 or job.running_ms is None:
        return job.slowed_ms
    return job.slowed_ms + (1.0 - job.speed) * max(0, now_ms - max(job.speed_ms, job.running_ms))


def set_speed(job: JobState, speed: float, now_ms: int) -> None:
    """From now on it runs at this speed, relative to alone."""
    job.slowed_ms = slowed_ms(job, now_ms)
    job.speed, job.speed_ms = speed, now_ms


def left_is_known(job: JobState, now_ms: int) -> None:
    """What is left of it was reported, or answered, as of now."""
    job.slowed_ms, job.speed_ms = 0.0, now_ms
