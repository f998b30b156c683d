"""Ledger events: the placer's decisions, and the record that carries them."""

import json
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.model.decisions.moves import Moved
from penstock.model.decisions.plans import MAX_PLANNED_STOPS, MAX_PROPOSED_UNITS, UnitRef
from penstock.model.decisions.refusals import Refused, StopRefused, UnitRefused
from penstock.model.inputs.external_events import Attempt, PublicKey, Token
from penstock.model.nouns.nodes import JoinRefusal
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.token import MAX_EPOCH
from penstock.model.nouns.types import MAX_DIGEST, Identifier, Milliseconds, ShortText, TaskPlacement, Value
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import Topic

MAX_RANK_LEVEL = 15
MAX_RANKS = 1_024  # changes of the queue in one event: a quarter of a record's maximum size
MAX_CANDIDATES = 5  # an explanation has the top five (`why`)


@event
class TermStarted(Event, frozen=True, kw_only=True):
    """A placer took over. Only its record may raise the term (LAW 3)."""

    TYPE = "penstock.term.started"
    OMITTED = ("code_version", "fold_version")

    term: Annotated[int, Meta(ge=1)]
    placer_id: Identifier
    settings: PlacerSettings
    code_version: ShortText = ""
    """Version of the package that decides this term's records; empty: not recorded."""
    fold_version: Annotated[int, Meta(ge=0)] = 0
    """Its `penstock.ledger.fold.evolve.FOLD_VERSION`; 0: not recorded."""


@event
class InputAccepted(Event, frozen=True, kw_only=True):
    """An operator accepts that an input topic is not the one that was answered so far: it was truncated or
    created anew.

    Follows the `TermStarted` of a term of its own.
    """

    TYPE = "penstock.input.accepted"

    topic: ShortText
    partition: Annotated[int, Meta(ge=0)]
    position: Annotated[int, Meta(ge=0)]
    """Offset of the next record to answer, before this event."""
    offset: Annotated[int, Meta(ge=0)]
    """Offset of the next record to answer, from now on."""
    end: Annotated[int, Meta(ge=0)]
    """End of the partition at that time."""
    reason: ShortText = ""


@event
class LedgerAccepted(Event, frozen=True, kw_only=True):
    """An operator accepts that this ledger has lost records: it was truncated, or restored from an older
    copy.

    Follows the `TermStarted` of a term of its own. No job is placed until every node has joined anew and its
    tasks of the lost records are dead.
    """

    TYPE = "penstock.ledger.accepted"

    epoch: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    """Epoch of all tokens from now on; higher than any before."""
    nodes_offset: Annotated[int, Meta(ge=0)]
    """End of the nodes' topic at that time: a joining before it gives no information about the lost
    records."""
    reason: ShortText = ""


@event
class PlacementDecided(Event, frozen=True, kw_only=True):
    """A gang's tasks get their places, all or nothing; the orders' token is (epoch, this record's seq)."""

    TYPE = "penstock.placement.decided"
    OMITTED = ("unit", "group", "after", "prelaunch", "borrows")

    job_id: Identifier
    attempt: Attempt
    tasks: Annotated[tuple[TaskPlacement, ...], Meta(min_length=1, max_length=512)]
    unit: UnitRef | None = None
    """Unit of a proposed plan that the job belongs to: all jobs of a unit are placed in one record."""
    group: Identifier | None = None
    """The job shares the GPUs of these places with the members of this group (`GroupDecided`); None: it has
    them alone."""
    after: Annotated[tuple[Identifier, ...], Meta(max_length=512)] = ()
    """Jobs that are being stopped or about to end, and still hold some of these GPUs and cores: this job's
    tasks start there as soon as theirs have ended."""
    prelaunch: bool = False
    """The tasks launch before these have ended, and wait for their GPUs where training begins
    (`JobSpec.prelaunch`)."""
    borrows: bool = False
    """The job has no GPUs, and some of its cores are reserved for jobs with GPUs: they may be reclaimed
    (`penstock.model.decisions.arrays`)."""


@event
class StopDecided(Event, frozen=True, kw_only=True):
    """The running attempt is to be stopped; nothing is freed before the exits are proven."""

    TYPE = "penstock.stop.decided"
    OMITTED = ("detail",)

    job_id: Identifier
    attempt: Attempt
    reason: Literal[
        "cancelled",
        "preempted",
        "run_timeout",
        "gang_member_failed",
        "migrated",
        "completed",
        "drained",
        "queue_timeout",
        "predecessor_late",
    ]
    """`completed`: every worker succeeded; the parameter servers are no longer needed. `drained`: its node is
    drained. `queue_timeout`: its start was not confirmed within its queue timeout. `predecessor_late`: a job
    that was to end before it did not, or not in time."""
    grace_ms: Annotated[int, Meta(ge=0)]
    detail: ShortText = ""
    """Why, in the words of the caller: the job's reason when it has ended."""


@event
class JobPreempted(Event, frozen=True, kw_only=True):
    """A running job is preempted for another one; it will queue again at its former place."""

    TYPE = "penstock.job.preempted"

    job_id: Identifier
    attempt: Attempt
    by_job_id: Identifier | None
    reason: ShortText


@event
class JobRequeued(Event, frozen=True, kw_only=True):
    """The attempt is over and there will be another: now, or not before `not_before_ms`."""

    TYPE = "penstock.job.requeued"
    OMITTED = ("estimate_again",)

    job_id: Identifier
    attempt: Attempt
    reason: Literal["failed", "node_lost", "preempted", "migrated", "refused", "drained", "predecessor_late"]
    not_before_ms: Milliseconds | None = None
    estimate_again: bool = False
    """The job ran out of memory under a cap that it had not requested: it queues after a new estimate, and
    the attempt does not count against its maximum."""


@event
class JobQueued(Event, frozen=True, kw_only=True):
    """The back-off of a job is over; it queues again."""

    TYPE = "penstock.job.queued"

    job_id: Identifier


@event
class JobFoundUnschedulable(Event, frozen=True, kw_only=True):
    """The job does not fit the cell even when it is empty; it ends unless a node joins in time.

    Ledgers of earlier versions write `JobFoundSchedulable` as this event with an empty reason.
    """

    TYPE = "penstock.job.found_unschedulable"

    job_id: Identifier
    reason: ShortText


@event
class JobFoundSchedulable(Event, frozen=True, kw_only=True):
    """An unschedulable job now fits the empty cell: a node joined or changed. It queues at its former
    place."""

    TYPE = "penstock.job.found_schedulable"

    job_id: Identifier


class JobRank(Value, frozen=True, kw_only=True):
    """A job's rank in a policy's own order; ranks are compared by level, chosen first, position."""

    job_id: Identifier
    level: Annotated[int, Meta(ge=0, le=MAX_RANK_LEVEL)]
    """Number of the policy's queue; 0 is served first."""
    chosen: bool
    """Whether the policy has chosen the job to run."""
    position: Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]


@event
class JobsRanked(Event, frozen=True, kw_only=True):
    """A policy moved these jobs within its queues; all others retain their ranks."""

    TYPE = "penstock.jobs.ranked"

    ranks: Annotated[tuple[JobRank, ...], Meta(min_length=1, max_length=MAX_RANKS)]


@event
class JobEnded(Event, frozen=True, kw_only=True):
    """The job has ended; none of its tasks runs any more."""

    TYPE = "penstock.job.ended"

    job_id: Identifier
    outcome: Literal[
        "succeeded", "failed", "cancelled", "timed_out_queued", "timed_out_running", "unschedulable"
    ]
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    reason: ShortText = ""


@event
class TaskLost(Event, frozen=True, kw_only=True):
    """A task is proven dead although its node never reported its exit (new boot id, node left)."""

    TYPE = "penstock.task.lost"

    task_id: Identifier
    node_id: Identifier
    reason: ShortText


class NodeFact(Event, frozen=True, kw_only=True):
    """Base of the placer's findings about one node."""

    node_id: Identifier


@event
class NodeLost(NodeFact, frozen=True, kw_only=True):
    """The node's departure is accepted; its tasks are dead."""

    TYPE = "penstock.node.lost"


@event
class NodeProbed(NodeFact, frozen=True, kw_only=True):
    """A suspect node is asked to join again; the token of the order is (epoch, this record's seq)."""

    TYPE = "penstock.node.probed"


@event
class ProbeExpired(NodeFact, frozen=True, kw_only=True):
    """A probe was in the log for the longest lease of its node's tasks plus a margin. `NodeLeft` with
    `lease_outlived` follows in the nodes' topic, unless the node's answer precedes it there."""

    TYPE = "penstock.node.probe_expired"

    probe: Token


@event
class NodeJoinRefused(NodeFact, frozen=True, kw_only=True):
    """A joining is refused, and its node is informed until one is accepted."""

    TYPE = "penstock.node.join_refused"
    OMITTED = ("public_key",)

    boot_id: Identifier
    incarnation: Token
    """Incarnation of the refused joining."""
    reason: JoinRefusal
    public_key: PublicKey | None = None
    """Key of that joining, where it was signed with another key than the node's."""


@event
class NodeRestored(NodeFact, frozen=True, kw_only=True):
    """A suspect node has reported again."""

    TYPE = "penstock.node.restored"


@event
class CellFrozen(Event, frozen=True, kw_only=True):
    """Most nodes vanished at once: no job is evicted and none is placed until they return (LAW 5)."""

    TYPE = "penstock.cell.frozen"

    reason: ShortText


@event
class CellThawed(Event, frozen=True, kw_only=True):
    """Enough nodes are back; placement resumes."""

    TYPE = "penstock.cell.thawed"

    reason: ShortText


@event
class ChoiceFailed(Event, frozen=True, kw_only=True):
    """A decision raised an exception and was not taken. The other events of its record are valid."""

    TYPE = "penstock.choice.failed"

    profile: Identifier
    """Profile of the policy that failed, or of the term in which the placer itself failed."""
    job_id: Identifier | None = None
    """The job to be placed. None: all further events of this record are missing."""
    error: ShortText
    """The last line of the traceback, and where it was raised."""


class TimerSubject(Value, frozen=True, kw_only=True):
    """Subject of a timer; enough to decide on firing whether the timer is still relevant."""

    kind: str
    """What it is for. Open: a reader keeps a kind that only a newer placer knows, and a placer ignores one
    when it fires, so that a new kind stops no version."""
    id: Identifier
    attempt: Annotated[int, Meta(ge=0)] = 0


@event
class TimerSet(Event, frozen=True, kw_only=True):
    """Sets a timer: `TimerFired` follows at or after `at_ms`. A timer about a job is cancelled when its
    condition no longer holds."""

    TYPE = "penstock.timer.set"

    timer_id: Identifier
    at_ms: Milliseconds
    about: TimerSubject


@event
class TimerFired(Event, frozen=True, kw_only=True):
    """A timer fired. An input without a topic: the placer's shell feeds it when the ledger's time has reached
    `at_ms`."""

    TYPE = "penstock.timer.fired"

    timer_id: Identifier


@event
class ProposalAnswered(Event, frozen=True, kw_only=True):
    """The placer's answer to a proposal: done as asked, or refused with the reason (LAW 1).

    Each unit of a plan is answered: it is started, waits until the stopped jobs have ended, or is refused.
    The plan is accepted if any unit is; else `reason` is that of the first one.
    """

    TYPE = "penstock.proposal.answered"
    OMITTED = ("started", "waiting", "refused", "stopped", "not_stopped", "copy_of")

    proposal_id: Identifier
    proposer: Identifier
    verdict: Literal["accepted", "refused"]
    reason: Literal["", Refused] = ""
    detail: ShortText = ""
    started: Annotated[int, Meta(ge=0, le=MAX_PROPOSED_UNITS)] = 0
    """Number of units of a plan that are started in this record."""
    waiting: Annotated[int, Meta(ge=0, le=MAX_PROPOSED_UNITS)] = 0
    """Number of units of a plan for which nodes are reserved (`PlanAdopted`)."""
    refused: Annotated[tuple[UnitRefused, ...], Meta(max_length=MAX_PROPOSED_UNITS)] = ()
    """Refused units of a plan, in its order."""
    stopped: Annotated[int, Meta(ge=0, le=MAX_PLANNED_STOPS)] = 0
    """Number of jobs that are stopped for units of the plan."""
    not_stopped: Annotated[tuple[StopRefused, ...], Meta(max_length=MAX_PLANNED_STOPS)] = ()
    """The other jobs that the plan names as stops, in its order."""
    copy_of: Annotated[int, Meta(ge=0)] = 0
    """Seq of the record that answered this proposal before, with the same verdict: a copy has no effect. 0:
    this is the first answer."""


class Candidate(Value, frozen=True, kw_only=True):
    """One way to place a job. `nodes`: per task in rank order; the winner comes first in a list."""

    nodes: tuple[Identifier, ...]
    score: float
    """As the profile computes it; the smaller the better."""


class PlacementExplanation(Value, frozen=True, kw_only=True):
    """Why a job was placed on its nodes; for a move also, in the record of the decision, why these are its
    target."""

    OMITTED = ("shape", "proposer", "reason", "moved")

    job_id: Identifier
    profile: Identifier
    candidates: Annotated[tuple[Candidate, ...], Meta(max_length=MAX_CANDIDATES)]
    margin: float | None
    """Score of the runner-up minus the winner's, ≥ 0; None without a runner-up."""
    feasible: Annotated[int, Meta(ge=0)]
    """Nodes on which the first task fits."""
    rejected: dict[str, int]
    """Nodes refused, counted by the first reason that holds (penstock.cluster.reasons)."""
    shape: ShortText = ""
    """How many workers a moldable job got, and why; empty for others."""
    proposer: ShortText = ""
    """Proposer of these nodes, which are then the only candidate; empty: the profile chose."""
    reason: ShortText = ""
    """Reason of the proposer, for display; of the profile, the jobs after which this one starts."""
    moved: Moved | None = None
    """None: the job was not moved there."""


class InputCause(Value, frozen=True, kw_only=True):
    """The input record that this ledger record answers."""

    topic: ShortText
    partition: Annotated[int, Meta(ge=0)]
    offset: Annotated[int, Meta(ge=0)]
    event_id: ShortText


class TimerCause(Value, frozen=True, kw_only=True):
    timer_id: Identifier


class TermCause(Value, frozen=True, kw_only=True):
    placer_id: Identifier


class FactEntry(Value, frozen=True, kw_only=True):
    """An event inside a record: its wire type and its fields."""

    OMITTED = ("needs",)

    type: Identifier
    data: dict[str, Any]
    needs: ShortText = ""
    """Lowest version of Penstock that may fold the record; one that does not know the fact leaves it out.
    Empty: each knows it."""

    def __post_init__(self) -> None:
        json.dumps(self.data, allow_nan=False)  # raises ValueError: `Any` permits NaN, JSON has none


@event
class LedgerRecord(Event, frozen=True, kw_only=True):
    """Record of the ledger: exactly one for each input (LAW 2). It is valid if and only if it extends the
    chain (LAW 3)."""

    TYPE = "penstock.ledger.record"
    TOPIC = Topic.LEDGER
    OMITTED = ("digest",)

    seq: Annotated[int, Meta(ge=1)]
    parent: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """Id of the record before: the first 32 hex digits of the sha256 of its bytes; zeros for the first."""
    term: Annotated[int, Meta(ge=1)]
    now_ms: Milliseconds
    """The ledger's time: max(last, placer's clock); every fold uses this and no other clock."""
    cause: InputCause | TimerCause | TermCause
    outcome: Literal["committed", "rejected", "dead_lettered"]
    reason: ShortText | None = None
    facts: tuple[FactEntry, ...] = ()
    explanation: tuple[PlacementExplanation, ...] = ()
    digest: Annotated[str, Meta(max_length=MAX_DIGEST)] = ""
    """Digest of the placer's state after this record, in every n-th one, to be compared with those of
    readers; empty: none is stated."""

    def subject(self) -> str:
        return str(self.seq)
