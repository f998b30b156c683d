"""What-if view of a cell's nodes: what is free and what fits once some jobs have ended and others have
started.

The view is the one answer to that question; the state is never changed. Each verb returns its undo, so that
trials nest. Only nodes that differ from the state are copied, at their first change; for all others the
state's own index answers.

Ideal: each booking names its GPUs and cores. Departure: `claim` counts resources only, so that searches over
many nodes stay cheap; `place` and `claim_places` book units. `node` shows the units, without the counts.

Source: Kueue's `Snapshot`, whose verbs return their undo.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

from penstock.cluster.assignment import Plan, place_on
from penstock.cluster.reasons import why_not
from penstock.cluster.two_roles import Beside, Role, arranged, beside
from penstock.ledger.derived.groups import booked
from penstock.ledger.fold.evolve_arrays import hold_cores
from penstock.ledger.fold.evolve_moves import taken
from penstock.ledger.state.index import NO_SHARE, Free, bits
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.nouns.allowed import Where
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, TaskPlacement

Fit = tuple[int, ...]
"""Ordinal of the node of each task: parameter servers first, then workers."""

Gangs = Sequence[tuple[JobState, Sequence[str]]]
"""Waiting jobs, each with the node of each task in rank order."""

Undo = Callable[[], object]
"""Takes one change back. Of several changes on one node the last comes first."""


class Placed(NamedTuple):
    """A job and the places of its next attempt."""

    job: JobState
    tasks: tuple[TaskPlacement, ...]
    """Places in rank order."""
    after: tuple[str, ...] = ()
    """Ids of the jobs that are being stopped and whose GPUs it gets, in the order of their submission; empty:
    it starts at once."""


def living_places(job: JobState) -> Iterator[TaskPlacement]:
    """Places of the job's tasks that hold resources."""
    return (task.place for task in job.tasks.values() if task.status is not TaskStatus.EXITED)


def held_places(job: JobState) -> Iterator[TaskPlacement]:
    """Places that the job denies to others: `living_places`, and what is reserved for its move."""
    yield from living_places(job)
    for node_id in dict.fromkeys(place.node_id for place in job.target):
        yield from taken(job, node_id)


class ClusterView:
    """The nodes of a cell with trial changes."""

    _at_first: frozenset[str] = frozenset()
    """Ids of jobs that ended before the first change."""
    _seen = True
    """Whether the nodes of those jobs are among the changed ones."""
    _changed = 0
    """Set of the nodes that differ from the state."""
    _shown: CellState | None = None

    def __init__(self, state: CellState, ended: Iterable[JobState] = ()) -> None:
        """`ended`: jobs that count as ended from the beginning. A node's share of them is freed at the first
        look at the node."""
        self.state = state
        self.ended: dict[str, JobState] = {}
        """Job id → job, of jobs that count as ended."""
        self._nodes: dict[int, NodeState] = {}
        """Copies of nodes whose units differ from the state's."""
        self._ahead: dict[int, list[TaskPlacement]] = {}
        """Places that were booked on a node before its copy was made."""
        self._claims: dict[int, list[ResourceVector]] = {}
        self._free: dict[int, Free] = {}
        """Free resources of changed nodes, computed when they are asked for."""
        if ended:
            self.ended = {job.job_id: job for job in ended}
            self._at_first = frozenset(self.ended)
            self._seen = not self.ended

    # ------------------------------------------------------------------------------------------- verbs

    def release(self, job: JobState) -> Undo:
        """Counts the job's resources as free, except those reserved for its move."""
        self.ended[job.job_id] = job
        for place in held_places(job):
            self._free_up(booked(self.state, job, place, self.ended))
        for place in job.target:
            self._book(place)
        return partial(self._keep, job)

    def release_by_task(self, job: JobState) -> Iterator[None]:
        """As `release`, one task after the other: yields after each. Not for a job that moves; without
        undo."""
        assert not job.target, job.job_id
        self.ended[job.job_id] = job
        for place in living_places(job):
            self._free_up(booked(self.state, job, place, self.ended))
            yield

    def _keep(self, job: JobState) -> None:
        del self.ended[job.job_id]
        self.release_places(job.target)
        for place in living_places(job):
            hold_cores(self._own(self.state.nodes[place.node_id]), job, place.cores)
        for place in held_places(job):
            self._book(booked(self.state, job, place, self.ended))

    def claim(self, demand: Demand, fit: Fit) -> Undo:
        """Counts tasks of this demand on these nodes, which must fit."""
        for need, ordinal in _tasks(demand, fit):
            self._count(need, ordinal)
        return partial(self._unclaim, demand, fit)

    def claim_task(self, need: ResourceVector, ordinal: int) -> Undo:
        """Counts one task on this node, which must fit."""
        self._count(need, ordinal)
        return partial(self._uncount, need, ordinal)

    def _count(self, need: ResourceVector, ordinal: int) -> None:
        self._free[ordinal] = self._less(ordinal, self.free(ordinal), need)
        self._claims.setdefault(ordinal, []).append(need)
        self._changed |= 1 << ordinal

    def _unclaim(self, demand: Demand, fit: Fit) -> None:
        for need, ordinal in _tasks(demand, fit):
            self._uncount(need, ordinal)

    def _uncount(self, need: ResourceVector, ordinal: int) -> None:
        self._claims[ordinal].remove(need)
        self._free.pop(ordinal, None)

    def place(self, gangs: Gangs) -> tuple[Placed, ...] | str:
        """Places for all gangs on the nodes that they name, with GPUs and cores, booked; or the missing
        resource, and nothing is booked. `release_places` undoes it."""
        placed: list[Placed] = []
        taken: list[TaskPlacement] = []
        for job, nodes in gangs:
            job = job if job.spec.min_workers is None else job.shaped(len(nodes))
            demand = job.demand
            first = len(taken)
            for rank, node_id in enumerate(nodes):
                place = self._task(job, demand, rank, node_id)
                if isinstance(place, str):
                    self.release_places(taken)
                    return f"task {rank} of {job.job_id} on {node_id}: {place}"
                taken.append(place)
            placed.append(Placed(job, tuple(taken[first:])))
        return tuple(placed)

    def _task(self, job: JobState, demand: Demand, rank: int, node_id: str) -> TaskPlacement | str:
        node = self.node(node_id)
        if node is None:
            return "no such node"
        need = demand.worker if rank < demand.workers else demand.parameter_server
        lacking = why_not(self.state, node, need, demand.where)
        if lacking:
            return lacking
        place = place_on(node, job, demand, rank)
        self._book(place)
        return place

    def claim_places(self, places: Sequence[TaskPlacement]) -> Undo:
        """Books these places, which were found on this view or on another one. Many nodes are never looked at
        afterwards, and not copied for it."""
        for place in places:
            known = self.state.nodes[place.node_id]
            if known.ordinal in self._nodes or self._shown is not None:
                self._book(place)
            else:
                self._ahead.setdefault(known.ordinal, []).append(place)
                self._changed |= known.bit
                self._free.pop(known.ordinal, None)
        return partial(self.release_places, places)

    def release_places(self, places: Sequence[TaskPlacement]) -> Undo:
        """Frees these places, the last first. Their jobs do not count as ended."""
        for place in reversed(places):
            self._free_up(place)
        return partial(self.claim_places, places)

    # ----------------------------------------------------------------------------------------- answers

    def node(self, node_id: str) -> NodeState | None:
        """The node, less the places that are booked; only to be read, until the next change. None: there is
        no such node."""
        known = self.state.nodes.get(node_id)
        if known is None:
            return None
        node = self._nodes.get(known.ordinal)
        if node is not None:
            return node
        if known.ordinal in self._ahead or not self._at_first.isdisjoint(known.tasks.values()):
            return self._own(known)
        return known

    def as_state(self) -> CellState:
        """The view as a state, with an index of its own, for policies that read one. It follows the places
        that are booked and freed later; it has no claims. O(index)."""
        if self._shown is None:
            self._shown = shown = copy(self.state)
            shown.nodes, shown.index = dict(shown.nodes), shown.index.copy()
            if not self._seen:
                self._see()
            for ordinal in bits(self._changed):
                self._show(shown, self._own(self.state.node(ordinal)))
        return self._shown

    def free(self, ordinal: int) -> Free:
        """Free resources of a node, less what is claimed and booked."""
        found = self._free.get(ordinal)
        if found is not None:
            return found
        if not self._seen:
            self._see()
        return self._computed(ordinal) if self._changed >> ordinal & 1 else self.state.node(ordinal).entered

    def awaited(self) -> int:
        """Set of the nodes with tasks that count as ended but still exist."""
        nodes = 0
        for job in self.ended.values():
            for place in living_places(job):
                nodes |= self.state.nodes[place.node_id].bit
        return nodes

    def candidates(self, need: ResourceVector, where: Where) -> int:
        """Set of the nodes that could take one such task."""
        if not self._seen:
            self._see()
        index, changed = self.state.index, self._changed
        nodes = index.candidates(need, where)
        if not changed:
            return nodes
        nodes &= ~changed
        for ordinal in bits(changed & index.eligible(need, where)):
            if (self._free.get(ordinal) or self._computed(ordinal)).fits(need):
                nodes |= 1 << ordinal
        return nodes

    def by_free_gpus(self, nodes: int) -> list[tuple[int, int]]:
        """(free GPUs, those of these nodes that have so many), most first. `nodes`: a set of placeable
        nodes."""
        if not self._seen:
            self._see()
        classes: dict[int, int] = {}
        for (used, total), having in self.state.index.load.items():
            here = having & nodes & ~self._changed
            if here:
                classes[total - used] = classes.get(total - used, 0) | here
        for ordinal in bits(self._changed & nodes):
            free = self.free(ordinal).gpus
            classes[free] = classes.get(free, 0) | 1 << ordinal
        return sorted(classes.items(), reverse=True)

    def fit(self, demand: Demand, avoid: int = 0) -> Fit | None:
        """First fit of the whole gang, parameter servers first; if that fails because a server takes what a
        worker needs, workers first, then any arrangement. None: none exists. `avoid`: set of nodes left
        out."""
        for servers_first in (True, False) if demand.parameter_servers else (True,):
            found = self._first_fit(demand, avoid, servers_first=servers_first)
            if len(found) == demand.tasks:
                return found
        return self._arrange(demand, avoid) if demand.parameter_servers else None

    def tasks_that_fit(self, demand: Demand) -> int:
        """How many tasks of the gang first fit places, parameter servers first or last; for equal tasks no
        policy places more."""
        servers = demand.parameter_servers
        if servers or demand.worker.gpu_share_milli < WHOLE_GPU:
            found = len(self._first_fit(demand, 0, servers_first=True))
            if found == demand.tasks or not servers:
                return found
            return max(found, len(self._first_fit(demand, 0, servers_first=False)))
        left = demand.workers  # a sum over the nodes has the same result for whole GPUs, and lists no task
        for ordinal in bits(self.candidates(demand.worker, demand.where)):
            left -= self.free(ordinal).count(demand.worker, left)
            if not left:
                break
        return demand.workers - left

    def count(self, need: ResourceVector, ordinal: int, at_most: int) -> int:
        """How many such tasks fit together on the node, at most so many."""
        free, found = self.free(ordinal), 0
        if need.gpu_share_milli == WHOLE_GPU:
            return max(0, free.count(need, at_most))
        while found < at_most and free.fits(need):
            free, found = self._less(ordinal, free, need), found + 1
        return found

    def holds(self, demand: Demand, fit: Fit) -> bool:
        """Whether the whole gang fits on these nodes."""
        left: dict[int, Free] = {}
        for need, ordinal in _tasks(demand, fit):
            free = left.get(ordinal)
            if free is None:
                if not self.candidates(need, demand.where) >> ordinal & 1:
                    return False
                free = self.free(ordinal)
            elif not free.fits(need):
                return False
            left[ordinal] = self._less(ordinal, free, need)
        return True

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

    def _first_fit(self, demand: Demand, avoid: int, *, servers_first: bool) -> Fit:
        """First fit of one role after the other; of a gang that does not fit the tasks before the first that
        finds no node."""
        left: dict[int, Free] = {}
        servers: list[int] = []
        workers: list[int] = []
        roles = [
            (demand.parameter_server, demand.parameter_servers, servers),
            (demand.worker, demand.workers, workers),
        ]
        for need, count, fit in roles if servers_first else reversed(roles):
            if count and not self._fit_equal(need, demand.where, count, avoid, left, fit):
                break
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

    # ----------------------------------------------------------------------------------------- copies

    def _see(self) -> None:
        """Enters the nodes of jobs that ended at first among those that are changed."""
        self._seen = True
        nodes = self.state.nodes
        for job_id in self._at_first:
            for place in living_places(self.state.jobs[job_id]):
                self._changed |= nodes[place.node_id].bit

    def _book(self, place: TaskPlacement) -> None:
        node = self._own(self.state.nodes[place.node_id])
        node.give(place)
        self._free.pop(node.ordinal, None)
        if self._shown is not None:
            self._show(self._shown, node)

    def _free_up(self, place: TaskPlacement) -> None:
        node = self._own(self.state.nodes[place.node_id])
        node.take_back(place)
        self._free.pop(node.ordinal, None)
        if self._shown is not None:
            self._show(self._shown, node)

    def _show(self, shown: CellState, node: NodeState) -> None:
        shown.nodes[node.spec.node_id], now = node, node.free()
        shown.index.refit(node.bit, len(node.spec.gpus), node.entered, now)
        node.entered = now

    def _own(self, known: NodeState) -> NodeState:
        """The view's copy of the node; without the jobs that ended at first."""
        node = self._nodes.get(known.ordinal)
        if node is not None:
            return node
        node = self._nodes[known.ordinal] = known.copy()
        self._changed |= known.bit
        state, gone = self.state, set[str]()
        for job_id in dict.fromkeys(known.tasks.values()) if self._at_first else ():
            if job_id not in self._at_first:
                continue
            gone.add(job_id)
            job, here = state.jobs[job_id], known.spec.node_id
            for place in held_places(job):
                if place.node_id == here:
                    node.take_back(booked(state, job, place, gone))
            for place in job.target:
                if place.node_id == here:
                    node.give(place)
        for place in self._ahead.pop(known.ordinal, ()):
            node.give(place)
        return node

    def _computed(self, ordinal: int) -> Free:
        """What is free on a changed node."""
        known = self.state.node(ordinal)
        own = ordinal in self._nodes or ordinal in self._ahead
        if own or not self._at_first.isdisjoint(known.tasks.values()):
            free = self._own(known).free()
        else:
            free = known.entered
        for need in self._claims.get(ordinal, ()):
            free = self._less(ordinal, free, need)
        self._free[ordinal] = free
        return free

    def _less(self, ordinal: int, free: Free, need: ResourceVector) -> Free:
        """What is free after one such task; negative where it does not fit."""
        shares = need.gpu_share_milli < WHOLE_GPU
        return free.less(need, self.state.node(ordinal).room_of_gpu(need) if shares else NO_SHARE)


def _tasks(demand: Demand, fit: Fit) -> Iterator[tuple[ResourceVector, int]]:
    """What each task needs, and the ordinal of its node."""
    servers = repeat(demand.parameter_server, demand.parameter_servers)
    return zip(chain(servers, repeat(demand.worker)), fit, strict=False)


def assign(state: CellState, job: JobState, plan: Plan) -> PlacementDecided:
    """The decision for a plan made on exactly this state: GPU ids, cores and caps, lowest free first.

    A moldable job has as many workers as the plan has nodes.
    """
    if job.spec.min_workers is not None:
        job = job.shaped(len(plan.nodes))
    demand = job.demand
    meet = len(set(plan.nodes)) < len(plan.nodes)  # on one node each finds less than the one before
    view = ClusterView(state)
    tasks: list[TaskPlacement] = []
    for rank, node_id in enumerate(plan.nodes):
        node = view.node(node_id) or state.nodes[node_id]
        tasks.append(place_on(node, job, demand, rank, None if plan.gpus is None else plan.gpus[rank]))
        if meet:
            view.claim_places(tasks[-1:])
    return PlacementDecided(
        job_id=job.job_id, attempt=job.attempt + 1, tasks=tuple(tasks), borrows=plan.borrows
    )
