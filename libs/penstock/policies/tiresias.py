"""Tiresias-L: discretised two-dimensional least attained service, for run times that nobody knows.

Source: Tiresias (NSDI '19) §3, with the reading of Muri's experiments. Several FIFO queues; a job enters the
first one and leaves queue i for the end of queue i + 1 when time run × GPUs reaches limit i, one queue at a
time and never back. The queues are walked in order; a job runs if its GPUs are still free, later ones are
still tried. Then, in each queue, the chosen jobs move before the others, both parts keeping their order.

The order so built up is no function of the jobs alone: each move is written into the ledger as a `JobRank`.
Only moves are written: within a level the chosen and the others are two rows of their own, so a job needs a
new position only when it changes rows. New positions derive from the record's seq and never meet old ones.

Departure: GPUs are counted, as in the source, and not nodes; where the chosen jobs do not fit the nodes as
they stand, some of them move (`penstock.policies.replan.make_room`).
"""

from collections.abc import Iterable, Sequence
from heapq import heappop
from math import ceil

from penstock.ledger.state import CellState, JobState
from penstock.model.ledger_events import JobRank
from penstock.policies.base import LazyRng, Plan, Policy, RunSet
from penstock.policies.replan import Nodes, gpus_of, holders
from penstock.policies.service import attained_s
from penstock.policies.waiting import NO_MORE, Entry, Head, Waiting, go_on, heads, in_order

POSITIONS_PER_RECORD = 1 << 12
MAX_RANKED = 1_024
"""Moves written at once; the rest of a larger change (a cell restarted full of jobs) comes with the next plan."""

CHOSEN, WAITS, DUE = 0, 1, 2
"""How a job stands in its queue: chosen by the last plan, or not, or its service has reached the limit."""
Row = tuple[int, int, int]
"""(level, stand, GPUs) of jobs that are interchangeable but for their order."""
Part = tuple[int, int]
"""(level, stand)."""


class Tiresias:
    """`limits_gpu_s`: the service at which a job leaves each queue but the last, rising. `where`: finds nodes.

    `strict_fifo`: within a queue the chosen jobs do not move before the others, as in Pollux's experiments.
    """

    def __init__(
        self, name: str, limits_gpu_s: Sequence[float], where: Policy, *, strict_fifo: bool = False
    ) -> None:
        assert list(limits_gpu_s) == sorted(limits_gpu_s), limits_gpu_s
        self.name = name
        self.limits_gpu_s = tuple(limits_gpu_s)
        self._last = len(self.limits_gpu_s)
        self._where = where
        self._strict_fifo = strict_fifo
        self._waiting = Waiting(self._stand)

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """As `where` does."""
        return self._where.place(state, job, rng)

    def plan(self, state: CellState) -> RunSet:
        """Walks the queues with one counter of GPUs.

        Looks at the jobs that run or were chosen, and at waiting ones of each size while there is room for it.
        """
        running, ending = holders(state)
        parts = self._parts(state, running)
        free = Nodes(state, ending).free
        chosen: list[str] = []
        ranks: list[JobRank] = []
        row = _Positions(state.seq)
        wake_s: float | None = None
        for level in range(self._last + 1):
            free, stay, stopped = _walk(state, parts.get((level, CHOSEN), []), free)
            free, come, _ = _walk(state, parts.get((level, WAITS), []), free, pass_over=True)
            free, entered, late = _walk(state, parts.get((level - 1, DUE), []), free)
            runs = [*stay, *come, *entered]
            chosen += [job.job_id for job in runs]
            if self._strict_fifo:
                both = sorted([*entered, *late], key=lambda job: job.order)
                ranks += [_rank(job, level, True, row.at_end()) for job in both]
            else:
                fronts = row.in_front(len(stopped))
                ranks += [_rank(job, level, True, row.at_end()) for job in (*come, *entered)]
                ranks += [_rank(job, level, False, front) for front, job in zip(fronts, stopped, strict=True)]
                ranks += [_rank(job, level, False, row.at_end()) for job in late]
            if level < self._last:
                limit = self.limits_gpu_s[level]
                for job in runs:  # who is only about to run reaches it later: no harm in asking too early
                    if gpus := gpus_of(job):
                        left_s = ceil(limit / gpus) - attained_s(state, job)
                        if wake_s is None or left_s < wake_s:
                            wake_s = left_s
        wake_ms = None if wake_s is None else state.now_ms + max(1, ceil(wake_s * 1_000))
        return RunSet(tuple(chosen), tuple(ranks[:MAX_RANKED]), wake_ms)

    def ranking(self, state: CellState) -> list[str]:
        """Queue after queue, as the next plan walks them. O(jobs · log jobs)."""
        parts = self._parts(state, holders(state)[0])
        walk = [
            part
            for level in range(self._last + 1)
            for part in ((level, CHOSEN), (level, WAITS), (level - 1, DUE))
        ]
        return in_order([parts.get(part, []) for part in walk])

    def _parts(self, state: CellState, running: Sequence[JobState]) -> dict[Part, list[Head[Row]]]:
        """Every contender in the part of its queue in which it stands, in order."""
        singles: dict[Part, list[Head[Row]]] = {}
        rows: dict[Part, list[Iterable[Entry[Row]]]] = {}
        for job in running:
            row, position = self._stand(state, job)
            singles.setdefault(row[:2], []).append((position, job.order, job.job_id, row, NO_MORE))
        for row, entries in self._waiting.rows(state).items():
            rows.setdefault(row[:2], []).append(entries)
        return {part: heads(singles.get(part, []), rows.get(part, ())) for part in {**singles, **rows}}

    def _stand(self, state: CellState, job: JobState) -> tuple[Row, float]:
        """Its row, and its position there: of those who are due, in order of submission."""
        level, waits, position = job.rank or (0, 1, job.order * POSITIONS_PER_RECORD)
        gpus, waits = gpus_of(job), waits or self._strict_fifo
        if level >= self._last:
            level = self._last  # there were more queues when it was ranked
        elif (self._strict_fifo or not waits) and attained_s(state, job) * gpus >= self.limits_gpu_s[level]:
            return (level, DUE, gpus), job.order
        return (level, WAITS if waits else CHOSEN, gpus), position


def _walk(
    state: CellState, heap: list[Head[Row]], free: int, *, pass_over: bool = False
) -> tuple[int, list[JobState], list[JobState]]:
    """(GPUs left, jobs that get theirs, jobs that do not); with `pass_over` the last are not looked for."""
    runs: list[JobState] = []
    others: list[JobState] = []
    while heap:
        _, _, job_id, row, _ = heap[0]
        if row[2] <= free:
            free -= row[2]
            runs.append(state.jobs[job_id])
        elif pass_over:
            heappop(heap)
            continue
        else:
            others.append(state.jobs[job_id])
        go_on(heap)
    return free, runs, others


class _Positions:
    """Positions that no job has: ever larger ones at a row's end, ever smaller ones at its front."""

    def __init__(self, seq: int) -> None:
        self._last = seq * POSITIONS_PER_RECORD
        self._first = -seq * POSITIONS_PER_RECORD

    def at_end(self) -> int:
        self._last += 1
        return self._last

    def in_front(self, count: int) -> range:
        """So many, rising."""
        self._first -= count
        return range(self._first, self._first + count)


def _rank(job: JobState, level: int, chosen: bool, position: int) -> JobRank:
    return JobRank(job_id=job.job_id, level=level, chosen=chosen, position=position)
