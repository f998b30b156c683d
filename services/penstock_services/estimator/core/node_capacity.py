"""Node capacity: the resources of the cell's nodes, by shape. Thousands of nodes have few shapes."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.cluster.capacity import slots
from penstock.ledger.state.index import NodeShape, shape_of
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.types import ResourceVector, TaskPlacement
from penstock_services.estimator.core.records.placements import Placement, why_no_placement
from penstock_services.estimator.core.records.runs import NO_CARD, Allocation, Card


class Capacity(NamedTuple):
    """Of each resource the maximum over the nodes that a job may use;
    the maxima may be of different nodes."""

    gpus: int
    cores: int
    host_memory_mib: int
    gpu_memory_mib: int


class NodeCapacity:
    """A fold of the nodes. Cards stay known after their node has left:
    attempts that ran there are yet to end."""

    def __init__(self) -> None:
        self._cards: dict[str, Card] = {}
        self._nodes: dict[str, NodeShape] = {}
        self._shapes: Counter[NodeShape] = Counter()
        self._named: tuple[Card, ...] | None = None

    def put(self, spec: NodeSpec, *, present: bool = True) -> None:
        """The node joined or changed."""
        node_id, shape = spec.node_id, shape_of(spec)
        card = Card(shape.gpu_model, shape.gpu_memory_mib)
        if self._cards.get(node_id) != card:
            self._cards[node_id], self._named = card, None
        if present:
            self.remove(node_id)
            self._nodes[node_id] = shape
            self._shapes[shape] += 1

    def remove(self, node_id: str) -> None:
        """The node is gone; unknown ones are ignored."""
        shape = self._nodes.pop(node_id, None)
        if shape is not None:
            self._shapes[shape] -= 1
            if not self._shapes[shape]:
                del self._shapes[shape]

    def cards(self) -> tuple[Card, ...]:
        """Cards with a name, each once, in order."""
        if self._named is None:
            self._named = tuple(sorted({card for card in self._cards.values() if card.model}))
        return self._named

    def allocation_of(self, places: Sequence[TaskPlacement]) -> Allocation:
        """Allocation of an attempt's workers (at least one); all of them get the same. A gang on unlike cards
        has none by name."""
        first = places[0]
        found = {self._cards.get(place.node_id, NO_CARD) for place in places} if first.gpus else {NO_CARD}
        card = found.pop() if len(found) == 1 else Card("", min(card.memory_mib for card in found))
        return Allocation(len(first.gpus), first.gpu_share_milli, len(first.cores), card)

    def max(self, spec: JobSpec, gpus: int) -> Capacity | None:
        """Capacity for a worker with so many GPUs of the models that the job allows; None: there is no such
        node now."""
        allowed = spec.gpu_models if gpus else ()
        fitting = [
            (shape.gpus, shape.cores, shape.host_memory_mib, shape.gpu_memory_mib)
            for shape in self._shapes
            if shape.gpus >= gpus and (not allowed or shape.gpu_model in allowed)
        ]
        return Capacity(*map(max, zip(*fitting, strict=True))) if fitting else None

    def hold(self, spec: JobSpec, worker: ResourceVector, server: ResourceVector) -> bool:
        """Whether the empty nodes hold the gang, in any order of its tasks: sufficient, not necessary."""
        workers, servers = (worker, spec.workers, spec.where), (server, spec.parameter_servers, ())
        nodes = sorted(self._shapes.items())
        return all(
            _holds(order, roles)
            for order in (nodes, nodes[::-1])
            for roles in ((workers, servers), (servers, workers))
        )

    def gpu_nodes(self, allowed: Collection[str]) -> list[tuple[str, Mapping[int, int]]]:
        """(GPU model, GPUs on a node → nodes) of those allowed (none named: all), the most GPUs first;
        without mixed nodes."""
        sizes: dict[str, Counter[int]] = {}
        for shape, nodes in self._shapes.items():
            if shape.gpu_model and (not allowed or shape.gpu_model in allowed):
                sizes.setdefault(shape.gpu_model, Counter())[shape.gpus] += nodes
        return sorted(sizes.items(), key=lambda one: (-sum(gpus * n for gpus, n in one[1].items()), one[0]))


Tasks = tuple[ResourceVector, int, Where]
"""Resources of each task, number of tasks, what they allow."""


def _holds(nodes: Sequence[tuple[NodeShape, int]], roles: tuple[Tasks, Tasks]) -> bool:
    """First fit, node by node, on each the first role first."""
    left = [wanted for _, wanted, _ in roles]
    for shape, count in nodes:
        for _ in range(count):
            rest, before = shape, sum(left)
            for role, (need, _, where) in enumerate(roles):
                if left[role]:
                    here = slots(rest, need, where, left[role])
                    left[role] -= here
                    rest = rest._replace(
                        gpus=rest.gpus - here * need.gpus,
                        cores=rest.cores - here * need.cores,
                        host_memory_mib=rest.host_memory_mib - here * need.host_memory_mib,
                        bandwidth_mbps=rest.bandwidth_mbps - here * need.bandwidth_mbps,
                    )
            if not any(left):
                return True
            if sum(left) == before:
                break  # other nodes of this shape hold none either
    return not any(left)


def densest(each: int, workers: int, sizes: Mapping[int, int]) -> Placement:
    """Workers with `each` GPUs on as few nodes as possible on an idle cell; `sizes`: GPUs on a node → nodes.

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
