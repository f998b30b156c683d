"""Groups of interleaved jobs: they hold the same GPUs and cores on the same nodes, task by task, and use them
in turns."""

from typing import Annotated

from msgspec import Meta

from penstock.model.nouns.types import Identifier, Milliseconds, ShortText, Value
from penstock.model.schema.event import Event, event

MAX_GROUP_MEMBERS = 4  # Muri §4: four resources, so a fifth member would find each of them in use
SPEED_STEP = 1.25
"""A node reports the part of its steps in which a member does not wait where that has changed by this factor
since the last report: what was reported is at most so far from the truth. Windows of 2 s, in which a member
has some ten iterations, differ by less."""


class Turns(Value, frozen=True, kw_only=True):
    """How the members of a group take turns, as predicted when it was formed. Source: Muri §4.1."""

    OMITTED = ("alternative",)

    job_ids: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GROUP_MEMBERS)]
    """All members in the order of the rotation:
    while the first uses storage the second uses the CPU, and so on."""
    period_ms: Annotated[float, Meta(gt=0, le=1e12)]
    """Period in which each member does one iteration: T of eq. 3."""
    efficiency: Annotated[float, Meta(ge=0, le=1)]
    """γ of eq. 4: the share of the period in which a resource is used, mean of the four resources."""
    speeds: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=4)], ...], Meta(min_length=1, max_length=MAX_GROUP_MEMBERS)
    ]
    """Speed of each job in `job_ids`, relative to its speed alone; above 1 only where an iteration alone has
    idle time."""
    alternative: ShortText = ""
    """Alternative that was considered, and by how much it is worse; for display."""

    def __post_init__(self) -> None:
        if len(self.job_ids) != len(self.speeds):
            raise ValueError(f"speeds: {len(self.speeds)} for {len(self.job_ids)} members; give one of each")


@event
class GroupDecided(Event, frozen=True, kw_only=True):
    """These jobs share the GPUs and cores of their tasks from now on, rank by rank. Members that run already
    are not restarted; waiting ones are placed in the same record (`PlacementDecided.group`).

    A member leaves when its attempt ends. When one member is left, it has the GPUs alone and the group is
    dissolved.
    """

    TYPE = "penstock.group.decided"
    OMITTED = ("turns",)

    group_id: Identifier
    job_ids: Annotated[tuple[Identifier, ...], Meta(min_length=2, max_length=MAX_GROUP_MEMBERS)]
    """All members, without those that are being stopped; members that run already come first."""
    by: ShortText
    """The proposer."""
    reason: ShortText
    turns: Turns | None = None
    """None: the proposer made no prediction."""


class Shortfall(Value, frozen=True, kw_only=True):
    """A member of a group that has been slower than its plan promised."""

    job_id: Identifier
    promised: Annotated[float, Meta(ge=0, le=4)]
    """Speed relative to its speed alone."""
    measured: Annotated[float, Meta(ge=0, le=1)]
    """Part of its time in which it did not wait for turns, as it last reported it."""


class KindsApart(Value, frozen=True, kw_only=True):
    """Two kinds of jobs that share no GPUs in turns for a time."""

    one: ShortText
    other: ShortText
    """Kinds as `penstock.ledger.state.apart.kind_of` names them; may be equal."""


@event
class GroupDissolved(Event, frozen=True, kw_only=True):
    """Members of this group have been slower than their plan promised for a minute: the jobs in `leaves` are
    stopped, save, and queue again. No group is formed of `apart` until `until_ms`."""

    TYPE = "penstock.group.dissolved"

    group_id: Identifier
    job_ids: Annotated[tuple[Identifier, ...], Meta(min_length=2, max_length=MAX_GROUP_MEMBERS)]
    """Its members that run, oldest first."""
    short: Annotated[tuple[Shortfall, ...], Meta(min_length=1, max_length=MAX_GROUP_MEMBERS)]
    leaves: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GROUP_MEMBERS)]
    apart: Annotated[tuple[KindsApart, ...], Meta(max_length=MAX_GROUP_MEMBERS)]
    until_ms: Milliseconds
    """Ledger time."""
    reason: ShortText
