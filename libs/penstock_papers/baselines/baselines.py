"""Baselines: `fifo` and `fifo-strict` (first fit), `random`, and `even`.

Sources: random and even are immediate-mode baselines of Liquid §7.4; first fit is the textbook rule. The
placer orders the queue (FIFO with a bounded window); here only nodes are chosen.
"""

from itertools import islice

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import Gang, Greedy, best_of, by_free_cores, place_greedily
from penstock.ledger.state.index import bits, nth
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import WHOLE_GPU
from penstock_papers.baselines.rows import GangGpus


class FirstFit(Greedy):
    """The earliest node that fits. Score: the node's ordinal. `name`: of the profile."""

    def rank(self, gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        return [(float(ordinal), ordinal) for ordinal in islice(bits(gang.open(is_worker)), limit)]


class MostFree(Greedy):
    """Fills one node after the other, each time the one with most free GPUs. Source: Pollux §5, its
    implementation of Tiresias.

    For gangs of one-GPU workers: as many workers as the node has GPUs, then the next node. Score: minus the
    GPUs free before the node's first worker of this gang. Ties: the lower ordinal. Examines classes of equal
    load, not single nodes.
    """

    def rank(self, gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
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
    """Uniformly random choice among the nodes that fit, and for a part of a GPU among the fitting GPUs of the
    chosen node.

    Score: 0 for all, since none is better than another.
    """

    name = "random"

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """Uses one random number per task, two for a part of a GPU; the explanation's alternatives are the
        lowest other nodes."""
        gpus = GangGpus(state)
        shares = any(need.gpu_share_milli < WHOLE_GPU for need in job.demand.needs())

        def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
            need = gang.need(is_worker)
            nodes = gpus.still_open(gang.open(is_worker), need)
            if not nodes:
                return []
            chosen = nth(nodes, int(rng.generator.integers(nodes.bit_count())))
            gpu = None
            if need.gpu_share_milli < WHOLE_GPU:
                fitting = gpus.row(chosen).fitting(need)
                gpu = (fitting[int(rng.generator.integers(len(fitting)))],)
            if shares:
                gpus.take(chosen, need, gpu)
            others = islice(bits(nodes & ~(1 << chosen)), limit - 1)
            return [(0.0, chosen), *((0.0, ordinal) for ordinal in others)]

        plan = place_greedily(self.name, state, job, rank)
        return gpus.named(plan, job) if plan is not None and shares else plan


class Even(Greedy):
    """Spread: the least loaded node. Source: Liquid §7.4, the even-distributed baseline.

    Load is the share of a node's GPUs in use before the task is placed, this gang's own included. For a task
    without GPUs that is always 0: there the node with the most free cores is the least loaded. Score: the
    share of GPUs, or minus the free cores. Ties: the lower ordinal. Examines classes of equal load, not
    single nodes.
    """

    def rank(self, gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        open_nodes = gang.open(is_worker)
        own, others = open_nodes & gang.used, open_nodes & ~gang.used
        if not gang.need(is_worker).gpus:
            classes = [(float(-gang.free(ordinal).cores), 1 << ordinal) for ordinal in bits(own)]
            return best_of([*classes, *by_free_cores(gang, others, limit)], limit)
        classes = []
        for ordinal in bits(own):
            total = len(gang.state.node(ordinal).spec.gpus)
            classes.append(((total - gang.free(ordinal).gpus) / total, 1 << ordinal))
        for (used, total), loaded in gang.state.index.load.items():
            if others & loaded:
                classes.append((used / total, others & loaded))
        return best_of(classes, limit)
