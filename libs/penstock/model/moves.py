"""Moves of running jobs: the placer's decision with the target that is kept for the job, and why a target was given up."""

from typing import Annotated

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.external_events import Attempt
from penstock.model.types import MAX_GANG_TASKS, Identifier, ShortText, TaskPlacement


@event
class MoveDecided(Event, frozen=True, kw_only=True):
    """A running job is to go on elsewhere; `StopDecided` follows. Nobody else gets the target until the job is there, ends or gives it up."""

    TYPE = "penstock.move.decided"

    job_id: Identifier
    attempt: Attempt
    """The one that is stopped."""
    tasks: Annotated[tuple[TaskPlacement, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Of the next attempt, in rank order."""
    by: ShortText
    """The operator who asked for it, else the proposer."""
    reason: ShortText


@event
class MoveGivenUp(Event, frozen=True, kw_only=True):
    """The target can no longer be used: others get what was kept of it, and the job queues once it has stopped."""

    TYPE = "penstock.move.given_up"

    job_id: Identifier
    attempt: Attempt
    reason: ShortText
