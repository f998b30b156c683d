"""Validation of plans: which units of a proposed plan may start, on exactly this state, and the places of
their jobs.

Units are validated in order, each all or nothing, on one overlay: resources of one unit are not available to
the next.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from penstock.cluster.overlay import Overlay, Placed
from penstock.cluster.refusal import Refusal, frozen, unknown
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import MAX_UNITS
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_GANG_TASKS
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit, ReadVersion
from penstock.proposals.allocation import Room
from penstock.scheduling.groups.companions import bound as bound_by_tenants
from penstock.scheduling.groups.companions import why_apart
from penstock.scheduling.groups.validate_groups import RUNS, Formed, comes_back_to_queue, shared_already
from penstock.scheduling.profiles import in_force, profile_for
from penstock.scheduling.stages.protocols import Profile
from penstock.scheduling.stages.regroup import PROPOSER

MAX_PLAN_TASKS = 4_096

Subject = tuple[Literal["job", "node"], str]


class ValidatedUnit(NamedTuple):
    """Result of one unit. `placed`: where its jobs start now, or when others end; empty where it waits for
    stops, or is refused."""

    number: int
    unit: ProposedUnit
    placed: tuple[Placed, ...] = ()
    refusal: Refusal | None = None
    group: Formed | None = None
    """Set for a unit of kind group that starts: `placed` has those of its jobs that do not run."""


class ValidatedPlan(NamedTuple):
    """Each unit, in the plan's order."""

    units: tuple[ValidatedUnit, ...]
    full: bool
    """Whether units wait only for the next record."""
    then: Overlay
    """The nodes, less what the units get, when all jobs that are being stopped have ended."""


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
    refusal = _of_the_plan(state, proposal)
    if refusal is not None:
        return refusal
    stale: dict[Subject, str] = {
        (read.kind, read.id): why for read in proposal.read if (why := moved_on(state, read))
    }
    if stale:
        jobs = {job.job_id for unit in proposal.units for job in unit.jobs}
        nodes = {node_id for unit in proposal.units for job in unit.jobs for node_id in job.nodes}
        for (kind, name), why in stale.items():
            if name not in (jobs if kind == "job" else nodes):
                return Refusal("stale", why)
    profile = profile or profile_for(state.settings)
    if (refusal := _makes_way(state, proposal, profile) or _who_runs(proposal, profile)) is not None:
        return refusal
    bound = profile.regroup is None or proposal.proposer != PROPOSER
    validation = _Validation(state, profile, stale, stops, bound=bound, fit_then=fit_then)
    units = tuple(validation.unit(number, unit) for number, unit in enumerate(proposal.units))
    return ValidatedPlan(units, validation.room.full, validation.room.then)


def _makes_way(state: CellState, proposal: PlanProposed, profile: Profile) -> Refusal | None:
    """The refusal of another proposer's plan while the profile's own waits for a job that makes way: it would
    take the places of both."""
    if profile.make_way is None or proposal.proposer == profile.name:
        return None
    for unit in state.planned.values():
        if unit.proposed is not None and unit.proposed.of.proposer == profile.name:
            return Refusal(
                "wrong_state", f"a job makes way for another, and {unit.job_id} still waits for its place"
            )
    return None


def _who_runs(proposal: PlanProposed, profile: Profile) -> Refusal | None:
    """The refusal of a plan that stops or ranks jobs without the right to do so."""
    if not proposal.stops and not proposal.ranks:
        return None
    if profile.make_way is not None and proposal.proposer == profile.name and not proposal.ranks:
        return None
    if profile.regroup is None:
        return Refusal("unsupported", f"profile {profile.name} lets no plan stop running jobs, or rank jobs")
    if proposal.proposer != PROPOSER:
        return Refusal("unsupported", f"only plans of {PROPOSER} stop running jobs, or rank jobs")
    return None


def moved_on(state: CellState, read: ReadVersion) -> str:
    """How a version that a proposal has read has changed; empty: it has not."""
    held = state.jobs.get(read.id) if read.kind == "job" else state.nodes.get(read.id)
    if held is None:
        return f"{read.kind} {read.id} is not known any more"
    if held.version != read.version:
        return f"{read.kind} {read.id} was read at {read.version}, is at {held.version}"
    return ""


def _of_the_plan(state: CellState, proposal: PlanProposed) -> Refusal | None:
    jobs = [job for unit in proposal.units for job in unit.jobs]
    if not jobs and not proposal.stops and not proposal.ranks and not state.in_window:
        return Refusal("invalid", "the plan is empty")  # in a window it means that nothing changes
    if len({job.job_id for job in jobs}) < len(jobs):
        return Refusal("invalid", "a job is planned twice")
    if len(jobs) > MAX_UNITS:
        return Refusal(
            "invalid",
            f"the plan has {len(jobs)} jobs, the bound is {MAX_UNITS}; propose the rest in another one",
        )
    tasks = sum(len(job.nodes) for job in jobs)
    if tasks > MAX_PLAN_TASKS:
        detail = (
            f"the plan places {tasks} tasks, the bound is {MAX_PLAN_TASKS}; propose the rest in another one"
        )
        return Refusal("invalid", detail)
    if (still := frozen(state)) is not None:
        return still
    until_ms = proposal.valid_until_ms
    if until_ms is not None and state.now_ms > until_ms:
        return Refusal("expired", f"it was valid until {until_ms}, the ledger's time is {state.now_ms}")
    return None


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
        self.room = Room(state, next_members=profile.preempt is None, stops=stops)
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
        if (wrong := _wrong_turns(unit)) is not None:
            return ValidatedUnit(number, unit, (), wrong)
        if unit.kind == "group":
            found = self._group(unit)
            if isinstance(found, Refusal):
                return ValidatedUnit(number, unit, (), found)
            self._accepted.update(job.job_id for job in unit.jobs)
            return ValidatedUnit(number, unit, () if found is None else found.placed, None, found)
        wrong = next(self._wrong(unit), None)
        if wrong is not None:
            return ValidatedUnit(number, unit, (), wrong)
        placed = self.room.give([(self._state.jobs[job.job_id], job.nodes) for job in unit.jobs])
        if placed is None and self._claims is not None:
            placed = (
                "its nodes have room only after stops, which are for the job that comes first in the profile"
            )
        if isinstance(placed, str):
            return ValidatedUnit(number, unit, (), Refusal("infeasible", placed))
        self._accepted.update(job.job_id for job in unit.jobs)
        return ValidatedUnit(number, unit, placed or ())

    def _group(self, unit: ProposedUnit) -> Formed | Refusal | None:
        """A job may join a running job out of turn, since it takes no other job's GPUs. Only a group whose
        turn it is may wait for stops (None)."""
        jobs, state = {job.job_id for job in unit.jobs}, self._state
        if (large := _too_large(unit)) is not None:
            return large
        for planned in unit.jobs if self._stale else ():
            if (moved := next(self._moved_on(planned), None)) is not None:
                return moved
        running = {job_id for job_id in jobs if job_id in state.jobs and state.jobs[job_id].status in RUNS}
        joins = bool(running - self._stops)
        if (reserved := next(self._reserved(unit, jobs), None)) is not None:
            return reserved
        late = next(self._turn(jobs), None)
        if not joins and late is not None:
            return late
        members = [(job.job_id, job.nodes) for job in unit.jobs]
        if unit.turns is not None and (same := shared_already(state, members, self._stops)) is not None:
            if all(state.jobs[job_id].turns == unit.turns for job_id in same.running):
                return Refusal("invalid", "they share these GPUs already, in these turns")
            return same
        if bound_by_tenants(self._profile):
            known = [state.jobs[job_id] for job_id, _ in members if job_id in state.jobs]
            if apart := why_apart(state, [job for job in known if job.estimate is not None]):
                return Refusal("infeasible", apart)
        waits = late is None and self._claims is None
        return self.room.form(members, waits=waits, fit_then=self._fit_then)

    def _wrong(self, unit: ProposedUnit) -> Iterator[Refusal]:
        """Errors of the unit that do not depend on free resources."""
        if (large := _too_large(unit)) is not None:
            yield large
        for planned in unit.jobs:
            if self._stale:
                yield from self._moved_on(planned)
            if (wrong := self._cannot_start(planned)) is not None:
                yield wrong
        jobs = {job.job_id for job in unit.jobs}
        yield from self._reserved(unit, jobs)
        yield from self._turn(jobs)

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
        names: list[Subject] = [("job", planned.job_id), *(("node", node_id) for node_id in planned.nodes)]
        yield from (Refusal("stale", self._stale[name]) for name in names if name in self._stale)

    def _cannot_start(self, planned: ProposedJob) -> Refusal | None:
        job = self._state.jobs.get(planned.job_id)
        if job is None:
            return unknown(self._state, planned.job_id)
        stops_jobs = self._profile.regroup is not None or self._profile.make_way is not None
        stopped = job.job_id in self._stops or (stops_jobs and comes_back_to_queue(job))
        if job.status is not JobStatus.QUEUED and not stopped:
            return Refusal("wrong_state", f"{job.job_id} is {job.status}, not queued")
        if job.held is not None:
            return Refusal("wrong_state", f"{job.job_id} is held")
        wrong = _wrong_size(job, planned)
        return Refusal("invalid", wrong) if wrong else None

    def _passes(self, jobs: set[str]) -> Iterator[Refusal]:
        """Other jobs than the head of the queue start only while it has not been overtaken too often; a plan
        counts once. Does not apply to regroup stages and profiles in which jobs make way, which have their
        own order."""
        if self._profile.regroup is not None or self._profile.make_way is not None:
            return
        while self._head in self._accepted:
            self._head = next(self._queue, None)
        if self._head is None or self._head in jobs or self._claims is not None:
            return
        passed = self._state.jobs[self._head].plans_passed
        if passed >= in_force(self._state.settings).max_overtakes:
            why = (
                f"{self._head} is first in the queue and {passed} plans have passed it: one has to start "
                "it first"
            )
            yield Refusal("wrong_state", why)


def _wrong_turns(unit: ProposedUnit) -> Refusal | None:
    if unit.turns is None:
        return None
    if unit.kind != "group":
        return Refusal("invalid", "turns are named for jobs that do not share GPUs")
    if sorted(unit.turns.job_ids) != sorted(job.job_id for job in unit.jobs):
        return Refusal("invalid", "the turns are not those of the group's members")
    return None


def _too_large(unit: ProposedUnit) -> Refusal | None:
    tasks = sum(len(job.nodes) for job in unit.jobs)
    if tasks <= MAX_GANG_TASKS:
        return None
    return Refusal("invalid", f"the unit places {tasks} tasks, the bound is {MAX_GANG_TASKS}; split it")


def _wrong_size(job: JobState, planned: ProposedJob) -> str:
    tasks = len(planned.nodes)
    fewest = job.spec.min_workers
    if fewest is not None and not fewest <= tasks <= job.spec.workers:
        return f"{job.job_id} has {fewest} to {job.spec.workers} workers, the plan names {tasks} nodes"
    if fewest is None and tasks != job.demand.tasks:
        return f"{job.job_id} has {job.demand.tasks} tasks, the plan names {tasks} nodes"
    return ""
