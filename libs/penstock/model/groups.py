"""Groups of interleaved jobs: they hold the same GPUs and cores on the same nodes, task by task, and use them in turns."""

from typing import Annotated

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.types import Identifier, ShortText, Value

MAX_GROUP_MEMBERS = 4  # Muri §4: four resources, so a fifth member would find each of them in use


class Turns(Value, frozen=True, kw_only=True):
    """How the members of a group take turns, as predicted when it was formed. Source: Muri §4.1."""

    OMITTED = ("alternative",)

    job_ids: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GROUP_MEMBERS)]
    """All members in the order of the rotation: while the first uses storage the second uses the CPU, and so on."""
    period_ms: Annotated[float, Meta(gt=0, le=1e12)]
    """Period in which each member does one iteration: T of eq. 3."""
    efficiency: Annotated[float, Meta(ge=0, le=1)]
    """γ of eq. 4: the share of the period in which a resource is used, mean of the four resources."""
    speeds: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=4)], ...], Meta(min_length=1, max_length=MAX_GROUP_MEMBERS)
    ]
    """Speed of each job in `job_ids`, relative to its speed alone; above 1 only where an iteration alone has idle time."""
    alternative: ShortText = ""
    """Alternative that was considered, and by how much it is worse; for display."""

    def __post_init__(self) -> None:
        if len(self.job_ids) != len(self.speeds):
            raise ValueError(f"speeds: {len(self.speeds)} for {len(self.job_ids)} members; give one of each")


@event
class GroupDecided(Event, frozen=True, kw_only=True):
    """These jobs share the GPUs and cores of their tasks from now on, rank by rank. Members that run already are not restarted;
    waiting ones are placed in the same record (`PlacementDecided.group`).

    A member leaves when its attempt ends. When one member is left, it has the GPUs alone and the group is dissolved.
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
