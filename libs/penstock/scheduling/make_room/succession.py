"""Succession placement: places gangs on GPUs of tasks that are being stopped or about to end, so that they
start when these have ended.

Possible where each task's memory and bandwidth are free already, and it lacks only GPUs, or cores of the
tasks whose GPUs it gets: the node delays a task until its GPUs are free, and for no other resource.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from penstock.cluster.assignment import place_on
from penstock.cluster.reasons import unusable, why_not
from penstock.cluster.view import ClusterView, Gangs, Placed, Undo
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

    def hand_over(self, place: TaskPlacement) -> Undo:
        """Allocates what the place has of these resources to a successor."""
        undo = partial(self._hold, self.gpu_mask, self.core_mask)
        self._hold(self.gpu_mask & ~mask_of(place.gpus), self.core_mask & ~mask_of(place.cores))
        return undo

    def _hold(self, gpu_mask: int, core_mask: int) -> None:
        self.gpu_mask, self.core_mask = gpu_mask, core_mask


def _leaving(
    state: CellState, node: NodeState, job: JobState, task_id: str, *, ending: bool
) -> _Leaving | None:
    """None where the task can have no successor: its end is neither ordered nor near, it is not known to run,
    or others also hold its GPUs."""
    task = job.tasks[task_id]
    ends = job.status is JobStatus.STOPPING or (ending and job.status is JobStatus.RUNNING)
    if not ends or job.sharing.group or job.target or task.started_ms is None:
        return None
    if not task.place.gpus or task.place.gpu_share_milli < WHOLE_GPU:
        return None
    part = booked(state, job, task.place)
    gpus = mask_of(part.gpus) & node.present_gpu_mask & ~node.unusable_gpu_mask
    return _Leaving(job, gpus, mask_of(part.cores)) if gpus else None


class Succession:
    """Places gangs on a view's nodes, one after the other, and on what the tasks leave that are being stopped
    there.

    `ending`: ids of running jobs that are about to end by themselves: they count as being stopped, too.
    """

    def __init__(self, view: ClusterView, ending: Container[str] = frozenset()) -> None:
        self._view = view
        self._ending = ending
        self._left: dict[str, list[_Leaving]] = {}

    def place(self, gangs: Gangs) -> tuple[Placed, ...] | None:
        """Places for all gangs, booked on the view; None, and nothing is booked, where a task could start too
        early, has no room, or no predecessor exists."""
        undos: list[Undo] = []
        found = [self._gang(job, nodes, undos) for job, nodes in gangs]
        placed = tuple(one for one in found if one is not None)
        after = {name for one in placed for name in one.after}
        jobs, several = self._view.state.jobs, len({node_id for _, nodes in gangs for node_id in nodes}) > 1
        stopped = (job for name in after if (job := jobs[name]).status is JobStatus.STOPPING)
        grace_ms = max((job.spec.grace_ms for job in stopped), default=0)
        if len(placed) < len(gangs) or not after or (several and grace_ms > MAX_RENDEZVOUS_MS):
            for undo in reversed(undos):
                undo()
            return None
        return placed

    def _gang(self, job: JobState, nodes: Sequence[str], undos: list[Undo]) -> Placed | None:
        state, job = self._view.state, job if job.spec.min_workers is None else job.shaped(len(nodes))
        demand = job.demand
        tasks: list[TaskPlacement] = []
        after: dict[str, JobState] = {}
        for rank, node_id in enumerate(nodes):
            node = self._view.node(node_id)
            need = demand.worker if rank < demand.workers else demand.parameter_server
            if node is None or unusable(state, node, need, demand.where):
                return None
            before = _before(state, node, self._left_on(node), need, demand.where)
            place = None if before is None else self._task(node, job, rank, need, before, undos)
            if before is None or place is None:
                return None
            tasks.append(place)
            after |= {leaving.job.job_id: leaving.job for leaving, _ in before}
        in_order = sorted(after.values(), key=lambda other: other.order)
        return Placed(job, tuple(tasks), tuple(other.job_id for other in in_order))

    def _left_on(self, node: NodeState) -> list[_Leaving]:
        """What the node's tasks leave, as far as no successor has it yet."""
        found = self._left.get(node.spec.node_id)
        if found is None:
            state = self._view.state
            jobs = ((task_id, state.jobs[job_id]) for task_id, job_id in node.tasks.items())
            left = (
                _leaving(state, node, job, task_id, ending=job.job_id in self._ending)
                for task_id, job in jobs
            )
            found = self._left[node.spec.node_id] = [one for one in left if one is not None]
        return found

    def _task(
        self,
        node: NodeState,
        job: JobState,
        rank: int,
        need: ResourceVector,
        before: Sequence[tuple[_Leaving, int]],
        undos: list[Undo],
    ) -> TaskPlacement | None:
        """Books what the task's place takes of the node beyond its predecessors, and returns the place; None
        where cores are lacking."""
        own = cores = node.free_core_mask
        gpus: list[int] = []
        for leaving, count in before:
            cores |= leaving.core_mask
            gpus += take_lowest(leaving.gpu_mask, count)
        if need.cores > cores.bit_count():
            return None
        if not before:
            place = part = place_on(node, job, job.demand, rank)
        else:
            gpus += take_lowest(node.healthy_gpu_mask, need.gpus - len(gpus))
            place = place_on(node, job, job.demand, rank, tuple(sorted(gpus)), cores)
            part = replace(
                place,
                gpus=tuple(gpu for gpu in place.gpus if node.free_gpu_mask >> gpu & 1),
                cores=tuple(core for core in place.cores if own >> core & 1),
            )
        undos.append(self._view.claim_places((part,)))
        undos += [leaving.hand_over(place) for leaving, _ in before]
        return place


def _before(
    state: CellState, node: NodeState, leaving: Sequence[_Leaving], need: ResourceVector, where: Where
) -> list[tuple[_Leaving, int]] | None:
    """Predecessors whose GPUs the task gets in addition to free ones, and how many of each: as few
    predecessors as possible. None: too few GPUs, memory or bandwidth."""
    if need.host_memory_mib > node.free_host_memory_mib or need.bandwidth_mbps > node.free_bandwidth_mbps:
        return None
    if not need.gpus or need.gpu_share_milli < WHOLE_GPU:
        return None if why_not(state, node, need, where) else []
    lacking = need.gpus - node.healthy_gpu_mask.bit_count()
    found: list[tuple[_Leaving, int]] = []
    for one in sorted(leaving, key=lambda one: -one.gpu_mask.bit_count()):
        if lacking <= 0:
            break
        if count := min(lacking, one.gpu_mask.bit_count()):
            found.append((one, count))
            lacking -= count
    return found if lacking <= 0 else None
