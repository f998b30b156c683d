"""The plan that a cell has adopted: for whom nodes are kept, until stops are proven or running jobs have ended."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.groups import MAX_GROUP_MEMBERS, Turns
from penstock.model.types import MAX_GANG_TASKS, Identifier, Milliseconds, ShortText, Value

MAX_UNITS = MAX_GANG_TASKS
MAX_PROPOSED_UNITS = 256
MAX_PLANNED_STOPS = 512


class UnitRef(Value, frozen=True, kw_only=True):
    """A unit of a proposed plan."""

    proposer: Identifier
    proposal_id: Identifier
    unit: Annotated[int, Meta(ge=0, lt=MAX_PROPOSED_UNITS)]
    """Its place in the plan, from 0."""


class Waiting(Value, frozen=True, kw_only=True):
    """A unit of a proposed plan that waits for stops."""

    OMITTED = ("explanation", "valid_until_ms", "group", "turns")

    of: UnitRef
    jobs: Annotated[int, Meta(ge=1, le=MAX_UNITS)]
    """That start together."""
    explanation: ShortText = ""
    """Of the unit; only at its first job."""
    valid_until_ms: Milliseconds | None = None
    """By the ledger's clock: it does not start later."""
    group: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GROUP_MEMBERS - 1)] | None = None
    """Who runs already of the group that it is to form; none where all of its members wait. None: its jobs share nothing."""
    turns: Turns | None = None
    """Of that group; only at the unit's first job."""


class PlanUnit(Value, frozen=True, kw_only=True):
    """A gang that starts as a whole, and the nodes that are kept for it."""

    OMITTED = ("expected_ms", "proposed")

    job_id: Identifier
    nodes: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Per task in rank order: workers, then parameter servers."""
    expected_ms: Milliseconds | None = None
    """Ledger time at which the jobs there are expected to have ended: who ends before it may run there meanwhile. None: they are
    being stopped."""
    proposed: Waiting | None = None
    """None: by the profile."""


@event
class PlanAdopted(Event, frozen=True, kw_only=True):
    """For these gangs nodes are kept. It takes the place of the plan adopted before: what of that has not begun is given up.

    A gang is done with when it starts or its job ends. Those of a unit of a proposed plan stand side by side.
    """

    TYPE = "penstock.plan.adopted"

    units: Annotated[tuple[PlanUnit, ...], Meta(max_length=MAX_UNITS)] = ()


@event
class BatchWindowOpened(Event, frozen=True, kw_only=True):
    """Jobs arrive fast: those that wait are not placed one by one until a plan was answered, or the time is over."""

    TYPE = "penstock.batch_window.opened"

    until_ms: Milliseconds
    """By the ledger's clock."""


@event
class BatchWindowClosed(Event, frozen=True, kw_only=True):
    """Those that wait are placed as usual."""

    TYPE = "penstock.batch_window.closed"

    reason: Literal["answered", "over"]
    """answered: a proposed plan was. over: none came in time."""
