"""Migration of running jobs: the placer's decision with the target reserved for the job, and the release of a
target."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.inputs.external_events import Attempt
from penstock.model.nouns.types import (
    MAX_GANG_TASKS,
    Identifier,
    Milliseconds,
    ShortText,
    TaskPlacement,
    Value,
)
from penstock.model.schema.event import Event, event

MAX_MIGRATIONS = 4
"""Maximum number of migrations of one job by services: a faulty policy or misleading telemetry costs a job no
more restarts."""
MoveCause = Literal["", "converged", "rebalance", "faster", "other"]
"""Why a service moves a job. `converged`: its loss falls ever more slowly, and other jobs on its node gain
more (SpeCon Alg. 2), once per job; `rebalance`: all jobs have converged, and nodes are unevenly loaded
(SpeCon Alg. 3), once per job; `faster`: the sum of completion times falls by more than the move costs;
`other`: the service names no cause. At most `MAX_MIGRATIONS` in total. Empty: an operator requested it."""


@event
class MoveDecided(Event, frozen=True, kw_only=True):
    """A running job is moved to other nodes; `StopDecided` follows. The target is reserved until the job is
    there, ends or gives it up."""

    TYPE = "penstock.move.decided"
    OMITTED = ("cause",)

    job_id: Identifier
    attempt: Attempt
    """The attempt that is stopped."""
    tasks: Annotated[tuple[TaskPlacement, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Placements of the next attempt, in rank order."""
    by: ShortText
    """The operator who asked for it, else the proposer."""
    reason: ShortText
    cause: MoveCause = ""


@event
class JobConverged(Event, frozen=True, kw_only=True):
    """A running job's placement was evaluated by its convergence, once per job: it moves (`MoveDecided`
    follows) or stays. Source: SpeCon Alg. 2, lines 9 and 15."""

    TYPE = "penstock.job.converged"

    job_id: Identifier
    attempt: Attempt
    moves: bool
    by: ShortText
    """The proposer."""
    reason: ShortText


@event
class MoveGivenUp(Event, frozen=True, kw_only=True):
    """The target of a move can no longer be used: its reservation is released, and the job queues once it has
    stopped."""

    TYPE = "penstock.move.given_up"

    job_id: Identifier
    attempt: Attempt
    reason: ShortText


class Moved(Value, frozen=True, kw_only=True):
    """Origin of a moved job, and the cost of the move."""

    OMITTED = ("stop_ms", "lost_ms", "resumes_at")

    seq: Annotated[int, Meta(ge=1)]
    """Seq of the record with `MoveDecided`."""
    attempt: Attempt
    """The attempt that is stopped."""
    nodes: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Nodes of that attempt, per task in rank order."""
    stop_ms: Milliseconds | None = None
    """From the decision until the last exit was proven; None: it is being stopped."""
    lost_ms: Milliseconds | None = None
    """Work done before the decision that is repeated after the move; None: it is being stopped, or not
    known."""
    resumes_at: Annotated[int, Meta(ge=0)] | None = None
    """Iteration of the checkpoint from which the job resumes; None: no checkpoint, or one without an
    iteration."""
