"""Deadline-driven preemption: a running job without a deadline makes way for an urgent one, and resumes
elsewhere or with fewer workers.

Source: own; GENIE §III has no preemption. If a waiting job that is urgent, prior or has its own deadline
would be late because of running jobs, a running job without these is stopped where that gains: the waiting
job then starts at once, and the stopped one has nodes at once, too, in the shape that ends first. No job is
stopped that would meet its expected completion now and miss it after the stop; a job that is late already may
lose less than the other one gains. Save and launch are charged, and only a job that saves in time is stopped.

Ideal: the smallest loss over all jobs. Departures: one job makes way for one other, and only while no other
job is being stopped and no plan waits; nodes that are reserved for a waiting job stay so; only jobs with
whole GPUs, and none that shares them; of the running jobs those that end first and last are looked at.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import NamedTuple

from penstock.cluster.view import ClusterView, Fit, living_places
from penstock.ledger.fold.plans import units_of_proposals
from penstock.ledger.state.index import bits, set_of
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_TEXT, ShapeOption
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.scheduling.make_room.backfill import KNOWN, MAX_ENDS, by_end
from penstock.scheduling.make_room.preemption import MAX_TRIALS, node_ids
from penstock.scheduling.order.deadlines import urgent
from penstock.scheduling.order.genie import Genie, on_each_node
from penstock.scheduling.order.job_rows import JobRows
from penstock.scheduling.remaining_time import remaining_s
from penstock.scheduling.stages.regroup import regroups
from penstock.scheduling.stop_cost import saves_in_time, stop_cost_s

MAX_ASKED = 4  # waiting jobs, those with the least slack; each costs a trial per job that may make way
MAX_MOVED = 2  # attempts that a job has given up for others, or lost to nodes
MIN_GAIN_MS = 1_000.0  # less is within the variation of launch times
PRESSING: tuple[()] = ()
"""Key of the only row: waiting jobs that are urgent or prior, or have their own deadline."""

MayTake = Callable[[CellState, JobState, JobState], bool]
"""(state, waiting job, running job) → whether the waiting one may have the other one's place at all."""


class Waiting(NamedTuple):
    """A job that cannot wait. `option`: None: it has only one shape. `gain_ms`: how much lateness a start now
    avoids; for an urgent job how much earlier it ends."""

    job: JobState
    option: ShapeOption | None
    gain_ms: float


class Way(NamedTuple):
    """A job that makes way, and the nodes of both jobs afterwards, one per worker."""

    job: JobState
    loss_ms: float
    """How much later it ends than its expected completion and its currently predicted end, whichever is
    later."""
    cost_ms: float
    nodes: tuple[str, ...]
    other_nodes: tuple[str, ...]


class MakeWay:
    """Implements `penstock.scheduling.stages.protocols.GiveWay`. `genie`: expected completions and placements
    of jobs; `may_take`: see `MayTake`."""

    def __init__(self, name: str, genie: Genie, may_take: MayTake = lambda *_: True) -> None:
        self._name = name
        self._genie = genie
        self._may_take = may_take
        self._waiting: JobRows[tuple[()]] = JobRows(_presses)
        self._ends: JobRows[tuple[str]] = JobRows(runs=by_end)

    def plan(self, state: CellState) -> PlanProposed | None:
        """The plan for the first waiting job with a gain. O(changes since the last call + waiting jobs that
        press × options), plus the trials where one of them cannot wait."""
        if state.frozen or state.in_window or state.stopping or not state.holding:
            return None
        self._waiting.update(state)
        pressing = [state.jobs[job_id] for _, _, job_id, _ in self._waiting.waiting.get(PRESSING, ())]
        if not pressing or units_of_proposals(state):
            return None
        self._ends.update(state)
        avoid = _reserved(state) | ~state.index.placeable
        may = list(self._may_make_way(state, avoid))
        if not may:
            return None
        for waiting in self._cannot_wait(state, pressing, avoid):
            ways = [
                way
                for job in may
                if self._may_take(state, waiting.job, job)
                and (way := self._way(state, waiting, job, avoid)) is not None
            ]
            if ways:
                best = min(ways, key=lambda way: (way.loss_ms, way.cost_ms, way.job.order))
                return self._proposal(state, waiting, best)
        return None

    def _proposal(self, state: CellState, waiting: Waiting, way: Way) -> PlanProposed:
        name, other = way.job.job_id, waiting.job.job_id
        fewer = (
            ""
            if len(way.nodes) == way.job.workers
            else f" with {len(way.nodes)} of {way.job.workers} workers"
        )
        loss = f"and ends {way.loss_ms / 1_000:,.0f} s later" if way.loss_ms else "and is not late for it"
        gain = "at once" if waiting.gain_ms == inf else f"{waiting.gain_ms / 1_000:,.0f} s earlier"
        text = f"{name} makes way for {other}: it goes on{fewer} {loss}; {other} gains its place {gain}"[
            :MAX_TEXT
        ]
        return PlanProposed(
            proposal_id=f"{self._name}-{state.seq}",
            proposer=self._name,
            units=(
                ProposedUnit(jobs=(ProposedJob(job_id=other, nodes=way.other_nodes),), explanation=text),
                ProposedUnit(jobs=(ProposedJob(job_id=name, nodes=way.nodes),), explanation=text),
            ),
            stops=(name,),
        )

    # --------------------------------------------------------------------------------------- jobs that wait

    def _cannot_wait(self, state: CellState, pressing: list[JobState], avoid: int) -> Iterator[Waiting]:
        """Jobs that cannot wait, least slack first. A job that is late even if it starts now is none, unless
        it is urgent."""
        asked = []
        for job in pressing:
            if job.job_id in state.planned or not _suits(job):
                continue
            choice = self._genie.choice(state, job)
            known = choice.latency_ms < inf and (choice.option is not None or job.spec.min_workers is None)
            if known and (urgent(job.spec) or choice.allowance_ms >= 0):
                asked.append((choice.allowance_ms, job.order, job, choice))
        asked.sort(key=lambda one: one[:2])
        for _, _, job, choice in asked[:MAX_ASKED]:
            wait_ms = self._wait_ms(state, job, choice.option, avoid)
            end_ms = state.now_ms + choice.latency_ms
            gain_ms = wait_ms if urgent(job.spec) else max(0.0, end_ms + wait_ms - choice.due_ms)
            if gain_ms >= MIN_GAIN_MS:
                yield Waiting(job, choice.option, gain_ms)

    def _wait_ms(self, state: CellState, job: JobState, option: ShapeOption | None, avoid: int) -> float:
        """Time until enough running jobs have ended by themselves; infinite where that is not known, 0 where
        the job fits now."""
        trial, demand = ClusterView(state), _demand(job, option)
        if _fit(trial, job, option, avoid) is not None:
            return 0.0
        suited = state.index.eligible(demand.worker, job.spec.where) & ~avoid
        for end_s, _, job_id, _ in islice(self._ends.running.get(KNOWN, ()), MAX_ENDS):
            held = state.jobs[job_id]
            trial.release(held)
            if not any(state.nodes[place.node_id].bit & suited for place in living_places(held)):
                continue
            if _fit(trial, job, option, avoid) is not None:
                return max(0.0, 1_000.0 * end_s - state.now_ms)
        return inf

    # ------------------------------------------------------------------------------------ jobs that make way

    def _may_make_way(self, state: CellState, avoid: int) -> Iterator[JobState]:
        """Running jobs that may make way, those that end last first; none on reserved nodes, whose place is
        another job's."""
        last = reversed(self._ends.running.get(KNOWN, ()))
        found = (
            job
            for _, _, job_id, _ in islice(last, MAX_ENDS)
            if (job := state.jobs[job_id]).status is JobStatus.RUNNING
            and not _matters(job)
            and _suits(job)
            and job.preemptible
            and not job.target
            and not job.succession.followed
            and job.saves
            and saves_in_time(job)
            and job.retries.infrastructure < MAX_MOVED
            and not any(state.nodes[place.node_id].bit & avoid for place in living_places(job))
        )
        return islice(found, MAX_TRIALS)

    def _way(self, state: CellState, waiting: Waiting, job: JobState, avoid: int) -> Way | None:
        """How the job would make way; None: it would not make room, or the loss would be too large."""
        left_ms, shapes = 1_000.0 * remaining_s(state, job), self._shapes(state, job)
        if left_ms == inf or not shapes:
            return None
        trial = ClusterView(state)
        trial.release(job)
        other = _fit(trial, waiting.job, waiting.option, avoid)
        if other is None:
            return None
        trial.claim(_demand(waiting.job, waiting.option), other)
        cost_ms = 1_000.0 * stop_cost_s(state, job)
        due_ms, ends_ms = self._genie.choice(state, job).due_ms, state.now_ms + left_ms
        for times, option in shapes:
            fit = _fit(trial, job, option, avoid)
            if fit is None:
                continue
            then_ms = state.now_ms + cost_ms + left_ms * times
            loss_ms = max(0.0, then_ms - max(due_ms, ends_ms))
            if loss_ms and (ends_ms <= due_ms or loss_ms >= waiting.gain_ms):
                return None  # in other shapes it ends even later
            nodes = node_ids(state, _demand(job, option), fit)
            return Way(
                job, loss_ms, cost_ms, nodes, node_ids(state, _demand(waiting.job, waiting.option), other)
            )
        return None

    def _shapes(self, state: CellState, job: JobState) -> list[tuple[float, ShapeOption | None]]:
        """(times as long as in its present shape, shape) of a running job, the fastest first; empty: how long
        it would take is not known."""
        if job.spec.min_workers is None:
            return [(1.0, None)]
        found = [one.option for one in self._genie.offers(state, job).found]
        here = next((one for one in found if one.workers == job.workers), None)
        if here is None:
            return []
        found.sort(key=lambda one: (one.step_ms, one.workers))
        return [(option.step_ms / here.step_ms, option) for option in found]


def _presses(state: CellState, job: JobState) -> tuple[tuple[()], float] | None:
    return (PRESSING, float(job.order)) if _matters(job) else None


def _matters(job: JobState) -> bool:
    """Whether the job is urgent or prior, or has its own deadline."""
    return job.spec.deadline_ms is not None or job.spec.qos in ("urgent", "prior")


def _suits(job: JobState) -> bool:
    """Whether its workers have whole GPUs: jobs without GPUs get cores by other ways, and parts of GPUs are
    not compared here."""
    return job.estimate is not None and regroups(job.demand)


def _reserved(state: CellState) -> int:
    """Set of the nodes that are reserved for waiting jobs."""
    names = {node_id for unit in state.planned.values() for node_id in unit.nodes}
    return set_of(state.nodes[name].ordinal for name in names if name in state.nodes)


def _demand(job: JobState, option: ShapeOption | None) -> Demand:
    return job.demand if option is None else job.demand_of(option.workers)


def _fit(trial: ClusterView, job: JobState, option: ShapeOption | None, avoid: int) -> Fit | None:
    """Places the job on other nodes than these: the workers on as many nodes as the option has, those with
    the fewest free GPUs first, else by first fit; None: there are too few."""
    if option is None:
        return trial.fit(job.demand, avoid)
    need = on_each_node(job, option)
    if need is None:
        return None
    found = list(bits(trial.candidates(need, job.spec.where) & ~avoid))
    if len(found) < option.nodes:
        return None
    found.sort(key=lambda ordinal: (trial.free(ordinal).gpus, ordinal))
    return tuple(ordinal for ordinal in found[: option.nodes] for _ in range(option.gpus_per_node))
