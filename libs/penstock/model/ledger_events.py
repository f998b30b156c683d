"""Ledger events: the placer's decisions, and the record that carries them."""

import json
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.model.event import Event, event
from penstock.model.external_events import Attempt, PublicKey, Token
from penstock.model.plans import MAX_PLANNED_STOPS, MAX_PROPOSED_UNITS, UnitRef
from penstock.model.refusals import Refused, StopRefused, UnitRefused
from penstock.model.settings import PlacerSettings
from penstock.model.token import MAX_EPOCH
from penstock.model.topics import Topic
from penstock.model.types import (
    MAX_GANG_TASKS,
    Identifier,
    JoinRefusal,
    Milliseconds,
    ShortText,
    TaskPlacement,
    Value,
)

MAX_RANKS = 1_024  # changes of the queue in one fact: a quarter of what a record may take
MAX_CANDIDATES = 5  # an explanation keeps the top five (issue: `why`)


@event
class TermStarted(Event, frozen=True, kw_only=True):
    """A placer took over. Its record alone may raise the term (LAW 3)."""

    TYPE = "penstock.term.started"
    OMITTED = ("code_version", "fold_version")

    term: Annotated[int, Meta(ge=1)]
    placer_id: Identifier
    settings: PlacerSettings
    code_version: ShortText = ""
    """Of the package that decides this term's records; empty: not recorded."""
    fold_version: Annotated[int, Meta(ge=0)] = 0
    """Its `penstock.ledger.evolve.FOLD_VERSION`; 0: not recorded."""


@event
class InputAccepted(Event, frozen=True, kw_only=True):
    """An operator accepts that an input is not the one that was answered so far: it was truncated or created anew.

    Stands behind the `TermStarted` of a term of its own.
    """

    TYPE = "penstock.input.accepted"

    topic: ShortText
    partition: Annotated[int, Meta(ge=0)]
    position: Annotated[int, Meta(ge=0)]
    """Offset of the next record to answer, as the ledger had it."""
    offset: Annotated[int, Meta(ge=0)]
    """As it is from now on."""
    end: Annotated[int, Meta(ge=0)]
    """Where the partition ended then."""
    reason: ShortText = ""


@event
class LedgerAccepted(Event, frozen=True, kw_only=True):
    """An operator accepts that this ledger has lost records: it was truncated, or restored from an older copy.

    Stands behind the `TermStarted` of a term of its own. Nothing is placed until every node has joined anew and what it ran
    of the lost records is dead.
    """

    TYPE = "penstock.ledger.accepted"

    epoch: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    """Of all tokens from now on; higher than any before."""
    nodes_offset: Annotated[int, Meta(ge=0)]
    """End of the nodes' topic at that moment: a joining before it says nothing about what is lost."""
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
    """Of the proposed plan that it belongs to: all jobs of a unit are placed in one record."""
    group: Identifier | None = None
    """It shares the GPUs of these places with the members of this group (`GroupDecided`); None: it has them alone."""
    after: Annotated[tuple[Identifier, ...], Meta(max_length=512)] = ()
    """Jobs that are being stopped, or come to their end, and still hold some of these GPUs and cores: its tasks start there as soon as theirs
    have ended."""
    prelaunch: bool = False
    """Its tasks launch before that, and wait for their GPUs where they begin to train (`JobSpec.prelaunch`)."""
    borrows: bool = False
    """It has no GPUs, and some of its cores are reserved for jobs that have: they may be reclaimed (`penstock.model.arrays`)."""


@event
class StopDecided(Event, frozen=True, kw_only=True):
    """The running attempt is to be stopped; nothing is freed before the exits are proven."""

    TYPE = "penstock.stop.decided"

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
    """`completed`: every worker succeeded; the parameter servers are no longer needed. `drained`: its node is emptied.
    `queue_timeout`: no answer came to its start while it might wait. `predecessor_late`: who was to end before it did not, or not in time."""
    grace_ms: Annotated[int, Meta(ge=0)]


@event
class JobPreempted(Event, frozen=True, kw_only=True):
    """A running job gave way to another; it will queue again at its old place."""

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
    """It ran out of memory under a cap that it had not asked for: it queues once it is estimated anew, and the attempt does not
    count against its own."""


@event
class JobQueued(Event, frozen=True, kw_only=True):
    """Back-off is over."""

    TYPE = "penstock.job.queued"

    job_id: Identifier


@event
class JobFoundUnschedulable(Event, frozen=True, kw_only=True):
    """It fits on no node of the cell even when empty; it ends unless a node joins in time.

    Ledgers of earlier versions write `JobFoundSchedulable` as this event with an empty reason.
    """

    TYPE = "penstock.job.found_unschedulable"

    job_id: Identifier
    reason: ShortText


@event
class JobFoundSchedulable(Event, frozen=True, kw_only=True):
    """It was unschedulable and now fits the empty cell: a node joined or changed. It queues at its old place."""

    TYPE = "penstock.job.found_schedulable"

    job_id: Identifier


class JobRank(Value, frozen=True, kw_only=True):
    """A job's place in the order of a policy that keeps one; compared by level, chosen first, position."""

    job_id: Identifier
    level: Annotated[int, Meta(ge=0, le=15)]
    """Which of its queues; 0 is served first."""
    chosen: bool
    """Whether it is among those that shall run."""
    position: Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]


@event
class JobsRanked(Event, frozen=True, kw_only=True):
    """A policy moved these jobs within its queues; all others keep their places."""

    TYPE = "penstock.jobs.ranked"

    ranks: Annotated[tuple[JobRank, ...], Meta(min_length=1, max_length=MAX_RANKS)]


@event
class JobEnded(Event, frozen=True, kw_only=True):
    """The job is over; nothing of it runs any more."""

    TYPE = "penstock.job.ended"

    job_id: Identifier
    outcome: Literal[
        "succeeded", "failed", "cancelled", "timed_out_queued", "timed_out_running", "unschedulable"
    ]
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    reason: ShortText = ""


@event
class TaskLost(Event, frozen=True, kw_only=True):
    """A task is proven dead although its node never reported it (new boot id, node left)."""

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
    """A probe was in the log for the longest lease of its node's tasks and a margin. `NodeLeft` with `lease_outlived` follows in the
    nodes' topic, unless the node's answer stands there before it."""

    TYPE = "penstock.node.probe_expired"

    probe: Token


@event
class NodeJoinRefused(NodeFact, frozen=True, kw_only=True):
    """A joining does not count, and its node is to know, until one counts."""

    TYPE = "penstock.node.join_refused"
    OMITTED = ("public_key",)

    boot_id: Identifier
    incarnation: Token
    """Of the joining that is refused."""
    reason: JoinRefusal
    public_key: PublicKey | None = None
    """Of that joining, where it was signed with another key than the node's."""


@event
class NodeRestored(NodeFact, frozen=True, kw_only=True):
    """A Suspect node spoke again."""

    TYPE = "penstock.node.restored"


@event
class CellFrozen(Event, frozen=True, kw_only=True):
    """Most nodes vanished at once: nobody is evicted and nothing is placed until they return (LAW 5)."""

    TYPE = "penstock.cell.frozen"

    reason: ShortText


@event
class CellThawed(Event, frozen=True, kw_only=True):
    """Enough nodes are back; placing goes on."""

    TYPE = "penstock.cell.thawed"

    reason: ShortText


@event
class ChoiceFailed(Event, frozen=True, kw_only=True):
    """Deciding raised an exception: this choice was not taken. The other facts of its record stand."""

    TYPE = "penstock.choice.failed"

    profile: Identifier
    """Whose policy was asked, or in whose term the placer itself failed."""
    job_id: Identifier | None = None
    """Whose placement was asked for. None: everything that would have followed in this record is missing."""
    error: ShortText
    """The last line of the traceback, and where it was raised."""


class TimerSubject(Value, frozen=True, kw_only=True):
    """What a timer is about; enough to judge on firing whether it still matters."""

    kind: Literal[
        "backoff",
        "queue_timeout",
        "run_timeout",
        "launch_timeout",
        "unschedulable",
        "place_more",
        "refused",
        "stop_timeout",
        "lease",
        "batch_window",
        "predecessor_timeout",
        "ending",
    ]
    id: Identifier
    attempt: Annotated[int, Meta(ge=0)] = 0


@event
class TimerSet(Event, frozen=True, kw_only=True):
    """Asks for `TimerFired` at or after `at_ms`. A timer about a job ends with what it waits for."""

    TYPE = "penstock.timer.set"

    timer_id: Identifier
    at_ms: Milliseconds
    about: TimerSubject


@event
class TimerFired(Event, frozen=True, kw_only=True):
    """An input without a topic: the shell feeds it when the ledger's time has come."""

    TYPE = "penstock.timer.fired"

    timer_id: Identifier


@event
class ProposalAnswered(Event, frozen=True, kw_only=True):
    """The placer's answer to a proposal: done as asked, or refused with the reason (LAW 1).

    Of a plan each unit is answered: so many were started, so many wait until what is being stopped has ended, and these are
    refused. It is accepted where any is; else `reason` is that of the first one.
    """

    TYPE = "penstock.proposal.answered"
    OMITTED = ("started", "waiting", "refused", "stopped", "not_stopped", "copy_of")

    proposal_id: Identifier
    proposer: Identifier
    verdict: Literal["accepted", "refused"]
    reason: Literal["", Refused] = ""
    detail: ShortText = ""
    started: Annotated[int, Meta(ge=0, le=MAX_PROPOSED_UNITS)] = 0
    """Units of a plan, started in this record."""
    waiting: Annotated[int, Meta(ge=0, le=MAX_PROPOSED_UNITS)] = 0
    """Units of a plan for which nodes are kept (`PlanAdopted`)."""
    refused: Annotated[tuple[UnitRefused, ...], Meta(max_length=MAX_PROPOSED_UNITS)] = ()
    """Units of a plan, in its order."""
    stopped: Annotated[int, Meta(ge=0, le=MAX_PLANNED_STOPS)] = 0
    """Jobs that make way for units of the plan."""
    not_stopped: Annotated[tuple[StopRefused, ...], Meta(max_length=MAX_PLANNED_STOPS)] = ()
    """The others that it names, in its order."""
    copy_of: Annotated[int, Meta(ge=0)] = 0
    """Seq of the record that answered this proposal before, with the same verdict: nothing follows from a copy. 0: it is the first."""


class Candidate(Value, frozen=True, kw_only=True):
    """One way to place a job. `nodes`: per task in rank order; the winner comes first in a list."""

    nodes: tuple[Identifier, ...]
    score: float
    """As the profile computes it; the smaller the better."""


class Moved(Value, frozen=True, kw_only=True):
    """From where a running job is moved, and what that cost."""

    OMITTED = ("stop_ms", "lost_ms", "resumes_at")

    seq: Annotated[int, Meta(ge=1)]
    """Of the record with `MoveDecided`."""
    attempt: Attempt
    """The one that is stopped."""
    nodes: Annotated[tuple[Identifier, ...], Meta(min_length=1, max_length=MAX_GANG_TASKS)]
    """Where that ran, per task in rank order."""
    stop_ms: Milliseconds | None = None
    """From the decision until the last exit was proven; None: it is being stopped."""
    lost_ms: Milliseconds | None = None
    """Work that had been done when the move was decided and is done again; None: it is being stopped, or nobody knows."""
    resumes_at: Annotated[int, Meta(ge=0)] | None = None
    """Iteration of the checkpoint on which it goes on; None: it has none, or none with an iteration."""


class PlacementExplanation(Value, frozen=True, kw_only=True):
    """Why a job went where it went; of a move also, in the record of the decision, why it is to go there."""

    OMITTED = ("shape", "proposer", "reason", "moved")

    job_id: Identifier
    profile: Identifier
    candidates: Annotated[tuple[Candidate, ...], Meta(max_length=MAX_CANDIDATES)]
    margin: float | None
    """Score of the runner-up minus the winner's, ≥ 0; None without a runner-up."""
    feasible: Annotated[int, Meta(ge=0)]
    """Nodes on which the first task fits."""
    rejected: dict[str, int]
    """Nodes refused, counted by the first reason that holds (penstock.policies.reasons)."""
    shape: ShortText = ""
    """How many workers a moldable job got, and why; empty for others."""
    proposer: ShortText = ""
    """Who asked for these nodes, which are then the only candidate; empty: the profile chose."""
    reason: ShortText = ""
    """Of the proposer, for people; of the profile, after whom the job starts."""
    moved: Moved | None = None
    """None: it was not moved there."""


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
    """A fact inside a record: its wire type and its fields."""

    type: Identifier
    data: dict[str, Any]

    def __post_init__(self) -> None:
        json.dumps(self.data, allow_nan=False)  # raises ValueError: `Any` lets NaN through, JSON has none


@event
class LedgerRecord(Event, frozen=True, kw_only=True):
    """One input, one record (LAW 2). Valid iff it extends the chain (LAW 3)."""

    TYPE = "penstock.ledger.record"
    TOPIC = Topic.LEDGER

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

    def subject(self) -> str:
        return str(self.seq)
