"""First fit of gangs on empty nodes, for preemptive policies; and which jobs to migrate so that a gang fits.

A plan is judged on GPUs alone, from empty nodes: the classical preemptive schedulers assume that a job can be
stopped and started elsewhere at will. Where the chosen jobs would fit but for their present places,
`make_room` names the smaller jobs that have to be migrated.
"""

from collections.abc import Iterable, Iterator

from penstock.ledger.index import Free, bits
from penstock.ledger.state import CellState, JobState, NodeState
from penstock.model.transitions import JobStatus, TaskStatus
from penstock.model.types import WHOLE_GPU

NO_LIMIT = 1 << 30  # above all GPUs of all gangs


def holders(state: CellState) -> tuple[list[JobState], list[JobState]]:
    """Jobs that hold resources, in no order: those that contend for them (they run, or are stopped only to make
    way), and those that are ending for good."""
    running: list[JobState] = []
    ending: list[JobState] = []
    for job in state.holding.values():
        if job.status is not JobStatus.STOPPING or job.stop_reason == "preempted":
            running.append(job)
        else:
            ending.append(job)
    return running, ending


def gpus_of(job: JobState) -> int:
    """GPUs of the whole gang. Only for jobs with an estimate."""
    assert job.estimate is not None, f"{job.job_id} has no estimate yet"
    return job.spec.workers * job.estimate.worker.gpus


class Nodes:
    """Free GPUs per node, as if all contenders were gone."""

    __slots__ = ("_first", "_left", "free")

    def __init__(self, state: CellState, ending: Iterable[JobState]) -> None:
        """`ending`: hold their GPUs until their exits; no job gets these before."""
        left = state.sound_gpus.copy()
        for node_id, held in _held(ending).items():
            ordinal = state.nodes[node_id].ordinal
            left[ordinal] = max(0, left[ordinal] - held)
        self.free = sum(left)
        self._left = [*left, NO_LIMIT]
        """Ordinal → free GPUs; behind the last node one that holds everything."""
        self._first: dict[int, int] = {}
        """GPUs → the lowest ordinal that may have so many: free GPUs only become fewer."""

    def take(self, workers: int, gpus: int) -> bool:
        """First fit of a gang of equal workers, all or nothing: each on the lowest ordinal with enough free GPUs."""
        if gpus == 0:
            return True
        if self.free < workers * gpus:
            return False
        left = self._left
        ordinal = self._first.get(gpus, 0)
        if workers == 1:  # most gangs; without a list of what was taken
            while left[ordinal] < gpus:
                ordinal += 1
            if ordinal == len(left) - 1:
                return False
            left[ordinal] -= gpus
        else:
            taken: list[int] = []
            for _ in range(workers):
                while left[ordinal] < gpus:
                    ordinal += 1
                left[ordinal] -= gpus
                taken.append(ordinal)
            if ordinal == len(left) - 1:
                for ordinal in taken:
                    left[ordinal] += gpus
                return False
        self._first[gpus] = ordinal
        self.free -= workers * gpus
        return True


def _held(ending: Iterable[JobState]) -> dict[str, int]:
    """Node id → GPUs held there by these jobs."""
    held: dict[str, int] = {}
    for job in ending:
        for task in job.tasks.values():
            if task.status is not TaskStatus.EXITED:
                place = task.place
                held[place.node_id] = held.get(place.node_id, 0) + len(place.gpus)
    return held


def make_room(state: CellState, job: JobState) -> tuple[str, ...]:
    """Ids of smaller jobs to stop so that this gang fits as soon as they have ended; () if none would help.

    Each worker goes to the node where the fewest GPUs have to be migrated (ties: the lower ordinal). Only
    jobs with fewer GPUs than one worker asks are migrated, so that chains of migrations end.
    """
    demand = job.demand
    need = demand.worker
    if demand.parameter_servers or not need.gpus:
        return ()
    suited = state.index.eligible(need, demand.gpu_models) & state.index.placeable
    options = sorted(
        (found[0], ordinal, found[1])
        for ordinal in bits(suited)
        if (found := _cheapest(state, state.node(ordinal), need.gpus)) is not None
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
            if task.place.gpu_share_milli == WHOLE_GPU:
                yield job, len(task.place.gpus)


def _after(state: CellState, node: NodeState, moved: Iterable[str]) -> Free:
    """What the node has free once these jobs are gone."""
    after = node.copy()
    for job_id in moved:
        for task in state.jobs[job_id].tasks.values():
            after.take_back(task.place)
    return after.free()
