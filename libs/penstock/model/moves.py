"""Moves of running jobs: the placer's decision with the target that is kept for the job, and why a target was given up."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.external_events import Attempt
from penstock.model.types import MAX_GANG_TASKS, Identifier, ShortText, TaskPlacement

MAX_MIGRATIONS = 4
"""Of one job, by services: a policy that errs, or telemetry that misleads it, costs a job no more restarts than these."""
MoveCause = Literal["", "converged", "rebalance", "faster", "other"]
"""Why a service moves a job. `converged`: its loss falls slower and slower, and others on its node gain more (SpeCon Alg. 2), once per job;
`rebalance`: all have converged, and nodes are unevenly full (SpeCon Alg. 3), once per job; `faster`: all in all jobs end earlier, by more than the
move costs; `other`: it names none. All together at most `MAX_MIGRATIONS` times. Empty: an operator asks for it."""


@event
class MoveDecided(Event, frozen=True, kw_only=True):
    """A running job is to go on elsewhere; `StopDecided` follows. No other job gets the target until the job is there, ends or gives it up."""

    TYPE = "penstock.move.decided"
    OMITTED = ("cause",)

    job_id: Identifier
    attempt: Attempt
    """The one that is stopped."""
    tasks: Annotated[tuple[TaskPlacement, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Of the next attempt, in rank order."""
    by: ShortText
    """The operator who asked for it, else the proposer."""
    reason: ShortText
    cause: MoveCause = ""


@event
class JobConverged(Event, frozen=True, kw_only=True):
    """A running job's place was judged by its convergence, once and for all: it moves (`MoveDecided` follows) or stays. Source: SpeCon Alg. 2,
    lines 9 and 15."""

    TYPE = "penstock.job.converged"

    job_id: Identifier
    attempt: Attempt
    moves: bool
    by: ShortText
    """The proposer."""
    reason: ShortText


@event
class MoveGivenUp(Event, frozen=True, kw_only=True):
    """The target can no longer be used: others get what was kept of it, and the job queues once it has stopped."""

    TYPE = "penstock.move.given_up"

    job_id: Identifier
    attempt: Attempt
    reason: ShortText
