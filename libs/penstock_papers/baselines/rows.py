"""Free resources of each node, GPU by GPU, as arrays: for policies that score every open node.

A row contains the inputs of one node's scores. The table contains the rows of a whole cell and recomputes
only those of nodes that have changed since the last call; it is a cache of the state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.cluster.assignment import Plan
from penstock.ledger.state.index import bits, shape_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import take_lowest
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import MAX_GPUS_PER_NODE, WHOLE_GPU, ResourceVector

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SHARED = 0
"""Class of tasks that hold a part of a GPU; the class of others is their number of whole GPUs."""


def class_of(gpus: int, gpu_share_milli: int) -> int:
    """Class of a task with GPUs: `SHARED`, or 1 … 16."""
    return SHARED if gpu_share_milli < WHOLE_GPU else gpus


@dataclass(slots=True)
class NodeRow:
    """One node; `take` books the tasks of a gang that is being placed."""

    cores: int
    """Free cores."""
    shares: list[int]
    """Per GPU: thousandths free; 0 for a faulted one."""
    memory_mib: list[int]
    """Per GPU: free memory, as if each had as much as the node's smallest."""
    classes: list[int]
    """Tasks with GPUs, counted by class."""
    model: str
    """Model of its GPUs; empty unless all are of one model."""
    shares_gpus: bool
    """Whether other tasks may get the rest of a partly allocated GPU."""

    @classmethod
    def of(cls, state: CellState, node: NodeState) -> "NodeRow":
        count, each = len(node.gpu_uuids), node.gpu_memory_mib
        shares, memory = [0] * count, [each] * count
        for gpu in bits(node.healthy_gpu_mask):
            shares[gpu] = WHOLE_GPU
        for gpu, left in node.offered.items():
            memory[gpu] = left.memory_mib
            if not node.unusable_gpu_mask >> gpu & 1:
                shares[gpu] = left.milli
        classes = [0] * (MAX_GPUS_PER_NODE + 1)
        for task_id, job_id in node.tasks.items():
            place = state.jobs[job_id].tasks[task_id].place
            if place.gpus:
                classes[class_of(len(place.gpus), place.gpu_share_milli)] += 1
        shape = shape_of(node.spec)
        return cls(
            node.free_core_mask.bit_count(), shares, memory, classes, shape.gpu_model, shape.shares_gpus
        )

    def fitting(self, need: ResourceVector) -> list[int]:
        """GPUs that can take a task with one GPU, ascending."""
        return [
            gpu
            for gpu, (share, memory) in enumerate(zip(self.shares, self.memory_mib, strict=True))
            if share >= need.gpu_share_milli and memory >= need.gpu_memory_mib
        ]

    @property
    def whole(self) -> int:
        """Bit set of the wholly free GPUs."""
        return sum(1 << gpu for gpu, share in enumerate(self.shares) if share == WHOLE_GPU)

    def take(self, need: ResourceVector, gpus: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Books a task that fits, on `gpus` or else on those that `penstock.cluster.view.assign` chooses;
        returns its GPUs."""
        if gpus is None and need.gpu_share_milli < WHOLE_GPU:
            gpus = (min((self.shares[gpu], self._rest(gpu), gpu) for gpu in self.fitting(need))[2],)
        elif gpus is None:
            gpus = take_lowest(self.whole, need.gpus)
        for taken in gpus:
            self.shares[taken] -= need.gpu_share_milli if self.shares_gpus else WHOLE_GPU
            self.memory_mib[taken] -= need.gpu_memory_mib
        if gpus:
            self.classes[class_of(need.gpus, need.gpu_share_milli)] += 1
        self.cores -= need.cores
        return gpus

    def _rest(self, gpu: int) -> int:
        """Free memory of a partly allocated GPU, MiB: of equal shares the one with less memory is taken."""
        return self.memory_mib[gpu] if self.shares[gpu] < WHOLE_GPU else 0


class GangGpus:
    """GPUs that a gang being placed has taken; rows only of the nodes that it uses."""

    def __init__(self, state: CellState) -> None:
        self._state = state
        self.rows: dict[int, NodeRow] = {}
        """Ordinal → the node less the gang's own tasks."""
        self._taken: list[tuple[int, ...]] = []

    def row(self, ordinal: int) -> NodeRow:
        row = self.rows.get(ordinal)
        if row is None:
            row = self.rows[ordinal] = NodeRow.of(self._state, self._state.node(ordinal))
        return row

    def still_open(self, nodes: int, need: ResourceVector) -> int:
        """The nodes, without those on which the gang's own tasks have left no GPU for the task."""
        for ordinal, row in self.rows.items():
            short = len(row.fitting(need)) < need.gpus if need.gpus else False
            nodes &= ~(short << ordinal)
        return nodes

    def take(self, ordinal: int, need: ResourceVector, gpus: tuple[int, ...] | None = None) -> None:
        """Books the next task, parameter servers first."""
        self._taken.append(self.row(ordinal).take(need, gpus))

    def named(self, plan: Plan, job: JobState) -> Plan:
        """The plan with these GPUs, in rank order."""
        servers = job.demand.parameter_servers
        return replace(plan, gpus=(*self._taken[servers:], *self._taken[:servers]))


class Rows(NamedTuple):
    """Arrays over the same nodes; see `NodeRow`. GPUs that a node does not have are never free."""

    cores: Ints
    """Shape (nodes)."""
    shares: Ints
    """Shape (nodes, 16)."""
    memory_mib: Ints
    """Shape (nodes, 16)."""
    gpus: Ints
    """Shape (nodes): GPUs of the node, free or not."""
    classes: Ints
    """Shape (nodes, 17)."""
    model: Ints
    """Shape (nodes): number of the model in `models`; 0 for none or several."""

    def at(self, nodes: Ints) -> "Rows":
        """The rows of these nodes."""
        return Rows(*(column[nodes] for column in self))

    def fits(self, need: ResourceVector) -> Flags:
        """Shape (nodes, 16): GPUs that can take the task or one of its whole GPUs."""
        return (self.shares >= need.gpu_share_milli) & (self.memory_mib >= need.gpu_memory_mib)


def rows_of(nodes: Sequence[NodeRow], models: Mapping[str, int]) -> Rows:
    """These nodes as arrays."""
    wide = [0] * MAX_GPUS_PER_NODE
    count = len(nodes)

    def padded(column: Iterable[list[int]]) -> Ints:
        return np.array([(values + wide)[:MAX_GPUS_PER_NODE] for values in column], np.int64).reshape(
            count, MAX_GPUS_PER_NODE
        )

    return Rows(
        np.array([node.cores for node in nodes], np.int64),
        padded(node.shares for node in nodes),
        padded(node.memory_mib for node in nodes),
        np.array([len(node.shares) for node in nodes], np.int64),
        np.array([node.classes for node in nodes], np.int64).reshape(count, MAX_GPUS_PER_NODE + 1),
        np.array([models[node.model] for node in nodes], np.int64),
    )


HOLE = NodeState(
    NodeSpec(node_id="hole", boot_id="none", cores=1, host_memory_mib=1), 0, NodeStatus.GONE, 0, 0, 0, 0
)
"""Row of an ordinal without node."""


class NodeTable:
    """The rows of all nodes of one cell, by ordinal."""

    def __init__(self) -> None:
        self._state: CellState | None = None
        self._capacity_version = -1
        self._nodes: list[NodeState] = []
        self.versions: Ints = np.zeros(0, np.int64)
        """Shape (nodes): version of the node that its row shows."""
        self.models: dict[str, int] = {}
        self.rows: Rows = rows_of((), {})

    def refresh(self, state: CellState) -> bool:
        """Brings the rows up to date; O(nodes), but few steps for an unchanged node.

        True if the table was rebuilt, because it is another cell or nodes have joined, changed or left.
        """
        anew = self._state is not state or self._capacity_version != state.capacity_version
        if anew:
            self._state, self._capacity_version = state, state.capacity_version
            self._nodes = [state.nodes.get(node_id, HOLE) for node_id in state.node_at]
            self.models = {
                model: number for number, model in enumerate(["", *sorted(set(state.index.gpu_model) - {""})])
            }
            found = [NodeRow.of(state, node) for node in self._nodes]
            self.rows = rows_of(found, self.models)
            self.versions = np.array([node.version for node in self._nodes], np.int64)
            return True
        versions = np.array([node.version for node in self._nodes], np.int64)
        changed = np.flatnonzero(versions != self.versions)
        if changed.size:
            new = rows_of([NodeRow.of(state, self._nodes[place]) for place in changed], self.models)
            for column, values in zip(self.rows, new, strict=True):
                column[changed] = values
            self.versions = versions
        return False
