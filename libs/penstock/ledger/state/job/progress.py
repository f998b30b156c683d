"""How far a job is: the runs that are over, what it has reported, and what is left by the estimator."""

from typing import NamedTuple

from penstock.ledger.state.job.remaining import Remaining
from penstock.model.nouns.types import Value

MAX_RUNS = 16  # of a job, so that one that is preempted without end does not grow the state


class Run(NamedTuple):
    """The time in which all tasks of an attempt ran, until it ended or was to stop: ledger times, `began_ms`
    ≤ `ended_ms`."""

    attempt: int
    began_ms: int
    ended_ms: int


class Progress(Value, frozen=True):
    """Written by `evolve_jobs`, of all attempts together."""

    attained_s: float | None = None
    """Run time of all attempts together, as the job last reported it. None: no report; see
    `penstock.scheduling.remaining_time`."""
    remaining_s: float | None = None
    at_ms: int = 0
    """Ledger time of its last progress report."""
    attempt: int = 0
    """Its latest attempt at that time."""
    eta: Remaining | None = None
    """The estimator's latest answer. None: there is none, or the job itself has reported `remaining_s`
    since."""
    served_ms: int = 0
    """Total run time of earlier attempts."""
    runs: tuple[Run, ...] = ()
    """The latest `MAX_RUNS` runs that are over, oldest first; none of an attempt that never ran."""


class Pace(Value, frozen=True):
    """Speed relative to running alone, and what sharing has cost (`penstock.ledger.derived.speed`)."""

    speed: float = 1.0
    """As the plan of the job's group predicts it."""
    since_ms: int = 0
    """Ledger time from which `speed` applies."""
    slowed_ms: float = 0.0
    """Run time lost to sharing until then, compared with running alone."""


NO_PROGRESS, FULL_SPEED = Progress(), Pace()
