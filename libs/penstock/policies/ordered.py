"""Baselines that differ only in the order of the jobs: `sjf`, `srtf`, `srsf`.

The jobs are sorted by a key, ascending, ties by submission. From the front, each job that still fits is
chosen; one that does not is skipped and later ones are still tried. Sources: SRTF and SRSF as in Muri's
comparison (§6.1 there); shortest job first is the textbook rule. Nodes: first fit.
"""

from collections.abc import Callable
from heapq import heappop

from penstock.ledger.state import CellState, JobState
from penstock.policies.base import RunSet
from penstock.policies.baselines import FirstFit
from penstock.policies.replan import Nodes, holders
from penstock.policies.service import remaining_s
from penstock.policies.waiting import NO_MORE, Head, Waiting, go_on, heads, in_order

Key = Callable[[CellState, JobState], float]
"""≥ 0; the smallest runs first."""


shortest_remaining_time: Key = remaining_s
"""Seconds."""


def shortest_remaining_service(state: CellState, job: JobState) -> float:
    """GPU seconds: what is left, times the gang's GPUs. Without GPUs it is 0, even if the time is unknown."""
    workers, gpus = shape_of(job)
    return remaining_s(state, job) * (workers * gpus) if gpus else 0.0


Shape = tuple[int, int]
"""(workers, GPUs of each)."""


def always_first(state: CellState, job: JobState) -> float:
    """In place of a key: before all of them."""
    return -1.0


class Ordered(FirstFit):
    """Runs the jobs with the smallest keys. `preemptive=False`: what runs stays, whatever its key."""

    def __init__(self, name: str, key: Key, *, preemptive: bool) -> None:
        super().__init__(name)
        self._key = key
        self._preemptive = preemptive
        self._waiting = Waiting(lambda state, job: (shape_of(job), key(state, job)))

    def plan(self, state: CellState) -> RunSet:
        """Looks at jobs that run, and at the waiting ones with the smallest keys of each shape."""
        running, ending = holders(state)
        heap = self._heads(state, running)
        nodes = Nodes(state, ending)
        full: set[Shape] = set()
        chosen: list[str] = []
        some_need_none = not all(head[3][1] for head in heap)
        while heap and (nodes.free or some_need_none):
            _, _, job_id, shape, more = heap[0]
            if shape in full or not nodes.take(*shape):
                full.add(shape)
                heappop(heap)
                continue
            chosen.append(job_id)
            if more is NO_MORE:
                heappop(heap)
            else:
                go_on(heap)
        return RunSet(tuple(chosen))

    def ranking(self, state: CellState) -> list[str]:
        """By key. O(jobs · log jobs)."""
        return in_order([self._heads(state, holders(state)[0])])

    def _heads(self, state: CellState, running: list[JobState]) -> list[Head[Shape]]:
        key = self._key if self._preemptive else always_first
        entries = [(key(state, job), job.order, job.job_id, shape_of(job), NO_MORE) for job in running]
        return heads(entries, self._waiting.rows(state).values())


def shape_of(job: JobState) -> Shape:
    """What a plan counts of a gang. Only for jobs with an estimate."""
    assert job.estimate is not None, f"{job.job_id} has no estimate yet"
    return job.spec.workers, job.estimate.worker.gpus
