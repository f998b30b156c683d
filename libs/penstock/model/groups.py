"""Groups: jobs that hold the same GPUs and cores on the same nodes, task by task, and run on them in turns."""

from typing import Annotated

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.types import Identifier, ShortText

MAX_GROUP_MEMBERS = 4  # Muri §4: four resources, so a fifth member would find each of them taken


@event
class GroupDecided(Event, frozen=True, kw_only=True):
    """These jobs share the GPUs and cores of their tasks from now on, rank by rank. Who of them runs already is not restarted; who
    waits is placed in the same record (`PlacementDecided.group`).

    A member leaves when its attempt is over. The last one has the GPUs alone, and the group is no more.
    """

    TYPE = "penstock.group.decided"

    group_id: Identifier
    job_ids: Annotated[tuple[Identifier, ...], Meta(min_length=2, max_length=MAX_GROUP_MEMBERS)]
    """All its members, without those that are being stopped; who runs already stands first."""
    by: ShortText
    """The proposer."""
    reason: ShortText
