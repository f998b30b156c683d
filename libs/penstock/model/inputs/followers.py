"""Followers of jobs: reports about the connections by which a pipeline follows a job that is tied to it
(decision 138)."""

from typing import Annotated

from msgspec import Meta

from penstock.model.nouns.types import Identifier, Milliseconds
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import Topic

FOLLOWER_TIMER = "follower"
MAX_FOLLOWED = 256  # jobs of one stream: their ids fit the 64 KiB of a request's head
PIPELINE_GONE = "its pipeline is gone"
"""Beginning of the reason of a job that was cancelled for lack of a follower."""


@event
class FollowerChanged(Event, frozen=True, kw_only=True):
    """A gateway has the connection of a job's follower,
    or the gateway that had the connection has lost it."""

    TYPE = "penstock.job.follower_changed"
    TOPIC = Topic.JOBS
    OMITTED = ("silent_ms",)

    job_id: Identifier
    gateway: Identifier
    """The run of a gateway that has, or had, the connection."""
    connected: bool
    after: Annotated[int, Meta(ge=0)]
    """Ledger seq up to which the sender knew the job:
    a connection that was reported before a newer change is refused."""
    silent_ms: Milliseconds = 0
    """For how long there was no connection when the loss was reported."""
