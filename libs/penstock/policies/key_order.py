"""Order stage by a key: of the jobs that wait the smallest key is tried first, those that do not fit are passed over, and nobody is stopped."""

from collections.abc import Iterable, Iterator
from heapq import heappop

from penstock.ledger.demand import DemandKey
from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.policies.base import Turns
from penstock.policies.job_rows import JobRows, go_on, goes_on, heads
from penstock.policies.ordered import Key
from penstock.policies.service import remaining_text


class KeyOrder:
    """Implements `penstock.policies.base.Order`. Ties: by submission. Of jobs with equal demands none is tried behind one that did not fit."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._rows: JobRows[DemandKey] = JobRows(lambda state, job: (job.demand.key, key(state, job)))

    def order(self, state: CellState) -> Iterator[str]:
        """O(what has changed + demands) for the first, O(log demands) for the others."""
        self._rows.update(state)
        heap = heads([], [list(entries) for entries in self._rows.waiting.values()])
        while heap:
            job_id = heap[0][2]
            yield job_id
            if goes_on(state, job_id):
                go_on(heap)
            else:
                heappop(heap)

    def ranking(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """Who does not start is passed over."""
        del holding, at_ms
        for job in sorted(waiting, key=lambda one: (self._key(state, one), one.order)):  # noqa: UP028 - a list takes no `send`
            yield job

    def claim(self, state: CellState, job: JobState) -> str:
        """Its remaining time."""
        return remaining_text(state, job)
