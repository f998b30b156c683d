"""Liquid Alg. 1 line by line, without any index: the yardstick for `penstock.scheduling.place.liquid`.

Every plan is evaluated from nothing with exact fractions; only the last step, eq. 4, is in floating point.
The readings of the paper are those named in the product's docstring. Slow on purpose: O(tasks² · nodes).
"""

from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import ResourceVector


class Placed(NamedTuple):
    """One container on a node."""

    node: NodeState
    is_worker: bool


class Answer(NamedTuple):
    """Node ids in rank order, and every complete plan that differs in the last container, best first."""

    nodes: tuple[str, ...]
    score: float
    ranking: list[tuple[float, int, tuple[str, ...]]]


def pair_cost(state: CellState, a: NodeState, b: NodeState, levels: bool) -> int:
    """Eq. 2."""
    if a is b:
        return 0
    same_domain = a.spec.domain == b.spec.domain
    everybody = list(state.nodes.values())
    if same_domain and a.spec.rack == b.spec.rack:
        rack = [n for n in everybody if (n.spec.domain, n.spec.rack) == (a.spec.domain, a.spec.rack)]
        return 1 if levels else len(rack)
    if same_domain:
        return 4 if levels else len([n for n in everybody if n.spec.domain == a.spec.domain])
    return 40 if levels else len(everybody)


def cost(state: CellState, plan: list[Placed], demand: Demand, levels: bool) -> int:
    """Eq. 5: parameter server × worker pairs, or the neighbours on the ring of workers."""
    workers = [placed.node for placed in plan if placed.is_worker]
    servers = [placed.node for placed in plan if not placed.is_worker]
    if demand.parameter_servers:
        pairs = [(server, worker) for server in servers for worker in workers]
    else:
        pairs = list(pairwise(workers))
        if len(workers) > 2:
            pairs.append((workers[-1], workers[0]))
    return sum(pair_cost(state, a, b, levels) for a, b in pairs)


def need_of(demand: Demand, is_worker: bool) -> ResourceVector:
    return demand.worker if is_worker else demand.parameter_server


def fitness(node: NodeState, plan: list[Placed], demand: Demand) -> Fraction:
    """Eq. 6."""
    total = len(node.spec.gpus)
    if total == 0:
        return Fraction(-1)
    healthy = node.free_gpu_mask & ~node.faulted_gpu_mask
    used = total - healthy.bit_count()
    asked = sum(need_of(demand, placed.is_worker).gpus for placed in plan if placed.node is node)
    return Fraction(-(asked + used), total)


def score(state: CellState, plan: list[Placed], demand: Demand, weight: float, levels: bool) -> float:
    """Eq. 4."""
    used_nodes = {placed.node.ordinal: placed.node for placed in plan}
    load = sum((fitness(node, plan, demand) for node in used_nodes.values()), Fraction(0))
    return weight * cost(state, plan, demand, levels) + (1 - weight) * float(load)


def fits(node: NodeState, plan: list[Placed], demand: Demand, is_worker: bool) -> bool:
    """Step (a): the node meets the estimate, this plan's own containers taken off."""
    need = need_of(demand, is_worker)
    if node.status is not NodeStatus.READY:
        return False
    models = {gpu.model for gpu in node.spec.gpus}
    if need.gpus:
        if demand.where and (len(models) != 1 or not models <= set(demand.where.gpu_models)):
            return False
        if any(gpu.memory_mib < need.gpu_memory_mib for gpu in node.spec.gpus):
            return False
    here = [need_of(demand, placed.is_worker) for placed in plan if placed.node is node] + [need]
    return (
        sum(n.gpus for n in here) <= (node.free_gpu_mask & ~node.faulted_gpu_mask).bit_count()
        and sum(n.cores for n in here) <= node.free_core_mask.bit_count()
        and sum(n.host_memory_mib for n in here) <= node.free_host_memory_mib
        and sum(n.bandwidth_mbps for n in here) <= node.free_bandwidth_mbps
    )


def best_fit(
    state: CellState, demand: Demand, weight: float, *, levels: bool = False, distinct_nodes: bool = False
) -> Answer | None:
    """Alg. 1; comments give its lines. None if a container finds no node."""
    placement: list[Placed] = []  # 1
    nodes = [state.node(ordinal) for ordinal in range(len(state.node_at))]
    containers = [False] * demand.parameter_servers + [True] * demand.workers
    ranking: list[tuple[float, int]] = []
    for is_worker in containers:  # 2
        best_node, best_score = None, float("inf")  # 3, 4
        ranking = []
        for candidate in nodes:  # 6
            if not fits(candidate, placement, demand, is_worker):
                continue
            placement.append(Placed(candidate, is_worker))  # 7
            value = score(state, placement, demand, weight, levels)  # 9
            ranking.append((value, candidate.ordinal))
            if value < best_score:  # 10
                best_node, best_score = candidate, value  # 11, 12
            placement.pop()  # 15
        if best_node is None:
            return None
        placement.append(Placed(best_node, is_worker))  # 17
        if distinct_nodes:
            nodes.remove(best_node)  # 18
    workers = [placed.node.spec.node_id for placed in placement if placed.is_worker]
    servers = [placed.node.spec.node_id for placed in placement if not placed.is_worker]
    return Answer(
        (*workers, *servers),
        best_score,
        [(v, o, (*workers[:-1], state.node_at[o], *servers)) for v, o in sorted(ranking)],
    )
