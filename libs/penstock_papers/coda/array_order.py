"""Order stage of profile `coda`: dominant resource fairness (DRF) inside each array. Source: CODA §V-C.

Jobs with reserved nodes come first, then the 4-GPU sub-array, the 1-GPU sub-array and the CPU array: training
has the higher priority (§V-A). In an array the next job is one of the owner who holds least of the dominant
resource: GPUs in the GPU array, both sub-arrays together; cores held by jobs without GPUs in the CPU array,
both counted from leases (`penstock.scheduling.order.shares`).
Ties, and the jobs of one owner: by submission. Jobs whose cores were reclaimed are at the head of the CPU
array, before all owners.

Departure from DRF: a job that does not fit is skipped, with all jobs of equal demand; the owner's other jobs
are tried, and may overtake it. The reclaim stage prevents starvation
(`penstock.scheduling.make_room.array_reclaim`).
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from penstock.ledger.fold.evolve_arrays import without_gpus
from penstock.ledger.fold.plans import units_of_profile
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.order.job_rows import Entry, JobRows, goes_on
from penstock.scheduling.order.shares import GPU, NOTHING, PARTS, Amounts, Holdings, amounts, plus
from penstock.scheduling.place.arrays import CPU, LARGE, SMALL, Array, array_of
from penstock.scheduling.stages.protocols import Turns
from penstock_papers.baselines.key_order import Ranked

ARRAYS: tuple[Array, ...] = (LARGE, SMALL, CPU)  # by priority (§V-A)
HEAD = ""
"""In place of an owner: the head of the CPU array."""
Row = tuple[object, ...]
"""(array, owner, demand)."""
Holder = tuple[bool, str]
"""(whether its jobs have GPUs, owner)."""


class ArrayOrder(Ranked):
    """Implements `penstock.scheduling.stages.protocols.Order`."""

    def __init__(self) -> None:
        self.rows: JobRows[Row] = JobRows(_row)
        self._holdings = Holdings(_holder)

    def order(self, state: CellState) -> Iterator[str]:
        """O(changes since the last call + owners) for the first job, O(log owners) for the others."""
        self.rows.update(state)
        self._holdings.update(state)
        first = [unit.job_id for unit in units_of_profile(state) if state.jobs[unit.job_id].in_line]
        yield from first
        passed = frozenset(first)
        for array in ARRAYS:
            yield from self._array(state, array, passed)

    def waits(self, state: CellState, array: Array) -> bool:
        """Whether any job waits for this array."""
        self.rows.update(state)
        return any(row[0] == array for row in self.rows.waiting)

    def _array(self, state: CellState, array: Array, passed: frozenset[str]) -> Iterator[str]:
        held = self._holdings.held
        heap: list[tuple[int, int, str, Row, Iterator[Entry[Row]]]] = []
        refused: set[Row] = set()

        def enter(row: Row, following: Iterator[Entry[Row]]) -> None:
            upcoming = next((one for one in following if one[2] not in passed), None)
            if upcoming is not None:
                heappush(heap, (_share(held, row), int(upcoming[1]), upcoming[2], row, following))

        for row, entries in list(self.rows.waiting.items()):
            if row[0] == array:
                enter(row, iter(list(entries)))
        while heap:
            share, order, job_id, row, following = heappop(heap)
            if row[2:] in refused:
                continue
            if share < (now := _share(held, row)):
                heappush(heap, (now, order, job_id, row, following))
                continue
            yield job_id
            if goes_on(state, job_id):
                self._holdings.update(state)
                enter(row, following)
            else:
                refused.add(row[2:])

    def ranked(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """A job that does not start is skipped, with the owner's other jobs of equal demand."""
        del at_ms
        held = self.held(self._holdings, state, holding)
        lines: dict[Row, list[JobState]] = {}
        for job in sorted(waiting, key=lambda job: job.order, reverse=True):
            lines.setdefault(_row(state, job)[0], []).append(job)
        for array in ARRAYS:
            heap = [_entry(held, row, line) for row, line in lines.items() if row[0] == array]
            heapify(heap)
            while heap:
                share, order, job_id, row = heappop(heap)
                if share < (now := _share(held, row)):
                    heappush(heap, (now, order, job_id, row))
                    continue
                job = lines[row].pop()
                if (yield job):
                    held[_holder(job)] = plus(held.get(_holder(job), NOTHING), amounts(job))
                    if lines[row]:
                        heappush(heap, _entry(held, row, lines[row]))

    def claim(self, state: CellState, job: JobState) -> str:
        """`1-GPU sub-array; ada holds 12 GPUs; submitted as record 812`."""
        array = array_of(job)
        if _row(state, job)[0][1] == HEAD:
            times = "once" if job.array.reclaims == 1 else f"{job.array.reclaims} times"
            return f"head of the {array}: its borrowed cores were reclaimed {times}"
        self._holdings.update(state)
        held = _share(self._holdings.held, _row(state, job)[0])
        has = f"{held / PARTS:g} cores" if array == CPU else f"{round(held / GPU, 2):g} GPUs"
        return f"{array}; {job.spec.owner} holds {has} of it; submitted as record {job.order}"


def _row(state: CellState, job: JobState) -> tuple[Row, float]:
    array = array_of(job)
    owner = HEAD if array == CPU and job.array.reclaims else job.spec.owner
    return (array, owner, *job.demand_key), float(job.order)


def _share(held: dict[Holder, Amounts], row: Row) -> int:
    """What the owner holds of the array's dominant resource: `Amounts` of GPUs or cores. -1: the head."""
    array, owner = row[0], row[1]
    if owner == HEAD:
        return -1
    found = held.get((array != CPU, str(owner)), NOTHING)
    return found[1] if array == CPU else found[0]


def _entry(held: dict[Holder, Amounts], row: Row, line: list[JobState]) -> tuple[int, int, str, Row]:
    return _share(held, row), line[-1].order, line[-1].job_id, row


def _holder(job: JobState) -> Holder:
    return not without_gpus(job), job.spec.owner
