"""Tiresias-L: discretised two-dimensional least attained service (2D-LAS), for unknown run times.

Source: Tiresias (NSDI '19) §3, as interpreted in Muri's experiments. Several FIFO queues; a job enters the
first one and moves from queue i to the end of queue i + 1 when run time × GPUs reaches limit i, one queue at
a time and never back. The queues are visited in order; a job runs if its GPUs are still free, later ones are
still tried. Then, in each queue, the chosen jobs move before the others, both in their previous order.

This order is not a function of the jobs alone: each move is written to the ledger as a `JobRank`.
Only moves are written: within a level the chosen and the other jobs are two separate rows, so a job needs a
new position only when it changes rows. New positions derive from the record's seq and never equal old ones.

Departure: GPUs are counted, as in the source, not nodes; where the chosen jobs do not fit the current
nodes, some of them move (`penstock.scheduling.make_room.preemption`).
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from heapq import heappop, merge
from itertools import chain
from math import ceil

from penstock.cluster.view import held_places
from penstock.ledger.derived.groups import holds_first
from penstock.ledger.derived.succession import beyond, successors
from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import JobRank
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import within_ms
from penstock.scheduling.order.job_rows import CONTENDING, Entry, JobRows, will_queue_again
from penstock.scheduling.remaining_time import attained_s, gpus_of
from penstock.scheduling.stages.protocols import NO_LIMITS, Selection
from penstock_papers.baselines.preempting.ordered import NO_MORE, Head, go_on, heads, in_order

POSITIONS_PER_RECORD = 1 << 12  # above `MAX_RANKED`
MAX_RANKED = 1_024
"""Moves written at once; the rest of a larger change (a cell restarted full of jobs) is written with the next
plan."""

CHOSEN, WAITS, DUE = 0, 1, 2
"""A job's part of its queue: chosen by the last plan, not chosen, or its service has reached the limit."""
Row = tuple[int, int, int]
"""(level, stand, GPUs) of jobs that are interchangeable except for their order."""
Part = tuple[int, int]
"""(level, stand)."""
ROUNDING_S = 0.01  # far above the rounding error of two sums of times; only closer times are compared exactly


class Tiresias:
    """Implements `penstock.scheduling.stages.protocols.Preemption`. `limits_gpu_s`: the service at which a
    job leaves each queue except the last, ascending.

    `strict_fifo`: within a queue the chosen jobs do not move before the others, as in Pollux's experiments.
    """

    def __init__(self, limits_gpu_s: Sequence[float], *, strict_fifo: bool = False) -> None:
        assert list(limits_gpu_s) == sorted(limits_gpu_s), limits_gpu_s
        self.limits_gpu_s = tuple(limits_gpu_s)
        self._last = len(self.limits_gpu_s)
        self._strict_fifo = strict_fifo
        self._rows: JobRows[Row] = JobRows(self._stand, self._runs)
        """All jobs except those being stopped; a job that becomes due while it runs stays in its previous
        row."""
        self._by_service: JobRows[tuple[int, int]] = JobRows(runs=self._service)
        """(level, GPUs) → running jobs, with the ledger time in s at which their service was 0: the first
        becomes due first."""
        self._launching: JobRows[tuple[int, int]] = JobRows(runs=self._begins)
        """(level, GPUs) → jobs that are being launched."""
        self._fixed: JobRows[tuple[int]] = JobRows(runs=_not_preemptible)
        """(GPUs,) → running jobs that may not be stopped."""

    def select(self, state: CellState, at_most: Mapping[DemandKey, int] = NO_LIMITS) -> Selection:
        """Visits the queues with one counter of free GPUs.

        O(changes + rows + jobs that change places + chosen jobs that wait); under `strict_fifo` O(jobs).
        """
        parts = self._parts(state)
        self._fixed.update(state)
        fixed = sum(gpus * len(entries) for (gpus,), entries in self._fixed.running.items())
        walk = _Walk(state, at_most, fixed)
        claims: list[JobState] = []
        stops: list[JobState] = []
        ranks: list[JobRank] = []
        row = _Positions(state.seq)
        near: list[tuple[int, JobState]] = []
        """(level, job) of jobs that enter a level, or may start."""
        for level in range(self._last + 1):
            stay, stopped = walk.chosen(parts, level)
            come, passed = walk.through(parts.heap(level, WAITS), pass_over=True)
            entered, late = walk.through(parts.heap(level - 1, DUE))
            runs = [*stay, *come, *entered]
            claims += [job for job in runs if job.status in WANTS]
            stops += [job for job in (*stopped, *passed, *late) if job.status in CONTENDING]
            near += [(level, job) for job in runs]
            if self._strict_fifo:
                both = sorted([*entered, *late], key=lambda job: job.order)
                ranks += [_rank(job, level, True, row.at_end()) for job in both]
            else:
                fronts = row.in_front(len(stopped))
                ranks += [_rank(job, level, True, row.at_end()) for job in (*come, *entered)]
                ranks += [_rank(job, level, False, front) for front, job in zip(fronts, stopped, strict=True)]
                ranks += [_rank(job, level, False, row.at_end()) for job in late]
        stops.sort(key=lambda job: -job.order)
        left_out = parts.due | {job.job_id for job in stops} if stops else parts.due
        wake_s = self._wake_s(state, left_out, near)
        return Selection(
            tuple(job.job_id for job in claims),
            tuple(job.job_id for job in stops),
            tuple(ranks[:MAX_RANKED]),
            None if wake_s is None else within_ms(state.now_ms + max(1, ceil(wake_s * 1_000))),
        )

    def _wake_s(self, state: CellState, left_out: Set[str], near: list[tuple[int, JobState]]) -> float | None:
        """Seconds until the next running job reaches its limit. Jobs that have not started yet reach it
        later; an early evaluation is harmless."""
        firsts: list[tuple[float, float, str]] = []
        """(approximate ledger time in s at which it becomes due, its service then, job id) of the first job
        of each row."""
        for (level, gpus), entries in self._by_service.running.items():
            for began_s, _, job_id, _ in entries:
                if job_id not in left_out:
                    service_s = ceil(self.limits_gpu_s[level] / gpus)
                    firsts.append((began_s + service_s, service_s, job_id))
                    break
        soon_s = min(firsts)[0] + ROUNDING_S if firsts else 0.0
        lefts = [
            service_s - attained_s(state, state.jobs[job_id])
            for due_s, service_s, job_id in firsts
            if due_s <= soon_s
        ]
        self._launching.update(state)
        for (level, _), entries in self._launching.running.items():
            near += [(level, state.jobs[job_id]) for _, _, job_id, _ in entries if job_id not in left_out]
        for level, job in near:
            if level < self._last and (gpus := gpus_of(job)):
                lefts.append(ceil(self.limits_gpu_s[level] / gpus) - attained_s(state, job))
        return min(lefts, default=None)

    def later(self, state: CellState, job: JobState) -> Iterator[JobState]:
        """Running jobs that come later, the last one first. O(jobs · log jobs)."""
        ranking = self.ranking(state)
        for job_id in reversed(ranking[ranking.index(job.job_id) + 1 :]):
            other = state.jobs[job_id]
            if other.status in CONTENDING:
                yield other

    def ranking(self, state: CellState) -> list[str]:
        """Ids queue by queue, as the next plan visits them. O(jobs · log jobs)."""
        parts = self._parts(state)
        walk = [
            part
            for level in range(self._last + 1)
            for part in ((level, CHOSEN), (level, WAITS), (level - 1, DUE))
        ]
        return in_order([parts.heap(*part) for part in walk])

    def claim(self, state: CellState, job: JobState) -> str:
        """`1,200 GPU seconds of service`."""
        return f"{attained_s(state, job) * gpus_of(job):,.0f} GPU seconds of service"

    def _parts(self, state: CellState) -> "_Parts":
        """All contending jobs by part of their queue."""
        self._rows.update(state)
        parts = _Parts(state, self._rows)
        for job in self._become_due(state):
            parts.becomes_due(job, self._stand(state, job)[0])
        for job in state.stopping.values():
            if will_queue_again(job):
                parts.add(job, *self._stand(state, job, runs=False))
        return parts

    def _become_due(self, state: CellState) -> Iterator[JobState]:
        """Running jobs whose service has reached the limit."""
        self._by_service.update(state)
        soon_s = state.now_ms / 1_000 + ROUNDING_S
        for (level, gpus), entries in self._by_service.running.items():
            if entries[0][0] + self.limits_gpu_s[level] / gpus > soon_s:
                continue
            for _, _, job_id, _ in entries:
                job = state.jobs[job_id]
                if attained_s(state, job) * gpus < self.limits_gpu_s[level]:
                    break
                yield job

    def _stand(self, state: CellState, job: JobState, *, runs: bool | None = None) -> tuple[Row, float]:
        """The job's row, and its position there; due jobs are in order of submission. A job that `runs` does
        not become due here."""
        if runs is None:
            runs = job.running_ms is not None
        level, waits, position = job.rank or (0, 1, job.order * POSITIONS_PER_RECORD)
        gpus, waits = gpus_of(job), waits or self._strict_fifo
        if level >= self._last:
            level = self._last  # there were more queues when it was ranked
        elif (
            not runs
            and (self._strict_fifo or not waits)
            and attained_s(state, job) * gpus >= self.limits_gpu_s[level]
        ):
            return (level, DUE, gpus), job.order
        return (level, WAITS if waits else CHOSEN, gpus), position

    def _runs(self, state: CellState, job: JobState) -> tuple[Row, float] | None:
        """Place of a running job; None: it may not be stopped."""
        return self._stand(state, job) if job.preemptible else None

    def _service(self, state: CellState, job: JobState) -> tuple[tuple[int, int], float] | None:
        """Place in `_by_service`, of running jobs that can become due."""
        began_s = served_since_s(job)
        if began_s is None or not job.preemptible:
            return None
        (level, stand, gpus), _ = self._stand(state, job)
        if level == self._last or not gpus or (stand == WAITS and not self._strict_fifo):
            return None
        return (level, gpus), began_s

    def _begins(self, state: CellState, job: JobState) -> tuple[tuple[int, int], float] | None:
        """Place in `_launching`, of jobs that are being launched."""
        if job.running_ms is not None or not job.preemptible:
            return None
        (level, stand, gpus), _ = self._stand(state, job)
        return None if stand == DUE else ((level, gpus), job.order)


def _not_preemptible(state: CellState, job: JobState) -> tuple[tuple[int], float] | None:
    if job.preemptible:
        return None
    return (gpus_of(job) if holds_first(state, job) else 0,), job.order


WANTS = frozenset({JobStatus.QUEUED, JobStatus.STOPPING})
"""Statuses of jobs that do not run and may be chosen."""


class _Parts:
    """The contending jobs by queue and stand."""

    def __init__(self, state: CellState, rows: JobRows[Row]) -> None:
        self.due: set[str] = set()
        """Ids of running jobs that have become due."""
        self._jobs = state.jobs
        self._singles: dict[Part, list[Head[Row]]] = {}
        self._waiting: dict[Part, list[list[Entry[Row]]]] = {}
        self._running: dict[Part, list[list[Entry[Row]]]] = {}
        self._due_gpus: dict[Part, int] = {}
        for found, by_part in ((rows.waiting, self._waiting), (rows.running, self._running)):
            for (level, stand, _), entries in found.items():
                part = level, stand
                if part in by_part:
                    by_part[part].append(entries)
                else:
                    by_part[part] = [entries]

    def becomes_due(self, job: JobState, row: Row) -> None:
        """Moves a running job from its row to the due jobs of its level."""
        level, stand, gpus = row
        self.due.add(job.job_id)
        self._due_gpus[level, stand] = self._due_gpus.get((level, stand), 0) + gpus
        self.add(job, (level, DUE, gpus), job.order)

    def add(self, job: JobState, row: Row, position: float) -> None:
        self._singles.setdefault(row[:2], []).append((position, job.order, job.job_id, row, NO_MORE))

    def heap(self, level: int, stand: int) -> list[Head[Row]]:
        """All jobs of a part, as a heap for `go_on`."""
        part = level, stand
        waiting = self._waiting.get(part, ())
        if not waiting and part not in self._singles and part not in self._running:
            return []
        singles = [*self._singles.get(part, ())]
        for entries in self._running.get(part, ()):
            singles += [(*entry, NO_MORE) for entry in entries if entry[2] not in self.due]
        return heads(singles, waiting)

    def waiting(self, level: int, stand: int) -> list[Entry[Row]]:
        """The jobs of a part that do not run, in order."""
        part = level, stand
        if part not in self._singles and part not in self._waiting:
            return []
        singles = [head[:4] for head in self._singles.get(part, ())]
        return sorted(chain(singles, *self._waiting.get(part, ())))

    def running_gpus(self, level: int, stand: int) -> int:
        """GPUs of the running jobs of a part."""
        part = level, stand
        total = -self._due_gpus.get(part, 0)
        for entries in self._running.get(part, ()):
            total += entries[0][3][2] * len(entries)
        return total

    def backwards(self, level: int, stand: int, waiting: list[Entry[Row]]) -> Iterator[Entry[Row]]:
        """Running and waiting jobs of a part, the last one first."""
        rows = [reversed(entries) for entries in (waiting, *self._running.get((level, stand), ()))]
        return (entry for entry in merge(*rows, reverse=True) if entry[2] not in self.due)


class _Walk:
    """Allocates the cell's GPUs in order of priority."""

    def __init__(self, state: CellState, at_most: Mapping[DemandKey, int], fixed: int) -> None:
        """`fixed`: GPUs that are not available."""
        self._jobs = state.jobs
        self._free = (
            state.total_sound_gpus
            - fixed
            - sum(
                len(beyond(place, list(successors(state, job, place))).gpus)
                for job in state.stopping.values()
                if not will_queue_again(job)
                for place in held_places(job)
            )
        )
        self._left = dict(at_most)

    def chosen(self, parts: _Parts, level: int) -> tuple[list[JobState], list[JobState]]:
        """(jobs that get GPUs, jobs that do not) of those that the last plan chose.

        All jobs before the first that does not fit get GPUs: of these the running ones are counted but not in
        the answer.
        """
        waiting, gpus = parts.waiting(level, CHOSEN), parts.running_gpus(level, CHOSEN)
        if not waiting and gpus <= self._free:
            self._free -= gpus
            return [], []
        left = dict(self._left)
        counted = {entry[2] for entry in waiting if _allowed(self._jobs[entry[2]], left)}
        gpus += sum(row[2] for *_, job_id, row in waiting if job_id in counted)
        last: list[Entry[Row]] = []
        late: set[str] = set()
        waits = {entry[2] for entry in waiting}
        for entry in parts.backwards(level, CHOSEN, waiting) if gpus > self._free else ():
            if gpus <= self._free:
                break
            last.append(entry)
            late.add(entry[2])
            if entry[2] in counted or entry[2] not in waits:
                gpus -= entry[3][2]
        runs: list[JobState] = []
        others: list[JobState] = []
        for _, _, job_id, _ in waiting:
            if job_id not in late:
                job = self._jobs[job_id]
                (runs if _allowed(job, self._left) else others).append(job)
        self._free -= gpus
        for _, _, job_id, row in reversed(last):
            self._give(self._jobs[job_id], row[2], runs, others)
        return runs, others

    def _give(self, job: JobState, gpus: int, runs: list[JobState], others: list[JobState]) -> None:
        if gpus <= self._free and _allowed(job, self._left):
            self._free -= gpus
            runs.append(job)
        else:
            others.append(job)

    def through(
        self, heap: list[Head[Row]], *, pass_over: bool = False
    ) -> tuple[list[JobState], list[JobState]]:
        """(jobs that get GPUs, jobs that do not); with `pass_over` waiting jobs are left out of the
        latter."""
        runs: list[JobState] = []
        others: list[JobState] = []
        while heap:
            _, _, job_id, row, _ = heap[0]
            job = self._jobs[job_id]
            if pass_over and row[2] > self._free and job.status not in CONTENDING:
                heappop(heap)
                continue
            self._give(job, row[2], runs, others)
            go_on(heap)
        return runs, others


def _allowed(job: JobState, left: dict[DemandKey, int]) -> bool:
    """Whether a job may start by the number of jobs of its demand that fit; counts it."""
    if not left or job.status is not JobStatus.QUEUED:
        return True
    key = job.demand_key
    fitting = left.get(key)
    if fitting is None:
        return True
    left[key] = max(0, fitting - 1)
    return fitting > 0


class _Positions:
    """Unused positions: ascending ones for a row's end, descending ones for its front."""

    def __init__(self, seq: int) -> None:
        self._last = seq * POSITIONS_PER_RECORD
        self._first = -seq * POSITIONS_PER_RECORD

    def at_end(self) -> int:
        self._last += 1
        return self._last

    def in_front(self, count: int) -> range:
        """`count` positions, ascending."""
        self._first -= count
        return range(self._first, self._first + count)


def _rank(job: JobState, level: int, chosen: bool, position: int) -> JobRank:
    return JobRank(job_id=job.job_id, level=level, chosen=chosen, position=position)


def served_since_s(job: JobState) -> float | None:
    """Ledger time in s at which the job's attained service would have been 0 if it had run ever since; None
    while it does not run."""
    since_ms = job.running_ms
    if since_ms is None:
        return None
    if job.progress.attained_s is None:
        return (since_ms - job.progress.served_ms) / 1_000
    return max(since_ms, job.progress.at_ms) / 1_000 - job.progress.attained_s
