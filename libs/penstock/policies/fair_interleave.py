"""Regroup stage of profile `penstock`: interleaving of jobs on shared GPUs in a saturated cell, with fair shares between tenants.

As `penstock.policies.interleave`, but with another order of jobs, since that search minimises the mean completion time in the order of its list:

- No job is regrouped while there are GPUs for all waiting jobs: jobs start where the other stages place them.
- A tenant's first jobs, up to its share of the GPUs (1 / tenants), come before all jobs beyond their tenant's share. A large gang that has waited too long
  (`penstock.policies.fair`) is not delayed by its tenant's share, but does not pass other jobs of its tenant: where the queue grows all gangs have waited so long.
- Within both parts: by expected service (GPU seconds) over the square root of the response ratio, so that waiting jobs move forward and no job waits for ever. A tenant's jobs of a higher
  priority take the positions of its others.
- Only jobs that save checkpoints are stopped (`checkpoint` of the job's specification). Others may have to share their GPUs.
- Jobs with a deadline or a service class are not regrouped, nor are jobs with parts of GPUs: they start in the profile's order, on GPUs that the plan leaves free when they
  come first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import islice
from math import ceil, inf, sqrt
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.types import WHOLE_GPU
from penstock.policies.candidates import NO_SHAPE, Candidates, Shape
from penstock.policies.fair import LARGE_GPUS, PATIENCE, response_r_s
from penstock.policies.group_plan import group_plan
from penstock.policies.interleave import Interleave
from penstock.policies.job_rows import Entry, JobRows
from penstock.policies.ordered import gpus_of
from penstock.policies.regroup import Answer, Candidate, GroupPlan, Question, Scope
from penstock.policies.service import received_s, remaining_s

STAYS = 4.0  # a job takes the GPUs of one without known stages, which cannot share, only with so many times less service
MAX_OTHERS = 64  # waiting jobs that are not regrouped, for which one plan leaves GPUs free
OTHERS: tuple[()] = ()
"""Key of the only row of such jobs."""
FairRow = tuple[Shape, str]
"""(shape, owner)."""


SCOPE = Scope(
    plans=lambda job: not job.spec.timed,
    stops=lambda job: job.spec.preemptible and job.spec.checkpoint != "none",
)


class FairCandidates(Candidates):
    """Takes the same number of waiting jobs of each tenant."""

    def _row(self, state: CellState, job: JobState) -> tuple[Any, Any]:
        shape, key = super()._row(state, job)
        return (shape, job.spec.owner), key

    def _waiting_rows(self) -> Sequence[list[Entry[Any]]]:
        return [entries for (shape, _), entries in self._rows.waiting.items() if shape != NO_SHAPE]

    def _taken(self, rows: Sequence[list[Entry[Any]]], gpus: int) -> Iterator[Entry[Any]]:
        by_owner: dict[str, list[list[Entry[Any]]]] = {}
        for entries in rows:
            by_owner.setdefault(entries[0][3][1], []).append(entries)
        each = max(1, (self._in_all or 1) // max(1, len(by_owner)))
        for theirs in by_owner.values():
            yield from islice(merge(*theirs), each)


class _Claim(NamedTuple):
    """A job's position before shares. `candidate`: None: it is not regrouped; `overdue`: a large gang that has waited so long that shares do not delay it."""

    fixed: bool
    aged: float
    order: int
    job: JobState
    gpus: int
    overdue: bool
    candidate: Candidate | None


class FairInterleave(Interleave):
    """Implements `penstock.policies.regroup.Regroup`."""

    fills = True
    beside = True

    def __init__(self, limits_gpu_s: Sequence[float], name: str = "penstock") -> None:
        super().__init__(limits_gpu_s, _plan, partial(FairCandidates, scope=SCOPE), name)
        self._others: JobRows[tuple[()]] = JobRows(_other)

    def question(self, state: CellState) -> Question | None:
        """None also while the cell has room for all waiting jobs, and no jobs share GPUs, except for a single job for which a window is open: it starts at once."""
        found = super().question(state)
        if found is None:
            return None
        gpus = sum(found.node_gpus)
        waiting = sum(job.gpus for job in found.jobs if not job.group)
        running = {job.group: job.gpus for job in found.jobs if job.group}
        fits = not found.behind and not state.groups and waiting + sum(running.values()) <= gpus
        if fits and not (state.in_window and len(state.queue) == 1):
            return None
        listed, room = self._shared_out(state, found, gpus)
        return replace(found, jobs=tuple(listed), node_gpus=_less(found.node_gpus, room))

    def keys(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Their positions: the list is already ordered by shares and waiting times."""
        return range(len(candidates))

    def _shared_out(self, state: CellState, found: Question, gpus: int) -> tuple[list[Candidate], int]:
        """The ordered list, and the number of GPUs left to jobs that are not regrouped."""
        claims = [self._claim(state, state.jobs[one.job_id], one.gpus, one) for one in found.jobs]
        self._others.update(state)
        for _, _, job_id, _ in self._others.waiting.get(OTHERS, ())[:MAX_OTHERS]:
            job = state.jobs[job_id]
            claims.append(self._claim(state, job, _whole_gpus(job), None))
        claims.sort(key=lambda claim: (not claim.fixed, claim.aged, claim.order))
        claims = _by_priority(claims)
        owners = {claim.job.spec.owner for claim in claims}
        share = gpus / max(1, len(owners))
        held: Counter[str] = Counter()
        first, beyond, delayed = list[_Claim](), list[_Claim](), set[str]()
        for claim in claims:
            owner = claim.job.spec.owner
            over = held[owner] >= share and not claim.fixed and not (claim.overdue and owner not in delayed)
            if over:
                delayed.add(owner)
            held[owner] += claim.gpus
            (beyond if over else first).append(claim)
        listed, room, taken = list[Candidate](), 0, 0
        for claim in (*first, *beyond):
            if claim.candidate is not None:
                listed.append(claim.candidate)
            elif taken + claim.gpus <= gpus:
                room += claim.gpus
            taken += claim.gpus
        return listed, room

    def _claim(self, state: CellState, job: JobState, gpus: int, candidate: Candidate | None) -> _Claim:
        """Time in which it ran does not count as waiting; of a running job whose run time is not known only that before its present attempt: else it would lose its
        GPUs, seconds after its start, to jobs of its queue that have waited as long."""
        fixed = False
        if candidate is None:
            of_workers = gpus_of(job)
            attained = received_s(state, job)
            need = self.key(remaining_s(state, job), attained, of_workers)
            service = 0.0 if job.spec.timed else need
        else:
            of_workers = candidate.shape[0] * candidate.shape[1]
            attained = candidate.attained_s
            service = need = self.key(candidate.remaining_s, attained, of_workers)
            if candidate.group:
                if candidate.remaining_s == inf:
                    attained = job.served_ms / 1_000
                fixed = not candidate.movable
                service = max(0.0, service - candidate.stop_cost_s * gpus)
                if candidate.stages is None:
                    service /= STAYS
        waited_s = max(0.0, (state.now_ms - job.submitted_ms) / 1_000 - attained)
        large = of_workers >= LARGE_GPUS
        overdue = gpus >= LARGE_GPUS and _ratio(waited_s, need, large) >= PATIENCE
        r_s = response_r_s(service, large)
        aged = service / sqrt((waited_s + r_s) / r_s)
        return _Claim(fixed, aged, job.order, job, gpus, overdue, candidate)


def _ratio(waited_s: float, service: float, large: bool) -> float:
    """(waited + r) / r, ≥ 1, by the GPU seconds that the job needs."""
    r_s = response_r_s(service, large)
    return (waited_s + r_s) / r_s


def _plan(state: CellState, answer: Answer) -> GroupPlan:
    """Units for groups and for jobs that need nodes of stopped jobs. Other jobs are left to the place stage, which finds better nodes than first fit."""
    found = group_plan(state, answer, SCOPE)
    stopped = {task.place.node_id for job_id in found.stops for task in state.jobs[job_id].tasks.values()}
    units = [
        unit
        for unit in found.units
        if unit.kind == "group"
        or len(unit.jobs[0].nodes) == 1
        or any(node_id in stopped for job in unit.jobs for node_id in job.nodes)
    ]
    return found._replace(units=units)


def _other(state: CellState, job: JobState) -> tuple[tuple[()], float] | None:
    """Sort key of a waiting job with GPUs that is not regrouped, oldest first; None for all other jobs."""
    worker = job.demand.worker
    if worker.gpus and (job.spec.timed or worker.gpu_share_milli != WHOLE_GPU):
        return OTHERS, float(job.order)
    return None


def _whole_gpus(job: JobState) -> int:
    """The job's GPUs, parts added up, rounded up."""
    worker = job.demand.worker
    return ceil(job.workers * worker.gpus * worker.gpu_share_milli / WHOLE_GPU)


def _by_priority(claims: Sequence[_Claim]) -> list[_Claim]:
    """The same positions for each tenant, but its jobs of higher priority in the earlier ones. A job that may not be stopped keeps its position."""
    if len({claim.job.spec.priority for claim in claims}) <= 1:
        return list(claims)
    places: dict[str, list[int]] = {}
    for number, claim in enumerate(claims):
        if not claim.fixed:
            places.setdefault(claim.job.spec.owner, []).append(number)
    found = list(claims)
    for theirs in places.values():
        ranked = sorted(theirs, key=lambda number: (-claims[number].job.spec.priority, number))
        for place, number in zip(theirs, ranked, strict=True):
            found[place] = claims[number]
    return found


def _less(node_gpus: Sequence[int], room: int) -> tuple[int, ...]:
    """The nodes' GPUs less `room`, taken from the nodes with the most GPUs; among equal nodes from the first."""
    found = list(node_gpus)
    for node in sorted(range(len(found)), key=lambda node: -found[node]) if room else ():
        taken = min(room, found[node])
        found[node] -= taken
        room -= taken
    return tuple(found)
