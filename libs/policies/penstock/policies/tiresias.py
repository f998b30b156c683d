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

from collections.abc import Sequence
from math import ceil

from penstock.events.facts import JobRank
from penstock.ledger.state import CellState, JobState
from penstock.policies.base import Chance, Plan, Policy, RunSet
from penstock.policies.replan import Nodes, contenders, gpus_of
from penstock.policies.service import attained_s

POSITIONS_PER_RECORD = 1 << 12
MAX_RANKED = 1_024
"""Moves written at once; the rest of a larger change (a cell restarted full of jobs) comes with the next plan."""

Entry = tuple[int, int, JobState]
"""(0 if chosen else 1, position, job)."""


class Tiresias:
    """`limits_gpu_s`: the service at which a job leaves each queue but the last, rising. `where`: finds nodes.

    `strict_fifo`: within a queue the chosen jobs do not move before the others, as in Pollux's experiments.
    """

    def __init__(
        self, name: str, limits_gpu_s: Sequence[float], where: Policy, *, strict_fifo: bool = False
    ) -> None:
        assert list(limits_gpu_s) == sorted(limits_gpu_s), limits_gpu_s
        self._name = name
        self.limits_gpu_s = tuple(limits_gpu_s)
        self._where = where
        self._strict_fifo = strict_fifo

    @property
    def name(self) -> str:
        return self._name

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """As `where` does."""
        return self._where.place(state, job, chance)

    def plan(self, state: CellState) -> RunSet:
        """Walks the queues with one counter of GPUs."""
        queues = self._queues(state)
        free = Nodes(state).free
        chosen: list[str] = []
        ranks: list[JobRank] = []
        row = _Positions(state.seq)
        wake_s: float | None = None
        for level, queue in enumerate(queues):
            runs: list[Entry] = []
            waits: list[Entry] = []
            for entry in queue:
                gpus = gpus_of(entry[2])
                if gpus <= free:
                    free -= gpus
                    runs.append(entry)
                else:
                    waits.append(entry)
            chosen += [job.job_id for _, _, job in runs]
            if self._strict_fifo:
                entered = [job for old, _, job in queue if old == _DEMOTED]
                ranks += [_rank(job, level, True, row.at_end()) for job in entered]
            else:
                ranks += _moved(level, runs, waits, row)
            if level < len(self.limits_gpu_s):
                for (
                    _,
                    _,
                    job,
                ) in runs:  # who is only about to run reaches it later: no harm in asking too early
                    if gpus_of(job):
                        left_s = ceil(self.limits_gpu_s[level] / gpus_of(job)) - attained_s(state, job)
                        wake_s = left_s if wake_s is None else min(wake_s, left_s)
        wake_ms = None if wake_s is None else state.now_ms + max(1, ceil(wake_s * 1_000))
        return RunSet(tuple(chosen), tuple(ranks[:MAX_RANKED]), wake_ms)

    def _queues(self, state: CellState) -> list[list[Entry]]:
        """Every contender in its queue and in order; who has reached the limit stands at the next one's end."""
        queues: list[list[Entry]] = [[] for _ in range(len(self.limits_gpu_s) + 1)]
        demoted: list[tuple[int, JobState]] = []
        for job in contenders(state):
            level, waiting, position = job.rank or (0, 1, job.order * POSITIONS_PER_RECORD)
            gpus = gpus_of(job)
            last = level == len(self.limits_gpu_s)
            if (
                (waiting == 0 or self._strict_fifo)
                and not last
                and attained_s(state, job) * gpus >= self.limits_gpu_s[level]
            ):
                demoted.append((level + 1, job))
            else:
                queues[level].append((waiting, position, job))
        for queue in queues:
            queue.sort(key=lambda entry: entry[1] if self._strict_fifo else entry[:2])
        for level, job in demoted:  # in order of submission
            queues[level].append((_DEMOTED, 0, job))
        return queues


_DEMOTED = 2
"""In place of chosen or waiting: enters a new queue, so it needs a position in any case."""


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


def _moved(level: int, runs: list[Entry], waits: list[Entry], row: _Positions) -> list[JobRank]:
    """New ranks for the jobs that changed rows: `runs` and `waits` are the two rows as they shall stand."""
    stopped = [job for old, _, job in waits if old == 0]
    fronts = row.in_front(len(stopped))
    return [
        *(_rank(job, level, True, row.at_end()) for old, _, job in runs if old != 0),
        *(_rank(job, level, False, front) for front, job in zip(fronts, stopped, strict=True)),
        *(_rank(job, level, False, row.at_end()) for old, _, job in waits if old == _DEMOTED),
    ]


def _rank(job: JobState, level: int, chosen: bool, position: int) -> JobRank:
    return JobRank(job_id=job.job_id, level=level, chosen=chosen, position=position)
