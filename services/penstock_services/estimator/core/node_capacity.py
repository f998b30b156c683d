"""Node capacity: what the cell's nodes have, by kind of node. Thousands of nodes are few kinds."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.model.types import JobSpec, NodeSpec, TaskPlacement
from penstock_services.estimator.core.runs import NO_CARD, Allocation, Card
from penstock_services.estimator.core.step_time.placements import Placement, why_no_placement

MAX_CACHED = 1_024  # answers; there are few kinds of questions


class NodeKind(NamedTuple):
    """What a node has."""

    gpus: int
    gpu_models: frozenset[str]
    cores: int
    host_memory_mib: int
    card: Card


class Capacity(NamedTuple):
    """Of each resource the maximum over the nodes that a job may use; not all of it need be on one."""

    gpus: int
    cores: int
    host_memory_mib: int
    gpu_memory_mib: int


def kind_of(spec: NodeSpec) -> NodeKind:
    models = frozenset(gpu.model for gpu in spec.gpus)
    card = Card(
        next(iter(models)) if len(models) == 1 else "", min((gpu.memory_mib for gpu in spec.gpus), default=0)
    )
    return NodeKind(len(spec.gpus), models, spec.cores, spec.host_memory_mib, card)


class NodeCapacity:
    """A fold of the nodes. Cards stay known when their node has left: the attempts that ran there still end."""

    def __init__(self) -> None:
        self._cards: dict[str, Card] = {}
        self._nodes: dict[str, NodeKind] = {}
        self._kinds: Counter[NodeKind] = Counter()
        self._named: tuple[Card, ...] | None = None
        self._known: dict[tuple[tuple[str, ...], int], Capacity | None] = {}

    def put(self, spec: NodeSpec, *, present: bool = True) -> None:
        """The node joined or changed."""
        node_id, kind = spec.node_id, kind_of(spec)
        if self._cards.get(node_id) != kind.card:
            self._cards[node_id], self._named = kind.card, None
        if not present or self._nodes.get(node_id) == kind:
            return
        self.remove(node_id)
        self._nodes[node_id] = kind
        self._kinds[kind] += 1
        if self._kinds[kind] == 1:
            self._known.clear()

    def remove(self, node_id: str) -> None:
        """The node is gone; unknown ones are ignored."""
        kind = self._nodes.pop(node_id, None)
        if kind is None:
            return
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
            self._known.clear()

    def cards(self) -> tuple[Card, ...]:
        """Those with a name, each once, in order."""
        if self._named is None:
            self._named = tuple(sorted({card for card in self._cards.values() if card.model}))
        return self._named

    def allocation_of(self, places: Sequence[TaskPlacement]) -> Allocation:
        """Of an attempt's workers (at least one); all of them get the same. A gang on unlike cards has none by name."""
        first = places[0]
        found = {self._cards.get(place.node_id, NO_CARD) for place in places} if first.gpus else {NO_CARD}
        card = found.pop() if len(found) == 1 else Card("", min(card.memory_mib for card in found))
        return Allocation(len(first.gpus), first.gpu_share_milli, len(first.cores), card)

    def max(self, spec: JobSpec, gpus: int) -> Capacity | None:
        """For a worker with so many GPUs of the models that the job allows; None: there is no such node now."""
        asked = (spec.gpu_models if gpus else (), gpus)
        if asked not in self._known:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            self._known[asked] = self._max(*asked)
        return self._known[asked]

    def _max(self, allowed: tuple[str, ...], gpus: int) -> Capacity | None:
        fitting = [
            kind
            for kind in self._kinds
            if kind.gpus >= gpus and (not allowed or kind.gpu_models.intersection(allowed))
        ]
        if not fitting:
            return None
        return Capacity(
            max(kind.gpus for kind in fitting),
            max(kind.cores for kind in fitting),
            max(kind.host_memory_mib for kind in fitting),
            max(kind.card.memory_mib for kind in fitting),
        )

    def gpu_nodes(self, allowed: Collection[str]) -> list[tuple[str, Mapping[int, int]]]:
        """(GPU model, GPUs on a node → nodes) of those allowed (none named: all), the most GPUs first; without mixed nodes."""
        sizes: dict[str, Counter[int]] = {}
        for kind, nodes in self._kinds.items():
            if kind.gpus and kind.card.model and (not allowed or kind.card.model in allowed):
                sizes.setdefault(kind.card.model, Counter())[kind.gpus] += nodes
        return sorted(sizes.items(), key=lambda one: (-sum(gpus * n for gpus, n in one[1].items()), one[0]))


def densest(each: int, workers: int, sizes: Mapping[int, int]) -> Placement:
    """Workers with `each` GPUs on as few nodes as can be, though none were busy; `sizes`: GPUs on a node → nodes.

    Empty where they do not fit.
    """
    ring: list[int] = []
    left = workers
    for size in sorted(sizes, reverse=True):
        for _ in range(sizes[size]):
            here = min(left, size // each)
            if not here:
                break
            ring.append(here * each)
            left -= here
    found = tuple(ring)
    return () if left or why_no_placement(found) else found
