"""Baselines that differ only in the sort key: shortest job first (`sjf`), shortest remaining time (`srtf`)
and service (`srsf`) first.

The jobs are sorted by a key, ascending, ties by submission. From the front, each job that still fits is
chosen; one that does not is skipped and later ones are still tried. Sources: SRTF and SRSF as in Muri's
comparison (§6.1 there); shortest job first is the textbook rule. Nodes: first fit.

Only differences are computed. A running job keeps its GPUs unless a waiting one comes before it and lacks
them; then the running jobs that come last are suspended, and are tried again, each at its own position in the
order, for the remaining GPUs. This chooses the same jobs as a pass through all of them.

The cost of stopping a running job is subtracted from its key, so that no job is stopped for a smaller gain:
with remaining times a of the waiting and b of the running job, the swap lowers the sum of both completion
times by b - a - cost.
"""

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from operator import itemgetter
from typing import Any

from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.job_rows import Entry, JobRows, Row, will_queue_again
from penstock.scheduling.remaining_time import Key, ends_s, gpus_of, remaining_s
from penstock.scheduling.stages.protocols import NO_LIMITS, Selection
from penstock.scheduling.stop_cost import fixed_cost_s, loses, saved_s, stop_cost_s
from penstock_papers.baselines.preempting.claims import cost_text, remaining_text
from penstock_papers.baselines.preempting.free_gpus import FreeGpus, GpuKinds, Need


def shortest_remaining_time(state: CellState, job: JobState, cost_s: float = 0.0) -> float:
    """Seconds."""
    left_s = remaining_s(state, job)
    return max(0.0, left_s - cost_s) if cost_s else left_s


def shortest_remaining_service(state: CellState, job: JobState, cost_s: float = 0.0) -> float:
    """GPU seconds: remaining time × the gang's GPUs. Without GPUs it is 0, even if the time is unknown."""
    gpus = gpus_of(job)
    return shortest_remaining_time(state, job, cost_s) * gpus if gpus else 0.0


NO_MORE: Iterator[Any] = iter(())
Head = tuple[float, int, str, Row, Iterator[Entry[Row]]]
"""An entry, and the iterator over the entries after it."""


def heads(singles: list[Head[Row]], rows: Iterable[Iterable[Entry[Row]]]) -> list[Head[Row]]:
    """Builds a heap of single entries (each with `NO_MORE`) and the first entries of rows.

    Read it with `go_on` and `heappop`: `heappop` skips the first entry and all that follow it in its row,
    `go_on` skips only the entry.
    """
    for row in rows:
        more = iter(row)
        singles.append((*next(more), more))
    heapify(singles)
    return singles


def go_on(heap: list[Head[Row]]) -> None:
    """Replaces the first entry by the next one of its row, if there is one."""
    more = heap[0][4]
    following = None if more is NO_MORE else next(more, None)
    if following is None:
        heappop(heap)
    else:
        heapreplace(heap, (*following, more))


def in_order(heaps: Iterable[list[Head[Row]]]) -> list[str]:
    """Ids of all jobs in these heaps, one heap after the other; empties them."""
    ids: list[str] = []
    for heap in heaps:
        while heap:
            ids.append(heap[0][2])
            go_on(heap)
    return ids


Kind = tuple[int, bool, bool]
"""(GPUs of the gang, whether its remaining time is falling, whether its cost is rising) of running jobs: the
order within a kind does not change."""
Place = tuple[float, int]
"""(key, order of submission): the smallest runs first."""


class Ordered:
    """Implements `penstock.scheduling.stages.protocols.Preemption`: the smallest keys run.
    `preemptive=False`: running jobs are not stopped."""

    def __init__(self, key: Key, *, preemptive: bool) -> None:
        self._key = key
        self._preemptive = preemptive
        self._rows: JobRows[tuple[object, ...]] = JobRows(
            lambda state, job: (job.demand_key, key(state, job)), _kind if preemptive else None
        )
        self._gpus: GpuKinds | None = None

    def select(self, state: CellState, at_most: Mapping[DemandKey, int] = NO_LIMITS) -> Selection:
        """O(rows of waiting jobs + jobs that start or stop)."""
        walk = _Walk(self, state, at_most)
        walk.go()
        stops = sorted(walk.stopped, key=itemgetter(0, 1), reverse=True)
        return Selection(tuple(walk.claims), tuple(job.job_id for _, _, job in stops))

    def kinds(self, state: CellState) -> GpuKinds:
        """Kinds of nodes, cached between plans while the nodes do not change."""
        if self._gpus is None or not self._gpus.current(state):
            self._gpus = GpuKinds(state)
        return self._gpus

    def waiting(self, state: CellState, at_most: Mapping[DemandKey, int]) -> list[Head[DemandKey]]:
        """A heap of the waiting jobs, one entry per row."""
        self._rows.update(state)
        rows = self._rows.waiting
        singles = [
            (self._key(state, job), job.order, job.job_id, job.demand_key, NO_MORE)
            for job in state.stopping.values()
            if will_queue_again(job)
        ]
        return heads(singles, (entries for row, entries in rows.items() if at_most.get(row) != 0))

    def running(self, state: CellState) -> Iterator[tuple[Place, JobState]]:
        """Running jobs that may be stopped, the last in order first; none if the stage is not preemptive."""
        if not self._preemptive:
            return
        key, jobs = self._charged, state.jobs
        heap = []
        self._rows.update(state)
        for entries in self._rows.running.values():
            backwards = reversed(entries)
            job = jobs[next(backwards)[2]]
            heap.append((-key(state, job), -job.order, job, backwards))
        heapify(heap)
        while heap:
            last_key, last_order, job, backwards = heap[0]
            yield (-last_key, -last_order), job
            entry = next(backwards, None)
            if entry is None:
                heappop(heap)
            else:
                job = jobs[entry[2]]
                heapreplace(heap, (-key(state, job), -job.order, job, backwards))

    def _charged(self, state: CellState, job: JobState) -> float:
        """The key of a running job, less the cost of stopping it."""
        if not job.saves:
            return self._key(state, job)
        return self._key(state, job, stop_cost_s(state, job))

    def later(self, state: CellState, job: JobState) -> Iterator[JobState]:
        """Running jobs with a larger key, the largest first."""
        place = self._key(state, job), job.order
        for other, runs in self.running(state):
            if other < place:
                return
            yield runs

    def ranking(self, state: CellState) -> list[str]:
        """Ids by key; if the stage is not preemptive, running jobs come first. O(jobs · log jobs)."""
        key = self._charged if self._preemptive else always_first
        running: list[Head[DemandKey]] = [
            (key(state, job), job.order, job.job_id, (), NO_MORE)
            for job in state.holding.values()
            if job.order not in state.stopping
        ]
        heap = [*running, *self.waiting(state, NO_LIMITS)]
        heapify(heap)
        return in_order([heap])

    def claim(self, state: CellState, job: JobState) -> str:
        """Its remaining time, and what stopping it would cost."""
        cost = cost_text(state, job) if self._preemptive and job.preemptible else ""
        return remaining_text(state, job) + cost


def always_first(state: CellState, job: JobState) -> float:
    """A key that sorts before all others."""
    return -1.0


def _kind(state: CellState, job: JobState) -> tuple[Kind, float] | None:
    """(kind, sort key) of a running job: within a kind, jobs whose time less cost ends later come later.
    None: it may not be stopped."""
    if not job.preemptible:
        return None
    ends = ends_s(job)
    if ends is None:
        return (gpus_of(job), False, False), remaining_s(state, job)
    if not job.saves:
        return (gpus_of(job), True, False), ends
    if loses(job):
        return (gpus_of(job), True, True), ends - fixed_cost_s(job) + saved_s(job)
    return (gpus_of(job), True, False), ends - fixed_cost_s(job)


class _Walk:
    """One pass over the waiting jobs, and the running jobs that have to be suspended."""

    def __init__(self, ordered: Ordered, state: CellState, at_most: Mapping[DemandKey, int]) -> None:
        self.claims: list[str] = []
        self.stopped: list[tuple[float, int, JobState]] = []
        self._state = state
        kinds = ordered.kinds(state)
        self._need = kinds.need
        self._free = FreeGpus(kinds)
        self._heap = ordered.waiting(state, at_most)
        self._left = dict(at_most)
        self._running = ordered.running(state)
        self._last: list[tuple[Place, JobState]] = []
        """Running jobs that were examined and not suspended, the last in order first."""
        self._suspended: list[tuple[float, int, str, JobState]] = []
        """Suspended jobs; a heap, the first in order on top. A job that finds GPUs at its own position
        continues to run."""
        self._refused: dict[object, int] = {}
        """`Need.alike` → the smallest need refused since the last suspension: later jobs with such needs
        cannot find more GPUs."""

    def go(self) -> None:
        heap, jobs = self._heap, self._state.jobs
        while heap:
            key, order, job_id, row, more = heap[0]
            place = key, order
            if self._suspended:
                self._resume(place)
            job = jobs[job_id]
            left = self._left.get(row) if self._left else None
            if left == 0 or not self._may_run(self._need(row, job), place):
                heappop(heap)
                continue
            if left is not None:
                self._left[row] = left - 1
            self.claims.append(job_id)
            if more is NO_MORE:
                heappop(heap)
            else:
                go_on(heap)
        self._resume(None)

    def _may_run(self, need: Need, place: Place) -> bool:
        refused = self._refused.get(need.alike)
        if refused is not None and need.milli >= refused:
            return False
        if self._free.take(need):
            return True
        if self._make_way(need, place):
            self._refused.clear()
            return True
        self._refused[need.alike] = need.milli
        return False

    def _make_way(self, need: Need, place: Place) -> bool:
        """Suspends running jobs, the last in order first, until the job has its GPUs;
        none if that is not enough."""
        free, last = self._free, self._last
        if last and last[0][0] < place:
            return False
        lack = free.lack(need)
        gave_way: list[int] = []
        for number in count():
            if number == len(last):
                following = next(self._running, None)
                if following is None:
                    break
                last.append(following)
            other_place, other = last[number]
            if other_place < place:
                break
            brings = free.brings(other, need)
            if not brings:
                continue
            gave_way.append(number)
            lack -= brings
            if lack <= 0:
                for given in reversed(gave_way):
                    (key, order), other = last.pop(given)
                    free.give_back(other)
                    heappush(self._suspended, (key, order, other.job_id, other))
                return free.take(need)
        return False

    def _resume(self, before: Place | None) -> None:
        """Tries suspended jobs that come before this place again: they continue to run, or are stopped."""
        while self._suspended and (before is None or self._suspended[0][:2] < before):
            key, order, _, job = heappop(self._suspended)
            if not self._free.take_again(job):
                self.stopped.append((key, order, job))
