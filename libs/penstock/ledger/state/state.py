"""The state of one cell, folded from its valid ledger. Mutable; only `evolve` writes it.

It includes time and sequence: before a record's facts are folded, `seq` and `now_ms` are set to the record's.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from sortedcontainers import SortedDict

from penstock.ledger.state.apart import Apart
from penstock.ledger.state.arrays import Arrays
from penstock.ledger.state.index import NodeIndex
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.distrust import Failure
from penstock.ledger.state.node.node_state import NodeState
from penstock.model.decisions.ledger_events import TimerSubject
from penstock.model.decisions.plans import PlanUnit
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.nouns.nodes import JoinRefusal
from penstock.model.nouns.settings import BEFORE_ANY_TERM, PlacerSettings
from penstock.model.nouns.token import token_of
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import Estimate, Value
from penstock.model.schema.topics import Topic

MAX_ENDED_REMEMBERED = 100_000  # ids of ended jobs, so that a late duplicate cannot start one again
MAX_REFUSED_JOINS = 1_000  # nodes whose refusal is remembered, the latest
MAX_FORGOTTEN_NODES = 100_000  # incarnations of nodes gone long ago
MAX_PROPOSALS_REMEMBERED = 4_096  # so that a duplicate of one of them has no effect
MAX_EARLY_ESTIMATES = 10_000  # estimates that arrived before their submission, which is on another topic


@dataclass(slots=True)
class Timer:
    at_ms: int
    about: TimerSubject


MAX_CHANGES = 1 << 12  # who has read fewer of them reads everything anew


class ChangeLog:
    """Bounded log of changes: ids of jobs in the order of their changes; only the last MAX_CHANGES stay.

    For caches of values computed from the state: a cache that has read up to `count` asks for the later
    changes, and is rebuilt when these are no longer stored. Nothing else may depend on the log: it is
    history, not state.
    """

    __slots__ = ("_found", "_ids", "count")

    def __init__(self) -> None:
        self.count = 0
        self._ids: deque[str] = deque(maxlen=MAX_CHANGES)
        self._found: tuple[int, int, list[str]] = (0, 0, [])
        """Latest answer of `since`: several caches ask for the same changes. (count asked for, `count` then,
        ids)."""

    def add(self, job_id: str) -> None:
        self.count += 1
        self._ids.append(job_id)

    def extend(self, job_ids: Sequence[str]) -> None:
        """As `add` for each, in order."""
        self.count += len(job_ids)
        self._ids.extend(job_ids)

    def since(self, count: int) -> list[str] | None:
        """Ids added after the first `count`, each once, in a list that is not to be changed; None if they are
        no longer stored."""
        new = self.count - count
        if not new:
            return []
        if new > len(self._ids):
            return None
        asked, then, found = self._found
        if asked != count or then != self.count:
            found = list(dict.fromkeys(islice(reversed(self._ids), new)))
            self._found = count, self.count, found
        return found


class FailedChoices(Value, frozen=True):
    """Placement choices that failed because the policy raised an exception."""

    count: int = 0
    """Since the cell began."""
    in_a_row: int = 0
    """Since the last placement."""
    seq: int = 0
    """Seq of the latest; the following fields describe it, too."""
    at_ms: int = 0
    profile: str = ""
    job_id: str | None = None
    error: str = ""


class RefusedJoin(Value, frozen=True):
    """A refused joining, of which the node must be informed by any later placer, too."""

    boot_id: str
    incarnation: int
    reason: JoinRefusal
    public_key: str | None
    token: int


class Answered(Value, frozen=True):
    """The answer to a proposal."""

    seq: int
    verdict: str
    reason: str
    detail: str


@dataclass(slots=True)
class CellState:
    """The state folded from the ledger. `jobs` holds only jobs that have not ended."""

    seq: int = 0
    now_ms: int = 0
    term: int = 0
    epoch: int = 0
    """Epoch of the log; rises when a ledger is accepted that has lost records."""
    rejoin_offset: int = 0
    """Offset in the nodes' topic: only joinings from there on belong to this epoch."""
    settings: PlacerSettings = BEFORE_ANY_TERM
    """Of the latest term."""
    frozen: str = ""
    """Why nothing is placed or evicted; empty: not frozen."""
    jobs: dict[str, JobState] = field(default_factory=dict)
    prelaunching: int = 0
    """Number of jobs that may launch before their GPUs are free; without such jobs ends of running jobs are
    not predicted."""
    next_port: int = 0
    """The port after those that a job was given last (`penstock.ledger.derived.ports`); 0: none was."""
    ended: "OrderedDict[str, str]" = field(default_factory=OrderedDict)
    """Job id → outcome, oldest first, bounded."""
    early_estimates: "OrderedDict[str, Estimate]" = field(default_factory=OrderedDict)
    stages: dict[str, StagesProfiled] = field(default_factory=dict)
    """Profiles by the key of `penstock.ledger.derived.stages`, the one published last at the end, bounded."""
    queue: "SortedDict[int, str]" = field(default_factory=SortedDict)
    """order → job id, of jobs in QUEUED that are neither unschedulable nor held."""
    holding: dict[int, JobState] = field(default_factory=dict)
    """order → job, of jobs that hold resources; in no order."""
    stopping: dict[int, JobState] = field(default_factory=dict)
    """order → job, of jobs that are being stopped."""
    moving: dict[int, JobState] = field(default_factory=dict)
    """order → job, of jobs with a reserved target."""
    groups: dict[str, dict[str, JobState]] = field(default_factory=dict)
    """Group id → its members by job id, each with a living attempt."""
    apart: dict[str, Apart] = field(default_factory=dict)
    """Kinds of jobs that share no GPUs in turns for a time, by the key of `penstock.ledger.state.apart`, the
    latest at the end, bounded."""
    planned: dict[str, PlanUnit] = field(default_factory=dict)
    """Job id → unit, of waiting jobs for which nodes are reserved; in the order of the plan."""
    proposals: "OrderedDict[str, Answered]" = field(default_factory=OrderedDict)
    """Answers by `penstock.ledger.fold.plans.proposal_key`, the latest at the end, bounded."""
    arrivals: list[int] = field(default_factory=list)
    """Ledger times at which the last `batch_arrivals` jobs arrived, in ms, ascending; empty where no job
    waits for batch plans."""
    plan_stands: bool = False
    """Whether the latest window ended with a plan, under a profile with a regroup stage: until the next
    window the plan determines which jobs run."""
    window_until_ms: int = 0
    """Ledger time until which waiting jobs are left to a batch plan; 0: they are not."""
    change_log: ChangeLog = field(default_factory=ChangeLog)
    """Jobs whose status, rank or progress changed, or that were held, released or found unschedulable;
    without `progress_log`."""
    progress_log: ChangeLog = field(default_factory=ChangeLog)
    """Jobs that hold resources and of which only the progress changed: most caches need not read these, and
    most changes are of this kind."""
    unschedulable: dict[str, None] = field(default_factory=dict)
    """Ids of jobs that would not fit even an empty cell: QUEUED, but outside the queue."""
    nodes: dict[str, NodeState] = field(default_factory=dict)
    forgotten_nodes: "OrderedDict[str, int]" = field(default_factory=OrderedDict)
    """Node id → incarnation, of nodes gone long ago, oldest first, bounded."""
    failures: list[Failure] = field(default_factory=list)
    """Attempts that failed soon after their start in the latest minutes, oldest first, bounded
    (`penstock.ledger.fold.evidence`)."""
    refused_joins: "OrderedDict[str, RefusedJoin]" = field(default_factory=OrderedDict)
    """Node id → its latest refused joining, until a joining is accepted; oldest first, bounded."""
    node_at: list[str] = field(default_factory=list)
    """ordinal → node id; empty for the ordinal of a dropped node, but never at the end."""
    droppable: "SortedDict[tuple[int, int], str]" = field(default_factory=SortedDict)
    """(left at ms, ordinal) → node id, of nodes proven gone that are not cordoned and that no living attempt
    names."""
    sound_gpus: list[int] = field(default_factory=list)
    """ordinal → number of GPUs without fault, allocated or free; 0 where nothing may be placed: for plans
    from empty nodes."""
    total_sound_gpus: int = 0
    """Sum of `sound_gpus`."""
    capacity_version: int = 0
    """Rises when nodes join, change or leave: which jobs fit an empty cell may have changed."""
    sound_version: int = 0
    """Rises when `sound_gpus` changes: also with faults, silence and cordons."""
    index: NodeIndex = field(default_factory=NodeIndex)
    timers: dict[str, Timer] = field(default_factory=dict)
    timer_heap: list[tuple[int, str]] = field(default_factory=list)
    arrays: Arrays = field(default_factory=Arrays)
    failed_choices: FailedChoices = field(default_factory=FailedChoices)
    positions: dict[tuple[str, int], int] = field(default_factory=dict)
    """(input topic, partition) → offset of the next record to read."""
    last_inputs: dict[tuple[str, int], str] = field(default_factory=dict)
    """(input topic, partition) → id of the event before that position; empty: it has no id, or the id is not
    known."""

    @property
    def in_window(self) -> bool:
        """Whether waiting jobs are left to a batch plan now."""
        return self.window_until_ms > self.now_ms

    @property
    def token(self) -> int:
        """Token of the current record's decisions."""
        return token_of(self.epoch, self.seq)

    def awaits_nodes(self) -> bool:
        """Whether nodes may still run tasks that this ledger has lost: they have not joined since, or have
        not ended these tasks."""
        if not self.epoch:
            return False
        if self.inputs_read(Topic.NODES) < self.rejoin_offset:
            return True
        lost = token_of(self.epoch, 0)
        return any(
            node.epoch < self.epoch or any(token > lost for token in node.orphan_tasks.values())
            for node in self.nodes.values()
            if node.status is not NodeStatus.GONE and not node.leaving
        )

    def inputs_read(self, topic: str) -> int:
        """Offset up to which an input topic is answered; a cell has one partition of each."""
        return max((offset for (name, _), offset in self.positions.items() if name == topic), default=0)

    def node(self, ordinal: int) -> NodeState:
        return self.nodes[self.node_at[ordinal]]

    def head_of_queue(self) -> JobState | None:
        """The first job of the queue."""
        return self.jobs[self.queue.peekitem(0)[1]] if self.queue else None

    def next_timer(self) -> tuple[int, str] | None:
        """(due at ms, id) of the earliest timer that is still set."""
        while self.timer_heap:
            at_ms, timer_id = self.timer_heap[0]
            timer = self.timers.get(timer_id)
            if timer is not None and timer.at_ms == at_ms:
                return at_ms, timer_id
            heapq.heappop(self.timer_heap)
        return None

    def reindex(self, node: NodeState) -> None:
        """Brings the index up to date with the node, after a change of its inventory, faults or status."""
        sound = node.sound_gpus()
        if sound != self.sound_gpus[node.ordinal]:
            self.total_sound_gpus += sound - self.sound_gpus[node.ordinal]
            self.sound_gpus[node.ordinal] = sound
            self.sound_version += 1
        self.rebook(node)
        self.relist(node)

    def relist(self, node: NodeState) -> None:
        """Brings `droppable` up to date with the node, after a change of its status, cordon or names."""
        place = (node.left_ms, node.ordinal)
        if node.status is NodeStatus.GONE and node.cordon is None and not node.named:
            self.droppable[place] = node.spec.node_id
        else:
            self.droppable.pop(place, None)

    def rebook(self, node: NodeState) -> None:
        """As `reindex`, after resources of the node were allocated or freed."""
        new = node.free()
        if new != node.entered:
            self.index.refit(node.bit, len(node.spec.gpus), node.entered, new)
            node.entered = new
        node.version += 1
