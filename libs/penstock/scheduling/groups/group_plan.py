"""Placement of planned groups: assigns nodes to them and lists the jobs to stop; the last step of regroup
stages (`penstock.scheduling.stages.regroup`).

Members that hold the same GPUs, and shall continue to, stay. Of a group that changes the largest part stays
on its GPUs (ties: the part whose stop costs most, then the oldest), and the others join it. All other running
jobs that shall not run are stopped. Groups without a part that stays get nodes by first fit on a copy of the
nodes on which the stopped jobs have ended, those with the largest workers first; where free GPUs are spread
over nodes, groups of one smaller task restart elsewhere.
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from msgspec import Struct

from penstock.cluster.view import ClusterView, Fit
from penstock.ledger.derived.succession import awaited
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import Turns
from penstock.model.decisions.ledger_events import MAX_RANKS
from penstock.model.decisions.plans import MAX_PLANNED_STOPS, MAX_PROPOSED_UNITS
from penstock.model.nouns.types import ResourceVector
from penstock.model.proposals import ProposedJob, ProposedUnit
from penstock.scheduling.groups.validate_groups import RUNS
from penstock.scheduling.make_room.clearing import clear
from penstock.scheduling.make_room.preemption import node_ids
from penstock.scheduling.stages.regroup import ALL_JOBS, Answer, GroupPlan, PlannedGroup, Scope, regroups
from penstock.scheduling.stop_cost import stop_cost_s


class _Part(Struct, frozen=True):
    """A planned group, divided by which members hold the same GPUs now."""

    stays: tuple[JobState, ...]
    """Members that stay on these GPUs; empty: the group is new."""
    comes: tuple[JobState, ...]
    """Members that wait, or are stopped to join."""
    turns: Turns | None

    @property
    def first(self) -> JobState:
        """One of the members: all have the same shape."""
        return (*self.stays, *self.comes)[0]


def group_plan(state: CellState, answer: Answer, scope: Scope = ALL_JOBS) -> GroupPlan:
    """Units, stops and ranks for an answer; all empty: nothing changes. The same state and answer give the
    same plan."""
    taken: set[str] = set()
    groups = [part for group in answer.groups if (part := _split(state, scope, group, taken)) is not None]
    shall_run = {job.job_id for part in groups for job in part.stays}
    stops = [
        job
        for job in state.holding.values()
        if job.status in RUNS
        and job.job_id not in shall_run
        and regroups(job.demand)
        and _may_stop(state, scope, job)
    ]
    placed, cleared = _placed(state, scope, stops, groups)
    stops += [job for part in cleared for job in part.stays]
    gone = {id(part) for part in cleared}
    units = [
        unit for part in groups if part.stays and id(part) not in gone and (unit := _joined(part)) is not None
    ]
    units += [_unit(part, node_ids(state, part.first.demand, fit)) for part, fit in placed]
    moved = {job.job_id for unit in units for job in unit.jobs}
    ranks = tuple(rank for rank in answer.ranks if rank.job_id in state.jobs)[:MAX_RANKS]
    units = units[:MAX_PROPOSED_UNITS]
    helps = _nodes(units)
    named = [
        job.job_id
        for job in stops
        if job.job_id in moved or any(task.place.node_id in helps for task in job.tasks.values())
    ]
    return GroupPlan(units, tuple(named[:MAX_PLANNED_STOPS]), ranks)


def _placed(
    state: CellState, scope: Scope, stops: Sequence[JobState], groups: Sequence[_Part]
) -> tuple[list[tuple[_Part, Fit]], list[_Part]]:
    """Nodes for groups without a part that stays, as far as they fit where the stopped jobs have ended, and
    the groups that have to restart elsewhere for them."""
    heap = [
        (-part.first.demand.worker.gpus, number, part) for number, part in enumerate(groups) if not part.stays
    ]
    placed: list[tuple[_Part, Fit]] = []
    cleared: list[_Part] = []
    if not heap:
        return placed, cleared
    heapify(heap)
    trial = ClusterView(state, [*state.stopping.values(), *stops])
    small: _Small | None = None
    while heap:
        _, _, part = heappop(heap)
        demand = part.first.demand
        fit = trial.fit(demand)
        if fit is None:
            small = small or _Small(state, scope, [part for part in groups if part.stays])
        if fit is None and small is not None and (moved := small.make_room(trial, demand)):
            fit = trial.fit(demand)
            for other in moved:
                heappush(heap, (-other.first.demand.worker.gpus, len(groups) + len(cleared), other))
                cleared.append(other)
        if fit is not None:
            trial.claim(demand, fit)
            placed.append((part, fit))
    return placed, cleared


class _Small:
    """Groups of one task that may restart elsewhere, by node: where free GPUs are spread over nodes, they
    make room for larger workers."""

    def __init__(self, state: CellState, scope: Scope, staying: Iterable[_Part]) -> None:
        self._state = state
        self._on: dict[int, list[_Part]] = {}
        for part in staying:
            tasks = part.stays[0].tasks
            if len(tasks) == 1 and all(scope.stops(job) and not job.target for job in part.stays):
                [task] = tasks.values()
                self._on.setdefault(state.nodes[task.place.node_id].ordinal, []).append(part)
        for parts in self._on.values():
            parts.sort(key=lambda part: (-part.first.demand.worker.gpus, part.first.order))

    def make_room(self, trial: ClusterView, demand: Demand) -> list[_Part]:
        """Groups to move, from the nodes where that moves the fewest GPUs (ties: the lower ordinal), until
        the gang fits; empty, and nothing is released, where it cannot."""
        need, moved = demand.worker, list[tuple[int, _Part]]()
        if demand.parameter_servers or not regroups(demand):
            return []

        def cheapest() -> list[JobState] | None:
            best = min(
                (one for node in self._on if (one := self._clears(trial, node, need)) is not None),
                key=lambda found: found[:2],
                default=None,
            )
            if best is None:
                return None
            _, node, parts = best
            moved.extend((node, part) for part in parts)
            return [job for part in parts for job in part.stays]

        if not clear(trial, demand, cheapest):
            return []
        for node, part in moved:
            self._on[node].remove(part)
        return [part for _, part in moved]

    def _clears(
        self, trial: ClusterView, node: int, need: ResourceVector
    ) -> tuple[int, int, list[_Part]] | None:
        """(GPUs that move, the node, the groups), of those smaller than the task the largest first; None: the
        node cannot be cleared, or already is."""
        free = trial.free(node).gpus
        cost, chosen = 0, list[_Part]()
        if free >= need.gpus:
            return None
        for part in self._on[node]:
            gpus = part.first.demand.worker.gpus
            if gpus >= need.gpus:
                continue
            if any(job.job_id in trial.ended for job in part.stays):
                return None
            chosen.append(part)
            cost += gpus
            if free + cost >= need.gpus:
                return cost, node, chosen
        return None


def _split(state: CellState, scope: Scope, group: PlannedGroup, taken: set[str]) -> _Part | None:
    """The group with those of its members that may still run; None: none may. `taken`: places, by group or by
    the single job there, where an earlier planned group stays."""
    jobs = [
        job
        for job_id in group.job_ids
        if (job := state.jobs.get(job_id)) is not None and (job.status in RUNS or _may_start(job))
    ]
    if not jobs:
        return None
    place = jobs[0].sharing.group
    if len(jobs) == 1 and jobs[0].status in RUNS and not place and jobs[0].job_id not in taken:
        taken.add(jobs[0].job_id)
        return _Part((jobs[0],), (), group.turns if len(group.job_ids) == 1 else None)
    if place and place not in taken and _are_there(state, place, jobs):
        taken.add(place)
        return _Part(tuple(jobs), (), group.turns if len(jobs) == len(group.job_ids) else None)
    parts: dict[str, list[JobState]] = {}
    for job in jobs:
        if job.status in RUNS:
            parts.setdefault(job.sharing.group or job.job_id, []).append(job)
    stayable = [
        (place, part)
        for place, part in parts.items()
        if place not in taken and not _held_by_others(state, scope, place, group)
    ]
    place, stays = (
        stayable[0]
        if len(stayable) == 1
        else max(stayable, key=lambda found: _worth(state, scope, found[1]), default=("", []))
    )
    taken.add(place)
    there = {job.job_id for job in stays}
    comes = tuple(
        job
        for job in jobs
        if job.job_id not in there and (job.status not in RUNS or _may_stop(state, scope, job))
    )
    if not stays and not comes:
        return None
    whole = len(stays) + len(comes) == len(group.job_ids)
    return _Part(tuple(stays), comes, group.turns if whole else None)


def _are_there(state: CellState, place: str, jobs: Sequence[JobState]) -> bool:
    """Whether exactly these jobs run in the group."""
    if len(state.groups[place]) != len(jobs):
        return False
    return all(job.sharing.group == place and job.status in RUNS for job in jobs)


def _held_by_others(state: CellState, scope: Scope, place: str, group: PlannedGroup) -> bool:
    """Whether a job that is not in the planned group runs there and may not be stopped."""
    return any(
        other.status in RUNS and other.job_id not in group.job_ids and not _may_stop(state, scope, other)
        for other in state.groups.get(place, {}).values()
    )


def _worth(state: CellState, scope: Scope, part: Sequence[JobState]) -> tuple[int, float, int]:
    """Value of leaving the part on its GPUs, as a sort key."""
    fixed = sum(not _may_stop(state, scope, job) for job in part)
    return (
        fixed,
        len(part) + sum(stop_cost_s(state, job) for job in part) / 1e9,
        -min(job.order for job in part),
    )


def _may_stop(state: CellState, scope: Scope, job: JobState) -> bool:
    """Whether a running job may be stopped; else it continues on its GPUs, whatever was planned for it."""
    return scope.plans(job) and scope.stops(job) and not job.target and not awaited(state, job)


def _may_start(job: JobState) -> bool:
    return job.in_line or job.comes_back


def _joined(part: _Part) -> ProposedUnit | None:
    """The unit for jobs that join a part that stays; None: no job joins, and its turns are unchanged."""
    first = part.stays[0]
    if not part.comes and (part.turns is None or len(part.stays) == 1 or part.turns == first.sharing.turns):
        return None
    return _unit(part, tuple(task.place.node_id for task in first.tasks.values()))


def _unit(part: _Part, nodes: tuple[str, ...]) -> ProposedUnit:
    members = (*part.stays, *part.comes)
    jobs = tuple(ProposedJob(job_id=job.job_id, nodes=nodes) for job in members)
    if len(members) == 1:
        return ProposedUnit(jobs=jobs, explanation="first in order, with GPUs of its own")
    return ProposedUnit(
        jobs=jobs, kind="group", turns=part.turns, explanation=_explained(part.turns, members)
    )


def _explained(turns: Turns | None, members: Sequence[JobState]) -> str:
    if turns is None:
        return f"{len(members)} jobs share GPUs"
    speeds = ", ".join(
        f"{job_id} {speed:.0%}" for job_id, speed in zip(turns.job_ids, turns.speeds, strict=True)
    )
    return f"take turns, efficiency {turns.efficiency:.2f}, speeds {speeds}; {turns.alternative}".rstrip("; ")


def _nodes(units: Iterable[ProposedUnit]) -> set[str]:
    return {node_id for unit in units for job in unit.jobs for node_id in job.nodes}
