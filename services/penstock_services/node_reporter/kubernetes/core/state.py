"""State of the reporter of a cluster: options, nodes, tasks, and what others hold. `evolve` is the only
writer.

Nothing of it is stored by the reporter: it is made anew from one list of nodes and pods (`reporter`).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from penstock.model.decisions.orders import Peer, StartTask
from penstock.model.inputs.external_events import OrderRefused, TaskExited
from penstock.model.nouns.nodes import NodeSpec
from penstock_services.node_reporter.core.state import (
    MAX_GANGS_REMEMBERED,
    NO_CONTEXT,
    Context,
)
from penstock_services.node_reporter.kubernetes.core.objects import Node, Pod
from penstock_services.node_reporter.kubernetes.core.requests import Request

TERM_SHIFT = 20  # a million joinings in one term; 2^33 terms remain below 2^53 (`Token`)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one cluster."""

    cluster: str
    """Node ids are `CLUSTER/NODE`."""
    namespace: str = "penstock"
    """Namespace of the pods that are created."""
    gpu_resource: str = "nvidia.com/gpu"
    """Extended resource by which the device plugin counts GPUs."""
    model_label: str = "nvidia.com/gpu.product"
    memory_label: str = "nvidia.com/gpu.memory"
    """Label with the memory of each GPU in MiB, as GPU feature discovery writes it."""
    gpu_memory_mib: int = 0
    """Memory of a GPU on nodes without that label; 0: such nodes are closed."""
    rack_label: str = "topology.kubernetes.io/rack"
    domain_label: str = "topology.kubernetes.io/zone"
    labels: tuple[str, ...] = (
        "kubernetes.io/arch",
        "node.kubernetes.io/instance-type",
        "topology.kubernetes.io/region",
        "topology.kubernetes.io/zone",
    )
    """Labels by which jobs may choose nodes, besides those that begin with `penstock.dev/`."""
    tolerated: tuple[str, ...] = ("nvidia.com/gpu",)
    """Keys of taints that do not close a node; pods tolerate them."""
    service: str = "penstock"
    """Headless Service in the namespace, which names the pods of gangs."""
    finished_pods: int = 200
    """Pods of ended tasks that stay for `kubectl logs`, at least; older ones are deleted."""
    run_as_user: int = 1_000
    public_key: str | None = None
    """See `NodeJoined.public_key`; one key for all nodes of the cluster."""

    def node_id(self, name: str) -> str:
        """Penstock's id of a node."""
        return f"{self.cluster}/{name}"


class Stage(StrEnum):
    CREATING = "creating"  # a create was asked for, and its result is not known
    PLACED = "placed"  # its pod exists, and no container of it was seen running
    RUNNING = "running"
    BARRING = "barring"  # it must never start: a pod that takes its name is being created
    VANISHED = "vanished"  # its pod is gone without proof of its end
    ENDED = "ended"


class Stop(msgspec.Struct, frozen=True):
    """A stop that was ordered."""

    token: int
    grace_s: int
    reason: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task under one token, and its pod."""

    task_id: str
    token: int
    node: str
    """Name of its node, without the cluster."""
    boot_id: str
    """Boot of the node for which it was ordered; empty: not known."""
    machine_id: str = ""
    """Machine of the node then; empty: not known."""
    namespace: str
    name: str
    """Of its pod."""
    stage: Stage
    gpus: tuple[str, ...] = ()
    need: Request = Request()
    """What its pod requests of the node."""
    order: StartTask | None = None
    """None: its pod was found, not created by this session."""
    pod: Pod | None = None
    """The newest version that was seen."""
    started_ms: int | None = None
    stop: Stop | None = None
    failure: str = ""
    """Why it cannot start: its pod is being deleted for that."""
    lost: str = ""
    """Why its exit code will not be known: its pod is being deleted for that."""
    refusal: OrderRefused | None = None
    """To be reported when its name is taken, or was found taken."""
    unsure_ms: int = 0
    """When a create last had no answer: it may still arrive; 0: each had one."""
    exited: TaskExited | None = None
    refused: OrderRefused | None = None
    reported: bool = False
    """The log has its end."""
    ended_ms: int = 0
    context: Context = NO_CONTEXT

    @property
    def answer(self) -> TaskExited | OrderRefused | None:
        """The report of its end."""
        return self.exited or self.refused


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, and what was reported of it."""

    name: str
    node: Node | None = None
    """None: its object was deleted while tasks of it are not proven ended."""
    spec: NodeSpec | None = None
    """As last reported; None: it has not joined in this session."""
    incarnation: int = 0
    closed: str = ""
    """Why nothing may be placed there, as last reported; empty: it is open."""
    owes_join: bool = False
    """An order to it was not obeyed: it joins again, so that the order is repeated."""


class Foreign(msgspec.Struct, frozen=True):
    """A pod on one of the nodes that is not Penstock's, and what it holds."""

    uid: str
    name: str
    """`NAMESPACE/NAME`."""
    node: str
    cpu_milli: int
    memory_bytes: int
    gpus: int


@dataclass(slots=True)
class ReporterState:
    """All state on which the reporter's decisions depend."""

    options: Options
    term: int = 0
    """Term of the fence that this session has raised; 0: not yet."""
    joinings: int = 0
    """Number of joinings in this term."""
    connected: bool = True
    over: str = ""
    """Why this session has ended; empty: it has not."""
    listed: frozenset[str] = frozenset()
    """Kinds that were listed."""
    nodes: dict[str, NodeView] = field(default_factory=dict)
    """By name."""
    tasks: dict[str, Task] = field(default_factory=dict)
    """Tasks that are not proven ended, by id."""
    at: dict[str, dict[str, None]] = field(default_factory=dict)
    """Node → ids of these."""
    ended: dict[str, Task] = field(default_factory=dict)
    """Ended ones, oldest first."""
    foreign: dict[str, dict[str, Foreign]] = field(default_factory=dict)
    """Node → uid → pod of others."""
    gangs: dict[tuple[str, int], tuple[Peer, ...]] = field(default_factory=dict)
    """(Task whose order contained them, token) → peers of the latest large gangs."""
    gpu_tokens: dict[str, int] = field(default_factory=dict)
    """GPU → the highest token that was obeyed on it (LAW 4)."""
    forgotten: dict[str, int] = field(default_factory=dict)
    """Node → the highest token among its forgotten tasks: an unknown task with such a token is old."""

    @property
    def complete(self) -> bool:
        """Whether this session has its term and knows the cluster: nodes have joined."""
        return bool(self.term) and len(self.listed) == 2

    @property
    def live(self) -> bool:
        """Whether orders are obeyed."""
        return self.complete and self.connected

    def on(self, node: str) -> list[Task]:
        """Tasks of this node that are not proven ended, by id."""
        return [self.tasks[task_id] for task_id in sorted(self.at.get(node, ()))]

    def find(self, task_id: str) -> Task | None:
        return self.tasks.get(task_id) or self.ended.get(task_id)


class Forget(msgspec.Struct, frozen=True):
    """An ended task is dropped from memory."""

    task_id: str
    token: int
    node: str


class DropNode(msgspec.Struct, frozen=True):
    """A node has left, with everything on it."""

    name: str


class DropForeign(msgspec.Struct, frozen=True):
    """Another's pod has ended or is gone."""

    node: str
    uid: str


class Gang(msgspec.Struct, frozen=True):
    """The peers of a large gang, for later orders after the first one."""

    bearer: str
    token: int
    peers: tuple[Peer, ...]


class Session(msgspec.Struct, frozen=True):
    """What this session has reached; None: as before."""

    term: int | None = None
    listed: Literal["nodes", "pods"] | None = None
    connected: bool | None = None
    over: str | None = None


Change = Task | NodeView | Foreign | Forget | DropNode | DropForeign | Gang | Session


def evolve(state: ReporterState, change: Change) -> None:
    """Applies one change; mechanical."""
    match change:
        case Task():
            _put(state, change)
        case NodeView():
            known = state.nodes.get(change.name)
            state.joinings += change.incarnation > (0 if known is None else known.incarnation)
            state.nodes[change.name] = change
        case Foreign():
            state.foreign.setdefault(change.node, {})[change.uid] = change
        case Forget():
            state.ended.pop(change.task_id, None)
            state.forgotten[change.node] = max(state.forgotten.get(change.node, -1), change.token)
        case DropNode():
            state.nodes.pop(change.name, None)
        case DropForeign():
            state.foreign.get(change.node, {}).pop(change.uid, None)
        case Gang():
            state.gangs[change.bearer, change.token] = change.peers
            if len(state.gangs) > MAX_GANGS_REMEMBERED:
                del state.gangs[next(iter(state.gangs))]
        case Session():
            _session(state, change)


def _put(state: ReporterState, task: Task) -> None:
    for gpu in task.gpus:
        state.gpu_tokens[gpu] = max(state.gpu_tokens.get(gpu, 0), task.token)
    if task.stage is Stage.ENDED:
        if state.tasks.pop(task.task_id, None) is not None:
            state.at[task.node].pop(task.task_id, None)
        state.ended[task.task_id] = task
    else:
        state.ended.pop(task.task_id, None)
        state.tasks[task.task_id] = task
        state.at.setdefault(task.node, {})[task.task_id] = None


def _session(state: ReporterState, change: Session) -> None:
    if change.term is not None:
        state.term, state.joinings = change.term, 0
    if change.listed is not None:
        state.listed |= {change.listed}
    if change.connected is not None:
        state.connected = change.connected
    if change.over is not None:
        state.over = change.over
