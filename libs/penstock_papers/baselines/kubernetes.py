"""Baselines after Kubernetes: `k8s-default` and `kubeflow`. Source: immediate-mode baselines of Liquid §7.4.

Per open node, with f(r) = (requested + asked) / capacity of resource r, this task included:

    LeastAllocated     = mean over r of 100 · (1 − f(r))
    BalancedAllocation = 100 · (1 − standard deviation over r of f(r))

The node with the largest sum is chosen (both plug-ins have weight 1). Score: minus the sum. Ties: the lower
ordinal, where Kubernetes chooses at random. Scores are not truncated to whole numbers. The other default
plug-ins (taints, spreading, affinity, images) give all our nodes the same score.

`k8s-default`: NodeResourcesFit and NodeResourcesBalancedAllocation. r runs over cores, memory and, on nodes
that have them, GPUs. Departures: Kubernetes' default ignores extended resources and would place GPU jobs by
cores and memory alone; pods of a gang are placed all or none. Of more than 100 open nodes the first 100 from
a random ordinal on are scored, where Kubernetes continues where it last stopped and takes 5 – 50 %.

`kubeflow`: a training operator of 2020 (v1.1, as in Liquid) with gang scheduling on, that is, the batch
scheduler Volcano under the configuration that it ships: actions enqueue, allocate, backfill; plug-ins
priority, gang, drf, predicates, proportion, nodeorder. Our interpretation: one queue and no priorities, so
that among waiting gangs the order is that of submission (drf and proportion compare running shares, which are
equal for gangs that hold nothing); a gang is all or nothing; one that does not fit is skipped, however often,
and all behind it are tried (the action named backfill only places pods without resource requests). So large
gangs can starve. Each pod is placed on the first node by nodeorder: the sum above with r over cores and
memory, all open nodes scored. Departures: the gang's parameter servers are placed before its workers, as
everywhere here; enqueue's limit of 1.2 times the cluster is left out, since it only hides gangs that could
not start anyway.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import sqrt

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import Gang, place_greedily
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import WHOLE_GPU
from penstock.scheduling.order.job_rows import JobRows
from penstock.scheduling.stages.protocols import Turns
from penstock_papers.baselines.key_order import Ranked, skipping

MAX_SCORED = 100
"""Nodes scored per task. Kubernetes, too, scores only a part of a large cluster, but at least 100
feasible nodes (`minFeasibleNodesToFind`)."""


class LeastAndBalanced:
    """`count_gpus`: whether GPUs are a resource to be balanced. `max_scored`: nodes scored; None: all."""

    def __init__(self, name: str, *, count_gpus: bool, max_scored: int | None) -> None:
        self.name = name
        self._count_gpus = count_gpus
        self._max_scored = max_scored

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """Places task by task like pods, but all or none; random only where more nodes are open than are
        scored."""

        def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
            nodes = gang.open(is_worker)
            if self._max_scored is not None and nodes.bit_count() > self._max_scored:
                start = int(rng.generator.integers(nodes.bit_length()))
                early = nodes & ((1 << start) - 1)
                sample = [*islice(bits(nodes ^ early), self._max_scored)]
                sample += islice(bits(early), self._max_scored - len(sample))
            else:
                sample = [*bits(nodes)]
            return sorted((-self._score(gang, ordinal, is_worker), ordinal) for ordinal in sample)[:limit]

        return place_greedily(self.name, state, job, rank)

    def _score(self, gang: Gang, ordinal: int, is_worker: bool) -> float:
        """Score of a node, 0 … 200, the larger the better."""
        spec, free, need = gang.state.node(ordinal).spec, gang.free(ordinal), gang.need(is_worker)
        shares = [
            1 - (free.cores - need.cores) / spec.cores,
            1 - (free.host_memory_mib - need.host_memory_mib) / spec.host_memory_mib,
        ]
        if spec.gpus and self._count_gpus:
            milli = free.gpus * WHOLE_GPU + sum(share.milli for share in free.shares)
            shares.append(1 - (milli - need.gpus * need.gpu_share_milli) / (len(spec.gpus) * WHOLE_GPU))
        mean = sum(shares) / len(shares)
        deviation = sqrt(sum((share - mean) ** 2 for share in shares) / len(shares))
        return 100 * (1 - mean) + 100 * (1 - deviation)


class Kubeflow(LeastAndBalanced, Ranked):
    """Implements `penstock.scheduling.stages.protocols.Order`, too: all waiting gangs, those of equal demand
    in one row."""

    def __init__(self) -> None:
        super().__init__("kubeflow", count_gpus=False, max_scored=None)
        self._rows = JobRows(by_demand)

    def order(self, state: CellState) -> Iterator[str]:
        """By submission; after a gang that does not fit those of equal demand are skipped. O(changes + kinds
        of gangs)."""
        self._rows.update(state)
        yield from skipping(state, self._rows.waiting.values())

    def ranked(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """By submission; after a gang that does not start those of equal demand are skipped."""
        del state, holding, at_ms
        hopeless: set[DemandKey] = set()
        for job in sorted(waiting, key=lambda job: job.order):
            if (key := job.demand_key) not in hopeless and not (yield job):
                hopeless.add(key)

    def claim(self, state: CellState, job: JobState) -> str:
        """`submitted as record 812`."""
        return f"submitted as record {job.order}"


def by_demand(state: CellState, job: JobState) -> tuple[tuple[object, ...], float]:
    """(Row of gangs with equal demand, sort key by submission)."""
    return job.demand_key, float(job.order)
