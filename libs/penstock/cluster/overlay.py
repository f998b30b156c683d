"""What-if overlay of placements: gangs are tried one after the other on copies of the nodes, with GPUs and
cores chosen as for any placement; the state is not changed."""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from penstock.cluster.assignment import place_on
from penstock.cluster.trial import held_places
from penstock.ledger.derived.groups import booked
from penstock.ledger.state.index import Free
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, TaskPlacement

Gangs = Sequence[tuple[JobState, Sequence[str]]]
"""Waiting jobs, each with the node of each task in rank order."""


class Placed(NamedTuple):
    """A job and the places of its next attempt."""

    job: JobState
    tasks: tuple[TaskPlacement, ...]
    """Places in rank order."""
    after: tuple[str, ...] = ()
    """Ids of the jobs that are being stopped and whose GPUs it gets, in the order of their submission; empty:
    it starts at once."""


class Overlay:
    """Nodes of a cell with trial placements. `ended`: the nodes as they are when all jobs that are being
    stopped have ended; `stops`: ids of further jobs that count as being stopped."""

    def __init__(self, state: CellState, *, ended: bool = False, stops: frozenset[str] = frozenset()) -> None:
        self._state, self.ended, self.stops = state, ended, stops
        self._nodes: dict[str, NodeState] = {}
        self._taken: dict[str, list[TaskPlacement]] = {}
        """Node → places booked on it before its copy was made."""
        self.gone: Container[str] = frozenset[str]()
        """Ids of jobs that have ended in this overlay."""
        if ended:
            self.gone = {job.job_id for job in state.stopping.values()} | stops

    def give(self, gangs: Gangs) -> tuple[Placed, ...] | str:
        """Places for all gangs, booked on the overlay; or the missing resource, and nothing is booked."""
        placed: list[Placed] = []
        taken: list[TaskPlacement] = []
        for job, nodes in gangs:
            job = job if job.spec.min_workers is None else job.shaped(len(nodes))
            demand = job.demand
            first = len(taken)
            for rank, node_id in enumerate(nodes):
                place = self._task(job, demand, rank, node_id)
                if isinstance(place, str):
                    self.take_back(taken)
                    return f"task {rank} of {job.job_id} on {node_id}: {place}"
                taken.append(place)
            placed.append(Placed(job, tuple(taken[first:])))
        return tuple(placed)

    def take(self, places: Iterable[TaskPlacement]) -> None:
        """Books places that were found on another overlay. Many nodes are never looked at afterwards, and not
        copied for it."""
        for place in places:
            node = self._nodes.get(place.node_id)
            if node is None:
                self._taken.setdefault(place.node_id, []).append(place)
            else:
                node.give(place)

    def take_back(self, places: Sequence[TaskPlacement]) -> None:
        """Undoes the booking of these places, in reverse order."""
        for place in reversed(places):
            self._nodes[place.node_id].take_back(place)

    def _task(self, job: JobState, demand: Demand, rank: int, node_id: str) -> TaskPlacement | str:
        node = self.node(node_id)
        if node is None:
            return "no such node"
        need = demand.worker if rank < demand.workers else demand.parameter_server
        lacking = lacking_of(self._state, node, need, demand.where)
        if lacking:
            return lacking
        place = place_on(node, job, demand, rank)
        node.give(place)
        return place

    def node(self, node_id: str) -> NodeState | None:
        """A copy of the node, less what is booked so far."""
        node = self._nodes.get(node_id)
        if node is not None:
            return node
        known = self._state.nodes.get(node_id)
        if known is None:
            return None
        node = self._nodes[node_id] = known.copy()
        gone: set[str] = set()
        stopping = self.ended and (self._state.stopping or self.stops)
        for job_id in dict.fromkeys(known.tasks.values()) if stopping else ():
            job = self._state.jobs[job_id]
            if job.status is JobStatus.STOPPING or job_id in self.stops:
                gone.add(job_id)
                for place in held_places(job):
                    if place.node_id == node_id:
                        node.take_back(booked(self._state, job, place, gone))
                for place in job.target:
                    if place.node_id == node_id:
                        node.give(place)
        for place in self._taken.pop(node_id, ()):
            node.give(place)
        return node


def unusable(state: CellState, node: NodeState, need: ResourceVector, where: Where) -> str:
    """Why no new task may start on the node, whatever is free there; empty: one may."""
    if node.status is not NodeStatus.READY or node.leaving:
        return f"the node is {node.status}"
    if node.cordon is not None:
        return "the node is cordoned"
    if node.distrusted:
        return "the node is suspect, since jobs failed there one after another"
    if not state.index.eligible(need, where) & node.bit:
        if where and not where.allows(node.spec.terms):
            return "the job does not allow the node"
        return "its GPUs are of another model or have too little memory"
    return ""


def lacking_of(state: CellState, node: NodeState, need: ResourceVector, where: Where) -> str:
    """What the node, which may be a copy, lacks for this task; empty: it fits."""
    if wrong := unusable(state, node, need, where):
        return wrong
    if (
        need.gpu_share_milli == WHOLE_GPU
        and node.healthy_gpu_mask.bit_count() >= need.gpus
        and node.free_core_mask.bit_count() >= need.cores
        and node.free_host_memory_mib >= need.host_memory_mib
        and node.free_bandwidth_mbps >= need.bandwidth_mbps
    ):
        return ""  # a shortcut: the following test has the same result
    free = node.free()
    return "" if free.fits(need) else _short_of(free, need)


def _short_of(free: Free, need: ResourceVector) -> str:
    for what, has, wants in (
        ("cores", free.cores, need.cores),
        ("MiB of memory", free.host_memory_mib, need.host_memory_mib),
        ("Mbit/s", free.bandwidth_mbps, need.bandwidth_mbps),
    ):
        if has < wants:
            return f"{has} {what} are free, {wants} needed"
    if need.gpu_share_milli < WHOLE_GPU:
        return f"no GPU has {need.gpu_share_milli}/1000 and {need.gpu_memory_mib} MiB left"
    return f"{free.gpus} GPUs are free, {need.gpus} needed"
