"""Validation of plans: which units of a proposed plan may start, on exactly this state, and the places of
their jobs.

Units are validated in order, each all or nothing, on one view of the cell: resources of one unit are not
available to the next. A unit starts now, is ordered to start after jobs that are being stopped, or waits for
their ends (`Allocation`).
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from penstock.cluster.reasons import Refusal, frozen, unknown
from penstock.cluster.view import ClusterView, Gangs, Placed
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.decisions.plans import MAX_UNITS
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_GANG_TASKS, TaskPlacement
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit, ReadVersion
from penstock.scheduling.groups.validate_groups import (
    RUNS,
    Formed,
    Members,
    formed,
    shared_already,
    why_apart,
)
from penstock.scheduling.groups.validate_groups import bound as bound_by_tenants
from penstock.scheduling.make_room.succession import Succession
from penstock.scheduling.profiles import in_force, profile_for
from penstock.scheduling.stages.protocols import Profile
from penstock.scheduling.stages.regroup import PROPOSER

MAX_PLAN_TASKS = 4_096  # decision 53

Subject = tuple[Literal["job", "node"], str]


class Waits(Enum):
    """A result: the unit gets its places when stops have ended."""

    FOR_STOPS = "waits for stops"


class ValidatedUnit(NamedTuple):
    """Result of one unit. `placed`: where its jobs start now, or when others end; empty where it waits for
    stops, or is refused."""

    number: int
    unit: ProposedUnit
    placed: tuple[Placed, ...] = ()
    refusal: Refusal | None = None
    group: Formed | None = None
    """Set for a unit of kind group that starts: `placed` has those of its jobs that do not run."""

    @property
    def starts(self) -> bool:
        """Whether it starts now, or when others end."""
        return bool(self.placed) or self.group is not None

    @property
    def waits(self) -> bool:
        """Whether its nodes are reserved until its jobs fit there."""
        return self.refusal is None and not self.starts


class ValidatedPlan(NamedTuple):
    """Each unit, in the plan's order."""

    units: tuple[ValidatedUnit, ...]
    full: bool
    """Whether units wait only for the next record."""
    then: ClusterView
    """The nodes, less what the units get, when all jobs that are being stopped have ended."""

    @property
    def refused(self) -> Sequence[ValidatedUnit]:
        """The units that are refused."""
        return [unit for unit in self.units if unit.refusal is not None]


def validate_plan(
    state: CellState,
    proposal: PlanProposed,
    profile: Profile | None = None,
    stops: frozenset[str] = frozenset(),
    *,
    fit_then: bool = False,
) -> ValidatedPlan | Refusal:
    """Result of each unit; or why the whole plan is refused. Never changes the state. `profile`: the cell's
    own, if available.

    A profile that stops jobs alone decides which run: a unit may start only jobs that the profile would start
    now, on nodes that its own plan does not reserve. Reservations do not bind plans of the profile's regroup
    stage, which has an order of its own. `stops`: ids of running jobs that count as being stopped.
    Reservations of the previous plan for units that have not started are dropped if any unit of this one is
    accepted. `fit_then`: all groups are known to fit when all jobs that are being stopped have ended.
    """
    profile = profile or profile_for(state.settings)
    stale: dict[Subject, str] = {
        (read.kind, read.id): why for read in proposal.read if (why := moved_on(state, read))
    }
    if (wrong := next(_wrong_as_a_whole(state, proposal, profile, stale), None)) is not None:
        return wrong
    bound = profile.regroup is None or proposal.proposer != PROPOSER
    validation = _Validation(state, profile, stale, stops, bound=bound, fit_then=fit_then)
    units = tuple(validation.unit(number, unit) for number, unit in enumerate(proposal.units))
    return ValidatedPlan(units, validation.room.full, validation.room.then)


def _wrong_as_a_whole(
    state: CellState, proposal: PlanProposed, profile: Profile, stale: Mapping[Subject, str]
) -> Iterator[Refusal]:
    """Why no unit of the plan may start."""
    yield from _wrong_size_of_plan(state, proposal)
    if (still := frozen(state)) is not None:
        yield still
    until_ms = proposal.valid_until_ms
    if until_ms is not None and state.now_ms > until_ms:
        yield Refusal("expired", f"it was valid until {until_ms}, the ledger's time is {state.now_ms}")
    if stale:
        jobs = {job.job_id for unit in proposal.units for job in unit.jobs}
        nodes = {node_id for unit in proposal.units for job in unit.jobs for node_id in job.nodes}
        for (kind, name), why in stale.items():
            if name not in (jobs if kind == "job" else nodes):
                yield Refusal("stale", why)
    yield from _makes_way(state, proposal, profile)
    yield from _who_runs(proposal, profile)


def _wrong_size_of_plan(state: CellState, proposal: PlanProposed) -> Iterator[Refusal]:
    jobs = [job for unit in proposal.units for job in unit.jobs]
    if not jobs and not proposal.stops and not proposal.ranks and not state.in_window:
        yield Refusal("invalid", "the plan is empty")  # in a window it means that nothing changes
    if len({job.job_id for job in jobs}) < len(jobs):
        yield Refusal("invalid", "a job is planned twice")
    if len(jobs) > MAX_UNITS:
        bound = f"the bound is {MAX_UNITS}; propose the rest in another one"
        yield Refusal("invalid", f"the plan has {len(jobs)} jobs, {bound}")
    tasks = sum(len(job.nodes) for job in jobs)
    if tasks > MAX_PLAN_TASKS:
        bound = f"the bound is {MAX_PLAN_TASKS}; propose the rest in another one"
        yield Refusal("invalid", f"the plan places {tasks} tasks, {bound}")


def _makes_way(state: CellState, proposal: PlanProposed, profile: Profile) -> Iterator[Refusal]:
    """Another proposer's plan while the profile's own waits for a job that makes way: it would take the
    places of both."""
    if profile.make_way is not None and proposal.proposer != profile.name:
        for unit in state.planned.values():
            if unit.proposed is not None and unit.proposed.of.proposer == profile.name:
                waits = f"a job makes way for another, and {unit.job_id} still waits for its place"
                yield Refusal("wrong_state", waits)


def _who_runs(proposal: PlanProposed, profile: Profile) -> Iterator[Refusal]:
    """A plan that stops or ranks jobs without the right to do so."""
    own_way = profile.make_way is not None and proposal.proposer == profile.name and not proposal.ranks
    if (proposal.stops or proposal.ranks) and not own_way:
        if profile.regroup is None:
            lets = f"profile {profile.name} lets no plan stop running jobs, or rank jobs"
            yield Refusal("unsupported", lets)
        if proposal.proposer != PROPOSER:
            yield Refusal("unsupported", f"only plans of {PROPOSER} stop running jobs, or rank jobs")


def moved_on(state: CellState, read: ReadVersion) -> str:
    """How a version that a proposal has read has changed; empty: it has not."""
    held = state.jobs.get(read.id) if read.kind == "job" else state.nodes.get(read.id)
    if held is None:
        return f"{read.kind} {read.id} no longer exists"
    if held.version != read.version:
        return f"{read.kind} {read.id} was read at version {read.version}, and has version {held.version}"
    return ""


class _Validation:
    """The units of one plan, one after the other."""

    def __init__(
        self,
        state: CellState,
        profile: Profile,
        stale: Mapping[Subject, str],
        stops: frozenset[str],
        *,
        bound: bool,
        fit_then: bool,
    ) -> None:
        """`bound`: whether nodes that the profile reserves are not available."""
        self._state, self._profile, self._stale, self._stops = state, profile, stale, stops
        self._fit_then = fit_then
        self.room = Allocation(state, next_members=profile.preempt is None, stops=stops)
        self._queue = iter(state.queue.values())
        self._head = next(self._queue, None)
        self._accepted: set[str] = set()
        self._claims = None if profile.preempt is None else frozenset(profile.preempt.select(state).claims)
        self._reserved_for: dict[str, str] = {
            node_id: reserved.job_id
            for reserved in state.planned.values()
            if reserved.proposed is None and (profile.preempt is not None or reserved.expected_ms is not None)
            for node_id in reserved.nodes
            if bound
        }

    def unit(self, number: int, unit: ProposedUnit) -> ValidatedUnit:
        """Validates one unit and books its resources, so that later units do not get them."""
        jobs = {job.job_id for job in unit.jobs}
        late = next(self._turn(jobs), None)
        found: Formed | Refusal | tuple[Placed, ...] | Waits | None = next(
            self._wrong(unit, jobs, late), None
        )
        if found is None:
            found = self._group(unit, late) if unit.kind == "group" else self._solo(unit)
        if isinstance(found, Refusal):
            return ValidatedUnit(number, unit, (), found)
        self._accepted.update(jobs)
        if isinstance(found, Formed):
            return ValidatedUnit(number, unit, found.placed, None, found)
        return ValidatedUnit(number, unit, () if isinstance(found, Waits) else found)

    def _solo(self, unit: ProposedUnit) -> tuple[Placed, ...] | Refusal | Waits:
        """Places for the unit's gangs."""
        placed = self.room.give([(self._state.jobs[job.job_id], job.nodes) for job in unit.jobs])
        if isinstance(placed, Waits) and self._claims is not None:
            placed = (
                "its nodes have room only after stops, and the stops are for the first job of the profile"
            )
        return Refusal("infeasible", placed) if isinstance(placed, str) else placed

    def _group(self, unit: ProposedUnit, late: Refusal | None) -> Formed | Refusal | Waits:
        """Only a group whose turn it is may wait for stops. `late`: why it is not its turn."""
        state, members = self._state, [(job.job_id, job.nodes) for job in unit.jobs]
        if unit.turns is not None and (same := shared_already(state, members, self._stops)) is not None:
            unchanged = all(state.jobs[job_id].sharing.turns == unit.turns for job_id in same.running)
            return Refusal("invalid", "they share these GPUs already, in these turns") if unchanged else same
        if apart := self._apart(members):
            return Refusal("infeasible", apart)
        waits = late is None and self._claims is None
        return self.room.form(members, waits=waits, fit_then=self._fit_then)

    def _apart(self, members: Members) -> str:
        """Why these jobs share no GPUs; empty: they may."""
        known = [self._state.jobs[job_id] for job_id, _ in members if job_id in self._state.jobs]
        bound = bound_by_tenants(self._profile)
        return why_apart(self._state, [job for job in known if job.estimate is not None]) if bound else ""

    def _wrong(self, unit: ProposedUnit, jobs: set[str], late: Refusal | None) -> Iterator[Refusal]:
        """Errors of the unit that do not depend on free resources. `late`: why it is not its turn.

        A job may join a running job out of turn, since it takes no other job's GPUs.
        """
        group, state = unit.kind == "group", self._state
        yield from _wrong_turns(unit)
        yield from _too_large(unit)
        for planned in unit.jobs:
            yield from self._moved_on(planned)
            if not group:
                yield from self._cannot_start(planned)
        yield from self._reserved(unit, jobs)
        running = {job_id for job_id in jobs if job_id in state.jobs and state.jobs[job_id].status in RUNS}
        if late is not None and not (group and running - self._stops):
            yield late

    def _reserved(self, unit: ProposedUnit, jobs: set[str]) -> Iterator[Refusal]:
        for node_id in sorted(self._reserved_for.keys() & {name for job in unit.jobs for name in job.nodes}):
            if self._reserved_for[node_id] not in jobs:
                yield Refusal("infeasible", f"{node_id} is reserved for {self._reserved_for[node_id]}")

    def _turn(self, jobs: set[str]) -> Iterator[Refusal]:
        """Refusals if it is not these jobs' turn to take free GPUs."""
        if self._claims is not None and (outranked := sorted(jobs - self._claims)):
            why = f"profile {self._profile.name} does not start {outranked[0]} now: others come first"
            yield Refusal("wrong_state", why)
        yield from self._passes(jobs)

    def _moved_on(self, planned: ProposedJob) -> Iterator[Refusal]:
        if self._stale:
            names: list[Subject] = [("job", planned.job_id), *(("node", name) for name in planned.nodes)]
            yield from (Refusal("stale", self._stale[name]) for name in names if name in self._stale)

    def _cannot_start(self, planned: ProposedJob) -> Iterator[Refusal]:
        job = self._state.jobs.get(planned.job_id)
        if job is None:
            yield unknown(self._state, planned.job_id)
            return
        stops_jobs = self._profile.regroup is not None or self._profile.make_way is not None
        stopped = job.job_id in self._stops or (stops_jobs and job.comes_back)
        if job.status is not JobStatus.QUEUED and not stopped:
            yield Refusal("wrong_state", f"{job.job_id} is {job.status}, not queued")
        if job.held is not None:
            yield Refusal("wrong_state", f"{job.job_id} is held")
        yield from _wrong_size(job, planned)

    def _passes(self, jobs: set[str]) -> Iterator[Refusal]:
        """Other jobs than the head of the queue start only while it has not been overtaken too often; a plan
        counts once. Does not apply to regroup stages and profiles in which jobs make way, which have their
        own order."""
        own_order = self._profile.regroup is not None or self._profile.make_way is not None
        while not own_order and self._head in self._accepted:
            self._head = next(self._queue, None)
        if own_order or self._head is None or self._head in jobs or self._claims is not None:
            return
        passed = self._state.jobs[self._head].plans_passed
        if passed >= in_force(self._state.settings).max_overtakes:
            why = (
                f"{self._head} is first in the queue and {passed} plans have passed it: a plan must "
                "start it first"
            )
            yield Refusal("wrong_state", why)


def _wrong_turns(unit: ProposedUnit) -> Iterator[Refusal]:
    if unit.turns is not None:
        if unit.kind != "group":
            yield Refusal("invalid", "turns are named for jobs that do not share GPUs")
        if sorted(unit.turns.job_ids) != sorted(job.job_id for job in unit.jobs):
            yield Refusal("invalid", "the turns are not those of the group's members")


def _too_large(unit: ProposedUnit) -> Iterator[Refusal]:
    tasks = sum(len(job.nodes) for job in unit.jobs)
    if tasks > MAX_GANG_TASKS:
        bound = f"the bound is {MAX_GANG_TASKS}; split it"
        yield Refusal("invalid", f"the unit places {tasks} tasks, {bound}")


def _wrong_size(job: JobState, planned: ProposedJob) -> Iterator[Refusal]:
    tasks, fewest = len(planned.nodes), job.spec.min_workers
    if fewest is not None and not fewest <= tasks <= job.spec.workers:
        size = f"{fewest} to {job.spec.workers} workers"
        yield Refusal("invalid", f"{job.job_id} has {size}, the plan names {tasks} nodes")
    if fewest is None and tasks != job.demand.tasks:
        size = f"{job.demand.tasks} tasks"
        yield Refusal("invalid", f"{job.job_id} has {size}, the plan names {tasks} nodes")


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

    def give(self, gangs: Gangs) -> tuple[Placed, ...] | str | Waits:
        """Allocates to the unit's gangs. Returns their places where they start, and a text that names the
        lacking resource where they do not fit even after all stops."""
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
        return then if isinstance(then, str) else self.reserve(nodes)

    def form(self, members: Members, *, waits: bool, fit_then: bool = False) -> Formed | Refusal | Waits:
        """Forms a group, whose members are never successors of other jobs. Returns the group where it starts,
        and the refusal where it cannot be formed even after all stops. Only with `waits` it may wait.

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
            return self.reserve(nodes)
        then = formed(self._state, members, self.then)
        return then if isinstance(then, Refusal) else self.reserve(nodes)

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

    def reserve(self, nodes: Sequence[str]) -> Waits:
        """Reserves what is free on these nodes for a waiting unit."""
        self._reserved.update(nodes)
        self.full |= self._too_many(nodes)
        return Waits.FOR_STOPS

    def _too_many(self, nodes: Sequence[str]) -> bool:
        """Whether the tasks exceed one record; a record may always have one unit, whatever its size."""
        return self._tasks > 0 and self._tasks + len(nodes) > MAX_GANG_TASKS
