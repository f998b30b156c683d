"""`drf`: dominant resource fairness (DRF) between the owners of jobs.

Source: Ghodsi et al., NSDI '11, Algorithm 1. An owner's dominant share is the largest of four shares: what
the owner's leases hold (`penstock.scheduling.order.shares`) of GPUs (by share), cores, host memory and
bandwidth, each divided by the total of the cell's nodes that are not gone. The next job is the earliest job
of the owner with the smallest dominant share (ties: the owner whose next job was submitted first). Placing it
raises the share, and the choice is made again. No job is stopped: shares converge as jobs end. Nodes: first
fit.

Interpretation and departures. The source's task is a gang here, all or nothing. The source stops when the
next task does not fit; here its owner is skipped until resources are freed, and the other owners' jobs are
tried, else a large gang would block a cell that others could use. No job overtakes another of the same owner,
so with one owner this is `fifo-strict`. Owners have equal weights.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.job_rows import Entry, JobRows, goes_on
from penstock.scheduling.order.shares import (
    NOTHING,
    Holdings,
    amounts,
    at_least,
    capacity,
    dominant,
    owner_of,
    plus,
)
from penstock.scheduling.stages.protocols import Turns
from penstock_papers.baselines.baselines import FirstFit
from penstock_papers.baselines.key_order import Ranked


class DominantResourceFairness(FirstFit, Ranked):
    """Implements `penstock.scheduling.stages.protocols.Order`."""

    def __init__(self, name: str = "drf") -> None:
        super().__init__(name)
        self._rows = JobRows(by_owner)
        self._held = Holdings(owner_of)

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + owners) for the first, O(log owners) for the others."""
        self._rows.update(state)
        rows = self._rows.waiting
        if not rows:
            return
        self._held.update(state)
        heap: list[tuple[float, int, str, str, Iterator[Entry[tuple[str]]]]] = []

        def enter(owner: str, following: Iterator[Entry[tuple[str]]]) -> None:
            upcoming = next(following, None)
            if upcoming is not None:
                share = self._held.share(owner)
                heappush(heap, (share, upcoming[1], upcoming[2], owner, following))

        for (owner,), entries in rows.items():
            enter(owner, iter(entries))
        while heap:
            _, _, job_id, owner, following = heappop(heap)
            yield job_id
            if goes_on(state, job_id):
                self._held.update(state)
                enter(owner, following)

    def ranked(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """An owner whose next job does not start is skipped."""
        del at_ms
        held = self.held(self._held, state, holding)
        total = at_least(capacity(state), held)
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
        held = self._held.share(job.spec.owner)
        return f"{job.spec.owner} holds {held:.0%} of the cell; submitted as record {job.order}"


def by_owner(state: CellState, job: JobState) -> tuple[tuple[str], float]:
    """(Row of the owner, sort key by submission)."""
    return (job.spec.owner,), float(job.order)
