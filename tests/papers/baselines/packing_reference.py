"""The packing family line by line, without arrays or caches: the yardstick for `packing`, `fgd` and `random`.

For jobs of one task. A score is computed in exact fractions and cut; only FGD's logistic is in floating
point, but for a gradient of 0, whose score is 50. Slow on purpose.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import exp

from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import ResourceVector
from penstock_papers.settings import TypicalTask

WHOLE = 1_000


@dataclass
class Gpus:
    """One node's GPUs: thousandths and MiB free of each."""

    milli: list[int]
    memory_mib: list[int]


def gpus_of(node: NodeState) -> Gpus:
    count = len(node.spec.gpus)
    each = min((gpu.memory_mib for gpu in node.spec.gpus), default=0)
    found = Gpus([0] * count, [each] * count)
    for gpu in range(count):
        if node.faulted_gpu_mask >> gpu & 1:
            continue
        if node.free_gpu_mask >> gpu & 1:
            found.milli[gpu] = WHOLE
        elif gpu in node.shared:
            found.milli[gpu], found.memory_mib[gpu] = node.shared[gpu]
    return found


def fitting(node: NodeState, need: ResourceVector) -> list[int]:
    """GPUs that can take the task, or one of its whole GPUs."""
    free = gpus_of(node)
    return [
        gpu
        for gpu in range(len(free.milli))
        if free.milli[gpu] >= need.gpu_share_milli and free.memory_mib[gpu] >= need.gpu_memory_mib
    ]


def feasible(node: NodeState, demand: Demand) -> bool:
    need = demand.worker
    if node.status is not NodeStatus.READY:
        return False
    if need.gpus and demand.where and {gpu.model for gpu in node.spec.gpus} - {*demand.where.gpu_models}:
        return False
    if need.gpus and any(gpu.memory_mib < need.gpu_memory_mib for gpu in node.spec.gpus):
        return False
    return (
        node.free_core_mask.bit_count() >= need.cores
        and node.free_host_memory_mib >= need.host_memory_mib
        and node.free_bandwidth_mbps >= need.bandwidth_mbps
        and (not need.gpus or len(fitting(node, need)) >= need.gpus)
    )


def largest(state: CellState) -> tuple[int, int]:
    """(cores, thousandths of GPUs) of the largest node that is not gone."""
    alive = [node for node in state.nodes.values() if node.status is not NodeStatus.GONE]
    return max(node.spec.cores for node in alive), WHOLE * max(1, *(len(node.spec.gpus) for node in alive))


def best_fit(state: CellState, node: NodeState, need: ResourceVector) -> int:
    cores, milli = largest(state)
    left_cores = Fraction(node.free_core_mask.bit_count() - need.cores, cores)
    left_milli = Fraction(sum(gpus_of(node).milli) - need.gpus * need.gpu_share_milli, milli)
    return int(100 * (1 - (left_cores + left_milli) / 2))


def dot_product(state: CellState, node: NodeState, need: ResourceVector) -> int:
    cores, milli = largest(state)
    by_cores = Fraction(node.free_core_mask.bit_count(), cores) * Fraction(need.cores, cores)
    by_gpus = Fraction(sum(gpus_of(node).milli), milli) * Fraction(need.gpus * need.gpu_share_milli, milli)
    return int(100 * (1 - (by_cores + by_gpus) / 2))


def clustering(state: CellState, node: NodeState, need: ResourceVector) -> int:
    if need.gpus == 0:
        return 0
    _, milli = largest(state)

    def kind(gpus: int, share_milli: int) -> str:
        return "shared" if share_milli < WHOLE else str(gpus)

    kinds: Counter[str] = Counter()
    for task_id, job_id in node.tasks.items():
        place = state.jobs[job_id].tasks[task_id].place
        if place.gpus:
            kinds[kind(len(place.gpus), place.gpu_share_milli)] += 1
    own = kind(need.gpus, need.gpu_share_milli)
    score = 25 * (milli - sum(gpus_of(node).milli)) // milli
    if not kinds:
        return score + 25
    if own in kinds:
        return score + (75 if len(kinds) == 1 else 50)
    return score


def packing(state: CellState, node: NodeState, need: ResourceVector) -> int:
    if need.gpus == 0:
        return 0
    milli = gpus_of(node).milli
    count = len(milli)
    if all(share == WHOLE for share in milli):
        return max(33 - count, count)
    used = sorted(milli[gpu] for gpu in fitting(node, need))[: need.gpus]
    whole = used.count(WHOLE)
    if whole:
        return max(50 - whole, 33)
    return max(50, 100 - sum(share // 10 for share in used) // 10)


def fragmentation(cores: int, milli: list[int], model: str, typical: tuple[TypicalTask, ...]) -> Fraction:
    """F of a node."""
    total = sum(task.count for task in typical)
    found = Fraction(0)
    for task in typical:
        runs = (
            task.gpus > 0
            and (not task.gpu_models or model in task.gpu_models)
            and cores >= task.cores
            and sum(share >= task.gpu_share_milli for share in milli) >= task.gpus
        )
        lost = sum(share for share in milli if share < task.gpu_share_milli) if runs else sum(milli)
        found += Fraction(task.count * lost, total)
    return found


def gradient(
    node: NodeState, need: ResourceVector, typical: tuple[TypicalTask, ...]
) -> tuple[int, int | None]:
    """(score, the GPU that a part goes to)."""
    milli, cores = gpus_of(node).milli, node.free_core_mask.bit_count()
    models = {gpu.model for gpu in node.spec.gpus}
    model = models.pop() if len(models) == 1 else ""
    before = fragmentation(cores, milli, model, typical)

    def score(after_milli: list[int]) -> int:
        gain = before - fragmentation(cores - need.cores, after_milli, model, typical)
        return int(100 / (1 + exp(-float(gain) / 1_000))) if gain else 50

    if need.gpu_share_milli == WHOLE:
        left, after = need.gpus, list(milli)
        for gpu in range(len(after)):
            if left and after[gpu] == WHOLE:
                after[gpu], left = 0, left - 1
        return score(after), None
    best: tuple[int, int | None] = (-1, None)
    for gpu in fitting(node, need):
        after = list(milli)
        after[gpu] -= need.gpu_share_milli
        if score(after) > best[0]:
            best = score(after), gpu
    return best


Score = Callable[[CellState, NodeState, ResourceVector], int]
SCORES: Mapping[str, Score] = {
    "best-fit": best_fit,
    "dot-product": dot_product,
    "clustering": clustering,
    "packing": packing,
}


def choice(
    state: CellState, demand: Demand, profile: str, typical: tuple[TypicalTask, ...] = ()
) -> tuple[str, int, int | None] | None:
    """(node id, score, GPU if the policy names it) of the best node, the first of equals; None if none
    fits."""
    best: tuple[str, int, int | None] | None = None
    for node_id in state.node_at:
        node = state.nodes[node_id]
        if not feasible(node, demand):
            continue
        gpu: int | None = None
        if profile == "fgd":
            score, gpu = gradient(node, demand.worker, typical)
        else:
            score = SCORES[profile](state, node, demand.worker)
        if best is None or score > best[1]:
            best = node_id, score, gpu
    return best
