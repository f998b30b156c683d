"""Trial allocation of a plan's units, one after the other: which start now, which are ordered to start after
jobs that are being stopped, and which wait for their ends."""

from collections.abc import Sequence

from penstock.cluster.refusal import Refusal
from penstock.cluster.view import ClusterView, Gangs, Placed
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_GANG_TASKS, TaskPlacement
from penstock.scheduling.groups.validate_groups import RUNS, Formed, Members, formed
from penstock.scheduling.make_room.succession import Succession


class Allocation:
    """Allocates to units. Once resources of a node are reserved for a waiting unit, later units get none of
    this node until that one has started.

    `next_members`: whether units may be ordered to start after jobs that are being stopped. `stops`: ids of
    running jobs that count as being stopped.
    """

    def __init__(
        self, state: CellState, *, next_members: bool = True, stops: frozenset[str] = frozenset()
    ) -> None:
        self._state = state
        self._now = self.then = ClusterView(state)
        """`then`: the nodes when all jobs that are being stopped have ended."""
        self._next: Succession | None = None
        self._stops = bool(state.stopping or stops)
        """Whether any job is being stopped."""
        if self._stops:
            self.then = ClusterView(
                state, [*state.stopping.values(), *(state.jobs[job_id] for job_id in sorted(stops))]
            )
            self._next = Succession(self._now) if next_members and not stops else None
        self._reserved: set[str] = set()
        """Nodes with reserved resources."""
        self._tasks = 0
        self.full = False
        """Whether a unit waits only for the next record."""

    def give(self, gangs: Gangs) -> tuple[Placed, ...] | str | None:
        """Allocates to the unit's gangs. Returns their places where they start, a text that names the lacking
        resource where they do not fit even after all stops, and None where the unit waits for stops."""
        nodes = [node_id for _, names in gangs for node_id in names]
        if not self._blocked(nodes) and all(job.status is JobStatus.QUEUED for job, _ in gangs):
            found = self._now.place(gangs)
            if not isinstance(found, str):
                self._taken([place for placed in found for place in placed.tasks])
                return found
            if not self._stops:
                return found
            later = None if self._next is None else self._next.place(gangs)
            if later is not None:
                self._taken([place for placed in later for place in placed.tasks])
                return later
        then = self.then.place(gangs)
        if isinstance(then, str):
            return then
        self.reserve(nodes)
        return None

    def form(self, members: Members, *, waits: bool, fit_then: bool = False) -> Formed | Refusal | None:
        """Forms a group, whose members are never successors of other jobs. Returns the group where it starts,
        the refusal where it cannot be formed even after all stops, and None where it waits for stops (only if
        `waits`).

        `fit_then`: the group is known to fit after all stops; it is tested again once no job is being stopped
        on its nodes.
        """
        nodes = [node_id for _, names in members for node_id in names]
        blocked = self._blocked(nodes)
        if blocked:
            found: Formed | Refusal = Refusal("infeasible", blocked)
        elif waits and self._stops and self._waits_for_stops(members):
            found = Refusal("infeasible", "it waits")  # never reported: the test on `then` decides
        else:
            found = formed(self._state, members, self._now)
        if isinstance(found, Formed):
            self._taken(found.parts)
            return found
        if not waits or not (blocked or self._stops):
            return found
        if fit_then and any(self._ends_on(node_id) for node_id in nodes):
            self.reserve(nodes)
            return None
        then = formed(self._state, members, self.then)
        if isinstance(then, Refusal):
            return then
        self.reserve(nodes)
        return None

    def _ends_on(self, node_id: str) -> bool:
        """Whether a job that is being stopped has a task there."""
        node, jobs = self._state.nodes.get(node_id), self._state.jobs
        return node is not None and any(
            jobs[job_id].status is JobStatus.STOPPING for job_id in node.tasks.values()
        )

    def _waits_for_stops(self, members: Members) -> bool:
        """Whether `formed` is certain to refuse the group now: a fast test. A member is being stopped, or too
        many of its running members' group are still there, or no member runs and there are too few free
        GPUs."""
        jobs, waiting, group = [], 0, None
        for job_id, _ in members:
            job = self._state.jobs.get(job_id)
            if job is None:
                return False
            if job.status is JobStatus.STOPPING:
                return True
            if job.status in RUNS:
                group = job.sharing.group
            else:
                waiting += 1
            jobs.append(job)
        if group is not None:
            return waiting + len(self._state.groups.get(group, ())) > MAX_GROUP_MEMBERS
        first = jobs[0]
        if first.estimate is None:
            return False
        need = first.estimate.worker.gpus
        nodes = (self._now.node(node_id) for node_id in members[0][1][: first.workers])
        return any(node is not None and node.healthy_gpu_mask.bit_count() < need for node in nodes)

    def _blocked(self, nodes: Sequence[str]) -> str:
        """Why a unit with a task on each of these nodes gets nothing now; empty: it may get resources."""
        if self._too_many(nodes):
            return f"{MAX_GANG_TASKS} tasks start in one record; propose it again"
        reserved = min(self._reserved.intersection(nodes), default=None)
        return "" if reserved is None else f"the free part of {reserved} is reserved for an earlier unit"

    def _taken(self, places: Sequence[TaskPlacement]) -> None:
        """Books these places on the later view, too. Where no job is being stopped there is only one view."""
        self._tasks += len(places)
        if self._stops:
            self.then.claim_places(places)

    def reserve(self, nodes: Sequence[str]) -> None:
        """Reserves what is free on these nodes for a waiting unit."""
        self._reserved.update(nodes)
        self.full |= self._too_many(nodes)

    def _too_many(self, nodes: Sequence[str]) -> bool:
        """Whether the tasks exceed one record; a record may always have one unit, whatever its size."""
        return self._tasks > 0 and self._tasks + len(nodes) > MAX_GANG_TASKS
