"""Baselines that differ only in the order of the jobs: `sjf`, `srtf`, `srsf`.

The jobs are sorted by a key, ascending, ties by submission. From the front, each job that still fits is
chosen; one that does not is skipped and later ones are still tried. Sources: SRTF and SRSF as in Muri's
comparison (§6.1 there); shortest job first is the textbook rule. Nodes: first fit.
"""

from collections.abc import Callable
from heapq import heapify, heappop

from penstock.cluster.moves import JobStatus
from penstock.ledger.state import CellState, JobState
from penstock.policies.base import Chance, Plan, RunSet
from penstock.policies.baselines import FirstFit
from penstock.policies.replan import Nodes, contenders, gpus_of
from penstock.policies.service import remaining_s

Key = Callable[[CellState, JobState], float]
"""≥ 0; the smallest runs first."""


def shortest_remaining_time(state: CellState, job: JobState) -> float:
    """Seconds."""
    return remaining_s(state, job)


def shortest_remaining_service(state: CellState, job: JobState) -> float:
    """GPU seconds: what is left, times the gang's GPUs."""
    return remaining_s(state, job) * gpus_of(job)


class Ordered:
    """Runs the jobs with the smallest keys. `preemptive=False`: what runs stays, whatever its key."""

    def __init__(self, name: str, key: Key, *, preemptive: bool) -> None:
        self._name = name
        self._key = key
        self._preemptive = preemptive
        self._where = FirstFit(name)

    @property
    def name(self) -> str:
        return self._name

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """The lowest ordinals; chance is not used."""
        return self._where.place(state, job, chance)

    def plan(self, state: CellState) -> RunSet:
        """O(jobs), and O(log jobs) for each job looked at; looks no further once all GPUs are taken."""
        ranked: list[tuple[float, int, JobState]] = []
        without_gpus = 0
        for job in contenders(state):
            stays = not self._preemptive and job.status is not JobStatus.QUEUED
            ranked.append((-1.0 if stays else self._key(state, job), job.order, job))
            without_gpus += gpus_of(job) == 0
        heapify(ranked)
        nodes = Nodes(state)
        chosen: list[str] = []
        while ranked and (nodes.free or without_gpus):
            job = heappop(ranked)[2]
            gpus = gpus_of(job)
            without_gpus -= gpus == 0
            if nodes.take(job.spec.workers, gpus // job.spec.workers):
                chosen.append(job.job_id)
        return RunSet(tuple(chosen))
