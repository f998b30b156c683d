"""State of a node: orders and tasks. `evolve` is the only writer; the shell journals its changes.

A task's row is a frozen value that is replaced as a whole, so that disk and memory hold
the same.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.orders import HandOverCheckpoint, Peer, StartTask
from penstock.model.inputs.external_events import OrderRefused, TaskExited
from penstock.model.nouns.nodes import GpuFault
from penstock.model.nouns.types import MAX_CORES_PER_NODE, WHOLE_GPU

MAX_ENDED_REMEMBERED = 1_000  # ended tasks whose answer can be repeated; older ones count as "too old"
MAX_HANDOVERS = 256  # most are over within seconds
MAX_GANGS_REMEMBERED = 8  # large ones, whose orders to one node follow each other


class Status(StrEnum):
    WAITING = "waiting"  # accepted, but a predecessor on one of its GPUs is still alive
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"  # SIGTERM sent, unless `awaits_chief`; SIGKILL follows at `kill_at_ms`
    ENDED = "ended"  # exited, refused, or never to start (a tombstone)


LIVE = frozenset({Status.STARTING, Status.RUNNING, Status.STOPPING})


class Context(msgspec.Struct, frozen=True):
    """The tracing context of the task's order; its events continue it."""

    traceparent: str | None = None
    correlation_id: str | None = None


NO_CONTEXT = Context()


class Adjusted(msgspec.Struct, frozen=True, omit_defaults=True):
    """The latest order to change a task's cores or bandwidth; older ones are not obeyed."""

    token: int
    percent: int | None = None
    """Of the memory bandwidth; None: no cap. Cores are in the task's order."""
    answer: TaskAdjusted | None = None
    """The reported result; None: it is not known to be applied."""


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task under one token, as it is in memory and in the journal."""

    task_id: str
    token: int
    boot_id: str
    status: Status
    gpus: tuple[str, ...] = ()
    """UUIDs."""
    order: StartTask | None = None
    """Stored until the task has ended."""
    context: Context = NO_CONTEXT
    pid: int | None = None
    started_ms: int | None = None
    stop_grace_ms: int | None = None
    """Set once a stop was requested."""
    kill_at_ms: int | None = None
    awaits_chief: bool = False
    """It is being stopped, and gets SIGTERM when rank 0 of its gang has ended."""
    exited: TaskExited | None = None
    refusal: OrderRefused | None = None
    refused_token: int = -1
    """The highest token under which the same task was refused because this one was alive;
    never obeyed later."""
    cores: Adjusted | None = None
    bandwidth: Adjusted | None = None
    lent: tuple[int, ...] = ()
    """Idle cores that it uses beside its own (`core.lending`)."""
    steps: bool = False
    """Its script reports step times: it keeps to its own cores."""
    gated: bool = False
    """It launches, or is about to, while others live on its GPUs: they are not allocated to it yet."""
    opened_ms: int | None = None
    """When it got them, where it was gated before."""

    @property
    def answer(self) -> TaskExited | OrderRefused | None:
        """The node's report at its end; it is repeated when the task is ordered again."""
        return self.exited or self.refusal

    @property
    def share_milli(self) -> int:
        """Thousandths of each of its GPUs; others may have the rest."""
        return WHOLE_GPU if self.order is None else self.order.place.gpu_share_milli


@dataclass(slots=True)
class NodeState:
    """All state on which decisions of this node depend."""

    node_id: str
    boot_id: str
    gpus: tuple[str, ...]
    """UUIDs of its GPUs."""
    incarnation: int = 0
    """Incarnation of its latest joining."""
    gpu_tokens: dict[str, int] = field(default_factory=dict)
    """Per GPU, by UUID, the highest token ever accepted (LAW 4); also of GPUs that it no longer has."""
    tasks: dict[str, Task] = field(default_factory=dict)
    """Waiting and live tasks by id."""
    ended: dict[str, Task] = field(default_factory=dict)
    """The latest ended ones, oldest first, at most MAX_ENDED_REMEMBERED."""
    faults: dict[str, GpuFault] = field(default_factory=dict)
    """GPUs, by UUID, that broke since the machine booted."""
    machine_id: str | None = None
    public_key: str | None = None
    accepted: int = 0
    """The highest incarnation of its own that the cell has accepted since the reporter began; 0: none."""
    gangs: dict[tuple[str, int], tuple[Peer, ...]] = field(default_factory=dict)
    """(First task here, token) → peers of the latest large gangs, at most MAX_GANGS_REMEMBERED."""
    forgotten_token: int = -1
    """The highest token among forgotten tasks: an unknown task with such a token is not new, but old."""
    handovers: dict[str, HandOverCheckpoint] = field(default_factory=dict)
    """Job → the latest order to hand its checkpoint over, oldest first, at most MAX_HANDOVERS."""
    cores: int = MAX_CORES_PER_NODE
    """Number of its cores."""

    def find(self, task_id: str) -> Task | None:
        return self.tasks.get(task_id) or self.ended.get(task_id)

    def live(self) -> list[Task]:
        """Tasks that have, or are about to have, a process; by token and id."""
        return in_order([task for task in self.tasks.values() if task.status in LIVE])

    def waiting(self) -> list[Task]:
        """Accepted orders whose predecessor is still alive; by token and id."""
        return in_order([task for task in self.tasks.values() if task.status is Status.WAITING])


def in_order(tasks: list[Task]) -> list[Task]:
    """Sorts the list by token and id."""
    if len(tasks) > 1:
        tasks.sort(key=lambda task: (task.token, task.task_id))
    return tasks


class Put(msgspec.Struct, frozen=True):
    """A task has this state now; its GPUs' highest tokens rise to its token."""

    task: Task


class Forget(msgspec.Struct, frozen=True):
    """An ended task is dropped from memory."""

    task_id: str
    token: int


class Break(msgspec.Struct, frozen=True):
    """A GPU has this fault until the machine boots anew or an operator repairs it."""

    fault: GpuFault
    boot_id: str


class Accept(msgspec.Struct, frozen=True):
    """The cell has accepted this node's joining; not journaled."""

    incarnation: int


class Gang(msgspec.Struct, frozen=True):
    """The peers of a large gang, for later orders after the first one's task has ended; not journaled."""

    bearer: str
    """The task whose order contained them."""
    token: int
    peers: tuple[Peer, ...]


class HandOver(msgspec.Struct, frozen=True):
    """Another node may fetch a job's checkpoint."""

    order: HandOverCheckpoint


Change = Put | Forget | Break | Accept | Gang | HandOver


def evolve(state: NodeState, change: Change) -> None:
    """Applies one change; mechanical."""
    match change:
        case Put(task=task):
            _put(state, task)
        case Forget():
            state.ended.pop(change.task_id, None)
            state.forgotten_token = max(state.forgotten_token, change.token)
        case Break():
            state.faults[change.fault.uuid] = change.fault
        case Accept():
            state.accepted = max(state.accepted, change.incarnation)
        case Gang():
            state.gangs[change.bearer, change.token] = change.peers
            if len(state.gangs) > MAX_GANGS_REMEMBERED:
                del state.gangs[next(iter(state.gangs))]
        case HandOver(order):
            hand_over(state, order)


def hand_over(state: NodeState, order: HandOverCheckpoint) -> None:
    """Beyond the bound the oldest is dropped: an attempt that still waits for it begins anew."""
    state.handovers.pop(order.job_id, None)
    state.handovers[order.job_id] = order
    if len(state.handovers) > MAX_HANDOVERS:
        del state.handovers[next(iter(state.handovers))]


def _put(state: NodeState, task: Task) -> None:
    for gpu in task.gpus:
        if state.gpu_tokens.get(gpu, -1) < task.token:
            state.gpu_tokens[gpu] = task.token
    state.ended.pop(task.task_id, None)
    if task.status is Status.ENDED:
        state.tasks.pop(task.task_id, None)
        state.ended[task.task_id] = task
    else:
        state.tasks[task.task_id] = task


def check(state: NodeState) -> None:
    """Raises AssertionError when an invariant is broken: no GPU given twice,
    no task older than its GPU's token."""
    holders: dict[str, list[Task]] = {}
    for task in state.live():
        for gpu in () if task.gated else task.gpus:
            holders.setdefault(gpu, []).append(task)
    for gpu, tasks in holders.items():
        holders_text = " and ".join(f"{task.task_id} ({task.share_milli}/1000)" for task in tasks)
        for task in tasks:
            strangers = [other for other in tasks if not _named_together(task, other)]
            assert sum(other.share_milli for other in strangers) <= WHOLE_GPU, (
                f"GPU {gpu}: {holders_text} at once"
            )
    for task in state.tasks.values():
        assert all(task.token <= state.gpu_tokens[gpu] for gpu in task.gpus), task
        assert task.order is not None, task
    assert not state.tasks.keys() & state.ended.keys()
    assert len(state.ended) <= MAX_ENDED_REMEMBERED


def _named_together(one: Task, other: Task) -> bool:
    """Whether the order of either names the other; not of a task and itself."""
    pairs = {(one.task_id, one.token), (other.task_id, other.token)}
    orders = [task.order for task in (one, other) if task.order is not None]
    named = {(known.task_id, known.token) for order in orders for known in order.companions}
    return one is not other and bool(named & pairs)
