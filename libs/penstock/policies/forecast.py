"""Expected start of a waiting job, by list scheduling: running jobs end as estimated, and those ahead in the queue start first.

Pure, and read only. A node counts with its GPUs (as shares), cores, host memory and bandwidth; memory of shared GPUs, network scores
and what a policy would preempt or plan anew are left out. So it is an estimate, and `ASSUMES` stands beside it.
"""

import heapq
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from penstock.ledger.demand import Demand
from penstock.ledger.state import CellState, JobState, NodeState
from penstock.model.transitions import TaskStatus
from penstock.model.types import WHOLE_GPU, ResourceVector, TaskPlacement

MAX_AHEAD = 256  # jobs in the queue that are looked at, by their place; a later one has no expected start
MAX_VISITS = 20_000  # nodes looked at: about 5 µs each
MAX_NAMED = 5  # holders
ASSUMES = "jobs that run end as estimated (overdue ones now), the jobs ahead in the queue start first, one that does not fit yet lets the others pass, and no new job comes in between"


class Holder(NamedTuple):
    """A job that holds what another one waits for. `ends_ms`: expected; None: not known."""

    job_id: str
    owner: str
    gpus: int
    ends_ms: int | None


class Start(NamedTuple):
    """`starts_ms`: expected, in the ledger's ms; None: not known, and `unknown` names the cause. `holders`: on nodes that suit the job, first ends first."""

    starts_ms: int | None
    unknown: str
    holders: tuple[Holder, ...]


class Room:
    """What is free of one node in the forecast."""

    __slots__ = ("bandwidth", "cores", "memory", "milli")

    def __init__(self, node: NodeState) -> None:
        self.milli = {slot: 0 for slot in range(len(node.gpu_uuids)) if node.present_gpu_mask >> slot & 1}
        for slot in self.milli:
            left = node.left_of(slot)
            self.milli[slot] = 0 if left is None else left.milli
        self.cores = node.free_core_mask.bit_count()
        self.memory = node.free_host_memory_mib
        self.bandwidth = node.free_bandwidth_mbps

    def take(self, need: ResourceVector) -> list[int] | None:
        """Slots for one task, whose needs are taken; None where it does not fit."""
        share = need.gpu_share_milli
        slots = [slot for slot, milli in self.milli.items() if milli >= share][: need.gpus]
        short = self.cores < need.cores or self.memory < need.host_memory_mib
        if len(slots) < need.gpus or short or self.bandwidth < need.bandwidth_mbps:
            return None
        self._add(slots, -share, -need.cores, -need.host_memory_mib, -need.bandwidth_mbps)
        return slots

    def give_back(self, slots: list[int], need: ResourceVector) -> None:
        self._add(slots, need.gpu_share_milli, need.cores, need.host_memory_mib, need.bandwidth_mbps)

    def free(self, place: TaskPlacement) -> None:
        """A task that is placed there in truth has ended."""
        slots = [slot for slot in place.gpus if slot in self.milli]
        self._add(slots, place.gpu_share_milli, len(place.cores), place.host_memory_mib, place.bandwidth_mbps)

    def _add(self, slots: list[int], milli: int, cores: int, memory: int, bandwidth: int) -> None:
        for slot in slots:
            self.milli[slot] = min(WHOLE_GPU, self.milli[slot] + milli)
        self.cores += cores
        self.memory += memory
        self.bandwidth += bandwidth


Taken = list[tuple[str, list[int], ResourceVector]]
"""(node, slots, needs) per task."""


class TooFar(Exception):
    """More than MAX_VISITS nodes were looked at."""


def expected_start(state: CellState, job: JobState, ends_ms: Mapping[str, int], now_ms: int) -> Start | None:
    """When this job of the queue starts. `ends_ms`: expected end per job that holds resources, where it is known.

    None: it is not in the queue. Looks at MAX_VISITS nodes at most, about 0.1 s.
    """
    ahead = state.queue.bisect_left(job.order)
    if job.order not in state.queue:
        return None
    holders = _holders(state, job, ends_ms)
    try:
        if ahead >= MAX_AHEAD:
            raise TooFar
        starts_ms = _Forecast(state, ends_ms, now_ms).start_of(job, ahead)
    except TooFar:
        return Start(None, "too many jobs and nodes are to be looked at", holders)
    return Start(starts_ms, "" if starts_ms is not None else _unknown(state, ends_ms), holders)


class _Forecast:
    """The cell from now on, as far as it is estimated."""

    def __init__(self, state: CellState, ends_ms: Mapping[str, int], now_ms: int) -> None:
        self._state = state
        self._now_ms = now_ms
        self._rooms = {node_id: Room(node) for node_id, node in state.nodes.items() if node.placeable}
        self._begun: dict[str, Taken] = {}
        self._visits = 0
        self._ends = [
            (max(now_ms, ends_ms[held.job_id]), order, held.job_id)
            for order, held in state.holding.items()
            if held.job_id in ends_ms
        ]
        heapq.heapify(self._ends)

    def start_of(self, job: JobState, ahead: int) -> int | None:
        """In ms; None: not known. Raises `TooFar`."""
        state, at_ms = self._state, self._now_ms
        waiting = [state.jobs[job_id] for job_id in islice(state.queue.values(), ahead + 1)]
        while True:
            hopeless = set()
            for other in list(waiting):
                key = other.demand.key
                taken = None if key in hopeless else self._take(other.demand)
                if taken is None:
                    hopeless.add(key)
                    continue
                if other is job:
                    return at_ms
                waiting.remove(other)
                self._begun[other.job_id] = taken
                run_ms = other.estimate.run_ms if other.estimate is not None else None
                if run_ms is not None:
                    heapq.heappush(self._ends, (at_ms + run_ms, other.order, other.job_id))
            if not self._ends:
                return None
            at_ms, _, ended = heapq.heappop(self._ends)
            self._release(ended)

    def _take(self, demand: Demand) -> Taken | None:
        """The whole gang, by first fit; nothing is taken where it does not fit."""
        taken: Taken = []
        needs = demand.needs()
        names = iter(self._rooms)
        name = next(names, None)
        for number, need in enumerate(needs):
            if number and need is not needs[number - 1]:
                names = iter(self._rooms)
                name = next(names, None)
            slots = None
            while name is not None and slots is None:
                self._visits += 1
                if suits_node(self._state.nodes[name], need, demand.gpu_models):
                    slots = self._rooms[name].take(need)
                if slots is None:
                    name = next(names, None)
            if name is None or slots is None:
                for held, given, had in taken:
                    self._rooms[held].give_back(given, had)
                if self._visits > MAX_VISITS:
                    raise TooFar
                return None
            taken.append((name, slots, need))
        return taken

    def _release(self, job_id: str) -> None:
        if job_id in self._begun:
            for name, slots, need in self._begun.pop(job_id):
                self._rooms[name].give_back(slots, need)
            return
        for task in self._state.jobs[job_id].tasks.values():
            if task.status is not TaskStatus.EXITED and task.place.node_id in self._rooms:
                self._rooms[task.place.node_id].free(task.place)


def suits_node(node: NodeState, need: ResourceVector, gpu_models: tuple[str, ...]) -> bool:
    """Whether the node, empty, could hold such a task."""
    model = node.spec.gpus[0].model if node.spec.gpus else ""
    if need.gpus and (gpu_models and model not in gpu_models):
        return False
    return not need.gpus or node.gpu_memory_mib >= need.gpu_memory_mib


def _holders(state: CellState, job: JobState, ends_ms: Mapping[str, int]) -> tuple[Holder, ...]:
    """Who holds something on nodes that suit a worker of this job; first those that end first."""
    need, models = job.demand.worker, job.demand.gpu_models
    suitable = {
        name for name, node in state.nodes.items() if node.placeable and suits_node(node, need, models)
    }
    found = []
    for held in state.holding.values():
        places = [
            task.place
            for task in held.tasks.values()
            if task.status is not TaskStatus.EXITED and task.place.node_id in suitable
        ]
        gpus = sum(len(place.gpus) for place in places)
        if places and (gpus or not need.gpus):
            found.append(Holder(held.job_id, held.spec.owner, gpus, ends_ms.get(held.job_id)))
    found.sort(key=lambda holder: (holder.ends_ms is None, holder.ends_ms or 0, holder.job_id))
    return tuple(found[:MAX_NAMED])


def _unknown(state: CellState, ends_ms: Mapping[str, int]) -> str:
    unknown = sum(held.job_id not in ends_ms for held in state.holding.values())
    if unknown:
        return f"the remaining time of {unknown} of {len(state.holding)} running jobs is not known"
    return "what is known to end does not make enough room"
