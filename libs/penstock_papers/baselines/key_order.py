"""Order stage by a sort key: waiting jobs are tried by ascending key, those that do not fit are skipped, and
no job is stopped."""

from collections.abc import Iterable, Iterator
from heapq import heappop

from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.job_rows import Entry, JobRows, Row, go_on, goes_on, heads
from penstock.scheduling.service import Key
from penstock.scheduling.stages.protocols import Turns
from penstock_papers.baselines.preempting.claims import remaining_text


class KeyOrder:
    """Implements `penstock.scheduling.stages.protocols.Order`. Ties: by submission. After a job that did not
    fit no job of equal demand is tried."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._rows: JobRows[DemandKey] = JobRows(lambda state, job: (job.demand_key, key(state, job)))

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + demands) for the first, O(log demands) for the others."""
        self._rows.update(state)
        yield from skipping(state, [list(entries) for entries in self._rows.waiting.values()])

    def ranking(
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
