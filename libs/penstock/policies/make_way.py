"""Deadline-driven preemption: a running job without a deadline makes way for an urgent one, and resumes elsewhere or with fewer workers.

Source: own; GENIE §III has no preemption. If a waiting job that is urgent, prior or has its own deadline would be late because of running jobs, a running job
without these is stopped where that gains: the waiting job then starts at once, and the stopped one has nodes at once, too, in the shape that ends first. No job is stopped that would meet its expected completion
now and miss it after the stop; a job that is late already may lose less than the other one gains. Save and launch are charged, and only a job that saves in time is stopped.

Ideal: the smallest loss over all jobs. Departure: one job makes way for one other, and only while no other job is being stopped and no node is reserved.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from penstock.ledger.demand import Demand
from penstock.ledger.index import bits
from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.model.transitions import JobStatus
from penstock.model.types import MAX_TEXT, ResourceVector, ShapeOption
from penstock.policies.deadlines import urgent
from penstock.policies.genie import Genie, on_each_node
from penstock.policies.service import remaining_s, saves_in_time, stop_cost_s
from penstock.policies.trial import Fit, Trial

MAX_ASKED = 4  # waiting jobs, those with the least slack; each costs a trial per job that may make way
MAX_MAKING_WAY = 32  # running jobs that are tried for one of them, those that end last
MAX_MOVED = 2  # attempts that a job has given up for others, or lost to nodes
MIN_GAIN_MS = 1_000.0  # less is within the variation of launch times


class Waiting(NamedTuple):
    """A job that cannot wait. `gain_ms`: how much lateness a start now avoids; for an urgent job how much earlier it ends."""

    job: JobState
    option: ShapeOption
    gain_ms: float


class Way(NamedTuple):
    """A job that makes way, and the nodes of both jobs afterwards, one per worker."""

    job: JobState
    loss_ms: float
    """How much later it ends than its expected completion and its currently predicted end, whichever is later."""
    cost_ms: float
    nodes: tuple[str, ...]
    other_nodes: tuple[str, ...]


class MakeWay:
    """Implements `penstock.policies.base.GiveWay`. `genie`: expected completions and placements of jobs."""

    def __init__(self, name: str, genie: Genie) -> None:
        self._name = name
        self._genie = genie

    def plan(self, state: CellState) -> PlanProposed | None:
        """The plan for the first waiting job with a gain. O(waiting jobs × options), plus the trials where one of them cannot wait."""
        if state.frozen or state.stopping or state.planned or not state.queue or not state.holding:
            return None
        may = list(self._may_make_way(state))
        if not may:
            return None
        for waiting in self._cannot_wait(state):
            ways = [way for job in may if (way := self._way(state, waiting, job)) is not None]
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

    def _cannot_wait(self, state: CellState) -> Iterator[Waiting]:
        """Jobs that cannot wait, least slack first."""
        jobs = [state.jobs[job_id] for job_id in state.queue.values()]
        asked = [
            (choice.allowance_ms, job.order, job, choice)
            for job in jobs
            if _matters(job) and (choice := self._genie.choice(state, job)).option
        ]
        asked.sort(key=lambda one: one[:2])
        for _, _, job, choice in asked[:MAX_ASKED]:
            assert choice.option is not None
            wait_ms = self._wait_ms(state, job, choice.option)
            end_ms = state.now_ms + choice.latency_ms
            if urgent(job.spec):
                gain_ms = wait_ms
            elif end_ms > choice.due_ms:
                continue  # it would be late even if it started now
            else:
                gain_ms = max(0.0, end_ms + wait_ms - choice.due_ms)
            if gain_ms >= MIN_GAIN_MS:
                yield Waiting(job, choice.option, gain_ms)

    def _wait_ms(self, state: CellState, job: JobState, option: ShapeOption) -> float:
        """Time until enough running jobs have ended by themselves; infinite where that is not known, 0 where the job fits now."""
        trial = Trial(state)
        if _fit(state, trial, job, option) is not None:
            return 0.0
        ends = sorted((remaining_s(state, held), held.order) for held in state.holding.values())
        for left_s, order in ends:
            if left_s == inf:
                break
            trial.release(state.holding[order])
            if _fit(state, trial, job, option) is not None:
                return 1_000.0 * left_s
        return inf

    # ------------------------------------------------------------------------------------ jobs that make way

    def _may_make_way(self, state: CellState) -> Iterator[JobState]:
        """Running jobs that may make way, those that end last first."""
        found = [
            job
            for job in state.holding.values()
            if job.status is JobStatus.RUNNING
            and not _matters(job)
            and job.preemptible
            and not job.target
            and not job.followed
            and job.spec.checkpoint != "none"
            and saves_in_time(job)
            and job.infrastructure_retries < MAX_MOVED
            and self._genie.offers(state, job).found
        ]
        found.sort(key=lambda job: (-remaining_s(state, job), job.order))
        return islice(found, MAX_MAKING_WAY)

    def _way(self, state: CellState, waiting: Waiting, job: JobState) -> Way | None:
        """How the job would make way; None: it would not make room, or the loss would be too large."""
        left_ms = 1_000.0 * remaining_s(state, job)
        found = self._genie.offers(state, job).found
        here = next((one.option for one in found if one.option.workers == job.workers), None)
        if here is None or left_ms == inf:
            return None
        trial = Trial(state)
        trial.release(job)
        other = _fit(state, trial, waiting.job, waiting.option)
        if other is None:
            return None
        trial.claim(_demand(waiting.job, waiting.option), other)
        cost_ms = 1_000.0 * stop_cost_s(state, job)
        due_ms, ends_ms = self._genie.choice(state, job).due_ms, state.now_ms + left_ms
        for placement in sorted(found, key=lambda one: (one.option.step_ms, one.option.workers)):
            option = placement.option
            fit = _fit(state, trial, job, option)
            if fit is None:
                continue
            then_ms = state.now_ms + cost_ms + left_ms * option.step_ms / here.step_ms
            loss_ms = max(0.0, then_ms - max(due_ms, ends_ms))
            if loss_ms and (ends_ms <= due_ms or loss_ms >= waiting.gain_ms):
                return None  # in other shapes it ends even later
            return Way(job, loss_ms, cost_ms, _names(state, fit), _names(state, other))
        return None


def _matters(job: JobState) -> bool:
    """Whether the job is urgent or prior, or has its own deadline."""
    return job.spec.deadline_ms is not None or job.spec.qos in ("urgent", "prior")


def _demand(job: JobState, option: ShapeOption) -> Demand:
    return job.shaped(option.workers).demand


def _fit(state: CellState, trial: Trial, job: JobState, option: ShapeOption) -> Fit | None:
    """Places the workers on as many nodes as the option has, those with the fewest free GPUs first; None: there are too few."""
    need = on_each_node(job, option)
    if need is None:
        return None
    suited = state.index.eligible(need, job.spec.gpu_models) & state.index.placeable
    found = [ordinal for ordinal in bits(suited) if _holds(trial, ordinal, need)]
    if len(found) < option.nodes:
        return None
    found.sort(key=lambda ordinal: (trial.free(ordinal).gpus, ordinal))
    return tuple(ordinal for ordinal in found[: option.nodes] for _ in range(option.gpus_per_node))


def _holds(trial: Trial, ordinal: int, need: ResourceVector) -> bool:
    return trial.free(ordinal).fits(need)


def _names(state: CellState, fit: Sequence[int]) -> tuple[str, ...]:
    return tuple(state.node_at[ordinal] for ordinal in fit)
