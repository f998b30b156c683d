"""Baselines that differ only in the order of the jobs: `sjf`, `srtf`, `srsf`, `fifo-preemptive`.

The jobs are sorted by a key, ascending, ties by submission. From the front, each job that still fits is
chosen; one that does not is skipped and later ones are still tried. Sources: SRTF and SRSF as in Muri's
comparison (§6.1 there); shortest job first is the textbook rule. Nodes: first fit.
"""

from collections.abc import Callable

from penstock.cluster.moves import JobStatus
from penstock.ledger.state import CellState, JobState
from penstock.policies.base import Chance, Plan, RunSet
from penstock.policies.baselines import FirstFit
from penstock.policies.replan import Nodes, contenders, gpus_of
from penstock.policies.service import remaining_s

Key = Callable[[CellState, JobState], float]


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
        """Sorts all jobs: O(n log n), and O(n) while the order hardly changes."""
        ranked = sorted((self._rank(state, job), job.order, job.job_id) for job in contenders(state))
        nodes = Nodes(state)
        chosen: list[str] = []
        for _, _, job_id in ranked:
            demand = state.jobs[job_id].demand
            if nodes.take(demand.workers, demand.worker.gpus):
                chosen.append(job_id)
        return RunSet(tuple(chosen))

    def _rank(self, state: CellState, job: JobState) -> tuple[int, float]:
        stays = not self._preemptive and job.status is not JobStatus.QUEUED
        return (0, 0.0) if stays else (1, self._key(state, job))
