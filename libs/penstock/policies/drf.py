"""`drf`: dominant resource fairness (DRF) between the owners of jobs.

Source: Ghodsi et al., NSDI '11, Algorithm 1. An owner's dominant share is the largest of four shares: what the owner's
tasks hold of GPUs (by share), cores, host memory and bandwidth, each divided by the total of the cell's nodes that are
not gone. The next job is the earliest of the owner with the smallest dominant share (ties: the owner whose next
job was submitted first). Placing it raises the share, and the choice is made again. No job is
stopped: shares converge as jobs end. Nodes: first fit.

Interpretation and departures. The source's task is a gang here, all or nothing. The source stops when the next
task does not fit; here its owner is skipped until resources are freed, and the other owners' jobs are tried,
else a large gang would block a cell that others could use. No job overtakes another of the same owner, so with one
owner this is `fifo-strict`. Owners have equal weights.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.transitions import JobStatus, TaskStatus
from penstock.model.types import WHOLE_GPU
from penstock.policies.base import Turns
from penstock.policies.baselines import FirstFit
from penstock.policies.job_rows import Entry, JobRows, goes_on

Amounts = tuple[int, int, int, int]
"""Thousandths of GPUs, cores, MiB of host memory, Mbit/s."""


class DominantResourceFairness(FirstFit):
    """Implements `penstock.policies.base.Order`."""

    def __init__(self, name: str = "drf") -> None:
        super().__init__(name)
        self._rows = JobRows(by_owner)

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + running jobs + owners) for the first, O(log owners) for the others."""
        self._rows.update(state)
        rows = self._rows.waiting
        if not rows:
            return
        total, held = capacity(state), holdings(state)
        heap: list[tuple[float, int, str, str, Iterator[Entry[tuple[str]]]]] = []

        def enter(owner: str, following: Iterator[Entry[tuple[str]]]) -> None:
            upcoming = next(following, None)
            if upcoming is not None:
                share = dominant(held.get(owner, NOTHING), total)
                heappush(heap, (share, upcoming[1], upcoming[2], owner, following))

        for (owner,), entries in rows.items():
            enter(owner, iter(entries))
        while heap:
            _, _, job_id, owner, following = heappop(heap)
            yield job_id
            job = state.jobs[job_id]
            if job.status is JobStatus.LAUNCHING:
                held[owner] = plus(held.get(owner, NOTHING), job_holds(job))
            if goes_on(state, job_id):
                enter(owner, following)

    def ranking(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """An owner whose next job does not start is skipped."""
        del at_ms
        total, held = capacity(state), wanted(holding)
        lines: dict[str, list[JobState]] = {}
        for job in sorted(waiting, key=lambda job: job.order, reverse=True):
            lines.setdefault(job.spec.owner, []).append(job)
        heap = [
            (dominant(held.get(owner, NOTHING), total), line[-1].order, owner)
            for owner, line in lines.items()
        ]
        heapify(heap)
        while heap:
            owner = heappop(heap)[-1]
            line = lines[owner]
            job = line.pop()
            if (yield job):
                held[owner] = plus(held.get(owner, NOTHING), amounts(job))
                if line:
                    heappush(heap, (dominant(held[owner], total), line[-1].order, owner))

    def claim(self, state: CellState, job: JobState) -> str:
        """`ada holds 40% of the cell; submitted as record 812`."""
        held = dominant(holdings(state).get(job.spec.owner, NOTHING), capacity(state))
        return f"{job.spec.owner} holds {held:.0%} of the cell; submitted as record {job.order}"


def by_owner(state: CellState, job: JobState) -> tuple[tuple[str], float]:
    """(Row of the owner, sort key by submission)."""
    return (job.spec.owner,), float(job.order)


NOTHING: Amounts = (0, 0, 0, 0)


def plus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def capacity(state: CellState) -> Amounts:
    """Total capacity of all nodes that are not gone."""
    total = NOTHING
    for shape, nodes in state.index.shape.items():
        count = (nodes & ~state.index.gone).bit_count()
        total = plus(
            total,
            (
                shape.gpus * WHOLE_GPU * count,
                shape.cores * count,
                shape.host_memory_mib * count,
                shape.bandwidth_mbps * count,
            ),
        )
    return total


def job_holds(job: JobState) -> Amounts:
    """What the job's tasks that are not proven ended hold."""
    held = NOTHING
    for task in job.tasks.values():
        if task.status is not TaskStatus.EXITED:
            place = task.place
            held = plus(
                held,
                (
                    len(place.gpus) * place.gpu_share_milli,
                    len(place.cores),
                    place.host_memory_mib,
                    place.bandwidth_mbps,
                ),
            )
    return held


def amounts(job: JobState) -> Amounts:
    """Demand of the whole gang."""
    total = NOTHING
    for need in job.demand.needs():
        total = plus(
            total,
            (need.gpus * need.gpu_share_milli, need.cores, need.host_memory_mib, need.bandwidth_mbps),
        )
    return total


def wanted(jobs: Iterable[JobState]) -> dict[str, Amounts]:
    """Owner → demand of the owner's jobs among these."""
    found: dict[str, Amounts] = {}
    for job in jobs:
        found[job.spec.owner] = plus(found.get(job.spec.owner, NOTHING), amounts(job))
    return found


def holdings(state: CellState) -> dict[str, Amounts]:
    """Owner → what the owner's jobs hold."""
    held: dict[str, Amounts] = {}
    for job in state.holding.values():
        held[job.spec.owner] = plus(held.get(job.spec.owner, NOTHING), job_holds(job))
    return held


def dominant(held: Amounts, total: Amounts) -> float:
    """The dominant share: the largest share of a resource, 0 … 1."""
    return max(amount / of if of else 0.0 for amount, of in zip(held, total, strict=True))
