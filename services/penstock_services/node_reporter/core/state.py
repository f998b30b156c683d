"""State of a node: orders and tasks. `evolve` is the only writer; the shell journals its changes.

A task's row is a frozen value that is replaced whole, so that what is on disk and what is in memory are
the same thing.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from penstock.model.external_events import GpuFault, OrderRefused, TaskExited
from penstock.model.orders import Peer, StartTask
from penstock.model.types import WHOLE_GPU

MAX_ENDED_REMEMBERED = 1_000  # ended tasks whose answer can be repeated; older ones only count as "too old"
MAX_GANGS_REMEMBERED = 8  # large ones, whose orders to one node follow each other


class Status(StrEnum):
    WAITING = "waiting"  # accepted, but a predecessor on one of its GPUs is still alive
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"  # SIGTERM sent; SIGKILL follows at `kill_at_ms`
    ENDED = "ended"  # exited, refused, or never to start (a tombstone)


LIVE = frozenset({Status.STARTING, Status.RUNNING, Status.STOPPING})


class Context(msgspec.Struct, frozen=True):
    """The tracing context of the order that a task came from; its events carry it on."""

    traceparent: str | None = None
    causation_id: str | None = None
    correlation_id: str | None = None


NO_CONTEXT = Context()


class Task(msgspec.Struct, frozen=True, omit_defaults=True):
    """One task under one token, as it is in memory and in the journal."""

    task_id: str
    token: int
    boot_id: str
    status: Status
    gpus: tuple[str, ...] = ()
    """UUIDs."""
    order: StartTask | None = None
    """Kept until the task has ended."""
    context: Context = NO_CONTEXT
    pid: int | None = None
    started_ms: int | None = None
    stop_grace_ms: int | None = None
    """Set once somebody asked to stop it."""
    kill_at_ms: int | None = None
    exited: TaskExited | None = None
    refusal: OrderRefused | None = None
    refused_token: int = -1
    """The highest token under which the same task was refused because this one was alive; never obeyed later."""

    @property
    def answer(self) -> TaskExited | OrderRefused | None:
        """What the node reported at its end; it is repeated when the task is ordered again."""
        return self.exited or self.refusal

    @property
    def share_milli(self) -> int:
        """Thousandths of each of its GPUs; others may have the rest."""
        return WHOLE_GPU if self.order is None else self.order.place.gpu_share_milli


@dataclass(slots=True)
class NodeState:
    """Everything that decisions on this node rest on."""

    node_id: str
    boot_id: str
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that it has."""
    incarnation: int = 0
    """Of its latest joining."""
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

    def find(self, task_id: str) -> Task | None:
        return self.tasks.get(task_id) or self.ended.get(task_id)

    def live(self) -> list[Task]:
        """Tasks that have, or are about to have, a process; by token and id."""
        return _in_order([task for task in self.tasks.values() if task.status in LIVE])

    def waiting(self) -> list[Task]:
        """Accepted orders whose predecessor is still alive; by token and id."""
        return _in_order([task for task in self.tasks.values() if task.status is Status.WAITING])


def _in_order(tasks: list[Task]) -> list[Task]:
    if len(tasks) > 1:
        tasks.sort(key=lambda task: (task.token, task.task_id))
    return tasks


class Put(msgspec.Struct, frozen=True):
    """A task has this state now; its GPUs' highest tokens rise to its token."""

    task: Task


class Forget(msgspec.Struct, frozen=True):
    """An ended task leaves the memory."""

    task_id: str
    token: int


class Break(msgspec.Struct, frozen=True):
    """A GPU has this fault until the machine boots anew or an operator repairs it."""

    fault: GpuFault
    boot_id: str


class Accept(msgspec.Struct, frozen=True):
    """The cell has accepted this node's joining; not for the disk."""

    incarnation: int


class Gang(msgspec.Struct, frozen=True):
    """The peers of a large gang, for its orders that come after the first one's task has ended; not for the disk."""

    bearer: str
    """The task whose order had them."""
    token: int
    peers: tuple[Peer, ...]


Change = Put | Forget | Break | Accept | Gang


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
    """Raises AssertionError when an invariant is broken: no GPU given twice, no task older than its GPU's token."""
    holders: dict[str, list[Task]] = {}
    for task in state.live():
        for gpu in task.gpus:
            holders.setdefault(gpu, []).append(task)
    for gpu, tasks in holders.items():
        holders_text = " and ".join(f"{task.task_id} ({task.share_milli}/1000)" for task in tasks)
        assert sum(task.share_milli for task in tasks) <= WHOLE_GPU, f"GPU {gpu}: {holders_text} at once"
    for task in state.tasks.values():
        assert all(task.token <= state.gpu_tokens[gpu] for gpu in task.gpus), task
        assert task.order is not None, task
    assert not state.tasks.keys() & state.ended.keys()
    assert len(state.ended) <= MAX_ENDED_REMEMBERED
