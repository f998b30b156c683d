"""GPU occupancy per node, and how many more jobs of each size could start."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.model.types import WHOLE_GPU
from penstock.simulator.traces.jobs import Shape, shape_of

SIZES = (1, 2, 4, 8, 16, 32, 64)  # GPUs of the jobs whose free capacity is counted: the sizes in traces


class Block(NamedTuple):
    """A rectangle inside a node: both in thousandths of a GPU, `y` from the node's first."""

    y: int
    height: int


@dataclass(slots=True)
class Node:
    """One node. `taken`: per GPU, in thousandths."""

    node_id: str
    ordinal: int
    taken: list[int]
    faulted: set[int] = field(default_factory=set)
    there: bool = True
    """False once it is gone."""
    open: bool = True
    """Whether anything may be placed there."""
    shared: dict[int, list[Block]] = field(default_factory=dict)
    """Blocks on each partly given GPU."""
    free: int = 0
    """Whole GPUs that could be given out, as last counted."""

    @property
    def gpus(self) -> int:
        return len(self.taken)

    def count_free(self) -> int:
        if not (self.open and self.there):
            return 0
        return sum(not taken and gpu not in self.faulted for gpu, taken in enumerate(self.taken))


class Occupancy:
    """The nodes of the cell, and what is free on them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.held_milli = 0
        self.gpus = 0
        """Of the nodes that are there."""
        self._at: dict[str, Node] = {}
        self._largest = 0
        self._shapes: tuple[Shape, ...] = ()
        self._slots: dict[int, int] = {}
        """Per size of a worker: how many such workers fit, all nodes together."""

    def __getitem__(self, node_id: str) -> Node:
        return self._at[node_id]

    def startable(self) -> Sequence[int]:
        """Per size of `SIZES`: how many more jobs of that size could start, if no other did."""
        return [self._slots[shape.gpus_per_worker] // shape.workers for shape in self._shapes] or [0] * len(
            SIZES
        )

    def join(self, node_id: str, gpus: int) -> None:
        """A node joins, comes back or changes; what its tasks hold stays held."""
        node = self._at.get(node_id)
        if node is None:
            node = Node(node_id, len(self.nodes), [])
            self._at[node_id] = node
            self.nodes.append(node)
        elif node.there:
            self.gpus -= node.gpus
        node.there = node.open = True
        node.faulted.clear()
        node.taken = node.taken[:gpus] + [0] * (gpus - node.gpus)
        self.gpus += gpus
        if gpus > self._largest:
            self._largest = gpus
            self._shapes = tuple(shape_of(size, gpus) for size in SIZES)
            self._slots = {
                each: sum(other.free // each for other in self.nodes)
                for each in {shape.gpus_per_worker for shape in self._shapes}
            }
        self._count(node)

    def close(self, node_id: str, *, gone: bool = False) -> None:
        """Nothing new is placed there; with `gone` it counts no more at all."""
        node = self._at[node_id]
        node.open = False
        if gone and node.there:
            node.there = False
            self.gpus -= node.gpus
        self._count(node)

    def reopen(self, node_id: str) -> None:
        """A Suspect node has recovered."""
        self._at[node_id].open = True
        self._count(self._at[node_id])

    def fault(self, node_id: str, gpu: int) -> None:
        self._at[node_id].faulted.add(gpu)
        self._count(self._at[node_id])

    def give(self, node: Node, gpus: Sequence[int], share: int) -> tuple[Block, ...]:
        """Takes `share` thousandths of each. Returns the rectangles that show it."""
        blocks: list[Block] = []
        for gpu in gpus:
            node.taken[gpu] += share
            if share < WHOLE_GPU:
                blocks += _shelve(node.shared.setdefault(gpu, []), share, gpu * WHOLE_GPU)
            elif blocks and blocks[-1].y + blocks[-1].height == gpu * WHOLE_GPU:
                blocks[-1] = Block(blocks[-1].y, blocks[-1].height + WHOLE_GPU)
            else:
                blocks.append(Block(gpu * WHOLE_GPU, WHOLE_GPU))
        self.held_milli += len(gpus) * share
        self._count(node)
        return tuple(blocks)

    def take_back(self, node: Node, gpus: Sequence[int], share: int, blocks: Sequence[Block]) -> None:
        for gpu in gpus:
            if gpu < node.gpus:
                node.taken[gpu] -= share
            if share < WHOLE_GPU:
                node.shared[gpu] = [block for block in node.shared[gpu] if block not in blocks]
        self.held_milli -= len(gpus) * share
        self._count(node)

    def _count(self, node: Node) -> None:
        free = node.count_free()
        if free != node.free:
            for each in self._slots:
                self._slots[each] += free // each - node.free // each
            node.free = free


def _shelve(blocks: list[Block], share: int, base: int) -> list[Block]:
    """Assigns a share to the gaps of its GPU, lowest first, split if necessary; what does not fit overlaps at the top."""
    pieces: list[Block] = []
    y, left = base, share
    for block in [*sorted(blocks), Block(base + WHOLE_GPU, 0)]:
        piece = min(left, block.y - y)
        if piece > 0:
            pieces.append(Block(y, piece))
            left -= piece
        y = max(y, block.y + block.height)
    if left:
        pieces.append(Block(base + WHOLE_GPU - left, left))
    blocks += pieces
    return pieces
