"""How many GPUs the cell's nodes have, by kind of GPU: which gangs fit together. Thousands of nodes are few kinds."""

from collections import Counter
from collections.abc import Collection, Mapping

from penstock_services.estimator.core.step_time.placements import Placement, wrong_placement


class NodeSizes:
    """Nodes that have GPUs of one model; mixed ones are left out."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, int]] = {}
        self._kinds: dict[str, Counter[int]] = {}

    def put(self, node_id: str, model: str, gpus: int) -> None:
        """The node joined or changed. `model`: empty unless all of its GPUs are of one."""
        self.remove(node_id)
        if model and gpus:
            self._nodes[node_id] = (model, gpus)
            self._kinds.setdefault(model, Counter())[gpus] += 1

    def remove(self, node_id: str) -> None:
        """The node is gone; unknown ones are ignored."""
        model, gpus = self._nodes.pop(node_id, ("", 0))
        if model:
            self._kinds[model][gpus] -= 1
            self._kinds[model] += Counter()  # drops what is 0
            if not self._kinds[model]:
                del self._kinds[model]

    def kinds(self, allowed: Collection[str]) -> list[tuple[str, Mapping[int, int]]]:
        """(GPU model, GPUs on a node → nodes) of those allowed (none named: all), the most GPUs first."""
        found = [(model, sizes) for model, sizes in self._kinds.items() if not allowed or model in allowed]
        return sorted(found, key=lambda one: (-sum(size * nodes for size, nodes in one[1].items()), one[0]))


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
    return () if left or wrong_placement(found) else found
