"""What replanning policies share: who takes part, how many GPUs there are, and room for a gang that lacks it.

A plan is judged on GPUs alone, from empty nodes: the classical preemptive schedulers assume that a job can be
stopped and started elsewhere at will. Where the chosen jobs would fit but for their present places,
`make_room` names the smaller jobs that have to move.
"""

from collections.abc import Iterable, Iterator

from penstock.cluster.moves import JobStatus, NodeStatus
from penstock.ledger.index import Free
from penstock.ledger.state import HOLDING, CellState, JobState, NodeState

RUNNABLE = frozenset({JobStatus.QUEUED, JobStatus.LAUNCHING, JobStatus.RUNNING})


def contenders(state: CellState) -> Iterator[JobState]:
    """Jobs that may run now, in order of submission: waiting, running, or stopped only to make way."""
    for job in state.jobs.values():
        if (job.status in RUNNABLE and not job.unschedulable) or (
            job.status is JobStatus.STOPPING and job.stop_reason == "preempted"
        ):
            yield job


def gpus_of(job: JobState) -> int:
    """GPUs of the whole gang. Only for jobs with an estimate."""
    assert job.estimate is not None, f"{job.job_id} has no estimate yet"
    return job.spec.workers * job.estimate.worker.gpus


class Nodes:
    """Free GPUs per node, as if all contenders were gone. Node sets are bit sets over ordinals."""

    __slots__ = ("_having", "free")

    def __init__(self, state: CellState) -> None:
        self._having: dict[int, int] = {}
        """Free GPUs → nodes with exactly so many; 0 is left out."""
        self.free = 0
        for node in state.nodes.values():
            if node.status is NodeStatus.READY:
                here = len(node.spec.gpus) - node.faulted_gpu_mask.bit_count() - _kept(state, node)
                self.free += max(0, here)
                if here > 0:
                    self._having[here] = self._having.get(here, 0) | node.bit

    def take(self, workers: int, gpus: int) -> bool:
        """First fit of a gang of equal workers, all or nothing: each on the lowest ordinal that has room."""
        if gpus == 0:
            return True
        if self.free < workers * gpus:
            return False
        taken: list[tuple[int, int]] = []
        for _ in range(workers):
            fitting = 0
            for level, nodes in self._having.items():
                if level >= gpus:
                    fitting |= nodes
            if not fitting:
                for bit, level in reversed(taken):
                    self._move(bit, level - gpus, level)
                return False
            bit = fitting & -fitting
            level = next(level for level, nodes in self._having.items() if nodes & bit)
            self._move(bit, level, level - gpus)
            taken.append((bit, level))
        return True

    def _move(self, bit: int, old: int, new: int) -> None:
        self.free += new - old
        if old:
            self._having[old] ^= bit
        if new:
            self._having[new] = self._having.get(new, 0) | bit


def _kept(state: CellState, node: NodeState) -> int:
    """GPUs held by jobs that are ending for good: nobody can have them before their exits."""
    kept = 0
    for task_id, job_id in node.tasks.items():
        job = state.jobs[job_id]
        if job.status is JobStatus.STOPPING and job.stop_reason != "preempted":
            kept += len(job.tasks[task_id].place.gpus)
    return kept


def holding(state: CellState) -> list[JobState]:
    """Jobs that hold resources, latest submitted first."""
    ids = {job_id for node in state.nodes.values() for job_id in node.tasks.values()}
    jobs = [state.jobs[job_id] for job_id in ids]
    return sorted((job for job in jobs if job.status in HOLDING), key=lambda job: -job.order)


def make_room(state: CellState, job: JobState) -> tuple[str, ...]:
    """Ids of smaller jobs to stop so that this gang fits as soon as they have ended; () if none would help.

    Each worker goes to the node where the fewest GPUs have to move (ties: the lower ordinal). Only jobs with
    fewer GPUs than one worker asks move, so that chains of moves end.
    """
    demand = job.demand
    need = demand.worker
    if demand.parameter_servers or not need.gpus:
        return ()
    suited = [
        node for node in state.nodes.values() if node.status is NodeStatus.READY and _suits(state, node, job)
    ]
    options = sorted(
        (cost, node.ordinal, moved)
        for node in suited
        if (found := _cheapest(state, node, need.gpus)) is not None
        for cost, moved in (found,)
    )
    victims: list[str] = []
    placed = 0
    for _, ordinal, moved in options:
        if placed == demand.workers:
            break
        if _after(state, state.node(ordinal), moved).fits(need):
            victims += [victim for victim in moved if victim not in victims]
            placed += 1
    return tuple(victims) if placed == demand.workers else ()


def _suits(state: CellState, node: NodeState, job: JobState) -> bool:
    models = job.demand.gpu_models
    return bool(node.spec.gpus) and all(
        gpu.memory_mib >= job.demand.worker.gpu_memory_mib and (not models or gpu.model in models)
        for gpu in node.spec.gpus
    )


def _cheapest(state: CellState, node: NodeState, gpus: int) -> tuple[int, tuple[str, ...]] | None:
    """(GPUs moved, jobs moved) that leave `gpus` free on the node, largest jobs first; None if impossible."""
    free = node.free().gpus
    if free >= gpus:
        return 0, ()
    small = sorted((-held, other.order, other.job_id) for other, held in _single(state, node) if held < gpus)
    moved: list[str] = []
    cost = 0
    for size, _, job_id in small:
        if free + cost >= gpus:
            break
        cost -= size
        moved.append(job_id)
    return (cost, tuple(moved)) if free + cost >= gpus else None


def _single(state: CellState, node: NodeState) -> Iterator[tuple[JobState, int]]:
    """Running jobs of one task on this node, with the number of GPUs that they hold."""
    for job_id in node.tasks.values():
        job = state.jobs[job_id]
        if len(job.tasks) == 1 and job.status in (JobStatus.LAUNCHING, JobStatus.RUNNING):
            [task] = job.tasks.values()
            yield job, len(task.place.gpus)


def _after(state: CellState, node: NodeState, moved: Iterable[str]) -> Free:
    """What the node has free once these jobs are gone."""
    free = node.free()
    gpus, cores, memory, bandwidth = free
    for job_id in moved:
        for task in state.jobs[job_id].tasks.values():
            gpus += len(task.place.gpus)
            cores += len(task.place.cores)
            memory += task.place.host_memory_mib
            bandwidth += task.place.bandwidth_mbps
    return Free(gpus, cores, memory, bandwidth)
