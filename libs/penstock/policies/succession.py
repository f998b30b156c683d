"""Places for a gang on nodes that have room when those that are being stopped there have ended: next members of their leases.

Possible where each task has its memory and bandwidth beside them by now, and lacks GPUs alone, or cores of those whose GPUs it gets: the node makes a
task wait for the GPUs that it gets, and for nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.ledger.groups import booked
from penstock.ledger.job_state import JobState
from penstock.ledger.masks import mask_of, take_lowest
from penstock.ledger.node_state import NodeState
from penstock.ledger.state import CellState
from penstock.model.transitions import JobStatus
from penstock.model.types import WHOLE_GPU, ResourceVector, TaskPlacement
from penstock.policies.base import place_on
from penstock.policies.overlay import lacking_of, unusable

MAX_RENDEZVOUS_MS = 60_000  # that members of a gang on other nodes wait for one whose predecessor saves


class Next(NamedTuple):
    """A gang that starts as others end."""

    tasks: tuple[TaskPlacement, ...]
    """In rank order."""
    after: tuple[str, ...]
    """Ids of the jobs whose GPUs it gets, in the order of their submission."""


@dataclass(slots=True)
class _Leaving:
    """What a task that is being stopped leaves, and nobody was given yet."""

    job: JobState
    gpu_mask: int
    core_mask: int


class _Node:
    """A node, less what was given out."""

    def __init__(self, state: CellState, node: NodeState) -> None:
        self.node = node.copy()
        self.leaving = [
            leaving
            for task_id, job_id in node.tasks.items()
            if (leaving := _leaving(state, node, state.jobs[job_id], task_id)) is not None
        ]


def _leaving(state: CellState, node: NodeState, job: JobState, task_id: str) -> _Leaving | None:
    """None where nobody can come after the task: its end is not ordered, or it is not known to run, or others hold a GPU of it as well."""
    task = job.tasks[task_id]
    if job.status is not JobStatus.STOPPING or job.group or job.target or task.started_ms is None:
        return None
    if not task.place.gpus or task.place.gpu_share_milli < WHOLE_GPU:
        return None
    part = booked(state, job, task.place)
    gpus = mask_of(part.gpus) & node.present_gpu_mask & ~node.faulted_gpu_mask
    return _Leaving(job, gpus, mask_of(part.cores)) if gpus else None


def place_after(state: CellState, job: JobState, nodes: Sequence[str]) -> Next | None:
    """Places of a job that waits on these nodes, in rank order; None where a task could start too early, or has no room."""
    if job.spec.min_workers is not None:
        job = job.shaped(len(nodes))
    demand = job.demand
    found: dict[str, _Node] = {}
    tasks: list[TaskPlacement] = []
    after: dict[str, JobState] = {}
    for rank, node_id in enumerate(nodes):
        known = state.nodes.get(node_id)
        need = demand.worker if rank < demand.workers else demand.parameter_server
        if known is None or unusable(state, known, need, demand.gpu_models):
            return None
        node = found[node_id] = found.get(node_id) or _Node(state, known)
        before = _before(state, node, need, demand.gpu_models)
        if before is None:
            return None
        place = _give(node, job, rank, need, before)
        if place is None:
            return None
        tasks.append(place)
        after |= {leaving.job.job_id: leaving.job for leaving, _ in before}
    grace_ms = max((other.spec.grace_ms for other in after.values()), default=0)
    if not after or (len(found) > 1 and grace_ms > MAX_RENDEZVOUS_MS):
        return None
    in_order = sorted(after.values(), key=lambda other: other.order)
    return Next(tuple(tasks), tuple(other.job_id for other in in_order))


def _before(
    state: CellState, node: _Node, need: ResourceVector, gpu_models: tuple[str, ...]
) -> list[tuple[_Leaving, int]] | None:
    """Whose GPUs the task gets beside free ones, and how many: as few others as possible. None: there are too few, or it has no room."""
    free = node.node
    if need.host_memory_mib > free.free_host_memory_mib or need.bandwidth_mbps > free.free_bandwidth_mbps:
        return None
    if not need.gpus or need.gpu_share_milli < WHOLE_GPU:
        return None if lacking_of(state, free, need, gpu_models) else []
    lacking = need.gpus - free.healthy_gpu_mask.bit_count()
    found: list[tuple[_Leaving, int]] = []
    for leaving in sorted(node.leaving, key=lambda one: -one.gpu_mask.bit_count()):
        if lacking <= 0:
            break
        if count := min(lacking, leaving.gpu_mask.bit_count()):
            found.append((leaving, count))
            lacking -= count
    return found if lacking <= 0 else None


def _give(
    node: _Node, job: JobState, rank: int, need: ResourceVector, before: Sequence[tuple[_Leaving, int]]
) -> TaskPlacement | None:
    """The task's place, which is taken of the node; None where cores are lacking."""
    free = node.node
    if not before:
        if need.cores > free.free_core_mask.bit_count():
            return None
        place = place_on(free, job, job.demand, rank)
        free.give(place)
        return place
    own = cores = free.free_core_mask
    gpus: list[int] = []
    for leaving, count in before:
        cores |= leaving.core_mask
        gpus += take_lowest(leaving.gpu_mask, count)
    if need.cores > cores.bit_count():
        return None
    gpus += take_lowest(free.healthy_gpu_mask, need.gpus - len(gpus))
    free.free_core_mask = cores
    place = place_on(free, job, job.demand, rank, tuple(sorted(gpus)))
    for leaving, _ in before:
        leaving.gpu_mask &= ~mask_of(place.gpus)
        leaving.core_mask &= ~mask_of(place.cores)
    free.free_core_mask = own
    free.give(place)
    return place
