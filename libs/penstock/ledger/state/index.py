"""Indexes over the nodes of a cell, as bit sets: bit i stands for the node of ordinal i.

Finding the nodes that can take a task costs a handful of big-integer operations whatever the size of the cell
(10,000 nodes are 1,250 bytes), because every resource has one bit set per level of free units. Levels are
coarse for large resources; inside a level nodes are grouped by exact value, so every answer is exact.
"""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock.model.nouns.allowed import Where
from penstock.model.nouns.gpu_names import allows
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector


def bits(mask: int) -> Iterator[int]:
    """Ordinals in the set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def lowest(mask: int) -> int:
    """The smallest ordinal in a set that is not empty."""
    return (mask & -mask).bit_length() - 1


def nth(mask: int, rank: int) -> int:
    """The ordinal of the set bit that has exactly `rank` set bits below it,
    by bisection; 0 ≤ rank < popcount."""
    below, width = 0, mask.bit_length()
    while width > 1:
        half = width // 2
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if rank < count:
            mask, width = low, half
        else:
            rank, mask, below, width = rank - count, mask >> half, below + half, width - half
    return below


Key = TypeVar("Key")


def _add(sets: dict[Key, int], key: Key, bit: int) -> None:
    """Puts the node into one set."""
    sets[key] = sets.get(key, 0) | bit


def _drop(sets: dict[Key, int], key: Key, bit: int) -> None:
    """Takes the node out of one set; removes the set if it becomes empty."""
    left = sets.get(key, 0) & ~bit
    if left:
        sets[key] = left
    else:
        sets.pop(key, None)


class Thermometer:
    """Per level k the set of nodes with at least k units free; one unit is `unit` of the resource.

    With `unit` > 1 the nodes of a level are also grouped by their exact value. A change then updates one set
    per level crossed, a query reads at most one set per distinct value inside one level.
    """

    __slots__ = ("at_least", "exact", "unit")

    def __init__(self, unit: int = 1) -> None:
        self.unit = unit
        self.at_least: list[int] = [0]
        self.exact: dict[int, dict[int, int]] = {}
        """Level → free → nodes; empty when the unit is 1."""

    def copy(self) -> "Thermometer":
        found = Thermometer(self.unit)
        found.at_least = list(self.at_least)
        found.exact = {level: dict(sets) for level, sets in self.exact.items()}
        return found

    def change(self, bit: int, old: int, new: int) -> None:
        """The node behind `bit` had `old` and now has `new` free; −1: the node is not in the index."""
        unit, sets = self.unit, self.at_least
        before, after = old // unit, new // unit
        if after > before:
            if after >= len(sets):
                sets.extend([0] * (after + 1 - len(sets)))
            for level in range(before + 1, after + 1):
                sets[level] |= bit
        else:
            for level in range(after + 1, before + 1):
                sets[level] ^= bit
        if unit > 1:
            if old >= 0:
                _drop(self.exact[before], old, bit)
            if new >= 0:
                _add(self.exact.setdefault(after, {}), new, bit)

    def having(self, need: int) -> int:
        """Nodes that have at least `need` free."""
        level, over = divmod(need, self.unit)
        sets = self.at_least
        if not over:
            return sets[level] if level < len(sets) else 0
        mask = sets[level + 1] if level + 1 < len(sets) else 0
        for value, nodes in self.exact.get(level, {}).items():
            if value >= need:
                mask |= nodes
        return mask


class Share(NamedTuple):
    """What is free of a GPU that several tasks may share; compared by the free share first."""

    milli: int
    """Thousandths of the GPU's time."""
    memory_mib: int

    def holds(self, need: ResourceVector) -> bool:
        return self.milli >= need.gpu_share_milli and self.memory_mib >= need.gpu_memory_mib


NO_SHARE = Share(0, 0)


class Free(msgspec.Struct, frozen=True, gc=False):
    """What is free on one node, or -1 everywhere for a node on which nothing may be placed."""

    gpus: int = -1
    """Wholly free GPUs."""
    cores: int = -1
    host_memory_mib: int = -1
    bandwidth_mbps: int = -1
    shares: tuple[Share, ...] = ()
    """What is free of each partly allocated GPU, ascending."""
    unreserved_cores: int = -1
    """Those of `cores` that belong to the CPU array; -1: the cell has no arrays, or nothing may be placed."""

    def fits(self, need: ResourceVector) -> bool:
        """Whether the task fits these resources, exactly; the index checks GPU model and memory of wholly
        free GPUs."""
        return (
            (
                self.gpus >= need.gpus
                or (need.gpu_share_milli < WHOLE_GPU and self.best_share(need) is not None)
            )
            and self.cores >= need.cores
            and self.host_memory_mib >= need.host_memory_mib
            and self.bandwidth_mbps >= need.bandwidth_mbps
        )

    def count(self, need: ResourceVector, at_most: int) -> int:
        """How many such tasks fit together, at most so many. Only for tasks that share no GPU."""
        both = (
            (self.gpus, need.gpus),
            (self.cores, need.cores),
            (self.host_memory_mib, need.host_memory_mib),
            (self.bandwidth_mbps, need.bandwidth_mbps),
        )
        return min([at_most, *[free // each for free, each in both if each]])

    def best_share(self, need: ResourceVector) -> int | None:
        """Best fit: position in `shares` of the partly allocated GPU with least free that still holds the
        task; None if none does."""
        return next((place for place, share in enumerate(self.shares) if share.holds(need)), None)

    def less(self, need: ResourceVector, gpu: Share) -> "Free":
        """What is free after a task that fits was placed;
        `gpu`: what a wholly free GPU of the node offers it."""
        gpus, shares = self.gpus - need.gpus, self.shares
        if need.gpu_share_milli < WHOLE_GPU:
            place = self.best_share(need)
            if place is None:
                left = gpu
            else:
                gpus, left = self.gpus, shares[place]
                shares = shares[:place] + shares[place + 1 :]
            left = Share(left.milli - need.gpu_share_milli, left.memory_mib - need.gpu_memory_mib)
            shares = tuple(sorted((*shares, left)))
        return Free(
            gpus,
            self.cores - need.cores,
            self.host_memory_mib - need.host_memory_mib,
            self.bandwidth_mbps - need.bandwidth_mbps,
            shares,
            self.unreserved_cores if need.gpus else max(-1, self.unreserved_cores - need.cores),
        )


NOT_PLACEABLE = Free()


class NodeShape(NamedTuple):
    """Capacity of an empty node; a cell has few shapes, however many nodes it has."""

    gpus: int
    gpu_model: str
    """Empty unless all its GPUs are of one model."""
    gpu_memory_mib: int
    """Memory of its smallest GPU."""
    cores: int
    host_memory_mib: int
    bandwidth_mbps: int
    shares_gpus: bool = True


def shape_of(spec: NodeSpec) -> NodeShape:
    """The shape of a node with this inventory; faulted GPUs count, since they may be repaired."""
    models = {gpu.model for gpu in spec.gpus}
    return NodeShape(
        len(spec.gpus),
        models.pop() if len(models) == 1 else "",
        min((gpu.memory_mib for gpu in spec.gpus), default=0),
        spec.cores,
        spec.host_memory_mib,
        spec.bandwidth_mbps,
        spec.shares_gpus,
    )


_SHARED = frozenset({"gpu_node", "ordinals", "labelled"})
"""Fields of the index that its copies share."""


@dataclass(slots=True)
class NodeIndex:
    """All bit sets of one cell, and its GPUs. An ordinal is reused when its node is dropped."""

    known: int = 0
    placeable: int = 0
    gone: int = 0
    """Nodes proven gone (`evolve` enters them); a node that joins or is restored leaves the set."""
    cordoned: int = 0
    """Nodes out of use by an operator's order (`evolve` enters them), whatever their status."""
    distrusted: int = 0
    """Nodes that are distrusted, or GPUs of which are (`evolve` enters them),
    also while they take a probe."""
    shape: dict[NodeShape, int] = field(default_factory=dict)
    gpus: Thermometer = field(default_factory=Thermometer)
    cores: Thermometer = field(default_factory=Thermometer)
    unreserved_cores: Thermometer = field(default_factory=Thermometer)
    """Free cores of the CPU array, only in a cell that has arrays."""
    host_memory: Thermometer = field(default_factory=lambda: Thermometer(4_096))
    bandwidth: Thermometer = field(default_factory=lambda: Thermometer(1_000))
    gpu_model: dict[str, int] = field(default_factory=dict)
    """GPU model → nodes that have only GPUs of this model."""
    gpu_memory: dict[int, int] = field(default_factory=dict)
    """MiB of the node's smallest GPU → nodes."""
    rack: dict[str, int] = field(default_factory=dict)
    domain: dict[str, int] = field(default_factory=dict)
    load: dict[tuple[int, int], int] = field(default_factory=dict)
    """(GPUs used, GPUs in total) → placeable nodes; the classes of Liquid's fitness. A partly allocated GPU
    counts as used."""
    shared: dict[Share, int] = field(default_factory=dict)
    """What is free of a partly allocated GPU → placeable nodes with such a GPU."""
    ordinals: dict[str, int] = field(default_factory=dict)
    """Node id → ordinal."""
    images_only: int = 0
    """Nodes that run container images alone (`NodeSpec.runs`)."""
    labelled: dict[str, int] = field(default_factory=dict)
    """`LABEL=VALUE` → nodes, also `rack=…` and `domain=…`."""
    gpu_node: dict[str, str] = field(default_factory=dict)
    """UUID → id of the node that has this GPU and is not proven gone."""

    def copy(self) -> "NodeIndex":
        """A copy for trials, whose nodes neither join nor leave: it shares what only these change."""
        found = copy(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Thermometer):
                setattr(found, each.name, value.copy())
            elif isinstance(value, dict) and each.name not in _SHARED:
                setattr(found, each.name, dict(value))
        return found

    def describe(self, bit: int, spec: NodeSpec) -> None:
        """Enters the properties that never change while a spec is valid."""
        self.known |= bit
        self.gone &= ~bit
        self.images_only |= bit if spec.runs == "images" else 0
        for sets, key in self._described(spec):
            _add(sets, key, bit)
        self.ordinals[spec.node_id] = bit.bit_length() - 1
        for gpu in spec.gpus:
            self.gpu_node[gpu.uuid] = spec.node_id

    def remove(self, bit: int, spec: NodeSpec) -> None:
        """Undoes `describe`; the node's free resources must have been taken out before."""
        self.known &= ~bit
        self.gone &= ~bit
        self.images_only &= ~bit
        for sets, key in self._described(spec):
            _drop(sets, key, bit)
        del self.ordinals[spec.node_id]
        self._release(spec)

    def lose(self, bit: int, spec: NodeSpec) -> None:
        """The node is proven gone: its GPUs may appear in another node."""
        self.gone |= bit
        self._release(spec)

    def _release(self, spec: NodeSpec) -> None:
        for gpu in spec.gpus:
            if self.gpu_node.get(gpu.uuid) == spec.node_id:
                del self.gpu_node[gpu.uuid]

    def _described(self, spec: NodeSpec) -> Iterator[tuple[dict[Any, int], object]]:
        """The sets that contain a node of this spec, and its key in each."""
        shape = shape_of(spec)
        yield self.shape, shape
        yield self.gpu_memory, shape.gpu_memory_mib
        if shape.gpu_model:
            yield self.gpu_model, shape.gpu_model
        for term in spec.labelled:
            yield self.labelled, term
        yield self.rack, spec.rack
        yield self.domain, spec.domain

    def refit(self, bit: int, total_gpus: int, old: Free, new: Free) -> None:
        """The node's free resources changed from `old` to `new`."""
        if old.cores != new.cores:
            self.cores.change(bit, old.cores, new.cores)
        if old.unreserved_cores != new.unreserved_cores:
            self.unreserved_cores.change(bit, old.unreserved_cores, new.unreserved_cores)
        if old.host_memory_mib != new.host_memory_mib:
            self.host_memory.change(bit, old.host_memory_mib, new.host_memory_mib)
        if old.bandwidth_mbps != new.bandwidth_mbps:
            self.bandwidth.change(bit, old.bandwidth_mbps, new.bandwidth_mbps)
        if old.shares != new.shares:
            for share in set(old.shares):
                _drop(self.shared, share, bit)
            for share in set(new.shares):
                _add(self.shared, share, bit)
        if old.gpus == new.gpus:
            return
        self.gpus.change(bit, old.gpus, new.gpus)
        if old.gpus >= 0:
            _drop(self.load, (total_gpus - old.gpus, total_gpus), bit)
        if new.gpus >= 0:
            _add(self.load, (total_gpus - new.gpus, total_gpus), bit)
            self.placeable |= bit
            self.gone &= ~bit
        else:
            self.placeable &= ~bit

    def within(self, where: Where) -> int:
        """Nodes that the job allows by name and label, and that can run its programs; -1: all."""
        mask = -1 if where and where.image else ~self.images_only
        if where and where.only:
            named = 0
            for term in where.only:
                named |= self._having(term)
            mask &= named
        if where:
            for term in where.exclude:
                mask &= ~self._having(term)
        return mask

    def _having(self, term: str) -> int:
        """Nodes for which a term of a job (`penstock.model.nouns.types.NodeTerm`) holds."""
        mask = -1
        for part in term.split("&"):
            ordinal = self.ordinals.get(part)
            mask &= self.labelled.get(part, 0) if ordinal is None else 1 << ordinal
        return mask

    def eligible(self, need: ResourceVector, where: Where) -> int:
        """Nodes that the job allows and that suit the task by GPU model and memory,
        whatever is free on them."""
        mask = self.known
        if where or self.images_only:
            mask &= self.within(where)
        if need.gpus:
            if where and where.gpu_models:
                of_models = 0
                for model, nodes in self.gpu_model.items():
                    if allows(where.gpu_models, model):
                        of_models |= nodes
                mask &= of_models
            for memory_mib, nodes in self.gpu_memory.items():
                if memory_mib < need.gpu_memory_mib:
                    mask &= ~nodes
        return mask

    def sharing(self, need: ResourceVector) -> int:
        """Nodes with a wholly or partly free GPU that can hold the task.
        O(distinct free parts of shared GPUs)."""
        nodes = self.gpus.having(need.gpus)
        if need.gpu_share_milli < WHOLE_GPU:
            for share, having in self.shared.items():
                if share.holds(need):
                    nodes |= having
        return nodes

    def candidates(self, need: ResourceVector, where: Where = ()) -> int:
        """Placeable nodes that can take the task now. In a full cell the free GPUs decide."""
        nodes = self.sharing(need)
        return nodes and (
            nodes
            & self.eligible(need, where)
            & self.cores.having(need.cores)
            & self.host_memory.having(need.host_memory_mib)
            & self.bandwidth.having(need.bandwidth_mbps)
        )


def set_of(ordinals: Iterable[int]) -> int:
    """Bit set of these ordinals."""
    nodes = 0
    for ordinal in ordinals:
        nodes |= 1 << ordinal
    return nodes
