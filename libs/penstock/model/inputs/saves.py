"""Event of requests to save that no process of a task took."""

from penstock.model.inputs.external_events import CountedTaskEvent
from penstock.model.nouns.types import Milliseconds, ShortText
from penstock.model.schema.event import event


@event
class SaveRefused(CountedTaskEvent, frozen=True, kw_only=True):
    """A running task was asked to save a checkpoint, or is being stopped, and no process of it saves: its
    work since the last checkpoint is lost with it."""

    TYPE = "penstock.save.refused"
    OMITTED = ("said",)

    at_ms: Milliseconds
    reason: ShortText
    """With the remedy."""
