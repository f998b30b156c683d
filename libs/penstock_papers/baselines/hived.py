"""`hived`: buddy allocation of GPUs in cells, so that small jobs break up as few large blocks of GPUs as
possible.

Source: HiveD (Zhao et al., OSDI '20) §3 – 4, a baseline of Liquid §7.4. A node's GPUs form cells of 1, 2, 4,
… GPUs, each beginning at a multiple of its size; above these come the node, the rack and the whole cluster. A
task takes the smallest free buddy cell that holds it; a larger one is split for it, and buddies that are free
again merge at once. So free cells need not be stored: they are the largest aligned blocks of free GPUs.

A gang takes the lowest level that holds it: one buddy cell, one node, one rack, several racks. Its workers
are placed one after the other; for each these are tried in order: nodes that the gang uses, other nodes of
its rack, and all others. Of these
1. where all remaining workers fit: the node with the smallest free cell that holds them together;
2. where they fit only in several cells: the node where they need the fewest;
3. where they do not all fit: the node that holds most of them.
If no node holds the whole gang, the rack is the one with the least room among those that hold it, else the
one with the most. Ties: the lower ordinal, the lower GPU.

Interpretation and departures. One virtual cluster: no cell is reserved for a tenant. As inside a virtual
cluster of the published scheduler, affinity is a preference: a task that finds no cell takes scattered GPUs
of one node, from the largest cells, and does not wait. A task whose number of GPUs is not a power of two
takes the first GPUs of its cell; the rest of the cell is split and free. A part of a GPU is placed on a GPU
that is already shared, if one holds it, else in a cell of one. Tasks without GPUs are placed on the lowest
ordinal. Cores, memory and bandwidth must fit but do not affect the score.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import Gang, best_of, place_greedily
from penstock.ledger.state.index import bits, lowest
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import full_mask
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import MAX_GPUS_PER_NODE, WHOLE_GPU, ResourceVector
from penstock_papers.baselines.rows import GangGpus

SCATTERED = 2 * MAX_GPUS_PER_NODE
"""Cost offset, above the size of any cell of a node."""
NOT_ALL = 4 * MAX_GPUS_PER_NODE
"""Score offset, above any score of a node that holds all remaining workers."""
FURTHER = 8 * MAX_GPUS_PER_NODE
"""Score offset, above any score of a node that is nearer to the gang."""
MAX_MASKS_CACHED = 4_096  # sets of free GPUs: a node with 8 GPUs has 256


class Block(NamedTuple):
    """A buddy cell; sorted by size."""

    size: int
    first: int


@lru_cache(maxsize=MAX_MASKS_CACHED)
def free_cells(mask: int) -> tuple[Block, ...]:
    """The free GPUs of a node as the largest aligned blocks of 1, 2, 4, …, smallest first."""
    found: list[Block] = []
    while mask:
        first = lowest(mask)
        size = 1
        while first % (2 * size) == 0 and not full_mask(2 * size) & ~(mask >> first):
            size *= 2
        found.append(Block(size, first))
        mask &= ~(full_mask(size) << first)
    return tuple(sorted(found))


def cost(mask: int, gpus: int) -> int:
    """Size of the cell that is broken up for so many GPUs of the free `mask`; `SCATTERED` + number of cells
    if no single cell holds them."""
    cells = free_cells(mask)
    for cell in cells:
        if cell.size >= gpus:
            return cell.size
    pieces = 0
    for cell in reversed(cells):
        gpus -= cell.size
        pieces += 1
        if gpus <= 0:
            break
    return SCATTERED + pieces


def choose(mask: int, gpus: int) -> tuple[int, ...]:
    """The chosen GPUs: of the smallest cell that holds them, else of the largest cells."""
    cells = free_cells(mask)
    for cell in cells:
        if cell.size >= gpus:
            return tuple(range(cell.first, cell.first + gpus))
    taken: list[int] = []
    for cell in sorted(cells, key=lambda cell: (-cell.size, cell.first)):
        taken += range(cell.first, cell.first + cell.size)
    return tuple(sorted(taken[:gpus]))


class BuddyCells:
    """See the module's docstring. Score of a job of one task: the size of the cell broken up."""

    name = "hived"

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """Examines every open node; no random choice."""
        search = _Search(state, job.demand.workers)
        plan = place_greedily(self.name, state, job, search.rank)
        return None if plan is None else search.gpus.named(plan, job)


class _Search:
    """The free cells during the placement of one gang."""

    def __init__(self, state: CellState, workers: int) -> None:
        self.gpus = GangGpus(state)
        self._state = state
        self._to_come = workers
        self._rack = 0
        """Nodes of the rack in which the gang is being placed."""
        self._promised: tuple[int, tuple[int, ...]] = (-1, ())
        """(ordinal, GPUs) of the cell that was chosen for all remaining workers."""

    def rank(self, gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        nodes, need = gang.open(is_worker), gang.need(is_worker)
        if not nodes:
            return []
        workers = self._to_come if is_worker else 1
        if not need.gpus:
            ranked = best_of([(0.0, nodes)], limit)
            chosen: tuple[int, ...] | None = ()
        elif need.gpu_share_milli < WHOLE_GPU:
            ranked = best_of(self._shares(nodes, need), limit)
            chosen = None if ranked[0][0] == 0 else choose(self._free(ranked[0][1]), 1)
        else:
            ranked = best_of(self._cells(gang, nodes, need, workers), limit)
            chosen = self._chosen(ranked[0][1], need.gpus, workers, self._fit(gang, ranked[0][1], need))
        self.gpus.take(ranked[0][1], need, chosen)
        if is_worker and not self._rack:
            self._rack = self._state.index.rack[self._state.node(ranked[0][1]).spec.rack]
        self._to_come -= is_worker
        return ranked

    def _free(self, ordinal: int) -> int:
        """Wholly free GPUs, less the gang's own."""
        row = self.gpus.rows.get(ordinal)
        if row is not None:
            return row.whole
        node = self._state.node(ordinal)
        return node.healthy_gpu_mask

    def _shares(self, nodes: int, need: ResourceVector) -> Iterator[tuple[float, int]]:
        """0 where a shared GPU holds the task, else the size of the cell broken up."""
        for ordinal in bits(nodes):
            row = self.gpus.row(ordinal)
            given = any(row.shares[gpu] < WHOLE_GPU for gpu in row.fitting(need))
            yield 0.0 if given else float(cost(row.whole, 1)), 1 << ordinal

    def _fit(self, gang: Gang, ordinal: int, need: ResourceVector) -> int:
        """How many such tasks still fit on the node."""
        free = gang.free(ordinal)
        return min(
            have // asked
            for have, asked in (
                (free.gpus, need.gpus),
                (free.cores, need.cores),
                (free.host_memory_mib, need.host_memory_mib),
                (free.bandwidth_mbps, need.bandwidth_mbps),
            )
            if asked
        )

    def _cells(
        self, gang: Gang, nodes: int, need: ResourceVector, workers: int
    ) -> Iterator[tuple[float, int]]:
        fits = {ordinal: self._fit(gang, ordinal, need) for ordinal in bits(nodes)}
        if workers > 1 and not self._rack & nodes and max(fits.values()) < workers:
            self._rack = self._roomiest(nodes, fits, workers)
        for ordinal, fit in fits.items():
            bit = 1 << ordinal
            if fit >= workers:
                score = cost(self._free(ordinal), workers * need.gpus)
            else:
                score = NOT_ALL + MAX_GPUS_PER_NODE - fit
            if gang.used or self._rack:
                score += FURTHER * (0 if bit & gang.used else 1 if bit & self._rack else 2)
            yield float(score), bit

    def _roomiest(self, nodes: int, fits: dict[int, int], workers: int) -> int:
        """The nodes of the rack with the least room that holds all remaining workers, else of the rack with
        the most room."""
        rooms = [
            (sum(fits[ordinal] for ordinal in bits(nodes & rack)), lowest(nodes & rack), rack)
            for rack in self._state.index.rack.values()
            if nodes & rack
        ]
        holding = [(room, first, rack) for room, first, rack in rooms if room >= workers]
        if holding:
            return min(holding)[2]
        return min((-room, first, rack) for room, first, rack in rooms)[2]

    def _chosen(self, ordinal: int, gpus: int, workers: int, fit: int) -> tuple[int, ...]:
        """The next worker's GPUs; where all remaining workers share a cell,
        each takes the next GPUs of it."""
        at, promised = self._promised
        if at != ordinal or len(promised) < gpus:
            mask = self._free(ordinal)
            together = fit >= workers and cost(mask, workers * gpus) < SCATTERED
            promised = choose(mask, workers * gpus if together else gpus)
        self._promised = ordinal, promised[gpus:]
        return promised[:gpus]
