"""Defragmentation: nodes are cleared of smaller jobs, which move elsewhere, where free GPUs are spread over
nodes.

Each worker is placed where the fewest GPUs have to move (ties: the lower ordinal). Only jobs with fewer GPUs
than a worker move, so that chains of moves end.
"""

from collections.abc import Callable, Iterable

from penstock.cluster.view import ClusterView, Undo
from penstock.ledger.state.index import bits
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector

MAX_LOOKED_AT = 64  # nodes that are tried for one worker, the most promising first


def clear(view: ClusterView, demand: Demand, cheapest: Callable[[], Iterable[JobState] | None]) -> bool:
    """Releases the jobs of one node after the other until the gang fits; nothing is released where it cannot.

    `cheapest`: the jobs to move from the next node; None: no node can be cleared.
    """
    undos: list[Undo] = []
    for _ in range(demand.workers):
        if view.fit(demand) is not None:
            break
        found = cheapest()
        if found is None:
            break
        undos += [view.release(job) for job in found]
    if view.fit(demand) is None:
        for undo in reversed(undos):
            undo()
        return False
    return True


def clear_for(view: ClusterView, demand: Demand) -> list[JobState]:
    """Smaller jobs of one task that have to move so that the gang's workers fit, released; empty where that
    does not suffice."""
    need = demand.worker
    if demand.parameter_servers or not need.gpus or need.gpu_share_milli < WHOLE_GPU:
        return []
    moved: list[JobState] = []

    def cheapest() -> list[JobState] | None:
        found = _cheapest(view, need, demand.where)
        moved.extend(found or ())
        return found

    return moved if clear(view, demand, cheapest) else []


def _cheapest(view: ClusterView, need: ResourceVector, where: Where) -> list[JobState] | None:
    """The jobs to move from the node with the lowest cost; None if no examined node can be cleared."""
    index = view.state.index
    suited = index.eligible(need, where) & index.placeable
    best: tuple[int, list[JobState]] | None = None
    looked_at = 0
    for free, nodes in view.by_free_gpus(suited):
        if free >= need.gpus:
            continue
        if best is not None and best[0] <= need.gpus - free:
            break
        for ordinal in bits(nodes):
            looked_at += 1
            found = _cleared(view, ordinal, need, free)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
            if looked_at == MAX_LOOKED_AT:
                return None if best is None else best[1]
    return None if best is None else best[1]


def _cleared(
    view: ClusterView, ordinal: int, need: ResourceVector, free: int
) -> tuple[int, list[JobState]] | None:
    """(GPUs moved, jobs moved), largest jobs first, so that a worker then fits there; None if impossible."""
    small = sorted(_small(view, ordinal, need), key=lambda found: found[:2])
    moved: list[JobState] = []
    cost = 0
    for size, _, job in small:
        if free + cost >= need.gpus:
            break
        cost -= size
        moved.append(job)
    if free + cost < need.gpus:
        return None
    undos = [view.release(job) for job in moved]
    fits = view.free(ordinal).fits(need)
    for undo in reversed(undos):
        undo()
    return (cost, moved) if fits else None


def _small(view: ClusterView, ordinal: int, need: ResourceVector) -> Iterable[tuple[int, int, JobState]]:
    """(minus its GPUs, order, job) of the jobs on the node that may move."""
    state = view.state
    for job_id in state.node(ordinal).tasks.values():
        job = state.jobs[job_id]
        if job.status is JobStatus.STOPPING or len(job.tasks) > 1 or job_id in view.ended:
            continue
        if not job.preemptible:
            continue
        [task] = job.tasks.values()
        if task.place.gpu_share_milli == WHOLE_GPU and 0 < len(task.place.gpus) < need.gpus:
            yield -len(task.place.gpus), job.order, job
