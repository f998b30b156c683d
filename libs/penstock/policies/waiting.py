"""Sorted waiting lists, one per shape of job: a plan looks at the jobs that may run, not at all that wait.

While a job waits and reports nothing, its key does not change. So the rows are cached from plan to plan and updated
with the jobs in `CellState.change_log`. Their content is a function of the state alone: a new policy object, or one
that is given another state, builds the same rows from nothing.

Within one plan free capacity only shrinks. So when one job of a row does not fit, no job behind it in that row does, and
the whole row is passed over: a plan costs O(jobs that run + rows), however many wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedList

from penstock.ledger.state import CellState, JobState

Row = TypeVar("Row", bound=tuple[object, ...])
Entry = tuple[float, int, str, Row]
"""(key, order, job id, row); no two are equal in the first two."""
NO_MORE: Iterator[Any] = iter(())


class Waiting(Generic[Row]):
    """`place`: a waiting job → (its row, its key there). Jobs of one row must have the same demand."""

    def __init__(self, place: Callable[[CellState, JobState], tuple[Row, float]]) -> None:
        self._place = place
        self._state: CellState | None = None
        self._read = 0
        self._rows: dict[Row, SortedList[Entry[Row]]] = {}
        self._entered: dict[str, Entry[Row]] = {}

    def rows(self, state: CellState) -> Mapping[Row, "SortedList[Entry[Row]]"]:
        """Row → its jobs in order; no row is empty. O(changes since the last call · log jobs)."""
        changed = state.change_log.since(self._read) if state is self._state else None
        if changed is None:
            self._state = state
            self._rows.clear()
            self._entered.clear()
            changed = list(state.queue.values())
        for job_id in changed:
            self._update(state, job_id)
        self._read = state.change_log.count
        return self._rows

    def _update(self, state: CellState, job_id: str) -> None:
        before = self._entered.pop(job_id, None)
        if before is not None:
            row = self._rows[before[3]]
            row.remove(before)
            if not row:
                del self._rows[before[3]]
        job = state.jobs.get(job_id)
        if job is None or not job.in_line:
            return
        name, key = self._place(state, job)
        entry = self._entered[job_id] = key, job.order, job_id, name
        if name not in self._rows:
            self._rows[name] = SortedList()
        self._rows[name].add(entry)


Head = tuple[float, int, str, Row, Iterator[Entry[Row]]]
"""An entry, and the iterator that gives those after it."""


def heads(singles: list[Head[Row]], rows: Iterable[Iterable[Entry[Row]]]) -> list[Head[Row]]:
    """Makes of single entries (jobs that run, each with `NO_MORE`) a heap that also has the first entries of rows.

    Read with `go_on` and `heappop`: `heappop` passes over the first entry and all that follow it in its row, `go_on` over the
    entry alone.
    """
    for row in rows:
        more = iter(row)
        singles.append((*next(more), more))
    heapify(singles)
    return singles


def go_on(heap: list[Head[Row]]) -> None:
    """To the next entry of the first one's row, if there is one."""
    more = heap[0][4]
    following = None if more is NO_MORE else next(more, None)
    if following is None:
        heappop(heap)
    else:
        heapreplace(heap, (*following, more))


def in_order(heaps: Iterable[list[Head[Row]]]) -> list[str]:
    """Ids of all jobs in these heaps, one heap after the other; empties them."""
    ids: list[str] = []
    for heap in heaps:
        while heap:
            ids.append(heap[0][2])
            go_on(heap)
    return ids
