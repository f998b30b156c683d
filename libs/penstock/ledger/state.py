"""The state of one cell: what a fold over its valid ledger knows. Mutable; only `evolve` writes it.

Time and sequence live here too: before a record's facts are folded, `seq` and `now_ms` are the record's.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter

from sortedcontainers import SortedDict

from penstock.ledger.demand import Demand
from penstock.ledger.holds import Cordon, Hold
from penstock.ledger.index import NOT_PLACEABLE, Free, NodeIndex, Share
from penstock.ledger.masks import full_mask, mask_of
from penstock.ledger.suspicion import Suspicion
from penstock.model.ledger_events import PlacerSettings, TimerSubject
from penstock.model.token import token_of
from penstock.model.topics import Topic
from penstock.model.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.model.types import WHOLE_GPU, Estimate, JobSpec, NodeSpec, ResourceVector, TaskPlacement, Value

MAX_ENDED_REMEMBERED = 100_000  # ids of ended jobs, so that a late duplicate cannot start one again
MAX_FORGOTTEN_NODES = 100_000  # incarnations of nodes gone long ago
MAX_EARLY_ESTIMATES = 10_000  # estimates that overtook their submission on another topic
WAITING = frozenset({JobStatus.SUBMITTED, JobStatus.QUEUED, JobStatus.BACKOFF})
HOLDING = frozenset({JobStatus.LAUNCHING, JobStatus.RUNNING, JobStatus.STOPPING})


@dataclass(slots=True)
class TaskState:
    """One task of the current attempt."""

    place: TaskPlacement
    status: TaskStatus = TaskStatus.ASSIGNED
    pid: int | None = None
    started_ms: int | None = None
    exited_ms: int | None = None
    succeeded: bool = False
    exit_code: int | None = None
    cause: str = ""
    exhausted: str = ""
    """Which memory an allocation of it failed in (`TaskExited.exhausted`)."""
    lease_ms: int = 0
    """Its node ends it when it has not reached the log for so long; 0: never."""


@dataclass(slots=True)
class JobState:
    """A job that has not ended. Times are the ledger's, in ms."""

    job_id: str
    spec: JobSpec
    order: int
    """Place in the queue: the seq of its submission; retries do not change it."""
    submitted_ms: int
    status: JobStatus = JobStatus.SUBMITTED
    estimate: Estimate | None = None
    estimated_attempt: int = 0
    """For which `estimate` was made; 0: the first."""
    attempt: int = 0
    losses: int = 0
    """Attempts lost to nodes and refusals; bounded, since such a job may be what kills its nodes."""
    infrastructure_retries: int = 0
    """Attempts lost to nodes, refusals or preemption; they do not count against the user's."""
    memory_retries: int = 0
    """Of these, attempts that ran out of memory under a guessed limit; bounded, since more memory may not help."""
    short_of: dict[str, int] = field(default_factory=dict)
    """Role and memory (`penstock.ledger.memory.short_key`) → MiB that such attempts had; what follows must have more."""
    token: int = 0
    """Of the current attempt's placement (`penstock.model.token`)."""
    tasks: dict[str, TaskState] = field(default_factory=dict)
    queued_ms: int | None = None
    placed_ms: int | None = None
    running_ms: int | None = None
    stop_reason: str | None = None
    stop_token: int = 0
    """Of the latest decision to stop."""
    exit_code: int | None = None
    failure: str = ""
    """The attempt's first failure, for people; `failure_cause` is its task's cause."""
    failure_cause: str = ""
    unschedulable: str = ""
    held: Hold | None = None
    """It does not start; while it waits it stands beside the queue."""
    commanded_seq: int = 0
    """Record of its latest hold or the end of one: commands from before are old."""
    backfill_count: int = 0
    version: int = 0
    served_ms: int = 0
    """Time that earlier attempts ran."""
    attained_s: float | None = None
    """As the job last reported: time run, all attempts together. None: no report; see `penstock.policies.service`."""
    remaining_s: float | None = None
    progress_ms: int = 0
    """Ledger time of its last progress report."""
    rank: tuple[int, int, int] | None = None
    """(level, 0 if chosen else 1, position) in a policy that keeps an order; None: as it came."""

    @property
    def in_line(self) -> bool:
        """Whether it is in the queue."""
        return self.status is JobStatus.QUEUED and not self.unschedulable and self.held is None

    @property
    def awaited_estimate(self) -> int | None:
        """The attempt whose estimate may come now; 0: the first, which waits for it. None: none is due.

        A retry that backs off takes one and waits for none; one that queues at once keeps the estimate that it had.
        """
        due = self.attempt + 1 if self.attempt else 0
        if self.status is JobStatus.BACKOFF and self.estimated_attempt != due:
            return due
        return due if self.status is JobStatus.SUBMITTED else None

    @property
    def demand(self) -> Demand:
        """What the gang needs. Only for jobs with an estimate."""
        assert self.estimate is not None, f"{self.job_id} has no estimate yet"
        return Demand(
            self.spec.workers,
            self.estimate.worker,
            self.spec.parameter_servers,
            self.estimate.parameter_server,
            self.spec.gpu_models,
        )


@dataclass(slots=True)
class NodeState:
    """One node. Masks have bit i for the GPU of slot i, or for core i."""

    spec: NodeSpec
    ordinal: int
    status: NodeStatus
    free_gpu_mask: int
    """Wholly free ones."""
    free_core_mask: int
    free_host_memory_mib: int
    free_bandwidth_mbps: int
    faulted_gpu_mask: int = 0
    slots: tuple[str, ...] = ()
    """UUID by slot, where slots are not the inventory's indexes: a GPU keeps its slot, and a slot its GPU, while a task
    holds it, whatever NVML calls it now and whether it is still there."""
    overdrawn_memory_mib: int = 0
    """Host memory that its tasks hold beyond the inventory: it was larger when they were placed."""
    overdrawn_bandwidth_mbps: int = 0
    shared: dict[int, Share] = field(default_factory=dict)
    """GPU → what is left of it, of each partly given one."""
    leaving: bool = False
    """Its departure is proven, but the cell is frozen."""
    left_ms: int = 0
    rebooted: bool = False
    """Its latest joining came with a new boot id: tasks of before are dead."""
    incarnation: int = 0
    """Of its latest joining; see `NodeJoined`."""
    epoch: int = 0
    """Of the log, in which it last joined; see `LedgerAccepted`."""
    public_key: str | None = None
    """Of its first joining that named one."""
    replaceable: bool = False
    """An operator or its deletion has proven that machine dead: the next one that joins has a key of its own."""
    tasks: dict[str, str] = field(default_factory=dict)
    """Task id → job id of every task not proven ended."""
    orphan_tasks: dict[str, int] = field(default_factory=dict)
    """What it ran when it last joined and the cell had given up there, and has not ended: task id → token of that joining."""
    cordon: Cordon | None = None
    """Stays however often the node joins."""
    commanded_seq: int = 0
    """Record of its latest cordon or the end of one, else of its first joining: commands from before are old."""
    leases: bool = False
    """Whether its reporter ends tasks whose lease has run out."""
    suspicion: Suspicion | None = None
    """While it is Suspect."""
    named: int = 0
    """Tasks of living attempts that were placed here, ended ones too."""
    version: int = 0
    entered: Free = NOT_PLACEABLE
    """What the index holds for this node."""
    gpu_uuids: tuple[str, ...] = ()
    """The UUID of each slot's GPU, which the inventory may no longer have; empty for a free slot. See `name_gpus`."""

    @property
    def bit(self) -> int:
        return 1 << self.ordinal

    def name_gpus(self) -> None:
        """After a change of the inventory or of the slots; orders and rows of every task ask for the names."""
        self.gpu_uuids = self.slots or tuple(gpu.uuid for gpu in self.spec.gpus)

    @property
    def present_gpu_mask(self) -> int:
        """Slots whose GPU the node has now."""
        if not self.slots:
            return full_mask(len(self.spec.gpus))
        have = {gpu.uuid for gpu in self.spec.gpus}
        return mask_of(tuple(slot for slot, uuid in enumerate(self.slots) if uuid in have))

    def slot_of(self, uuid: str) -> int | None:
        """The slot that belongs to this GPU; None if none does."""
        uuids = self.gpu_uuids
        return uuids.index(uuid) if uuid in uuids else None

    @property
    def offered(self) -> Mapping[int, Share]:
        """What is left of partly given GPUs for others; nothing where the node cannot prove a task's end."""
        return self.shared if self.spec.shares_gpus else {}

    def room_of_gpu(self, need: ResourceVector) -> Share:
        """What a wholly free GPU offers a task and those that come after it."""
        if self.spec.shares_gpus:
            return Share(WHOLE_GPU, self.gpu_memory_mib)
        return Share(need.gpu_share_milli, need.gpu_memory_mib)

    @property
    def gpu_memory_mib(self) -> int:
        """Of its smallest GPU: so much of each is given out."""
        return min((gpu.memory_mib for gpu in self.spec.gpus), default=0)

    def copy(self) -> "NodeState":
        """On which tasks can be placed and taken back without a trace in the state."""
        other = NodeState(*_FIELDS(self))
        other.shared = dict(self.shared)
        return other

    @property
    def healthy_gpu_mask(self) -> int:
        """Wholly free GPUs without fault."""
        return self.free_gpu_mask & ~self.faulted_gpu_mask

    def left_of(self, gpu: int) -> Share | None:
        """What is free of a GPU without fault; None if nothing is."""
        if self.healthy_gpu_mask >> gpu & 1:
            return Share(WHOLE_GPU, self.gpu_memory_mib)
        return None if self.faulted_gpu_mask >> gpu & 1 else self.offered.get(gpu)

    def give(self, place: TaskPlacement) -> None:
        """A task takes its place. Of a GPU that the inventory no longer has nothing is left for others."""
        for gpu in place.gpus:
            self.free_gpu_mask &= ~(1 << gpu)
            if place.gpu_share_milli < WHOLE_GPU and self.present_gpu_mask >> gpu & 1:
                left = self.shared.get(gpu) or Share(WHOLE_GPU, self.gpu_memory_mib)
                self.shared[gpu] = Share(
                    left.milli - place.gpu_share_milli, left.memory_mib - place.gpu_memory_mib
                )
        self.free_core_mask &= ~mask_of(place.cores)
        self.free_host_memory_mib -= place.host_memory_mib
        self.free_bandwidth_mbps -= place.bandwidth_mbps

    def take_back(self, place: TaskPlacement) -> None:
        """The task is proven dead: undoes `give`."""
        inventory = self.present_gpu_mask
        if place.gpu_share_milli == WHOLE_GPU:
            self.free_gpu_mask |= mask_of(place.gpus) & inventory
        else:
            for gpu in place.gpus:
                left = self.shared.pop(gpu, None)
                if left is None:
                    continue
                if left.milli + place.gpu_share_milli == WHOLE_GPU:
                    self.free_gpu_mask |= 1 << gpu & inventory
                else:
                    self.shared[gpu] = Share(
                        left.milli + place.gpu_share_milli, left.memory_mib + place.gpu_memory_mib
                    )
        self.free_core_mask |= mask_of(place.cores) & full_mask(self.spec.cores)
        self.free_host_memory_mib += place.host_memory_mib
        self.free_bandwidth_mbps += place.bandwidth_mbps

    @property
    def placeable(self) -> bool:
        """Whether anything new may be placed here, given room."""
        return self.status is NodeStatus.READY and self.cordon is None

    def sound_gpus(self) -> int:
        """GPUs without fault, given or free; 0 while nothing may be placed on it."""
        if not self.placeable:
            return 0
        return (self.present_gpu_mask & ~self.faulted_gpu_mask).bit_count()

    def free(self) -> Free:
        """What may be given out now. A node that shrank below what its tasks hold has nothing free."""
        if not self.placeable:
            return NOT_PLACEABLE
        return Free(
            self.healthy_gpu_mask.bit_count(),
            self.free_core_mask.bit_count(),
            max(0, self.free_host_memory_mib),
            max(0, self.free_bandwidth_mbps),
            tuple(
                sorted(
                    left
                    for gpu, left in self.offered.items()
                    if left.milli and not self.faulted_gpu_mask >> gpu & 1
                )
            )
            if self.shared
            else (),
        )


_FIELDS = attrgetter(*(known.name for known in fields(NodeState)))  # in the order of its constructor


@dataclass(slots=True)
class Timer:
    at_ms: int
    about: TimerSubject


MAX_CHANGES = 1 << 12


class ChangeLog:
    """Ids of jobs, in the order in which something about them changed; only the last MAX_CHANGES stay.

    For caches of what could be computed from the state: a cache that has read up to `count` asks for what came
    since, and is made anew when that is no longer here. Nothing else may depend on it: it is history, not state.
    """

    __slots__ = ("_ids", "count")

    def __init__(self) -> None:
        self.count = 0
        self._ids: deque[str] = deque(maxlen=MAX_CHANGES)

    def add(self, job_id: str) -> None:
        self.count += 1
        self._ids.append(job_id)

    def since(self, count: int) -> list[str] | None:
        """What was added after the first `count`, each id once; None when that is forgotten."""
        new = self.count - count
        if not new:
            return []
        if new > len(self._ids):
            return None
        return list(dict.fromkeys(islice(reversed(self._ids), new)))


class FailedChoices(Value, frozen=True):
    """Choices that were not taken because deciding raised."""

    count: int = 0
    """Since the cell began."""
    in_a_row: int = 0
    """Since the last placement."""
    seq: int = 0
    """The rest is of the latest."""
    at_ms: int = 0
    profile: str = ""
    job_id: str | None = None
    error: str = ""


@dataclass(slots=True)
class CellState:
    """The state folded from the ledger. `jobs` holds only jobs that have not ended."""

    seq: int = 0
    now_ms: int = 0
    term: int = 0
    epoch: int = 0
    """Of the log; rises when a ledger is accepted that has lost records."""
    rejoin_offset: int = 0
    """In the nodes' topic: only joinings from there on are of this epoch."""
    settings: PlacerSettings = field(default_factory=PlacerSettings)
    frozen: str = ""
    """Why nothing is placed or evicted; empty: not frozen."""
    jobs: dict[str, JobState] = field(default_factory=dict)
    ended: "OrderedDict[str, str]" = field(default_factory=OrderedDict)
    """Job id → outcome, oldest first, bounded."""
    early_estimates: "OrderedDict[str, Estimate]" = field(default_factory=OrderedDict)
    queue: "SortedDict[int, str]" = field(default_factory=SortedDict)
    """order → job id, of jobs in QUEUED that are neither unschedulable nor held."""
    holding: dict[int, JobState] = field(default_factory=dict)
    """order → job, of jobs that hold resources; in no order."""
    change_log: ChangeLog = field(default_factory=ChangeLog)
    """Jobs that began or ceased to wait in the queue, or wait there and changed."""
    unschedulable: dict[str, None] = field(default_factory=dict)
    """Ids of jobs that would not fit even an empty cell: QUEUED, but beside the queue."""
    nodes: dict[str, NodeState] = field(default_factory=dict)
    forgotten_nodes: "OrderedDict[str, int]" = field(default_factory=OrderedDict)
    """Node id → incarnation, of nodes gone long ago, oldest first, bounded."""
    node_at: list[str] = field(default_factory=list)
    """ordinal → node id; empty for that of a forgotten node, but never at the end."""
    forgettable: "SortedDict[tuple[int, int], str]" = field(default_factory=SortedDict)
    """(left at ms, ordinal) → node id, of nodes proven gone that are not cordoned and that no living attempt names."""
    sound_gpus: list[int] = field(default_factory=list)
    """ordinal → GPUs without fault, given or free; 0 where nothing may be placed: for plans from empty nodes."""
    capacity_version: int = 0
    """Rises when nodes join, change or leave: what fits an empty cell may have changed."""
    index: NodeIndex = field(default_factory=NodeIndex)
    timers: dict[str, Timer] = field(default_factory=dict)
    timer_heap: list[tuple[int, str]] = field(default_factory=list)
    failed_choices: FailedChoices = field(default_factory=FailedChoices)
    positions: dict[tuple[str, int], int] = field(default_factory=dict)
    """(input topic, partition) → offset of the next record to read."""
    last_inputs: dict[tuple[str, int], str] = field(default_factory=dict)
    """(input topic, partition) → id of the event before that position; empty: it has none, or is not known."""

    @property
    def token(self) -> int:
        """Of what the present record decides."""
        return token_of(self.epoch, self.seq)

    def awaits_nodes(self) -> bool:
        """Whether nodes may still run what this ledger has lost: they have not joined since, or not ended it."""
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
        """The waiting job that is first in line."""
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
        self.sound_gpus[node.ordinal] = node.sound_gpus()
        self.rebook(node)
        self.relist(node)

    def relist(self, node: NodeState) -> None:
        """Brings `forgettable` up to date with the node, after a change of its status, cordon or names."""
        place = (node.left_ms, node.ordinal)
        if node.status is NodeStatus.GONE and node.cordon is None and not node.named:
            self.forgettable[place] = node.spec.node_id
        else:
            self.forgettable.pop(place, None)

    def rebook(self, node: NodeState) -> None:
        """As `reindex`, after something of the node was given out or taken back."""
        new = node.free()
        if new != node.entered:
            self.index.refit(node.bit, len(node.spec.gpus), node.entered, new)
            node.entered = new
        node.version += 1
