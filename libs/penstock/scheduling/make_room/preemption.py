"""Preemption: which jobs are stopped, and which start now or as soon as the stops are proven, tried on a copy
of the nodes.

A stage of the profile selects the jobs that shall run, by numbers of GPUs
(`penstock.scheduling.stages.protocols.Preemption`). Here all jobs that shall start get nodes on a copy
(`ClusterView`), those with the largest workers first, so that small jobs do not take what a large one needs.
No job is stopped for a job that would then not fit: because of GPU models, cores, memory, or because free
GPUs are spread over nodes. Such a job is left out, and the stage selects again.

Where enough GPUs are free but spread, smaller jobs move. Where another resource is lacking, running jobs that
come later in the order are stopped.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from penstock.cluster.assignment import Plan
from penstock.cluster.gang import Gang, place_greedily
from penstock.cluster.view import ClusterView, Fit, Undo, living_places
from penstock.ledger.state.index import bits, set_of
from penstock.ledger.state.job.demand import Demand, DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus
from penstock.scheduling.make_room.clearing import clear_for
from penstock.scheduling.scheduling_pass import Starts, Trying, Waits, in_turn, scheduling_pass
from penstock.scheduling.stages.protocols import Preemption, Selection

MAX_TRIALS = 32
"""Of one plan: selections because a demand does not fit, after which no job is stopped; running jobs as
victims of one that waits; waiting jobs that may launch early."""


class Stop(NamedTuple):
    """A job to be stopped, and the job that gets a place of it."""

    job: JobState
    by: str


class Start(NamedTuple):
    """A waiting job, and the nodes on which it was tried."""

    job: JobState
    fit: Fit


class Arrangement(NamedTuple):
    """Starts and stops that carry out a selection now."""

    selection: Selection
    starts: Sequence[Start]
    """Jobs that fit beside all tasks that still exist; in the order in which they were tried."""
    awaiting: Sequence[Start]
    """Jobs that get their nodes once stops are proven; in the order in which they were tried."""
    stops: Sequence[Stop]


class _Hopeless(Exception):
    """A claim does not fit. `unmovable`: because a job that moves for it finds no other place; `overtaken`:
    perhaps because a later claim got nodes before it."""

    def __init__(
        self, key: DemandKey, fitted: int, *, unmovable: bool = False, overtaken: bool = False
    ) -> None:
        self.key, self.fitted, self.unmovable, self.overtaken = key, fitted, unmovable, overtaken


def arrange(state: CellState, stage: Preemption) -> Arrangement:
    """The stage's selection, without jobs that do not fit. The same state gives the same answer."""
    at_most: dict[DemandKey, int] = {}
    unmovable: set[DemandKey] = set()
    by_size = True
    for _ in range(MAX_TRIALS):
        selection = stage.select(state, at_most)
        if not selection.claims:
            return Arrangement(selection, (), (), ())
        if len(selection.claims) == 1 and (only := _only(state, selection)) is not None:
            return Arrangement(selection, (only,), (), ())
        try:
            return _Arranging(state, stage, selection, unmovable).all(by_size=by_size)
        except _Hopeless as claim:
            by_size = not claim.overtaken
            if claim.unmovable:
                unmovable.add(claim.key)
            elif not claim.overtaken:
                at_most[claim.key] = claim.fitted
    return _Arranging(state, stage, selection, unmovable).who_fits()


def _only(state: CellState, selection: Selection) -> Start | None:
    """Fast path for the most frequent case: one job of one task, for which no job has to stop."""
    demand = (job := state.jobs[selection.claims[0]]).demand
    if selection.stops or state.stopping or state.planned or demand.tasks > 1:
        return None
    nodes = state.index.candidates(demand.worker, demand.where)
    return Start(job, (next(bits(nodes)),)) if nodes else None


class _Arranging(Trying[DemandKey, Fit]):
    """The trial of one selection."""

    def __init__(
        self, state: CellState, stage: Preemption, selection: Selection, unmovable: set[DemandKey]
    ) -> None:
        self._state, self._stage, self._selection, self._unmovable = state, stage, selection, unmovable
        self._stops: list[JobState] = []
        self._trial = ClusterView(state, state.stopping.values())
        self._awaited = 0
        self._moved_for: dict[str, JobState] = {}
        self._fitted: Counter[DemandKey] = Counter()
        self._fits: list[Start] = []

    def all(self, *, by_size: bool) -> Arrangement:
        """Places all selected jobs. `by_size`: largest workers first, else in order of priority. Raises
        `_Hopeless`."""
        for job_id in self._selection.stops:
            self._stop(self._state.jobs[job_id])
        self._awaited = self._trial.awaited()
        claims = self._unplanned()
        queue = [(-job.demand.worker.gpus * by_size, number, job) for number, job in enumerate(claims)]
        heapify(queue)
        last = -1
        while queue:
            _, number, job = heappop(queue)
            for moved in self._place(job, overtaken=number < last):
                self._moved_for[moved.job_id] = self._moved_for.get(job.job_id, job)
                number_moved = len(claims) + len(self._moved_for)
                heappush(queue, (-moved.demand.worker.gpus * by_size, number_moved, moved))
            last = max(last, number)
        return self._arrangement()

    def who_fits(self) -> Arrangement:
        """Places the selected jobs that fit without stops, in order of priority."""
        self._awaited = self._trial.awaited()
        for result in scheduling_pass(in_turn(self._unplanned()), self):
            if isinstance(result, Starts):
                self._claim(result.job, result.place)
        return self._arrangement()

    def alike(self, job: JobState) -> DemandKey:
        """As `Trying`."""
        return job.demand_key

    def place(self, job: JobState, key: DemandKey) -> Starts[Fit] | Waits:
        """As `Trying`."""
        fit = self._fit(job.demand)
        return Waits(job) if fit is None else Starts(job, fit)

    def _unplanned(self) -> list[JobState]:
        """Claims without a place in the adopted plan. A claim with a place keeps it, unless it fits where no
        job has to stop.

        A place that its job no longer claims passes to the first claim of the same demand.
        """
        planned = self._state.planned
        claims = {job_id: self._state.jobs[job_id] for job_id in self._selection.claims}
        if not planned:
            return list(claims.values())
        given: dict[str, JobState] = {}
        for job_id in planned:
            if job_id in claims:
                given[job_id] = claims.pop(job_id)
            elif (former := self._state.jobs.get(job_id)) is not None:
                key = former.demand.key
                alike = (other for other in claims.values() if other.demand.key == key)
                found = next((other for other in alike if other.job_id not in planned), None)
                if found is not None:
                    given[job_id] = claims.pop(found.job_id)
        left = dict.fromkeys(self._selection.claims)
        for planned_id, job in given.items():
            fit = self._trial.fit(job.demand, self._awaited) if job.status is JobStatus.QUEUED else None
            if fit is None:
                nodes = planned[planned_id].nodes
                known = len(nodes) == job.demand.tasks and all(
                    node_id in self._state.nodes for node_id in nodes
                )
                fit = fit_of(self._state, job.demand, nodes) if known else None
            if fit is not None and self._trial.holds(job.demand, fit):
                self._claim(job, fit)
                del left[job.job_id]
        return [self._state.jobs[job_id] for job_id in left]

    def _arrangement(self) -> Arrangement:
        """Starts the jobs that fit beside the tasks that still exist; a stop that no claim needs is left
        out."""
        starts: list[Start] = []
        awaiting: list[Start] = []
        now: ClusterView | None = None
        for start in self._fits:
            job, fit = start
            waits = job.status is not JobStatus.QUEUED
            if not waits and self._awaited & set_of(fit):
                if now is None:
                    now = ClusterView(self._state)
                    for other in starts:
                        now.claim(other.job.demand, other.fit)
                waits = not now.holds(job.demand, fit)
            (awaiting if waits else starts).append(start)
            if not waits and now is not None:
                now.claim(job.demand, fit)
        claims = {job_id: number for number, job_id in enumerate(self._selection.claims)}
        starts.sort(key=lambda start: (-start.job.demand.worker.gpus, claims[start.job.job_id]))
        stops = []
        for job in self._stops:
            by = self._by(job, awaiting)
            if by is not None:
                stops.append(Stop(job, by))
        return Arrangement(self._selection, starts, awaiting, stops)

    def _stop(self, job: JobState) -> None:
        self._trial.release(job)
        self._stops.append(job)

    def _fit(self, demand: Demand) -> Fit | None:
        """First fit, if possible on nodes on which no job has to stop."""
        fit = self._trial.fit(demand, self._awaited) if self._awaited else None
        return self._trial.fit(demand) if fit is None else fit

    def _claim(self, job: JobState, fit: Fit) -> None:
        self._trial.claim(job.demand, fit)
        self._fits.append(Start(job, fit))
        self._fitted[job.demand_key] += job.status is JobStatus.QUEUED

    def _place(self, job: JobState, *, overtaken: bool) -> Sequence[JobState]:
        """Places the job on the trial; returns jobs that have to move for it, and need nodes themselves."""
        demand, waits = job.demand, job.status is JobStatus.QUEUED
        fit = self._fit(demand)
        moved: tuple[JobState, ...] = ()
        cause = self._moved_for.get(job.job_id)
        if fit is None and (waits or cause is not None):
            if demand.key not in self._unmovable:
                moved = tuple(clear_for(self._trial, demand))
            if moved or (waits and self._give_up(job)):
                self._awaited = self._trial.awaited()
                fit = self._trial.fit(demand)
        if fit is None:
            if cause is not None:
                raise _Hopeless(cause.demand.key, 0, unmovable=True)
            if waits:
                raise _Hopeless(demand.key, self._fitted[demand.key], overtaken=overtaken)
            return ()
        self._stops += moved
        self._claim(job, fit)
        return moved

    def _give_up(self, job: JobState) -> bool:
        """Releases running jobs of lower priority until this one fits, and then takes back those that were
        not necessary; returns whether it fits."""
        trial, demand = self._trial, job.demand
        suited = self._state.index.eligible(demand.worker, demand.where) & self._state.index.placeable
        released: list[tuple[JobState, Undo]] = []
        for other in islice(self._stage.later(self._state, job), MAX_TRIALS):
            there = any(self._state.nodes[place.node_id].bit & suited for place in living_places(other))
            if other.job_id in trial.ended or not there:
                continue
            released.append((other, trial.release(other)))
            if trial.fit(demand) is not None:
                break
        else:
            for _, undo in released:
                undo()
            return False
        for other, undo in reversed(released):
            undo()
            if trial.fit(demand) is None:
                trial.release(other)
                self._stops.append(other)
        return True

    def _by(self, stopped: JobState, awaiting: Sequence[Start]) -> str | None:
        """The first claim that gets a node of the stopped job."""
        if stopped.job_id in self._moved_for:
            return self._moved_for[stopped.job_id].job_id
        nodes = set_of(self._state.nodes[place.node_id].ordinal for place in living_places(stopped))
        return next((job.job_id for job, fit in awaiting if set_of(fit) & nodes), None)


def node_ids(state: CellState, demand: Demand, fit: Fit) -> tuple[str, ...]:
    """Node of each task in rank order: workers first, then parameter servers."""
    servers = demand.parameter_servers
    return tuple(state.node_at[ordinal] for ordinal in (*fit[servers:], *fit[:servers]))


def fit_of(state: CellState, demand: Demand, nodes: Sequence[str]) -> Fit:
    """Inverse of `node_ids`."""
    ordinals = [state.nodes[node_id].ordinal for node_id in nodes]
    return (*ordinals[demand.workers :], *ordinals[: demand.workers])


def keeps_room(state: CellState, plan: Plan, start: Start, rest: Sequence[Start]) -> bool:
    """Whether the jobs that start after this one still fit if it is placed as the place stage chooses."""
    demand = start.job.demand
    fit = fit_of(state, demand, plan.nodes)
    if not rest or fit == start.fit:
        return True
    trial = ClusterView(state)
    trial.claim(demand, fit)
    for other, _ in rest:
        found = trial.fit(other.demand)
        if found is None:
            return False
        trial.claim(other.demand, found)
    return True


def place_as_tried(profile: str, state: CellState, start: Start) -> Plan | None:
    """The plan that places the job on the nodes on which it was tried."""
    remaining = iter(start.fit)

    def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        ordinal = next(remaining)
        return [(0.0, ordinal)] if gang.open(is_worker) >> ordinal & 1 else []

    return place_greedily(profile, state, start.job, rank)
