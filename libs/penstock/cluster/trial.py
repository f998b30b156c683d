"""A what-if copy of the nodes: what would be free once some tasks have ended and others have started. The
state is not changed.

Only nodes that differ from the state are copied; for all others the state's own index answers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from penstock.cluster.two_roles import Beside, Role, arranged, beside
from penstock.ledger.derived.groups import booked
from penstock.ledger.fold.evolve_moves import taken
from penstock.ledger.state.index import NO_SHARE, Free, bits
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, TaskPlacement

MAX_LOOKED_AT = 64  # nodes that are tried for a worker, those with most free GPUs first

Fit = tuple[int, ...]
"""Ordinal of the node of each task: parameter servers first, then workers."""


def living_places(job: JobState) -> Iterator[TaskPlacement]:
    """Places of the job's tasks that hold resources."""
    return (task.place for task in job.tasks.values() if task.status is not TaskStatus.EXITED)


def held_places(job: JobState) -> Iterator[TaskPlacement]:
    """Places that the job denies to others: `living_places`, and what is reserved for its move."""
    yield from living_places(job)
    for node_id in dict.fromkeys(place.node_id for place in job.target):
        yield from taken(job, node_id)


class Trial:
    """The nodes of a cell with trial changes."""

    def __init__(self, state: CellState, stopping: Iterable[JobState] = ()) -> None:
        """`stopping`: jobs that are being stopped; they count as ended."""
        self.state = state
        self.released: dict[str, JobState] = {}
        """Job id → job, of jobs that count as ended."""
        self._copies: dict[int, NodeState] = {}
        self._claims: dict[int, list[ResourceVector]] = {}
        self._free: dict[int, Free] = {}
        self._touched = 0
        for job in stopping:
            self.release(job)

    def release(self, job: JobState) -> None:
        """Counts the job's resources as free, except those reserved for its move."""
        self.released[job.job_id] = job
        for place in held_places(job):
            self._leave(job, place)
        for place in job.target:
            node = self._copy(place)
            node.give(place)
            self._changed(node.ordinal)

    def release_by_task(self, job: JobState) -> Iterator[None]:
        """As `release`, one task after the other: yields after each. Not for a job that moves."""
        assert not job.target, job.job_id
        self.released[job.job_id] = job
        for place in living_places(job):
            self._leave(job, place)
            yield

    def _leave(self, job: JobState, place: TaskPlacement) -> None:
        node = self._copy(place)
        node.take_back(booked(self.state, job, place, self.released))
        self._changed(node.ordinal)

    def awaited(self) -> int:
        """Set of the nodes with tasks that count as ended but still exist."""
        nodes = 0
        for job in self.released.values():
            for place in living_places(job):
                nodes |= self.state.nodes[place.node_id].bit
        return nodes

    def keep(self, job: JobState) -> None:
        """Undoes `release`."""
        assert not job.target, "a job that moves is being stopped"
        del self.released[job.job_id]
        for place in living_places(job):
            node = self._copy(place)
            node.give(booked(self.state, job, place, self.released))
            self._changed(node.ordinal)

    def claim(self, demand: Demand, fit: Fit) -> None:
        """Books tasks of this demand on these nodes, which must fit."""
        servers = demand.parameter_servers
        for number, ordinal in enumerate(fit):
            need = demand.parameter_server if number < servers else demand.worker
            self._claims.setdefault(ordinal, []).append(need)
            self._free[ordinal] = self._less(ordinal, self.free(ordinal), need)
            self._touched |= 1 << ordinal

    def free(self, ordinal: int) -> Free:
        """Free resources of a node, with the trial changes."""
        found = self._free.get(ordinal)
        return self.state.node(ordinal).entered if found is None else found

    def fit(self, demand: Demand, avoid: int = 0) -> Fit | None:
        """First fit of the whole gang, parameter servers first; if that fails because a server takes what a
        worker needs, workers first, then any arrangement. None: none exists. `avoid`: set of nodes left
        out."""
        found = self._fit_roles(demand, avoid, servers_first=True)
        if found is not None or not demand.parameter_servers:
            return found
        return self._fit_roles(demand, avoid, servers_first=False) or self._arrange(demand, avoid)

    def _arrange(self, demand: Demand, avoid: int) -> Fit | None:
        """Any arrangement of two kinds of tasks, on the lowest nodes of each kind of node. O(nodes) where
        each kind fits without the other."""
        both = ((demand.worker, demand.workers), (demand.parameter_server, demand.parameter_servers))
        if not all(self._fit_equal(need, demand.where, count, avoid, {}, []) for need, count in both):
            return None
        suited = [self.candidates(need, demand.where) & ~avoid for need, _ in both]
        tables: dict[tuple[object, ...], Beside] = {}
        nodes: list[tuple[int, Beside]] = []
        alike: Counter[Beside] = Counter()
        for ordinal in bits(suited[0] | suited[1]):
            free, node = self.free(ordinal), self.state.node(ordinal)
            roles = [
                Role(need, count if here >> ordinal & 1 else 0, node.room_of_gpu(need))
                for (need, count), here in zip(both, suited, strict=True)
            ]
            key = (free, *(role[1:] for role in roles))
            table = tables.get(key)
            if table is None:
                table = tables[key] = beside(free, *roles)
            alike[table] += 1
            if alike[table] <= demand.tasks:
                nodes.append((ordinal, table))
        found = arranged([table for _, table in nodes], demand.workers, demand.parameter_servers)
        if found is None:
            return None
        workers: list[int] = []
        servers: list[int] = []
        for (ordinal, table), here in zip(nodes, found, strict=False):
            workers += [ordinal] * here
            servers += [ordinal] * table[here]
        return (*servers[: demand.parameter_servers], *workers)

    def holds(self, demand: Demand, fit: Fit) -> bool:
        """Whether the whole gang fits on these nodes."""
        servers = demand.parameter_servers
        left: dict[int, Free] = {}
        for number, ordinal in enumerate(fit):
            need = demand.parameter_server if number < servers else demand.worker
            free = left.get(ordinal)
            if free is None:
                if not self.candidates(need, demand.where) >> ordinal & 1:
                    return False
                free = self.free(ordinal)
            elif not free.fits(need):
                return False
            left[ordinal] = self._less(ordinal, free, need)
        return True

    def _fit_roles(self, demand: Demand, avoid: int, *, servers_first: bool) -> Fit | None:
        left: dict[int, Free] = {}
        servers: list[int] = []
        workers: list[int] = []
        roles = [
            (demand.parameter_server, demand.parameter_servers, servers),
            (demand.worker, demand.workers, workers),
        ]
        for need, count, fit in roles if servers_first else reversed(roles):
            if count and not self._fit_equal(need, demand.where, count, avoid, left, fit):
                return None
        return (*servers, *workers)

    def _fit_equal(
        self,
        need: ResourceVector,
        where: Where,
        count: int,
        avoid: int,
        left: dict[int, Free],
        fit: list[int],
    ) -> bool:
        """Places tasks of equal demand on the lowest nodes, and adds these to `fit`."""
        until = len(fit) + count
        for ordinal in bits(self.candidates(need, where) & ~avoid):
            free = left.get(ordinal) or self.free(ordinal)
            while free.fits(need):
                fit.append(ordinal)
                free = left[ordinal] = self._less(ordinal, free, need)
                if len(fit) == until:
                    return True
        return False

    def candidates(self, need: ResourceVector, where: Where) -> int:
        """Set of the nodes that could take one such task."""
        index = self.state.index
        nodes = index.candidates(need, where) & ~self._touched
        for ordinal in bits(self._touched & index.eligible(need, where)):
            if self._free[ordinal].fits(need):
                nodes |= 1 << ordinal
        return nodes

    def clear_for(self, demand: Demand) -> list[JobState]:
        """Smaller jobs of one task that have to move so that the gang's workers fit; empty where that does
        not suffice.

        Each worker is placed where the fewest GPUs have to move (ties: the lower ordinal); only jobs with
        fewer GPUs than a worker move, so that chains of moves end. They are released.
        """
        need = demand.worker
        if demand.parameter_servers or not need.gpus or need.gpu_share_milli < WHOLE_GPU:
            return []
        moved: list[JobState] = []
        for _ in range(demand.workers):
            if self.fit(demand) is not None:
                break
            found = self._cheapest(need, demand.where)
            if found is None:
                break
            for job in found:
                self.release(job)
                moved.append(job)
        if self.fit(demand) is None:
            for job in reversed(moved):
                self.keep(job)
            return []
        return moved

    def _cheapest(self, need: ResourceVector, where: Where) -> list[JobState] | None:
        """The jobs to move from the node with the lowest cost; None if no examined node can be cleared."""
        index = self.state.index
        suited = index.eligible(need, where) & index.placeable
        best: tuple[int, list[JobState]] | None = None
        looked_at = 0
        for free, nodes in self._by_free_gpus(suited):
            if free >= need.gpus:
                continue
            if best is not None and best[0] <= need.gpus - free:
                break
            for ordinal in bits(nodes):
                looked_at += 1
                found = self._clear(ordinal, need, free)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found
                if looked_at == MAX_LOOKED_AT:
                    return None if best is None else best[1]
        return None if best is None else best[1]

    def _by_free_gpus(self, suited: int) -> list[tuple[int, int]]:
        """(free GPUs, nodes), most first."""
        classes: dict[int, int] = {}
        for (used, total), nodes in self.state.index.load.items():
            here = nodes & suited & ~self._touched
            if here:
                classes[total - used] = classes.get(total - used, 0) | here
        for ordinal in bits(self._touched & suited):
            free = self._free[ordinal].gpus
            classes[free] = classes.get(free, 0) | 1 << ordinal
        return sorted(classes.items(), reverse=True)

    def _clear(self, ordinal: int, need: ResourceVector, free: int) -> tuple[int, list[JobState]] | None:
        """(GPUs moved, jobs moved), largest jobs first, so that a worker then fits there; None if
        impossible."""
        state, node = self.state, self.state.node(ordinal)
        small = []
        for job_id in node.tasks.values():
            job = state.jobs[job_id]
            if job.status is JobStatus.STOPPING or len(job.tasks) > 1 or job_id in self.released:
                continue
            if not job.preemptible:
                continue
            [task] = job.tasks.values()
            if task.place.gpu_share_milli == WHOLE_GPU and 0 < len(task.place.gpus) < need.gpus:
                small.append((-len(task.place.gpus), job.order, job))
        small.sort(key=lambda found: found[:2])
        moved: list[JobState] = []
        cost = 0
        for size, _, job in small:
            if free + cost >= need.gpus:
                break
            cost -= size
            moved.append(job)
        if free + cost < need.gpus:
            return None
        for job in moved:
            self.release(job)
        fits = self.free(ordinal).fits(need)
        for job in reversed(moved):
            self.keep(job)
        return (cost, moved) if fits else None

    def _copy(self, place: TaskPlacement) -> NodeState:
        node = self.state.nodes[place.node_id]
        copy = self._copies.get(node.ordinal)
        if copy is None:
            copy = self._copies[node.ordinal] = node.copy()
            self._touched |= node.bit
        return copy

    def _changed(self, ordinal: int) -> None:
        free = self._copies[ordinal].free()
        for need in self._claims.get(ordinal, ()):
            free = self._less(ordinal, free, need)
        self._free[ordinal] = free

    def _less(self, ordinal: int, free: Free, need: ResourceVector) -> Free:
        """What is free after one such task; negative where it does not fit."""
        shares = need.gpu_share_milli < WHOLE_GPU
        return free.less(need, self.state.node(ordinal).room_of_gpu(need) if shares else NO_SHARE)
