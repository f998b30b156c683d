"""Order stage of profile `penstock`: fair shares between tenants, a tenant's jobs by priority, then highest
response ratio next.

- Tenants below their share come first. A tenant (the job's owner) has reached its share when the largest
  share of a resource that its jobs hold (dominant resource, Ghodsi et al., NSDI '11; counted from leases:
  `penstock.scheduling.order.shares`) is at least 1 / tenants that wait or run.
- Among a tenant's jobs the highest priority comes first; those of the next one are tried once none of these
  fits. Priorities are not compared between tenants, so that no tenant gets more than others by claiming a
  higher priority.
- Among tenants below their share, and among the others, jobs go by response ratio, the largest first: (waited
  + r) / r (highest response ratio next, Brinch Hansen), so that small jobs overtake large ones and no job
  waits for ever. Departure: r is not the run time but √(hour × run time × GPUs): with the service itself
  large gangs wait longer than in strict order of arrival, with the run time alone a wide job counts as a
  small one (`python -m tests.papers.default.profile_penstock`). The run time is the estimator's; run time ×
  GPUs is rounded up to a power of two, so that jobs are compared by rows and not one by one.
- A large gang, of eight GPUs or more, has to wait for many at once: r = (6 min)^0.6 × (run time × GPUs)^0.4,
  a third to a seventh of the r of others. Once it has waited five times that, its tenant's share no longer
  delays it. Strict order of arrival favours such gangs, and response ratios alone would disadvantage them
  (decision 59).
- Ties: by submission.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from heapq import heappop, heappush
from math import inf, sqrt
from operator import attrgetter
from typing import TypeVar

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.job_rows import Entry, JobRows, goes_on
from penstock.scheduling.order.shares import (
    GPU,
    NOTHING,
    Amounts,
    Holdings,
    amounts,
    at_least,
    capacity,
    dominant,
    owner_of,
    plus,
)
from penstock.scheduling.service import gpus_of, remaining_s
from penstock.scheduling.stages.protocols import Turns
from penstock.text.spans import span

UNKNOWN_RUN_S = 3_600.0  # assumed for a job without an estimated run time
HOUR_S = 3_600.0  # seconds of an hour
LARGE_GPUS = 8  # minimum of a large gang: few nodes have more
LARGE_S, LARGE_EXPONENT = 360.0, 0.4  # of a large gang's r; see above
PATIENCE = 6.0  # response ratio from which nodes are reserved for a job, and shares do not delay a large gang
WIDE_PART, MAX_WIDE = 0.25, 4.0  # see `patience`
Row = tuple[str, int, tuple[object, ...], float]
"""(owner, priority, demand, r in s)."""
Following = Iterator[Entry[Row]]
"""The jobs of a row that come next, in order."""
T = TypeVar("T")
_BY_ORDER = attrgetter("order")


class FairResponse:
    """Implements `penstock.scheduling.stages.protocols.Order`."""

    def __init__(self) -> None:
        self._rows: JobRows[Row] = JobRows(_row)
        self.holdings = Holdings(owner_of)
        self._waits: Set[str] | None = None
        """Tenants with waiting jobs; None: not computed since the rows changed."""

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + rows) for the first, O(log rows) for the others.

        A row whose first job does not start is skipped.
        """
        share_of, share = self.holdings.share, 1.0 / max(1, len(self._tenants(state)))
        reached: dict[str, bool] = {}  # owner → whether it has reached its share; until a job starts
        started = False  # only then an owner below its share may have reached it since

        def over(owner: str) -> bool:
            found = reached.get(owner)
            if found is None:
                found = reached[owner] = share_of(owner) >= share
            return found

        heap: list[tuple[bool, float, int, str, Row, Following]] = []
        levels = _levels(self._rows.waiting)
        tried = dict.fromkeys(levels, 0)  # rows of the owner's current priority

        def enter(following: Following) -> None:
            head = next(following, None)
            if head is not None:
                _, order, job_id, row = head
                job = state.jobs[job_id]
                ratio = _ratio(job, state.now_ms, row[-1])
                later = over(row[0]) and not _overdue(job, ratio)
                heappush(heap, (later, -ratio, order, job_id, row, following))
                tried[row[0]] += 1

        def descend(owner: str) -> None:
            if levels[owner]:
                for _, entries in levels[owner].pop():
                    enter(iter(entries))

        for owner in levels:
            descend(owner)
        while heap:
            later, ratio, order, job_id, row, following = heappop(heap)
            owner = row[0]
            if started and not later and over(owner) and not _overdue(state.jobs[job_id], -ratio):
                heappush(heap, (True, ratio, order, job_id, row, following))
                continue
            yield job_id
            tried[owner] -= 1
            if goes_on(state, job_id):
                self.holdings.update(state)
                reached.clear()
                started = True
                enter(following)
            if not tried[owner]:
                descend(owner)

    def ranking(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """O(holding + waiting · log waiting)."""
        return self.turns(state, waiting, self.holdings.if_held(state, holding), at_ms)

    def turns(
        self, state: CellState, waiting: Iterable[JobState], held: dict[str, Amounts], at_ms: int
    ) -> Turns:
        """As `ranking`. `held`: what tenants hold; what starts is added to it."""
        total = at_least(capacity(state), held)
        levels = self._levels_of(state, waiting)
        share = 1.0 / max(1, len(levels.keys() | held.keys()))
        reached = {owner for owner, amount in held.items() if dominant(amount, total) >= share}
        heap: list[tuple[bool, float, int, JobState, Row, Iterator[JobState]]] = []
        tried = dict.fromkeys(levels, 0)  # rows of the owner's current priority

        def enter(row: Row, following: Iterator[JobState]) -> None:
            job = next(following, None)
            if job is not None:
                ratio = _ratio(job, at_ms, row[-1])
                later = row[0] in reached and not _overdue(job, ratio)
                heappush(heap, (later, -ratio, job.order, job, row, following))
                tried[row[0]] += 1

        def descend(owner: str) -> None:
            if levels[owner]:
                for row, jobs in levels[owner].pop():
                    enter(row, iter(jobs))

        for owner in levels:
            descend(owner)
        while heap:
            later, ratio, order, job, row, following = heappop(heap)
            owner = row[0]
            if not later and owner in reached and not _overdue(job, -ratio):
                heappush(heap, (True, ratio, order, job, row, following))
                continue
            started = yield job
            tried[owner] -= 1
            if started:
                if owner not in reached:
                    held[owner] = plus(held.get(owner, NOTHING), amounts(job))
                    if dominant(held[owner], total) >= share:
                        reached.add(owner)
                enter(row, following)
            if not tried[owner]:
                descend(owner)

    def _levels_of(
        self, state: CellState, waiting: Iterable[JobState]
    ) -> dict[str, list[list[tuple[Row, list[JobState]]]]]:
        """Owner → these jobs in rows by priority, the highest last. A row's jobs are in order of submission,
        and so in order of their response ratios."""
        self._update_rows(state)
        known, rows = self._rows.row_of, dict[Row, list[JobState]]()
        for job in waiting:
            row = known(job.job_id) if state.jobs.get(job.job_id) is job else None
            rows.setdefault(_row(state, job)[0] if row is None else row, []).append(job)
        for jobs in rows.values():
            if len(jobs) > 1:
                jobs.sort(key=_BY_ORDER)
        return _levels(rows)

    def below_share(self, state: CellState, owner: str) -> bool:
        """Whether the owner's jobs hold less than its share now."""
        tenants = self._tenants(state) | {owner}
        return self.holdings.share(owner) < 1.0 / len(tenants)

    def _tenants(self, state: CellState) -> Set[str]:
        """Tenants that wait or hold anything now."""
        self._update_rows(state)
        self.holdings.update(state)
        if self._waits is None:
            self._waits = {row[0] for row in self._rows.waiting}
        return self._waits | self.holdings.held.keys()

    def _update_rows(self, state: CellState) -> None:
        changed, anew = self._rows.update(state)
        if changed or anew:
            self._waits = None

    def claim(self, state: CellState, job: JobState) -> str:
        """`ada holds 20% of the cell, below its share of 33%; priority 5 among its jobs; waited 2 h 10 min,
        and jobs of this size are raised every 30 min`."""
        owner = job.spec.owner
        tenants = len(self._tenants(state) | {owner})
        held = self.holdings.share(owner)
        side = "at or above" if held >= 1.0 / tenants else "below"
        share = f"{owner} holds {held:.0%} of the cell, {side} its share of {1 / tenants:.0%}"
        return (
            f"{share}; priority {job.spec.priority} among its jobs; waited "
            f"{span(state.now_ms - job.submitted_ms)}, and jobs of this size are raised every "
            f"{span(1_000 * _r_s(state, job))}"
        )


def _levels(rows: Mapping[Row, T]) -> dict[str, list[list[tuple[Row, T]]]]:
    """Owner → the owner's rows by priority, the highest last."""
    found: dict[str, dict[int, list[tuple[Row, T]]]] = {}
    for row in rows.items():
        found.setdefault(row[0][0], {}).setdefault(row[0][1], []).append(row)
    return {owner: [by[priority] for priority in sorted(by)] for owner, by in found.items()}


def _row(state: CellState, job: JobState) -> tuple[Row, float]:
    key: tuple[object, ...] = job.demand_key
    if job.spec.min_workers is not None and job.spec.timed:
        key = (*key, job.job_id)  # it waits for its own shape
    return (job.spec.owner, job.spec.priority, key, _r_s(state, job)), job.order


def _r_s(state: CellState, job: JobState) -> float:
    """r in s, of remaining run time × GPUs as a power of two in s, rounded up: few values, so that rows have
    many jobs."""
    left_s, gpus = remaining_s(state, job), gpus_of(job)
    seconds = UNKNOWN_RUN_S if left_s == inf else left_s
    return response_r_s(float(1 << int(seconds * max(1, gpus)).bit_length()), gpus >= LARGE_GPUS)


def response_ratio(state: CellState, job: JobState) -> float:
    """(waited + r) / r, ≥ 1; see the module's docstring."""
    return _ratio(job, state.now_ms, _r_s(state, job))


def patience(state: CellState, job: JobState) -> float:
    """Response ratio from which nodes are reserved for the job: PATIENCE, and up to four times that for a
    gang of more than a quarter of the cell's GPUs.

    Its reservation idles many GPUs: on 4 nodes of 4 GPUs the mean completion time of `poisson/12-per-hour`,
    whose gangs of eight need half of the cell, is 1.7 times Liquid's without this factor.
    """
    part = gpus_of(job) * GPU / max(1, capacity(state)[0])
    return PATIENCE * min(MAX_WIDE, max(1.0, part / WIDE_PART) ** 2)


def _ratio(job: JobState, at_ms: int, r_s: float) -> float:
    return ((at_ms - job.submitted_ms) / 1_000 + r_s) / r_s


def response_r_s(service_s: float, large: bool) -> float:
    """r in s, > 0, of a job of so many GPU seconds, ≥ 1; see the module's docstring. `large`: a gang of
    `LARGE_GPUS` or more."""
    service_s = max(1.0, service_s)
    if large:
        return float(LARGE_S * (service_s / LARGE_S) ** LARGE_EXPONENT)
    return sqrt(HOUR_S * service_s)


def _overdue(job: JobState, ratio: float) -> bool:
    """Whether the job is a large gang that has waited so long that its tenant's share no longer delays it."""
    return ratio >= PATIENCE and gpus_of(job) >= LARGE_GPUS
