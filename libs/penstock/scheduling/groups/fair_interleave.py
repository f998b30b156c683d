"""Regroup stage of profile `penstock`: interleaving of jobs on shared GPUs in a saturated cell, with fair
shares between tenants.

As `penstock.scheduling.groups.interleave`, but with another order of jobs, since that search minimises the
mean completion time in the order of its list:

- No job is regrouped while there are GPUs for all waiting jobs: jobs start where the other stages place them.
- A tenant's first jobs, up to its share of the GPUs (1 / tenants), come before all jobs beyond their tenant's
  share. A large gang that has waited too long (`penstock.scheduling.order.fair`) is not delayed by its
  tenant's share, but does not pass other jobs of its tenant: in an overloaded cell every gang would qualify.
- Within both parts: by expected service (GPU seconds) over the fourth root of the response ratio, so that
  waiting jobs move forward and no job with a known run time waits for ever. A job whose run time is not known
  has its queue's expected service however long it waits, and equal ones come in order of arrival, as under
  Tiresias: raised by their waiting time, jobs that have run long take GPUs from jobs that have hardly run
  (decision 115). A tenant's jobs of a higher priority take the positions of its others.
- Only jobs that save checkpoints are stopped (`checkpoint` of the job's specification). Others may have to
  share their GPUs.
- Jobs with a deadline or a service class are not regrouped, nor are jobs with parts of GPUs: they start in
  the profile's order, on GPUs that the plan leaves free when they come first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil, inf
from typing import Any

from msgspec import Struct

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import WHOLE_GPU
from penstock.scheduling.groups.candidates import Gathered, KeyOf, Source, first_of
from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.order.fair import LARGE_GPUS, PATIENCE, response_r_s
from penstock.scheduling.order.job_rows import Entry
from penstock.scheduling.remaining_time import Key, gpus_of, remaining_s
from penstock.scheduling.stages.regroup import Answer, Candidate, GroupPlan, Question, Scope

# exponent of the response ratio; with 0.5 large jobs come earlier, and completion times are longer by 2 % in
# the mean
AGEING = 0.25
# a job takes the GPUs of one without known stages, which cannot share, only with so many times less service
STAYS = 4.0
MAX_OTHERS = 64  # waiting jobs that are not regrouped, for which one plan leaves GPUs free
OTHERS: tuple[()] = ()
"""The row of such jobs. Rows of the others: (shape, owner)."""


SCOPE = Scope(
    plans=lambda job: not job.spec.timed,
    stops=lambda job: job.spec.preemptible and job.saves,
)


class _Claim(Struct, frozen=True, gc=False):
    """A job's claim to a position, without its waiting time, which alone changes while the job waits."""

    candidate: Candidate | None
    """None: the job is not regrouped."""
    gpus: int
    order: int
    owner: str
    priority: int
    fixed: bool
    """Whether it runs and may not be stopped."""
    submitted_ms: int
    attained_s: float
    """Time in which it ran: this does not count as waiting."""
    service: float
    """GPU seconds by which it is ordered."""
    r_s: float
    """`fair.response_r_s` of these; 0: its run time is not known, so waiting does not move it forward."""
    patient_r_s: float
    """The same of the GPU seconds that it needs, for a gang that shares may not delay for ever; 0: not so
    large a gang."""


_Aged = tuple[bool, float, int, float, _Claim]
"""A claim now: (whether it is not fixed, its service, over the fourth root of its response ratio if its run
time is known, order of submission, waiting time in s, the claim); sorted."""


class FairCandidates(Source[_Claim]):
    """The candidates in order of shares and waiting times. Takes the same number of waiting jobs of each
    tenant. `key_of`: GPU seconds that a job is expected to need, by its remaining and attained time in s, and
    its workers' GPUs."""

    def __init__(
        self,
        name: str,
        key: Key,
        *,
        key_of: KeyOf,
        in_all: int,
        attained: Callable[[CellState, JobState], float],
    ) -> None:
        super().__init__(name, key, key_of=key_of, in_all=in_all, attained=attained, scope=SCOPE)

    def question(self, state: CellState) -> Question | None:
        """None: no job waits and no jobs share GPUs, or there are no GPUs; also while the cell has room for
        all waiting jobs, and no jobs share GPUs, except for a single job for which a window is open: it
        starts at once."""
        found = self._gathered(state)
        if found is None:
            return None
        gpus = sum(found.node_gpus)
        if not (state.in_window and len(state.queue) == 1) and not state.groups and _fits(found, gpus):
            return None
        listed, room = self._shared_out(state, found.items, gpus)
        return self._question(state, listed, found._replace(node_gpus=_less(found.node_gpus, room)))

    def _row(self, state: CellState, job: JobState) -> tuple[Any, Any] | None:
        shape = self._shape(job)
        if shape is not None:
            return (shape, job.spec.owner), self._key_in_row(state, job)
        return (OTHERS, float(job.order)) if job.demand.worker.gpus else None

    def _waiting_rows(self) -> Sequence[list[Entry[Any]]]:
        return [entries for row, entries in self._rows.waiting.items() if row != OTHERS]

    def _taken(self, rows: Sequence[list[Entry[Any]]], gpus: int) -> Iterator[Entry[Any]]:
        by_owner: dict[str, list[list[Entry[Any]]]] = {}
        for entries in rows:
            by_owner.setdefault(entries[0][3][1], []).append(entries)
        each = max(1, (self._in_all or 1) // max(1, len(by_owner)))
        for theirs in by_owner.values():
            yield from first_of(theirs, each)

    def _shared_out(
        self, state: CellState, claims: Sequence[_Claim], gpus: int
    ) -> tuple[list[Candidate], int]:
        """The ordered list, and the number of GPUs left to jobs that are not regrouped."""
        in_order = _by_priority(_in_order([*claims, *self._other_claims(state)], state.now_ms))
        held = dict.fromkeys([claim.owner for _, _, _, _, claim in in_order], 0)
        share = gpus / max(1, len(held))
        first, beyond, delayed = list[_Claim](), list[_Claim](), set[str]()
        for _, _, _, waited_s, claim in in_order:
            owner = claim.owner
            if held[owner] < share or claim.fixed or (owner not in delayed and _overdue(claim, waited_s)):
                first.append(claim)
            else:
                delayed.add(owner)
                beyond.append(claim)
            held[owner] += claim.gpus
        in_place = first + beyond
        listed = [claim.candidate for claim in in_place if claim.candidate is not None]
        return listed, _room(in_place, gpus) if len(listed) < len(in_place) else 0

    def _other_claims(self, state: CellState) -> Iterator[_Claim]:
        """Claims of waiting jobs that are not regrouped, oldest first."""
        for _, _, job_id, _ in self._rows.waiting.get(OTHERS, ())[:MAX_OTHERS]:
            claim = self._of_waiting.get(job_id)
            if claim is None:
                claim = self._of_waiting[job_id] = self._other_claim(state, state.jobs[job_id])
            yield claim

    def _other_claim(self, state: CellState, job: JobState) -> _Claim:
        need = self._key(state, job)
        service = 0.0 if job.spec.timed else need
        attained_s, left_s = self._attained(state, job), remaining_s(state, job)
        return _claim(job, None, _whole_gpus(job), gpus_of(job), need, service, attained_s, left_s)

    def _item(self, state: CellState, job: JobState, candidate: Candidate) -> _Claim:
        gpus, fixed = candidate.gpus, False
        service = need = self._key_from(candidate)
        if candidate.group:
            fixed = not candidate.movable
            if candidate.stop_cost_s:
                service = max(0.0, service - candidate.stop_cost_s * gpus)
            if candidate.stages is None:
                service /= STAYS
        of_workers, attained_s = candidate.shape[0] * candidate.shape[1], candidate.attained_s
        return _claim(
            job, candidate, gpus, of_workers, need, service, attained_s, candidate.remaining_s, fixed
        )


def _claim(
    job: JobState,
    candidate: Candidate | None,
    gpus: int,
    of_workers: int,
    need: float,
    service: float,
    attained_s: float,
    left_s: float,
    fixed: bool = False,
) -> _Claim:
    """`of_workers`: the workers' GPUs; `need`: expected GPU seconds; `left_s`: remaining time; the others as
    in `_Claim`."""
    large = of_workers >= LARGE_GPUS
    return _Claim(
        candidate,
        gpus,
        job.order,
        job.spec.owner,
        job.spec.priority,
        fixed,
        job.submitted_ms,
        attained_s,
        service,
        response_r_s(service, large) if left_s < inf else 0.0,
        _patient_r_s(gpus, need, large),
    )


def _patient_r_s(gpus: int, need: float, large: bool) -> float:
    """`_Claim.patient_r_s`. `need`: GPU seconds; `gpus`: of all tasks;
    `large`: whether the workers have `LARGE_GPUS`."""
    return response_r_s(need, large) if gpus >= LARGE_GPUS else 0.0


def _room(claims: Iterable[_Claim], gpus: int) -> int:
    """GPUs left to jobs that are not regrouped: to those that find some, one after the other."""
    room = taken = 0
    for claim in claims:
        if claim.candidate is None and taken + claim.gpus <= gpus:
            room += claim.gpus
        taken += claim.gpus
    return room


def _in_order(claims: Iterable[_Claim], now_ms: int) -> list[_Aged]:
    """The claims in order at this time, before shares."""
    found = []
    for claim in claims:
        waited_s = (now_ms - claim.submitted_ms) / 1_000 - claim.attained_s
        if waited_s < 0:
            waited_s = 0.0
        service = claim.service / _ratio(waited_s, claim.r_s) ** AGEING if claim.r_s else claim.service
        found.append((not claim.fixed, service, claim.order, waited_s, claim))
    found.sort()
    return found


def _overdue(claim: _Claim, waited_s: float) -> bool:
    """Whether it is a large gang that has waited so long that shares do not delay it."""
    return claim.patient_r_s > 0 and _ratio(waited_s, claim.patient_r_s) >= PATIENCE


def _ratio(waited_s: float, r_s: float) -> float:
    """The response ratio, ≥ 1."""
    return (waited_s + r_s) / r_s


def _fits(found: Gathered[_Claim], gpus: int) -> bool:
    """Whether there are GPUs for all jobs, where none share any."""
    return not found.behind and sum(claim.gpus for claim in found.items) <= gpus


class FairInterleave(Interleave):
    """Implements `penstock.scheduling.stages.regroup.Regroup`."""

    fills = True
    beside = True

    def __init__(self, name: str = "penstock") -> None:
        super().__init__(_plan, FairCandidates, name)

    def keys(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Their positions: the list is already ordered by shares and waiting times."""
        return range(len(candidates))


def _plan(state: CellState, answer: Answer) -> GroupPlan:
    """Units for groups and for jobs that need nodes of stopped jobs. Other jobs are left to the place stage,
    which finds better nodes than first fit."""
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


def _whole_gpus(job: JobState) -> int:
    """The job's GPUs, parts added up, rounded up."""
    worker = job.demand.worker
    return ceil(job.workers * worker.gpus * worker.gpu_share_milli / WHOLE_GPU)


def _by_priority(claims: Sequence[_Aged]) -> Sequence[_Aged]:
    """The same positions for each tenant, but its jobs of higher priority in the earlier ones. A job that may
    not be stopped keeps its position."""
    if len({claim.priority for _, _, _, _, claim in claims}) <= 1:
        return claims
    places: dict[str, list[int]] = {}
    for number, (_, _, _, _, claim) in enumerate(claims):
        if not claim.fixed:
            places.setdefault(claim.owner, []).append(number)
    found = list(claims)
    for theirs in places.values():
        ranked = sorted(theirs, key=lambda number: (-claims[number][-1].priority, number))
        for place, number in zip(theirs, ranked, strict=True):
            found[place] = claims[number]
    return found


def _less(node_gpus: Sequence[int], room: int) -> tuple[int, ...]:
    """The nodes' GPUs less `room`, taken from the nodes with the most GPUs;
    among equal nodes from the first."""
    found = list(node_gpus)
    for node in sorted(range(len(found)), key=lambda node: -found[node]) if room else ():
        taken = min(room, found[node])
        found[node] -= taken
        room -= taken
    return tuple(found)
