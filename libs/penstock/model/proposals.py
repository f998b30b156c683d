"""Proposals of other services: plans, migrations, cores, bandwidth. The placer answers each one (LAW 1)."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.topics import Topic
from penstock.model.types import Identifier, ShortText, TaskPlacement, Value


class ReadVersion(Value, frozen=True, kw_only=True):
    """A version that a proposal was computed from; if it has moved on, the proposal conflicts."""

    kind: Literal["job", "node"]
    id: Identifier
    version: Annotated[int, Meta(ge=0)]


class JobPlan(Value, frozen=True, kw_only=True):
    """One job's whole placement inside a plan."""

    job_id: Identifier
    tasks: Annotated[tuple[TaskPlacement, ...], Meta(min_length=1, max_length=512)]


class Proposal(Event, frozen=True, kw_only=True):
    """Base of proposals: the placer answers each one with `ProposalAnswered` (LAW 1)."""

    TOPIC = Topic.PROPOSALS

    proposal_id: Identifier
    proposer: Identifier
    read: Annotated[tuple[ReadVersion, ...], Meta(max_length=2_048)] = ()


@event
class PlanProposed(Proposal, frozen=True, kw_only=True):
    """Place these waiting jobs so, all or nothing: a batch plan, or a group that shares GPUs."""

    TYPE = "penstock.plan.proposed"

    kind: Literal["batch", "group"]
    plans: Annotated[tuple[JobPlan, ...], Meta(min_length=1, max_length=256)]


@event
class MigrationProposed(Proposal, frozen=True, kw_only=True):
    """Checkpoint this running job, stop it and start it at these places."""

    TYPE = "penstock.migration.proposed"

    plan: JobPlan
    reason: ShortText


@event
class CoresProposed(Proposal, frozen=True, kw_only=True):
    """Give a running task so many cores."""

    TYPE = "penstock.cores.proposed"

    task_id: Identifier
    cores: Annotated[int, Meta(ge=1, le=1_024)]
    reason: ShortText


@event
class ThrottleProposed(Proposal, frozen=True, kw_only=True):
    """Cap a task's memory bandwidth; None lifts the cap. Source: CODA §5c."""

    TYPE = "penstock.throttle.proposed"

    task_id: Identifier
    memory_bandwidth_percent: Annotated[int, Meta(ge=1, le=100)] | None
    reason: ShortText
