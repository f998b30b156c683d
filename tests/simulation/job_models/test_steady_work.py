"""The work that job models share: whoever comes and goes, no work is lost or made up."""

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.simulator.job_models.model import (
    Allocation,
    Constant,
    End,
    JobModel,
    LossReport,
    PhaseChange,
    Placement,
)
from penstock.simulator.job_models.sharing import Phases, SharedNode
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import job

LAUNCH_S, SAVE_S = 7.0, 3.0
NODES = ("n0", "n1", "n2")
ON_N = {"n": Allocation((0,), cores=1)}


class Falling(Constant):
    """A job model for this test: the loss falls evenly from 1 to 0."""

    def loss(self, job: TraceJob, progress: float) -> float:
        return 1.0 - progress


def run_out(work: SteadyWork) -> list[End]:
    """Until nothing runs any more."""
    ended: list[End] = []
    while (next_s := work.next_s()) is not None:
        ended += work.advance(next_s).ended
    return ended


class Ledger:
    """The same jobs booked by hand, interval by interval: a job's speed is one over those that compute on its
    most crowded node. Nothing here is shared with what is tested."""

    def __init__(self, sizes: Mapping[str, float]) -> None:
        self.left = dict(sizes)
        self.at: dict[str, tuple[Placement, float]] = {}
        """Who runs: where, and since when it computes."""
        self.now_s = 0.0

    def flow(self, now_s: float) -> None:
        while self.now_s < now_s:
            later = [since_s for _, since_s in self.at.values() if self.now_s < since_s < now_s]
            until_s = min([now_s, *later])
            computing = {name: nodes for name, (nodes, since_s) in self.at.items() if since_s <= self.now_s}
            for name, nodes in computing.items():
                crowd = max(sum(node in other for other in computing.values()) for node in nodes)
                self.left[name] -= (until_s - self.now_s) / crowd
            self.now_s = until_s


SCRIPTS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sampled_from([(0,), (1,), (0, 1), (1, 2), (0, 1, 2)]), st.floats(0.1, 40)
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(SCRIPTS, st.booleans())
def test_all_work_is_done_at_the_speeds_that_there_were(
    script: Sequence[tuple[int, tuple[int, ...], float]], phases: bool
) -> None:
    """Five jobs are started, stopped and moved between three nodes in any order; each ends when its work is
    done."""
    sizes = {f"j{index}": 20.0 + 13.0 * index for index in range(5)}
    shared = SharedNode(Constant())
    work = SteadyWork(Phases(shared, LAUNCH_S, SAVE_S) if phases else shared)
    launch_s, save_s = (LAUNCH_S, SAVE_S) if phases else (0.0, 0.0)
    book = Ledger(sizes)
    for name, size_s in sizes.items():
        work.admit(job(name, 0, size_s), 0.0)
    saving: dict[str, float] = {}

    def advance(until_s: float) -> None:
        while (due_s := work.next_s()) is not None and due_s <= until_s:
            book.flow(due_s)
            instant = work.advance(due_s)
            for name, phase, at_s in instant.phases:
                if phase == "save":
                    assert book.left[name] == pytest.approx(0, abs=1e-6)
                    saving[name] = at_s
                    del book.at[name]
            for name, at_s in instant.ended:
                assert book.left.pop(name) == pytest.approx(0, abs=1e-6)
                assert at_s == pytest.approx(saving.pop(name, at_s) + save_s)
                book.at.pop(name, None)
        book.flow(until_s)
        work.advance(until_s)

    now_s = 0.0
    for index, nodes, wait_s in script:
        name = f"j{index}"
        if name in book.left and name not in saving:
            if name in book.at:
                work.stopped(name, now_s)
                del book.at[name]
            else:
                placement = {NODES[node]: Allocation((index,), cores=1) for node in nodes}
                work.started(name, placement, now_s)
                book.at[name] = placement, now_s + launch_s
        now_s += wait_s
        advance(now_s)
    advance(now_s + 10_000.0)
    assert not book.at, "whoever ran to the end has ended"
    assert all(left > -1e-6 for left in book.left.values())


def test_the_order_of_starts_in_one_moment_does_not_matter() -> None:
    """Three jobs land on one node at once: the order in which they start changes no end."""
    found = set()
    for order in permutations((("a", 30.0), ("b", 60.0), ("c", 90.0))):
        work = SteadyWork(SharedNode(Constant()))
        for name, size_s in order:
            work.admit(job(name, 0, size_s), 0.0)
        for name, _ in order:
            work.started(name, ON_N, 0.0)
        found.add(tuple(run_out(work)))
    assert found == {(End("a", 90.0), End("b", 150.0), End("c", 180.0))}


def test_a_run_launches_trains_and_saves() -> None:
    """100 s of work with 7 s before and 3 s after it; the second attempt launches anew and only then goes
    on."""
    work = SteadyWork(Phases(Constant(), LAUNCH_S, SAVE_S))
    work.admit(job("a", 0, 100), 0.0)
    work.started("a", ON_N, 0.0)
    assert work.next_s() == 7
    assert work.advance(7.0).phases == [PhaseChange("a", "train", 7.0)]
    work.stopped("a", 47.0)
    assert work.next_s() is None
    work.started("a", ON_N, 100.0)
    assert work.advance(107.0).phases == [PhaseChange("a", "train", 107.0)]
    instant = work.advance(167.0)
    assert instant.phases == [PhaseChange("a", "save", 167.0)]
    assert instant.ended == []
    assert work.advance(170.0).ended == [End("a", 170.0)]


def test_who_is_stopped_while_it_saves_has_only_to_save_again() -> None:
    """A node goes away in the last second of a long job: its work is done, its result is not yet saved."""
    work = SteadyWork(Phases(Constant(), LAUNCH_S, SAVE_S))
    work.admit(job("a", 0, 100), 0.0)
    work.started("a", ON_N, 0.0)
    work.advance(108.0)
    work.stopped("a", 109.0)
    work.started("a", ON_N, 200.0)
    assert [end.at_s for end in run_out(work)] == [210.0]


def test_who_launches_or_saves_slows_nobody_down() -> None:
    """b launches from 0 to 7 while a computes alone; they share until a's work is done, and a's saving is
    free."""
    work = SteadyWork(Phases(SharedNode(Constant()), LAUNCH_S, SAVE_S))
    work.admit(job("a", 0, 20), 0.0)
    work.admit(job("b", 0, 20), 0.0)
    work.started("a", ON_N, 0.0)  # computes from 7
    work.started(
        "b", ON_N, 5.0
    )  # computes from 12; a has done 5 of 20 by then, both go at half speed: a ends at 42
    assert run_out(work) == [
        End("a", 45.0),
        End("b", 50.0),
    ]  # b had 15 of 20 at 42, then 5 s alone, then it saves


def test_losses_are_reported_by_time_and_not_by_progress() -> None:
    """Every 20 s while it trains, however fast; a new start counts anew, and the end is no report."""
    work = SteadyWork(SharedNode(Falling()), loss_every_s=20.0)
    work.admit(job("a", 0, 100), 0.0)
    work.started("a", ON_N, 0.0)
    losses = list(work.advance(20.0).losses)
    assert losses == [LossReport("a", 0.8, pytest.approx(0.2), 20.0)]
    work.admit(job("b", 0, 1_000), 20.0)
    work.started("b", ON_N, 20.0)  # from here on a goes at half speed
    losses = list(work.advance(60.0).losses)
    assert [(loss.job_id, loss.at_s) for loss in losses] == [("a", 40), ("b", 40), ("a", 60), ("b", 60)]
    assert [loss.progress for loss in losses if loss.job_id == "a"] == pytest.approx([0.3, 0.4])
    work.stopped("a", 70.0)
    work.stopped("b", 70.0)
    work.started("a", ON_N, 100.0)  # 45 of 100 are done
    losses = list(work.advance(200.0).losses)
    assert [loss.at_s for loss in losses] == [120, 140]
    assert [loss.progress for loss in losses] == pytest.approx([0.65, 0.85])


def test_nobody_tells_a_loss_where_there_is_none() -> None:
    work = SteadyWork(Constant(), loss_every_s=5.0)
    work.admit(job("a", 0, 100), 0.0)
    work.started("a", ON_N, 0.0)
    assert work.next_s() == 100


def test_a_truth_without_neighbours_is_asked_once_per_start() -> None:
    """Nine jobs of ten run alone: the others on their nodes must cost nothing."""

    class Counted(JobModel):
        name = "counted"
        asked = 0

        def speed(self, job: TraceJob, placement: Placement, neighbours: object) -> float:
            assert not neighbours
            self.asked += 1
            return 1.0

    job_model = Counted()
    work = SteadyWork(job_model)
    for index in range(10):
        work.admit(job(f"j{index}", 0, 10), 0.0)
        work.started(f"j{index}", ON_N, 0.0)
    assert len(run_out(work)) == 10
    assert job_model.asked == 10
