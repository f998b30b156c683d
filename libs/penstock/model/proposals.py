"""Proposals of other services: plans, migrations, cores, bandwidth. The placer answers each one (LAW 1)."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.decisions.adjustments import AdjustmentCause
from penstock.model.decisions.groups import Turns
from penstock.model.decisions.ledger_events import MAX_RANKS, JobRank
from penstock.model.decisions.moves import MoveCause
from penstock.model.decisions.plans import MAX_PLANNED_STOPS, MAX_PROPOSED_UNITS
from penstock.model.nouns.types import MAX_GANG_TASKS, Identifier, Milliseconds, ShortText, Value
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import MAX_PLAN_BYTES, Topic

MAX_UNIT_JOBS = 256
ANSWER_WITHIN_MS = 10_000
"""A proposal without an answer for this long, in ledger time, has not reached the placer."""


class ReadVersion(Value, frozen=True, kw_only=True):
    """A version of a job or node that a proposal was computed from;
    if it has changed, the proposal conflicts."""

    kind: Literal["job", "node"]
    id: Identifier
    version: Annotated[int, Meta(ge=0)]


class ProposedJob(Value, frozen=True, kw_only=True):
    """A waiting job and the nodes of its whole gang. GPUs and cores are chosen when it is committed."""

    job_id: Identifier
    nodes: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Per task in rank order: workers, then parameter servers. A moldable job has as many workers as nodes
    are named."""


class ProposedUnit(Value, frozen=True, kw_only=True):
    """Jobs that start together or not at all."""

    OMITTED = ("kind", "turns")

    jobs: Annotated[tuple[ProposedJob, ...], Meta(min_length=1, max_length=MAX_UNIT_JOBS)]
    explanation: ShortText
    """Reason for this placement, for display; `why` shows it for each of the jobs."""
    kind: Literal["solo", "group"] = "solo"
    """solo: each job has GPUs and cores of its own. group: the jobs share them."""
    turns: Turns | None = None
    """For a group: how its members are predicted to take turns. None: not predicted."""


class Proposal(Event, frozen=True, kw_only=True):
    """Base of proposals: the placer answers each one with `ProposalAnswered` (LAW 1)."""

    TOPIC = Topic.PROPOSALS

    proposal_id: Identifier
    proposer: Identifier
    read: Annotated[tuple[ReadVersion, ...], Meta(max_length=2_048)] = ()


@event
class PlanProposed(Proposal, frozen=True, kw_only=True):
    """Proposal to start these waiting jobs on these nodes. Each unit is answered separately, in this order.

    Under a profile with a regroup stage running jobs may be stopped for it: they wait again, or start
    elsewhere as members of its units.
    """

    TYPE = "penstock.plan.proposed"
    VERSION = 2
    MAX_BYTES = MAX_PLAN_BYTES
    OMITTED = ("valid_until_ms", "stops", "ranks")

    units: Annotated[tuple[ProposedUnit, ...], Meta(max_length=MAX_PROPOSED_UNITS)]
    valid_until_ms: Milliseconds | None = None
    """Ledger time after which no unit of the plan starts. None: it does not expire."""
    stops: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_PLANNED_STOPS)] = ()
    """Ids of running jobs to stop: each saves its progress and queues again."""
    ranks: Annotated[tuple[JobRank, ...], Meta(max_length=MAX_RANKS)] = ()
    """Changes of the regroup stage's own order, stored for its next plan."""


@event
class MigrationProposed(Proposal, frozen=True, kw_only=True):
    """Proposal to stop this running job, which saves its progress, and to start it on these nodes. GPUs and
    cores are chosen when it is committed.

    With cause `converged` and the nodes on which it runs: it stays there, and is not evaluated by its
    convergence again.
    """

    TYPE = "penstock.migration.proposed"
    VERSION = 2
    OMITTED = ("by", "cause")

    job_id: Identifier
    nodes: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Per task in rank order: workers, then parameter servers."""
    reason: ShortText
    by: ShortText = ""
    """The operator who asks for it, as `Operator`; empty: the proposer decided by itself."""
    cause: MoveCause = ""


@event
class CoresProposed(Proposal, frozen=True, kw_only=True):
    """Proposal to give a running task this number of cores."""

    TYPE = "penstock.cores.proposed"
    OMITTED = ("by", "cause")

    task_id: Identifier
    cores: Annotated[int, Meta(ge=1, le=1_024)]
    reason: ShortText
    by: ShortText = ""
    """The operator who asks for it, as `Operator`; empty: the proposer decided by itself."""
    cause: AdjustmentCause = ""


@event
class ThrottleProposed(Proposal, frozen=True, kw_only=True):
    """Proposal to cap a task's memory bandwidth (`Isolation.bandwidth`: how); None lifts the cap. Source:
    CODA §5c."""

    TYPE = "penstock.throttle.proposed"
    OMITTED = ("by", "cause")

    task_id: Identifier
    memory_bandwidth_percent: Annotated[int, Meta(ge=1, le=100)] | None
    reason: ShortText
    by: ShortText = ""
    """The operator who asks for it, as `Operator`; empty: the proposer decided by itself."""
    cause: AdjustmentCause = ""
