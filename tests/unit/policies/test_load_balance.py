"""Slowdown by neighbours, learned from step times, and moves where all jobs together end earlier."""

from functools import partial
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.model.external_events import StepsMeasured
from penstock.model.moves import MAX_MIGRATIONS
from penstock.model.settings import Convergence, PlacerSettings
from penstock.policies.crowding import Crowding, busy_cores, share_of
from penstock.policies.load_balance import LoadBalance, Sharer, sum_of_completions_s
from penstock.policies.migrate import Migration, Seen
from tests.support.driver import CellDriver, estimate, job_spec, node_spec

STEP_MS = 100.0


class Crowded(CellDriver):
    """Two nodes; jobs of a core each, whose steps take `exponent` of their share of the node; someone watches from the beginning."""

    def __init__(self, exponent: float = 1.0) -> None:
        super().__init__(PlacerSettings(profile="balance"))
        self.exponent, self.done = exponent, dict[str, int]()
        self.crowding = Crowding()
        self.join(node_spec("n1"), node_spec("n2"))

    def runs(self, job_id: str, run_ms: int = 600_000) -> None:
        spec = job_spec(checkpoint="signal")
        self.submit(job_id, spec, replace(estimate(gpus=0, cores=1), run_ms=run_ms))
        self.start(job_id)
        self.crowding.changed(self.state, job_id, self.now_ms)

    def ends(self, job_id: str) -> None:
        node = self.where(job_id)
        self.exit(next(iter(self.job(job_id).tasks)))
        self.crowding.changed(self.state, job_id, self.now_ms, node)

    def where(self, job_id: str) -> str:
        return next(iter(self.job(job_id).tasks.values())).place.node_id

    def passes(self, ms: int, *jobs: str, reports: bool = True) -> None:
        """Time in which the shares stay; then these jobs report their steps."""
        self.now_ms += ms
        self.state.now_ms = self.now_ms
        for job_id in jobs if reports else ():
            job = self.job(job_id)
            step_ms = STEP_MS * share_of(job, partial(busy_cores, self.state)) ** -self.exponent
            steps = int(ms / step_ms)
            self.done[job_id] = self.done.get(job_id, 0) + steps
            fact = StepsMeasured(
                node_id=self.where(job_id), task_id=next(iter(job.tasks)), token=job.token, at_ms=0,
                done=self.done[job_id], total=10_000, steps=steps, step_ms=step_ms,
            )  # fmt: skip
            self.crowding.measured(self.state, fact, self.now_ms)

    def learns(self) -> None:
        """Others come to the first job's node and go."""
        self.runs("a")
        for number in range(4):
            self.passes(60_000, "a")
            self.runs(f"x{number}")
            self.runs(f"y{number}")
            self.passes(60_000, "a")
            for other in (f"x{number}", f"y{number}"):
                self.ends(other)

    def moves(self) -> list[Migration]:
        return list(
            LoadBalance(Convergence()).migrations(self.state, Seen(self.now_ms, {}, self.crowding, ()))
        )


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_the_slowdown_by_neighbours_is_learned(exponent: float) -> None:
    """Pinned cores: nobody slows anybody. Taking turns: half the share, twice the step. And in between."""
    cell = Crowded(exponent)
    assert not cell.crowding.matters()
    cell.learns()
    found = cell.crowding.exponent(gpus=False)
    assert found == pytest.approx(exponent, abs=0.2)
    assert cell.crowding.exponent(gpus=True) == 0.0
    assert cell.crowding.matters() is (exponent > 0)


def test_where_neighbours_do_not_matter_nobody_moves() -> None:
    """Five jobs on one node and none on the other, and all as fast as alone."""
    cell = Crowded(0.0)
    cell.learns()
    crowd(cell)
    assert cell.moves() == []


def crowd(cell: Crowded) -> None:
    """Jobs on both nodes of which those on the second all end."""
    for number in range(9):
        cell.runs(f"j{number}")
    for number in range(9):
        if cell.where(f"j{number}") != cell.where("a"):
            cell.ends(f"j{number}")


def test_a_job_leaves_a_crowd_for_an_idle_node() -> None:
    """All jobs of one node have ended. The move that gains most is proposed, with what it gains and costs."""
    cell = Crowded()
    cell.learns()
    crowd(cell)
    [found] = cell.moves()
    here = cell.where(found.job_id)
    assert found.nodes == ({"n1": "n2", "n2": "n1"}[here],)
    assert found.cause == "faster"
    assert "s earlier in sum" in found.reason


def test_who_may_not_move_stays() -> None:
    """It does not save, may not be stopped, was moved four times, or the cell is frozen: the others are looked at."""
    cell = Crowded()
    cell.learns()
    crowd(cell)
    for job in cell.state.jobs.values():
        job.migrations = MAX_MIGRATIONS
    assert cell.moves() == []
    for job in cell.state.jobs.values():
        job.migrations = 0
    cell.state.frozen = "nodes vanished"
    assert cell.moves() == []


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 7_000])), max_size=14))
def test_shares_are_those_of_a_watcher_that_begins_now(changes: list[tuple[int, int]]) -> None:
    """Jobs start and end, several at one moment: what is booked from change to change is the share that a look at the whole node finds."""
    cell = Crowded()
    for number, (slot, pause_ms) in enumerate(changes):
        cell.passes(pause_ms)
        running = [job.job_id for job in cell.state.holding.values()]
        if slot < len(running):
            cell.ends(running[slot])
        else:
            cell.runs(f"j{number}")
        for job in cell.state.holding.values():
            followed = cell.crowding.progress(cell.state, job, cell.now_ms)
            fresh = Crowding().progress(cell.state, job, cell.now_ms)
            assert followed is not None
            assert fresh is not None
            assert followed.share == pytest.approx(fresh.share)
            assert followed.left_s == pytest.approx(fresh.left_s)


def test_a_watcher_that_begins_late_knows_all_who_run() -> None:
    """The migrator is started anew: who runs is followed from when it is asked about, with what it has done until then."""
    cell = Crowded()
    cell.runs("a")
    cell.runs("b")
    cell.passes(60_000, reports=False)
    late = Crowding()
    for job_id in ("a", "b"):
        found = late.progress(cell.state, cell.job(job_id), cell.now_ms)
        assert found is not None
        assert 0 < found.left_s < 600
    cell.ends("a")


def test_three_jobs_end_when_processor_sharing_has_them_end() -> None:
    """10, 20 and 30 s alone, equal cores: at 30, 50 and 60 s; where neighbours do not matter at 10, 20 and 30 s."""
    for exponent, expected in ((1.0, 30 + 50 + 60), (0.0, 60)):
        sharers = [Sharer(name, 1, left_s, exponent) for name, left_s in (("a", 10), ("b", 20), ("c", 30))]
        assert sum_of_completions_s(sharers) == pytest.approx(expected)
    assert sum_of_completions_s([]) == 0


@given(
    st.lists(st.tuples(st.floats(0.01, 1e6) | st.just(0.0), st.integers(1, 64)), max_size=12),
    st.floats(0, 1),
)
def test_sums_of_completions_are_bounded(found: list[tuple[float, int]], exponent: float) -> None:
    """Between all at once alone and one after the other for everybody; never endless."""
    sharers = [Sharer(str(number), cores, left_s, exponent) for number, (left_s, cores) in enumerate(found)]
    total = sum_of_completions_s(sharers)
    alone = sum(one.left_s for one in sharers)
    assert alone * (1 - 1e-6) - 1e-6 <= total <= len(sharers) * alone * 64 + 1e-6
    assert total < inf
