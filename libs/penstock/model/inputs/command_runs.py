"""Event of commands that users run in running tasks (`penstock exec`)."""

from typing import Annotated

from msgspec import Meta

from penstock.model.nouns.types import Identifier, ShortText
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import Topic


@event
class JobCommandRun(Event, frozen=True, kw_only=True):
    """A user ran a command in a running task: as it began, and as it ended, with `exit_code` or `problem`."""

    TYPE = "penstock.job.command_run"
    TOPIC = Topic.JOBS
    OMITTED = ("exit_code", "problem", "by", "tenant")

    job_id: Identifier
    task_id: Identifier
    command: ShortText
    """As a shell would take it."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    """None: it began, or its end is not known."""
    problem: ShortText = ""
    """Why its end is not known."""
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """The caller may run commands in jobs of this tenant; None: in any job, as an operator may."""
