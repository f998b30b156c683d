"""Baselines: `fifo` (first fit), `random`, `even`, and `k8s-default`.

Sources: random, even and the Kubernetes default are the immediate-mode baselines of Liquid §7.4; first fit is
the textbook rule. The order of the queue is the placer's affair (FIFO with a bounded window): here only
nodes are chosen.
"""

from collections.abc import Iterator
from itertools import islice
from math import sqrt

from penstock.ledger.index import bits, nth
from penstock.ledger.state import CellState, JobState
from penstock.policies.base import Chance, Plan
from penstock.policies.gang import Gang, best_of, place_greedily


class FirstFit:
    """The earliest node that fits. Score: the node's ordinal. `name`: of the profile that places so."""

    def __init__(self, name: str = "fifo") -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """The lowest ordinals; chance is not used."""
        return place_greedily(self._name, state, job, self._rank)

    @staticmethod
    def _rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        return [(float(ordinal), ordinal) for ordinal in islice(bits(gang.open(is_worker)), limit)]


class MostFree:
    """Fills one node after the other, each time the one with most free GPUs. Source: the Tiresias of Pollux §5.

    For gangs of one-GPU workers: as many workers as the node has GPUs, then the next node. Score: minus the
    GPUs free before the node's first worker of this gang. Ties: the lower ordinal.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """Looks at classes of equal load, not at nodes; chance is not used."""
        return place_greedily(self._name, state, job, self._rank)

    @staticmethod
    def _rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        open_nodes = gang.open(is_worker)
        own = open_nodes & gang.used
        if own:
            return [(0.0, ordinal) for ordinal in islice(bits(own), limit)]
        classes = [
            (float(used - total), open_nodes & loaded)
            for (used, total), loaded in gang.state.index.load.items()
            if open_nodes & loaded
        ]
        return best_of(classes, limit)


class RandomFit:
    """Every node that fits is equally likely. Score: 0 for all, for none is better than another."""

    @property
    def name(self) -> str:
        return "random"

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """Draws once per task; the alternatives of the explanation are the lowest other ordinals."""

        def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
            nodes = gang.open(is_worker)
            if not nodes:
                return []
            drawn = nth(nodes, int(chance.generator.integers(nodes.bit_count())))
            others = islice(bits(nodes & ~(1 << drawn)), limit - 1)
            return [(0.0, drawn), *((0.0, ordinal) for ordinal in others)]

        return place_greedily(self.name, state, job, rank)


class Even:
    """Spread: the least loaded node. Source: Liquid §7.4, the even-distributed baseline.

    Load is the share of a node's GPUs in use before the task comes, this gang's own included. For a task
    without GPUs that says nothing, so there the node with the most free cores is the least loaded. Score:
    the share of GPUs, or minus the free cores. Ties: the lower ordinal.
    """

    @property
    def name(self) -> str:
        return "even"

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """Looks at classes of equal load, not at nodes; chance is not used."""
        return place_greedily(self.name, state, job, self._rank)

    @staticmethod
    def _rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        open_nodes = gang.open(is_worker)
        own, others = open_nodes & gang.used, open_nodes & ~gang.used
        if not gang.need(is_worker).gpus:
            classes = [(float(-gang.free(ordinal).cores), 1 << ordinal) for ordinal in bits(own)]
            return best_of([*classes, *_by_free_cores(gang, others, limit)], limit)
        classes = []
        for ordinal in bits(own):
            total = len(gang.state.node(ordinal).spec.gpus)
            classes.append(((total - gang.free(ordinal).gpus) / total, 1 << ordinal))
        for (used, total), loaded in gang.state.index.load.items():
            if others & loaded:
                classes.append((used / total, others & loaded))
        return best_of(classes, limit)


def _by_free_cores(gang: Gang, nodes: int, limit: int) -> Iterator[tuple[float, int]]:
    """(minus the free cores, nodes), most free first, until `limit` nodes have come."""
    at_least = gang.state.index.cores.at_least
    found = more = 0
    for level in range(len(at_least) - 1, -1, -1):
        here = nodes & at_least[level] & ~more
        more |= here
        if here:
            yield float(-level), here
            found += here.bit_count()
            if found >= limit:
                return


MAX_SCORED = 100
"""Nodes scored per task. Kubernetes, too, scores a part of a large cluster only, and never fewer than 100
feasible nodes on purpose (`minFeasibleNodesToFind`)."""


class KubernetesDefault:
    """Kubernetes' default scoring: NodeResourcesFit (LeastAllocated) plus NodeResourcesBalancedAllocation.

    Per node, with f(r) = (requested + asked) / capacity of resource r, this task included:

        LeastAllocated     = mean over r of 100 · (1 − f(r))
        BalancedAllocation = 100 · (1 − standard deviation over r of f(r))

    The node with the largest sum wins (both plug-ins have weight 1). Score: minus the sum.

    Departures: r runs over cores, memory and, on nodes that have them, GPUs (Kubernetes' default leaves
    extended resources out and would place GPU jobs by cores and memory alone). Whole numbers are not rounded
    down. The other default plug-ins (taints, spreading, affinity, images) give all our nodes the same. Of
    more than 100 open nodes the first 100 from a drawn ordinal on are scored, where Kubernetes goes on from
    where it last stopped and takes 5 – 50 %. Ties: the lower ordinal, where Kubernetes draws.
    """

    @property
    def name(self) -> str:
        return "k8s-default"

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """Task by task like pods, but all or nothing; draws only in cells with more than 100 open nodes."""

        def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
            nodes = gang.open(is_worker)
            if nodes.bit_count() > MAX_SCORED:
                start = int(chance.generator.integers(nodes.bit_length()))
                early = nodes & ((1 << start) - 1)
                sample = [*islice(bits(nodes ^ early), MAX_SCORED)]
                sample += islice(bits(early), MAX_SCORED - len(sample))
            else:
                sample = [*bits(nodes)]
            return sorted((-self._score(gang, ordinal, is_worker), ordinal) for ordinal in sample)[:limit]

        return place_greedily(self.name, state, job, rank)

    @staticmethod
    def _score(gang: Gang, ordinal: int, is_worker: bool) -> float:
        """0 … 200, the larger the better."""
        spec, free, need = gang.state.node(ordinal).spec, gang.free(ordinal), gang.need(is_worker)
        shares = [
            1 - (free.cores - need.cores) / spec.cores,
            1 - (free.host_memory_mib - need.host_memory_mib) / spec.host_memory_mib,
        ]
        if spec.gpus:
            shares.append(1 - (free.gpus - need.gpus) / len(spec.gpus))
        mean = sum(shares) / len(shares)
        deviation = sqrt(sum((share - mean) ** 2 for share in shares) / len(shares))
        return 100 * (1 - mean) + 100 * (1 - deviation)
