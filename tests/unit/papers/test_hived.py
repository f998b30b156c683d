"""Buddy cells: which block of GPUs is broken up, and the policy against an allocator with split and merge."""

import numpy as np
import pytest

from penstock.cluster.chance import LazyRng
from penstock.cluster.view import assign
from penstock.ledger.check.check import check
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import TaskPlacement
from penstock_papers.baselines.hived import Block, BuddyCells, choose, cost, free_cells
from tests.support.cluster import builders as b

POLICY = BuddyCells()


def run(state: CellState, job_id: str, gpus: int, workers: int = 1) -> JobState:
    job = b.queued(state, job_id, workers=workers, worker=b.need(gpus=gpus))
    b.placed(state, job, POLICY)
    return job


def places(job: JobState) -> list[tuple[str, tuple[int, ...]]]:
    ranked = sorted((task.place for task in job.tasks.values()), key=lambda place: place.rank)
    return [(place.node_id, place.gpus) for place in ranked]


def test_free_gpus_as_cells() -> None:
    """GPUs 1, 2 and 3 are a cell of one and one of two: 1 and 2 are neighbours, but no buddies."""
    assert free_cells(0b1110) == (Block(1, 1), Block(2, 2))
    assert free_cells(0b1111_0110) == (Block(1, 1), Block(1, 2), Block(4, 4))
    assert free_cells(0xFFFF) == (Block(16, 0),)
    assert free_cells(0b11_1111) == (Block(2, 4), Block(4, 0)), "a node of six"
    assert free_cells(0) == ()
    assert choose(0b1111_0110, 3) == (4, 5, 6), "the smallest cell that holds three"
    assert choose(0b1111_0110, 5) == (1, 4, 5, 6, 7), "no cell holds five: the largest cells"
    assert cost(0b1111_0110, 1) == 1


def test_small_jobs_break_up_what_is_broken_already() -> None:
    """Three single GPUs and a pair: the pair is whole, and an eight-GPU job still finds the second node."""
    state = b.cell(nodes=2, gpus=8)
    assert places(run(state, "one", 1)) == [("n0", (0,))]
    assert places(run(state, "pair", 2)) == [("n0", (2, 3))], "its buddy is of two GPUs, not 1 and 2"
    assert places(run(state, "two", 1)) == [("n0", (1,))]
    assert places(run(state, "three", 1)) == [("n0", (4,))]
    assert places(run(state, "eight", 8)) == [("n1", (0, 1, 2, 3, 4, 5, 6, 7))]


def test_buddies_merge_when_both_are_free() -> None:
    """Two singles end in the middle of a node: what is free is one cell of four again, for a job of four."""
    state = b.cell(nodes=1, gpus=4)
    jobs = [run(state, f"one-{i}", 1) for i in range(4)]
    for job in (jobs[1], jobs[2]):
        b.exited(state, job)
    assert [cell.size for cell in free_cells(state.nodes["n0"].free_gpu_mask)] == [1, 1]
    b.exited(state, jobs[0])
    b.exited(state, jobs[3])
    assert places(run(state, "four", 4)) == [("n0", (0, 1, 2, 3))]


def test_a_gang_takes_the_lowest_level_that_holds_it() -> None:
    """Workers of two GPUs: two of them share one cell of four; five fill most of a rack; the rest of it stays
    whole.

    Racks 0 and 1 have two nodes each (n0, n2 and n1, n3), of eight GPUs.
    """
    state = b.cell(nodes=4, gpus=8, racks=2)
    run(state, "one", 1)
    assert places(run(state, "gang", 2, workers=2)) == [("n0", (4, 5)), ("n0", (6, 7))]
    large = places(run(state, "large", 4, workers=3))
    assert [node for node, _ in large] == ["n1", "n1", "n3"], "rack 0 holds two such workers only"
    huge = b.queued(state, "huge", workers=3, worker=b.need(gpus=4))
    plan = POLICY.place(state, huge, LazyRng(0, "x"))
    assert plan is not None
    assert set(plan.nodes) == {"n2", "n3"}, "no rack holds it"


def test_the_rack_with_least_room_is_taken() -> None:
    """Two racks could hold a gang of two whole nodes; the one with a third free node is left for larger
    gangs."""
    state = b.cell_of([b.node(f"n{i}", gpus=4, rack="left" if i < 3 else "right") for i in range(5)])
    assert [node for node, _ in places(run(state, "gang", 4, workers=2))] == ["n3", "n4"]


def test_odd_numbers_and_odd_nodes_wait_for_nobody() -> None:
    """Three GPUs on a node of six: the first three of a cell of four; then two cells, since none holds
    three."""
    state = b.cell(nodes=1, gpus=6)
    assert places(run(state, "three", 3)) == [("n0", (0, 1, 2))]
    assert places(run(state, "more", 3)) == [("n0", (3, 4, 5))]


def test_parts_of_a_gpu_go_together() -> None:
    """Two jobs of half a GPU share one, though each of the other GPUs is free."""
    state = b.cell(nodes=2, gpus=4)
    run(state, "pair", 2)
    for number in range(2):
        job = b.queued(state, f"half-{number}", worker=b.need(gpu_share_milli=500))
        b.placed(state, job, POLICY)
        assert places(job) == [("n0", (2,))]


class Buddies:
    """The textbook's allocator of one node: lists of free cells by size, split on request, merged on
    return."""

    def __init__(self, gpus: int) -> None:
        self.free: dict[int, set[int]] = {1 << level: set() for level in range(gpus.bit_length())}
        self.free[gpus] = {0}
        self.most = gpus

    def smallest(self, size: int) -> int | None:
        """Size of the smallest free cell that holds so many."""
        return next((have for have in sorted(self.free) if have >= size and self.free[have]), None)

    def take(self, size: int) -> int:
        have = self.smallest(size)
        assert have is not None
        first = min(self.free[have])
        self.free[have].remove(first)
        while have > size:
            have //= 2
            self.free[have].add(first + have)
        return first

    def give(self, first: int, size: int) -> None:
        while size < self.most and first ^ size in self.free[size]:
            self.free[size].remove(first ^ size)
            first &= ~size
            size *= 2
        self.free[size].add(first)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_cells_as_with_split_and_merge(seed: int) -> None:
    """Jobs of 1, 2, 4 and 8 GPUs come and go on four nodes; the allocator remembers its cells, the policy
    nothing."""
    rng = np.random.default_rng(seed)
    state = b.cell(nodes=4, gpus=8)
    nodes = {f"n{i}": Buddies(8) for i in range(4)}
    living: list[TaskPlacement] = []
    placed = refused = 0
    for number in range(200):
        if living and rng.random() < 0.4:
            place = living.pop(int(rng.integers(len(living))))
            b.exited(state, state.jobs[place.task_id.split(".")[0]])
            nodes[place.node_id].give(place.gpus[0], len(place.gpus))
            continue
        size = 1 << int(rng.integers(4))
        job = b.queued(state, f"job-{number}", worker=b.need(gpus=size, host_memory_mib=1))
        cells = [(have, node) for node, buddies in nodes.items() if (have := buddies.smallest(size))]
        plan = POLICY.place(state, job, LazyRng(0, "x"))
        if not cells:
            refused += 1
            assert plan is None or cost(state.nodes[plan.nodes[0]].free_gpu_mask, size) > 8
            continue
        _, node = min(cells)
        first = nodes[node].take(size)
        assert plan is not None
        b.apply(state, assign(state, job, plan))
        assert job.status is JobStatus.LAUNCHING
        assert places(job) == [(node, tuple(range(first, first + size)))]
        assert plan.explanation.candidates[0].score == min(cells)[0]
        placed += 1
        living += [task.place for task in job.tasks.values()]
        assert check(state) == []
    assert placed > 60
    assert refused > 3
