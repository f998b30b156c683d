"""Succession placement: places gangs on GPUs of tasks that are being stopped or about to end, so that they
start when these have ended.

Possible where each task's memory and bandwidth are free already, and it lacks only GPUs, or cores of the
tasks whose GPUs it gets: the node delays a task until its GPUs are free, and for no other resource.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.cluster.assignment import place_on
from penstock.cluster.overlay import Gangs, Placed, lacking_of, unusable
from penstock.ledger.derived.groups import booked
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import mask_of, take_lowest
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, TaskPlacement

MAX_RENDEZVOUS_MS = 60_000  # how long a gang's tasks may wait for one whose predecessor saves


@dataclass(slots=True)
class _Leaving:
    """Resources of a task that is being stopped or about to end, as far as they are not allocated to a
    successor yet."""

    job: JobState
    gpu_mask: int
    core_mask: int


@dataclass(slots=True)
class _Node:
    """A node, less the trial placements."""

    node: NodeState
    leaving: list[_Leaving]

    def copy(self) -> "_Node":
        return _Node(self.node.copy(), [replace(leaving) for leaving in self.leaving])


def _leaving(
    state: CellState, node: NodeState, job: JobState, task_id: str, *, ending: bool
) -> _Leaving | None:
    """None where the task can have no successor: its end is neither ordered nor near, it is not known to run,
    or others also hold its GPUs."""
    task = job.tasks[task_id]
    ends = job.status is JobStatus.STOPPING or (ending and job.status is JobStatus.RUNNING)
    if not ends or job.group or job.target or task.started_ms is None:
        return None
    if not task.place.gpus or task.place.gpu_share_milli < WHOLE_GPU:
        return None
    part = booked(state, job, task.place)
    gpus = mask_of(part.gpus) & node.present_gpu_mask & ~node.unusable_gpu_mask
    return _Leaving(job, gpus, mask_of(part.cores)) if gpus else None


class NextMembers:
    """Nodes of a cell with the resources of tasks that are being stopped; units are placed on trial, one
    after the other.

    `ending`: ids of running jobs that are about to end by themselves: they count as being stopped, too.
    """

    def __init__(self, state: CellState, ending: Container[str] = frozenset()) -> None:
        self._state = state
        self._ending = ending
        self._nodes: dict[str, _Node] = {}
        self._taken: dict[str, list[TaskPlacement]] = {}
        """Node → places booked on it before its copy was made."""

    def give(self, gangs: Gangs) -> tuple[Placed, ...] | None:
        """Places for all gangs, booked on the trial; None, and nothing is booked, where a task could start
        too early, has no room, or no predecessor exists."""
        trial: dict[str, _Node] = {}
        found = [self._gang(job, nodes, trial) for job, nodes in gangs]
        placed = tuple(one for one in found if one is not None)
        after = {name for one in placed for name in one.after}
        stopped = (job for name in after if (job := self._state.jobs[name]).status is JobStatus.STOPPING)
        grace_ms = max((job.spec.grace_ms for job in stopped), default=0)
        if len(placed) < len(gangs) or not after or (len(trial) > 1 and grace_ms > MAX_RENDEZVOUS_MS):
            return None
        self._nodes |= trial
        return placed

    def take(self, places: Iterable[TaskPlacement]) -> None:
        """Books places on free resources that were found on another overlay."""
        for place in places:
            node = self._nodes.get(place.node_id)
            if node is None:
                self._taken.setdefault(place.node_id, []).append(place)
            else:
                node.node.give(place)

    def _gang(self, job: JobState, nodes: Sequence[str], trial: dict[str, _Node]) -> Placed | None:
        state, job = self._state, job if job.spec.min_workers is None else job.shaped(len(nodes))
        demand = job.demand
        tasks: list[TaskPlacement] = []
        after: dict[str, JobState] = {}
        for rank, node_id in enumerate(nodes):
            known = state.nodes.get(node_id)
            need = demand.worker if rank < demand.workers else demand.parameter_server
            if known is None or unusable(state, known, need, demand.where):
                return None
            node = trial[node_id] = trial.get(node_id) or self._node(node_id).copy()
            before = _before(state, node, need, demand.where)
            place = None if before is None else _give(node, job, rank, need, before)
            if before is None or place is None:
                return None
            tasks.append(place)
            after |= {leaving.job.job_id: leaving.job for leaving, _ in before}
        in_order = sorted(after.values(), key=lambda other: other.order)
        return Placed(job, tuple(tasks), tuple(other.job_id for other in in_order))

    def _node(self, node_id: str) -> _Node:
        found = self._nodes.get(node_id)
        if found is None:
            state, node = self._state, self._state.nodes[node_id]
            jobs = ((task_id, state.jobs[job_id]) for task_id, job_id in node.tasks.items())
            left = (
                _leaving(state, node, job, task_id, ending=job.job_id in self._ending)
                for task_id, job in jobs
            )
            found = self._nodes[node_id] = _Node(node.copy(), [one for one in left if one is not None])
            for place in self._taken.pop(node_id, ()):
                found.node.give(place)
        return found


def _before(
    state: CellState, node: _Node, need: ResourceVector, where: Where
) -> list[tuple[_Leaving, int]] | None:
    """Predecessors whose GPUs the task gets in addition to free ones, and how many of each: as few
    predecessors as possible. None: too few GPUs, memory or bandwidth."""
    free = node.node
    if need.host_memory_mib > free.free_host_memory_mib or need.bandwidth_mbps > free.free_bandwidth_mbps:
        return None
    if not need.gpus or need.gpu_share_milli < WHOLE_GPU:
        return None if lacking_of(state, free, need, where) else []
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
    """Books the task's place on the node and returns it; None where cores are lacking."""
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
