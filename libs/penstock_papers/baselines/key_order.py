"""Order stage by a sort key: waiting jobs are tried by ascending key, those that do not fit are skipped, and
no job is stopped."""

from collections.abc import Hashable, Iterable, Iterator
from heapq import heappop
from typing import TypeVar

from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.job_rows import Entry, JobRows, Row, goes_on
from penstock.scheduling.order.shares import Amounts, Holdings, IfHeld
from penstock.scheduling.remaining_time import Key
from penstock.scheduling.stages.protocols import Ranking, Turns
from penstock_papers.baselines.preempting.claims import remaining_text
from penstock_papers.baselines.preempting.ordered import go_on, heads

_T = TypeVar("_T", bound=Hashable)


class Ranked:
    """Orders whose what-ifs (`penstock.scheduling.stages.protocols.Ranking`) are ranked anew each time."""

    def ranked(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """The order if at `at_ms` the jobs `waiting` waited and the jobs `holding` held resources."""
        raise NotImplementedError

    def ranking(self, state: CellState, waiting: Iterable[JobState] | None = None) -> Ranking:
        """As `penstock.scheduling.stages.protocols.Order`."""
        queue = (state.jobs[job_id] for job_id in state.queue.values())
        return _Anew(self, state, queue if waiting is None else waiting)

    def held(
        self, holdings: Holdings[_T], state: CellState, holding: Iterable[JobState]
    ) -> dict[_T, Amounts]:
        """What tenants hold if exactly these jobs hold resources."""
        found = IfHeld(state, holdings)
        jobs = {job.order: job for job in holding}
        for order in state.holding.keys() - jobs.keys():
            found.ends(state.holding[order])
        for order in jobs.keys() - state.holding.keys():
            found.starts(jobs[order])
        return found.held


class _Anew:
    """Implements `Ranking`."""

    def __init__(self, order: Ranked, state: CellState, waiting: Iterable[JobState]) -> None:
        self._order, self._state = order, state
        self._waiting = {job.order: job for job in waiting}
        self._holding = dict(state.holding)

    def turns(self, at_ms: int) -> Turns:
        waiting, holding = list(self._waiting.values()), list(self._holding.values())
        turns = self._order.ranked(self._state, waiting, holding, at_ms)
        job = next(turns, None)
        while job is not None:
            started = yield job
            if started:
                self._holding[job.order] = self._waiting.pop(job.order)
            try:
                job = turns.send(started)
            except StopIteration:
                return

    def ends(self, job: JobState) -> None:
        del self._holding[job.order]


class KeyOrder(Ranked):
    """Implements `penstock.scheduling.stages.protocols.Order`. Ties: by submission. After a job that did not
    fit no job of equal demand is tried."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._rows: JobRows[DemandKey] = JobRows(lambda state, job: (job.demand_key, key(state, job)))

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + demands) for the first, O(log demands) for the others."""
        self._rows.update(state)
        yield from skipping(state, [list(entries) for entries in self._rows.waiting.values()])

    def ranked(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """A job that does not start is skipped."""
        del holding, at_ms
        ordered = sorted(waiting, key=lambda one: (self._key(state, one), one.order))
        for job in ordered:  # noqa: UP028 - a list takes no `send`
            yield job

    def claim(self, state: CellState, job: JobState) -> str:
        """Its remaining time."""
        return remaining_text(state, job)


def skipping(state: CellState, rows: Iterable[Iterable[Entry[Row]]]) -> Iterator[str]:
    """Ids of the waiting jobs of all rows, by key: after a job that does not start (`goes_on`) the others of
    its row are skipped."""
    heap = heads([], rows)
    while heap:
        job_id = heap[0][2]
        yield job_id
        if goes_on(state, job_id):
            go_on(heap)
        else:
            heappop(heap)
