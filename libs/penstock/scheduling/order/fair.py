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

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf, sqrt
from operator import attrgetter

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.job_rows import Entry, JobRows, goes_on
from penstock.scheduling.order.shares import GPU, NOTHING, Holdings, IfHeld, capacity, dominant, owner_of
from penstock.scheduling.remaining_time import gpus_of, remaining_s
from penstock.scheduling.stages.protocols import Turns
from penstock.text.spans import span

UNKNOWN_RUN_S = 3_600.0  # assumed for a job without an estimated run time
HOUR_S = 3_600.0  # seconds of an hour
LARGE_GPUS = 8  # minimum of a large gang: few nodes have more
LARGE_S, LARGE_EXPONENT = 360.0, 0.4  # of a large gang's r; see above
PATIENCE = 6.0  # response ratio from which nodes are reserved for a job, and shares do not delay a large gang
WIDE_PART, MAX_WIDE = 0.25, 4.0  # see `has_waited`
Row = tuple[str, int, tuple[object, ...], float, bool]
"""(owner, priority, demand, r in s, whether it is a large gang)."""
_Levels = dict[str, dict[int, dict[Row, list[Entry[Row]]]]]
"""Owner → priority → row → its jobs in order of submission, and so in order of their response ratios."""
_Head = tuple[bool, float, int, str, Row, Iterator[Entry[Row]]]
"""(whether its tenant's share delays it, -response ratio, order, job, row, the jobs behind it)."""


class _Reached:
    """Which tenants have reached their share. `share_of`: a tenant's dominant share now."""

    def __init__(self, share_of: Callable[[str], float], tenants: int) -> None:
        self._share_of, self._share = share_of, 1.0 / max(1, tenants)
        self.known: dict[str, bool] = {}
        """Owner → whether it has; to be cleared where it holds more."""

    def __call__(self, owner: str) -> bool:
        found = self.known.get(owner)
        if found is None:
            found = self.known[owner] = self._share_of(owner) >= self._share
        return found


def _in_turn(
    jobs: Mapping[str, JobState],
    levels: _Levels,
    at_ms: int,
    reached: _Reached,
    starts: Callable[[JobState], None],
    without: Container[str] = (),
) -> Turns:
    """The jobs of these levels in order. O(rows) for the first, O(log rows) for the others: a row whose first
    job does not start is skipped.

    `starts`: called for each job that starts, to bring `reached` up to date; `without`: ids of jobs that do
    not wait.
    """
    left = {owner: sorted(by.items()) for owner, by in levels.items()}  # the highest priority last
    tried: dict[str, int] = {}  # rows of the owner's current priority

    def heads(rows: Iterable[tuple[Row, Iterator[Entry[Row]]]], delayed: bool) -> list[_Head]:
        found: list[_Head] = []
        for row, following in rows:
            for submitted_ms, order, job_id, _ in following:
                if job_id not in without:
                    ratio = _ratio(submitted_ms, at_ms, row[3])
                    later = delayed and not _overdue(row, ratio)
                    found.append((later, -ratio, order, job_id, row, following))
                    break
        return found

    def descend(owner: str) -> list[_Head]:
        while left[owner]:
            _, rows = left[owner].pop()
            found = heads(zip(rows, map(iter, rows.values()), strict=True), reached(owner))
            if found:
                tried[owner] = len(found)
                return found
        return []

    heap = [one for owner in left for one in descend(owner)]
    heapify(heap)
    while heap:
        later, ratio, order, job_id, row, following = heappop(heap)
        owner = row[0]
        if not later and reached(owner) and not _overdue(row, -ratio):
            heappush(heap, (True, ratio, order, job_id, row, following))
            continue
        started = yield (job := jobs[job_id])
        tried[owner] -= 1
        if started:
            starts(job)
            for one in heads(((row, following),), reached(owner)):
                heappush(heap, one)
                tried[owner] += 1
        if not tried[owner]:
            for one in descend(owner):
                heappush(heap, one)


class _FairRanking:
    """Implements `penstock.scheduling.stages.protocols.Ranking`. `first`: jobs that come before all others
    while their tenants are below their share."""

    def __init__(
        self, jobs: Mapping[str, JobState], levels: _Levels, held: IfHeld[str], first: Sequence[JobState]
    ) -> None:
        self._jobs, self._levels, self._held, self._first = jobs, levels, held, first
        self._started: set[str] = set()
        self._new: list[tuple[JobState, bool]] = []
        """Jobs that have started since, and whether they count in `held`: what those of a tenant that has
        reached its share hold matters later."""
        self._wait = {
            owner: sum(len(entries) for rows in by.values() for entries in rows.values())
            for owner, by in levels.items()
        }
        """Owner → how many of its jobs wait."""

    def ends(self, job: JobState) -> None:
        """As `Ranking`."""
        self._count()
        self._held.ends(job)

    def turns(self, at_ms: int) -> Turns:
        """As `Ranking`. O(rows) for the first, O(log rows) for the others."""
        self._count()
        tried: Counter[str] = Counter()  # owners of the first jobs
        gone = self._started
        if self._first:
            reached, gone = self._reached(tried), set(self._started)
            for job in self._first:
                if job.job_id not in gone and not reached(job.spec.owner):
                    gone.add(job.job_id)
                    if (yield job):
                        self._starts(reached, job)
                    else:
                        tried[job.spec.owner] += 1
            self._count()
        reached = self._reached(tried)
        starts = partial(self._starts, reached)
        yield from _in_turn(self._jobs, self._levels, at_ms, reached, starts, gone)

    def _reached(self, tried: Mapping[str, int]) -> _Reached:
        """`tried`: owner → how many of its jobs do not count as waiting."""
        held, total = self._held.held, self._held.total
        tenants = held.keys() | {owner for owner, count in self._wait.items() if count > tried.get(owner, 0)}
        return _Reached(lambda owner: dominant(held.get(owner, NOTHING), total), len(tenants))

    def _starts(self, reached: _Reached, job: JobState) -> None:
        owner = job.spec.owner
        counts = not reached(owner)
        if counts:
            self._held.starts(job)
            del reached.known[owner]
        self._new.append((job, counts))

    def _count(self) -> None:
        for job, counts in self._new:
            self._started.add(job.job_id)
            self._wait[job.spec.owner] -= 1
            if not counts:
                self._held.starts(job)
        self._new.clear()


class FairResponse:
    """Implements `penstock.scheduling.stages.protocols.Order`."""

    def __init__(self) -> None:
        self._rows: JobRows[Row] = JobRows(_row)
        self._levels: _Levels = {}
        """The rows of waiting jobs."""
        self._holdings = Holdings(owner_of)

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + rows) for the first, O(log rows) for the others."""
        reached = _Reached(self._holdings.share, len(self._tenants(state)))

        def starts(_job: JobState) -> None:
            self._holdings.update(state)
            reached.known.clear()

        turns = _in_turn(state.jobs, self._levels, state.now_ms, reached, starts)
        job = next(turns, None)
        while job is not None:
            yield job.job_id
            try:
                job = turns.send(goes_on(state, job.job_id))
            except StopIteration:
                return

    def ranking(
        self, state: CellState, waiting: Iterable[JobState] | None = None, first: Sequence[JobState] = ()
    ) -> _FairRanking:
        """As `Order`. `first`: as in `_FairRanking`."""
        self._update_rows(state)
        held = IfHeld(state, self._holdings)
        if waiting is None:
            return _FairRanking(state.jobs, self._levels, held, first)
        jobs = {job.job_id: job for job in sorted(waiting, key=attrgetter("order"))}
        levels: _Levels = {}
        for job_id, job in jobs.items():
            row = self._rows.row_of(job_id) if state.jobs.get(job_id) is job else None
            row = row or _row(state, job)[0]
            entry = job.submitted_ms, job.order, job_id, row
            levels.setdefault(row[0], {}).setdefault(row[1], {}).setdefault(row, []).append(entry)
        return _FairRanking(jobs, levels, held, first)

    def below_share(self, state: CellState, owner: str) -> bool:
        """Whether the owner's jobs hold less than its share now."""
        tenants = self._tenants(state) | {owner}
        return self._holdings.share(owner) < 1.0 / len(tenants)

    def _tenants(self, state: CellState) -> Set[str]:
        """Tenants that wait or hold anything now."""
        self._update_rows(state)
        self._holdings.update(state)
        return self._levels.keys() | self._holdings.held.keys()

    def _update_rows(self, state: CellState) -> None:
        _, anew = self._rows.update(state)
        if anew:
            self._levels = {}
        for row in self._rows.opened:
            by = self._levels.setdefault(row[0], {})
            rows = by.setdefault(row[1], {})
            rows.pop(row, None)
            if row in self._rows.waiting:
                rows[row] = self._rows.waiting[row]
            if not rows:
                del by[row[1]]
            if not by:
                del self._levels[row[0]]

    def claim(self, state: CellState, job: JobState) -> str:
        """`ada holds 20% of the cell, below its share of 33%; priority 5 among its jobs; waited 2 h 10 min,
        and jobs of this size are raised every 30 min`."""
        owner = job.spec.owner
        tenants = len(self._tenants(state) | {owner})
        held = self._holdings.share(owner)
        side = "at or above" if held >= 1.0 / tenants else "below"
        share = f"{owner} holds {held:.0%} of the cell, {side} its share of {1 / tenants:.0%}"
        return (
            f"{share}; priority {job.spec.priority} among its jobs; waited "
            f"{span(state.now_ms - job.submitted_ms)}, and jobs of this size are raised every "
            f"{span(1_000 * _r_s(state, job))}"
        )


def _row(state: CellState, job: JobState) -> tuple[Row, float]:
    key: tuple[object, ...] = job.demand_key
    if job.spec.min_workers is not None and job.spec.timed:
        key = (*key, job.job_id)  # it waits for its own shape
    large = gpus_of(job) >= LARGE_GPUS
    return (job.spec.owner, job.spec.priority, key, _r_s(state, job), large), job.submitted_ms


def _r_s(state: CellState, job: JobState) -> float:
    """r in s, of remaining run time × GPUs as a power of two in s, rounded up: few values, so that rows have
    many jobs."""
    left_s, gpus = remaining_s(state, job), gpus_of(job)
    seconds = UNKNOWN_RUN_S if left_s == inf else left_s
    return response_r_s(float(1 << int(seconds * max(1, gpus)).bit_length()), gpus >= LARGE_GPUS)


def has_waited(state: CellState, job: JobState) -> bool:
    """Whether the job has waited so long that nodes are reserved for it: its response ratio is PATIENCE, or
    up to four times that for a gang of more than a quarter of the cell's GPUs.

    Its reservation idles many GPUs: on 4 nodes of 4 GPUs the mean completion time of `poisson/12-per-hour`,
    whose gangs of eight need half of the cell, is 1.7 times Liquid's without this factor.
    """
    ratio = _ratio(job.submitted_ms, state.now_ms, _r_s(state, job))
    if ratio < PATIENCE:
        return False
    part = gpus_of(job) * GPU / max(1, capacity(state)[0])
    return ratio >= PATIENCE * min(MAX_WIDE, max(1.0, part / WIDE_PART) ** 2)


def _ratio(submitted_ms: float, at_ms: int, r_s: float) -> float:
    """(waited + r) / r, ≥ 1; see the module's docstring."""
    return ((at_ms - submitted_ms) / 1_000 + r_s) / r_s


def response_r_s(service_s: float, large: bool) -> float:
    """r in s, > 0, of a job of so many GPU seconds, ≥ 1; see the module's docstring. `large`: a gang of
    `LARGE_GPUS` or more."""
    service_s = max(1.0, service_s)
    if large:
        return float(LARGE_S * (service_s / LARGE_S) ** LARGE_EXPONENT)
    return sqrt(HOUR_S * service_s)


def _overdue(row: Row, ratio: float) -> bool:
    """Whether jobs of the row are large gangs that have waited so long that their tenant's share no longer
    delays them."""
    return row[4] and ratio >= PATIENCE
