"""Slowdown by neighbours, learned from step times, and moves where all jobs together end earlier."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.ledger.state.state import CellState
from penstock.model.decisions.moves import MAX_MIGRATIONS
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.settings import Convergence, PlacerSettings
from penstock.scheduling.acting import load_balance
from penstock.scheduling.acting.convergence import Category
from penstock.scheduling.acting.crowding import Crowding, has_gpus
from penstock.scheduling.acting.load_balance import (
    CAUTION,
    LEAST_GAIN,
    SAVE_S,
    LoadBalance,
    Sharer,
    sum_of_completions_s,
)
from penstock.scheduling.acting.migrate import Migration, Seen, category_of
from penstock.scheduling.acting.validate_moves import can_go
from penstock.scheduling.stop_cost import stop_cost_s
from tests.support.cluster.crowd import share_of
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec

STEP_MS = 100.0


class Crowded(CellDriver):
    """Two nodes; jobs of a core each, whose steps take `exponent` of their share of the node; someone watches
    from the beginning."""

    def __init__(self, exponent: float = 1.0, nodes: int = 2) -> None:
        super().__init__(PlacerSettings(profile="balance"))
        self.exponent, self.done = exponent, dict[str, int]()
        self.crowding = Crowding()
        self.join(*(node_spec(f"n{number}") for number in range(1, nodes + 1)))

    def runs(self, job_id: str, run_ms: int = 600_000, gpus: int = 0, cores: int = 1) -> None:
        spec = job_spec(checkpoint="signal")
        self.submit(job_id, spec, replace(estimate(gpus=gpus, cores=cores), run_ms=run_ms))
        self.start(job_id)
        self.crowding.changed(self.state, job_id, self.now_ms)

    def ends(self, job_id: str) -> None:
        self.exit(next(iter(self.job(job_id).tasks)))
        self.crowding.changed(self.state, job_id, self.now_ms)

    def where(self, job_id: str) -> str:
        return next(iter(self.job(job_id).tasks.values())).place.node_id

    def passes(self, ms: int, *jobs: str, reports: bool = True) -> None:
        """Time in which the shares stay; then these jobs report their steps."""
        self.now_ms += ms
        self.state.now_ms = self.now_ms
        for job_id in jobs if reports else ():
            job = self.job(job_id)
            step_ms = STEP_MS * share_of(self.state, job) ** -self.exponent
            steps = int(ms / step_ms)
            self.done[job_id] = self.done.get(job_id, 0) + steps
            fact = StepsMeasured(
                node_id=self.where(job_id),
                task_id=next(iter(job.tasks)),
                token=job.token,
                at_ms=0,
                done=self.done[job_id],
                total=10_000,
                steps=steps,
                step_ms=step_ms,
            )
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
    assert "s earlier in total" in found.reason


def test_who_may_not_move_stays() -> None:
    """It does not save, may not be stopped, was moved four times, or the cell is frozen: the others are
    looked at."""
    cell = Crowded()
    cell.learns()
    crowd(cell)
    for job in cell.state.jobs.values():
        job.moves = replace(job.moves, migrations=MAX_MIGRATIONS)
    assert cell.moves() == []
    for job in cell.state.jobs.values():
        job.moves = replace(job.moves, migrations=0)
    cell.state.frozen = "nodes vanished"
    assert cell.moves() == []


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 7_000])), max_size=14))
def test_shares_are_those_of_a_watcher_that_begins_now(changes: list[tuple[int, int]]) -> None:
    """Jobs start and end, several at one moment: what is booked from change to change is the share that a
    look at the whole node finds."""
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
    """The migrator is started anew: who runs is followed from when it is asked about, with what it has done
    until then."""
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
    """10, 20 and 30 s alone, equal cores: at 30, 50 and 60 s; where neighbours do not matter at 10, 20 and 30
    s."""
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


def one_by_one_s(sharers: Sequence[Sharer]) -> float:
    """The sum of completion times, each job's speed worked out at each end: what `sum_of_completions_s` has
    to give to the last bit."""
    left = list(sharers)
    total_s = now_s = 0.0
    while left:
        cores = sum(one.cores for one in left)
        speeds = [(one.cores / cores) ** one.exponent for one in left]
        next_s = min(one.left_s / speed for one, speed in zip(left, speeds, strict=True))
        now_s += next_s
        after = [
            one._replace(left_s=one.left_s - next_s * speed) for one, speed in zip(left, speeds, strict=True)
        ]
        left = [one for one in after if one.left_s > 1e-9 * max(1.0, now_s)]
        total_s += (len(after) - len(left)) * now_s
    return total_s


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 1e6) | st.sampled_from([0.0, 7.0]),
            st.integers(1, 3),
            st.sampled_from([0.0, 0.3, 1.0]),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_sums_of_completions_are_those_of_each_job_by_itself(
    found: list[tuple[float, int, float]], one_kind: bool
) -> None:
    """Which of two moves is the better one is often decided by the last bit, so jobs that are equally fast
    may be counted together, but not differently."""
    sharers = [
        Sharer(str(number), cores, left_s, exponent) for number, (left_s, cores, exponent) in enumerate(found)
    ]
    if one_kind:
        sharers = [one._replace(cores=sharers[0].cores, exponent=sharers[0].exponent) for one in sharers]
    assert sum_of_completions_s(sharers) == one_by_one_s(sharers)


class Both(Crowding):
    """Two watchers of one cell."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Crowding()

    def changed(self, state: CellState, job_id: str, now_ms: int) -> None:
        super().changed(state, job_id, now_ms)
        self.second.changed(state, job_id, now_ms)

    def measured(self, state: CellState, steps: StepsMeasured, now_ms: int) -> None:
        super().measured(state, steps, now_ms)
        self.second.measured(state, steps, now_ms)


def best_of_all(state: CellState, seen: Seen) -> tuple[str, str, str] | None:
    """(job, target, part of the reason) of the best move, where each job is tried everywhere, and each sum
    worked out."""
    if not seen.crowding.matters():
        return None
    hosts: dict[str, list[Sharer]] = {node_id: [] for node_id, node in state.nodes.items() if node.placeable}
    for job in state.holding.values():
        progress = seen.crowding.progress(state, job, seen.now_ms)
        if progress is not None:
            [task] = job.tasks.values()
            exponent = seen.crowding.exponent(gpus=has_gpus(job))
            hosts[task.place.node_id].append(
                Sharer(job.job_id, len(task.place.cores), progress.left_s, exponent)
            )
    sums_s = {node_id: one_by_one_s(sharers) for node_id, sharers in hosts.items()}
    leaving = [
        (sums_s[here] - one_by_one_s([other for other in sharers if other is not one]), here, one)
        for here, sharers in hosts.items()
        for one in sharers
        if state.jobs[one.job_id].moves.migrations < MAX_MIGRATIONS
    ]
    leaving.sort(key=lambda one: (-one[0], state.jobs[one[2].job_id].order))
    found = []
    for gain_s, here, one in leaving[: load_balance.MAX_TRIED]:
        job = state.jobs[one.job_id]
        cost_s = stop_cost_s(state, job) + SAVE_S
        caution = CAUTION[category_of(job, seen.categories)] - 1.0
        moved = one._replace(left_s=one.left_s + cost_s)
        for there, sharers in hosts.items():
            net_s = gain_s - (one_by_one_s([*sharers, moved]) - sums_s[there])
            enough_s = max(caution * cost_s, LEAST_GAIN * (sums_s[here] + sums_s[there]))
            if there != here and net_s > enough_s:
                why = f"end {net_s:,.0f} s earlier in total, after {cost_s:,.0f} s for the move"
                found.append((net_s, (job.job_id, there, why)))
    for _, move in sorted(found, key=lambda one: -one[0]):
        if can_go(state, state.jobs[move[0]], (move[1],)):
            return move
    return None


@pytest.mark.parametrize("exponent", [0.04, 0.3, 0.7, 1.0])
def test_the_move_is_the_best_of_all(exponent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The migrator is started when some jobs run already. Jobs with and without GPUs come and end, on one
    node more than on others, and report their steps: each time the answer is the one that trying all moves
    gives, of one to eight jobs."""
    rng = Random(f"moves {exponent}")
    moves = 0
    for round_ in range(4):
        monkeypatch.setattr(load_balance, "MAX_TRIED", 1 << round_)
        cell = Crowded(exponent, nodes=4)
        jobs = iter(f"j{number}" for number in range(100))
        start = partial(_starts, cell, jobs, rng)
        for _ in range(6):
            start()
        both = cell.crowding = Both()
        for _ in range(40):
            running = [job.job_id for job in cell.state.holding.values()]
            fuller = [job_id for job_id in running if cell.where(job_id) == f"n{round_ + 1}"]
            if len(running) < 14 and rng.random() < 0.6:
                start()
            elif others := sorted(set(running) - set(fuller)):
                cell.ends(rng.choice(others))
            running = [job.job_id for job in cell.state.holding.values()]
            cell.passes(rng.choice([0, 20_000, 60_000]), *running, reports=rng.random() < 0.7)
            categories = {job_id: rng.choice(list(Category)) for job_id in running if rng.random() < 0.5}
            expected = best_of_all(cell.state, Seen(cell.now_ms, categories, both.second, ()))
            found = LoadBalance(Convergence()).migrations(cell.state, Seen(cell.now_ms, categories, both, ()))
            assert [(one.job_id, one.nodes) for one in found] == (
                [(expected[0], (expected[1],))] if expected else []
            )
            assert expected is None or expected[2] in found[0].reason
            assert all(both.exponent(gpus=gpus) == both.second.exponent(gpus=gpus) for gpus in (True, False))
            moves += expected is not None
    assert moves > 10 or exponent < 0.1, moves


def _starts(cell: Crowded, jobs: Iterator[str], rng: Random) -> None:
    job_id = next(jobs)
    run_ms = rng.choice([300_000, 600_000, rng.randrange(10_000, 3_000_000)])
    cell.runs(job_id, run_ms, gpus=rng.choice([0, 0, 1]), cores=rng.choice([1, 1, 2]))
    cell.job(job_id).moves = replace(cell.job(job_id).moves, migrations=rng.choice([0, 0, MAX_MIGRATIONS]))


def test_noise_of_step_times_costs_no_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps beside others are half a percent slower: no move could gain the least gain, so no completion is
    predicted, however often the stage is asked."""
    cell = Crowded(0.005)
    cell.learns()
    crowd(cell)
    assert cell.crowding.matters()
    predicted = []
    monkeypatch.setattr(load_balance, "sum_of_completions_s", predicted.append)
    assert cell.moves() == []
    assert predicted == []
