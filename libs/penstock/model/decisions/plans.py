"""Adopted plan of a cell: nodes reserved for waiting gangs, until stops are proven or running jobs have
ended; batch windows."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.decisions.groups import MAX_GROUP_MEMBERS, Turns
from penstock.model.nouns.types import MAX_GANG_TASKS, Identifier, Milliseconds, ShortText, Value
from penstock.model.schema.event import Event, event

MAX_UNITS = MAX_GANG_TASKS
MAX_PROPOSED_UNITS = 256
MAX_PLANNED_STOPS = 512


class UnitRef(Value, frozen=True, kw_only=True):
    """A unit of a proposed plan."""

    proposer: Identifier
    proposal_id: Identifier
    unit: Annotated[int, Meta(ge=0, lt=MAX_PROPOSED_UNITS)]
    """Index in the plan, from 0."""


class Waiting(Value, frozen=True, kw_only=True):
    """A unit of a proposed plan that waits for stops."""

    OMITTED = ("explanation", "valid_until_ms", "group", "turns")

    of: UnitRef
    jobs: Annotated[int, Meta(ge=1, le=MAX_UNITS)]
    """Number of jobs that start together."""
    explanation: ShortText = ""
    """Explanation of the unit; only at its first job."""
    valid_until_ms: Milliseconds | None = None
    """Ledger time after which the unit does not start."""
    group: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GROUP_MEMBERS - 1)] | None = None
    """Running members of the group that the unit is to form; empty where all members wait. None: its jobs
    share no GPUs."""
    turns: Turns | None = None
    """Turns of that group; only at the unit's first job."""


class PlanUnit(Value, frozen=True, kw_only=True):
    """A gang that starts as a whole, and the nodes reserved for it."""

    OMITTED = ("expected_ms", "proposed")

    job_id: Identifier
    nodes: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Per task in rank order: workers, then parameter servers."""
    expected_ms: Milliseconds | None = None
    """Ledger time at which the jobs there are expected to have ended: a job that ends before it may be
    backfilled there. None: they are being stopped."""
    proposed: Waiting | None = None
    """None: the unit is planned by the profile."""


@event
class PlanAdopted(Event, frozen=True, kw_only=True):
    """Nodes are reserved for these gangs. The plan replaces the one adopted before: units of that plan that
    have not started are given up.

    A gang leaves the plan when it starts or its job ends. Gangs of one unit of a proposed plan are adjacent.
    """

    TYPE = "penstock.plan.adopted"

    units: Annotated[tuple[PlanUnit, ...], Meta(max_length=MAX_UNITS)] = ()


@event
class BatchWindowOpened(Event, frozen=True, kw_only=True):
    """Jobs arrive fast: waiting jobs are not placed one by one until a plan is answered
    or the window ends."""

    TYPE = "penstock.batch_window.opened"

    until_ms: Milliseconds
    """End of the window, in ledger time."""


@event
class BatchWindowClosed(Event, frozen=True, kw_only=True):
    """Waiting jobs are placed one by one again."""

    TYPE = "penstock.batch_window.closed"

    reason: Literal["answered", "over"]
    """answered: a proposed plan was answered. over: no plan arrived in time."""
