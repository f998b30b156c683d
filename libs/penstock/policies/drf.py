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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from penstock.ledger.job_state import HOLDING, JobState
from penstock.ledger.state import CellState
from penstock.model.transitions import TaskStatus
from penstock.model.types import WHOLE_GPU
from penstock.policies.base import Turns
from penstock.policies.baselines import FirstFit
from penstock.policies.job_rows import Changes, Entry, JobRows, goes_on

Amounts = tuple[int, int, int, int]
"""Thousandths of GPUs, cores, MiB of host memory, Mbit/s."""


class DominantResourceFairness(FirstFit):
    """Implements `penstock.policies.base.Order`."""

    def __init__(self, name: str = "drf") -> None:
        super().__init__(name)
        self._rows = JobRows(by_owner)
        self._held = Holdings(job_holds)

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + owners) for the first, O(log owners) for the others."""
        self._rows.update(state)
        rows = self._rows.waiting
        if not rows:
            return
        self._held.update(state)
        total, held = capacity(state), self._held.by_owner
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
            if goes_on(state, job_id):
                self._held.update(state)
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
        self._held.update(state)
        held = dominant(self._held.by_owner.get(job.spec.owner, NOTHING), capacity(state))
        return f"{job.spec.owner} holds {held:.0%} of the cell; submitted as record {job.order}"


def by_owner(state: CellState, job: JobState) -> tuple[tuple[str], float]:
    """(Row of the owner, sort key by submission)."""
    return (job.spec.owner,), float(job.order)


NOTHING: Amounts = (0, 0, 0, 0)


def plus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def minus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3]


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
    demand = job.demand
    workers, worker = demand.workers, demand.worker
    servers, server = demand.parameter_servers, demand.parameter_server
    return (
        workers * worker.gpus * worker.gpu_share_milli + servers * server.gpus * server.gpu_share_milli,
        workers * worker.cores + servers * server.cores,
        workers * worker.host_memory_mib + servers * server.host_memory_mib,
        workers * worker.bandwidth_mbps + servers * server.bandwidth_mbps,
    )


def wanted(jobs: Iterable[JobState]) -> dict[str, Amounts]:
    """Owner → demand of the owner's jobs among these."""
    found: dict[str, Amounts] = {}
    for job in jobs:
        found[job.spec.owner] = plus(found.get(job.spec.owner, NOTHING), amounts(job))
    return found


@dataclass(slots=True)
class _Held:
    """A job and what it held at that version."""

    job: JobState
    version: int
    owner: str
    amounts: Amounts


class Holdings:
    """What the jobs of each owner hold. `of`: what one job does; it changes with the job's version alone."""

    def __init__(self, of: Callable[[JobState], Amounts]) -> None:
        self.by_owner: dict[str, Amounts] = {}
        self._of = of
        self._changes = Changes()
        self._jobs: dict[str, _Held] = {}

    def update(self, state: CellState) -> None:
        """O(changes since the last call)."""
        changed, anew = self._changes.ids(state)
        if anew:
            self.by_owner.clear()
            self._jobs.clear()
        jobs = self._jobs
        for job_id in changed:
            job, before = state.jobs.get(job_id), jobs.get(job_id)
            if job is None or job.status not in HOLDING:
                if before is not None:
                    self._take(before)
                    del jobs[job_id]
            elif before is None:
                jobs[job_id] = self._give(job, self._of(job))
            elif before.version != job.version or before.job is not job:
                held = self._of(job)
                if before.job is job and before.amounts == held:
                    before.version = job.version
                else:
                    self._take(before)
                    jobs[job_id] = self._give(job, held)

    def _give(self, job: JobState, held: Amounts) -> _Held:
        owner = job.spec.owner
        self.by_owner[owner] = plus(self.by_owner.get(owner, NOTHING), held)
        return _Held(job, job.version, owner, held)

    def _take(self, before: _Held) -> None:
        left = minus(self.by_owner.get(before.owner, NOTHING), before.amounts)
        if any(left):
            self.by_owner[before.owner] = left
        else:
            self.by_owner.pop(before.owner, None)


def dominant(held: Amounts, total: Amounts) -> float:
    """The dominant share: the largest share of a resource, 0 … 1."""
    return max(amount / of if of else 0.0 for amount, of in zip(held, total, strict=True))
