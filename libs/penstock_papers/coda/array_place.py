"""Place stage of profile `coda`: nodes by array, with borrowing between arrays. Source: CODA §V-C.

- *Jobs without GPUs* are placed where cores of the CPU array are free; else they borrow idle reserved cores.
  Source: "if the GPU resource array is relatively idle"; departure: also while jobs with GPUs wait, since
  these cannot use the idle cores, and later ones reclaim them.
- *Jobs of four GPUs and more* are placed in the 4-GPU sub-array, then on other nodes that fit.
- *Jobs of fewer GPUs* are placed in the 1-GPU sub-array; then, in the 4-GPU sub-array, on GPUs beyond
  multiples of four, which no job of four could use; then they borrow there, unless a job of four or more
  waits.
- Jobs with GPUs take idle cores of either array, and do not give them back.

Inside each step: fewest free GPUs first, then fewest free cores (best fit), so that whole nodes and nodes
with many cores stay free; ties: the lowest ordinal. The source names no choice there. Nodes reserved for
other jobs (`PlanUnit`) are left out. Score: 100 × step + free GPUs + free cores / 2,048.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import EVERYWHERE, Gang, Rank, place_greedily
from penstock.ledger.state.arrays import LARGE_GPUS
from penstock.ledger.state.index import Free, bits, set_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.place.arrays import CPU, LARGE, SMALL, Array, array_of, large_nodes
from penstock.scheduling.place.borrowing import borrowing, reserved_for
from penstock_papers.coda.array_order import ArrayOrder

MAX_LOOKED_AT = 64  # nodes of one class, the lowest ordinals first
OWN, FIRST, SPARE, BORROWED = range(
    4
)  # steps, in this order; OWN: nodes on which the gang already has a task
PER_STEP = 100.0  # above all GPUs and cores of any node
PER_CORE = 1 / 2_048  # below one GPU for any node


class ArrayPlace:
    """Implements `penstock.scheduling.stages.protocols.Policy`."""

    def __init__(self, name: str, order: ArrayOrder) -> None:
        self.name = name
        self._order = order

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """Places the job on nodes reserved for it if it fits there,
        else on nodes that are reserved for no job."""
        del rng
        own, others = reserved_for(state, job, state.planned.values())
        if own:
            found = self._within(own, state, job, waits=False)  # those that wait may not use them either
            if found is not None:
                return found
        return self._within(EVERYWHERE & ~others, state, job, waits=self._order.waits(state, LARGE))

    def _within(self, within: int, state: CellState, job: JobState, *, waits: bool) -> Plan | None:
        """Places the job on nodes of this set. `waits`: a job of four GPUs or more does, so that small ones
        do not borrow."""
        demand = job.demand
        index = state.index
        if not index.candidates(demand.worker, demand.where) & within:
            return None
        array = array_of(job)
        plan = place_greedily(self.name, state, job, _rank(state, array, waits=waits), within=within)
        return None if plan is None else borrowing(state, job, plan)


def _rank(state: CellState, array: Array, *, waits: bool) -> Rank:
    large = large_nodes(state)

    def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        nodes = gang.open(is_worker)
        if array == CPU:
            classes = _for_cores(gang, nodes, gang.need(is_worker).cores)
        elif array == LARGE or not is_worker:
            classes = _for_large(gang, nodes, large if is_worker else 0)
        else:
            classes = _for_small(gang, nodes, large, gang.need(is_worker).gpus, waits=waits)
        return _best(gang, classes, array, limit)

    return rank


Classes = Iterable[tuple[int, int, int]]
"""(step, free GPUs, nodes)."""


def _by_load(gang: Gang, nodes: int) -> Iterator[tuple[int, int]]:
    """(free GPUs, nodes), less what this plan has taken."""
    for (used, total), having in gang.state.index.load.items():
        if here := having & nodes & ~gang.used:
            yield total - used, here
    for ordinal in bits(nodes & gang.used):
        yield gang.free(ordinal).gpus, 1 << ordinal


def _for_cores(gang: Gang, nodes: int, cores: int) -> Classes:
    index = gang.state.index
    within = index.unreserved_cores.having(cores) if gang.state.arrays.cores_per_gpu_milli >= 0 else nodes
    for ordinal in bits(gang.used & nodes):
        if 0 <= gang.free(ordinal).unreserved_cores < cores:
            within &= ~(1 << ordinal)
    for free, having in _by_load(gang, nodes):
        if here := having & within:
            yield FIRST, free, here
        if here := having & ~within:
            yield BORROWED, free, here


def _for_large(gang: Gang, nodes: int, large: int) -> Classes:
    for free, having in _by_load(gang, nodes):
        if here := having & large:
            yield OWN if here & gang.used else FIRST, free, here
        if here := having & ~large:
            yield OWN if here & gang.used else BORROWED, free, here


def _for_small(gang: Gang, nodes: int, large: int, gpus: int, *, waits: bool) -> Classes:
    for free, having in _by_load(gang, nodes):
        if here := having & ~large:
            yield OWN if here & gang.used else FIRST, free, here
        if not (here := having & large):
            continue
        if waits:
            here = set_of(ordinal for ordinal in bits(here) if _spare(gang.state, ordinal, gpus))
            if here:
                yield SPARE, free, here
        elif (free - gpus) // LARGE_GPUS == free // LARGE_GPUS:
            yield SPARE, free, here
        else:
            yield BORROWED, free, here


def _spare(state: CellState, ordinal: int, gpus: int) -> bool:
    """Whether so many more GPUs for small jobs take only GPUs of the node beyond its multiples of four."""
    node = state.node(ordinal)
    total = len(node.spec.gpus)
    held = 0
    for task_id, job_id in node.tasks.items():
        job = state.jobs[job_id]
        if array_of(job) == SMALL:
            held += len(job.tasks[task_id].place.gpus)
    return held + gpus <= total % LARGE_GPUS


def _best(gang: Gang, classes: Classes, array: Array, limit: int) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    for step, free, nodes in sorted(classes):
        if len(found) >= limit:
            break
        base = PER_STEP * step + free
        found += [
            (base + PER_CORE * _cores(gang.free(ordinal), array), ordinal)
            for ordinal in islice(bits(nodes), MAX_LOOKED_AT)
        ]
    found.sort()
    return found[:limit]


def _cores(free: Free, array: Array) -> int:
    return free.cores if array != CPU or free.unreserved_cores < 0 else free.unreserved_cores
