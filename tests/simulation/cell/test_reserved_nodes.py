"""Fast tests before a trial change no decision: which jobs are released for a reservation, which are tried at
all, for which cores are reclaimed."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest

from penstock.cluster.capacity import never_fits
from penstock.cluster.view import ClusterView, Fit, living_places
from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanUnit
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.make_room import array_reclaim, backfill
from penstock.scheduling.make_room.backfill import Reservation
from penstock.scheduling.remaining_time import ends_s, remaining_s
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from penstock_services.placer.core.waiting.pass_reservation import PassReservation
from penstock_services.placer.core.waiting.placing import Placing
from tests.simulation.cell.test_still_waiting import KINDS
from tests.support.chance import rate, seeds_for

JOBS = 100
GPUS = (1, 2, 4, 8, 12, 16)
FURTHER = 1_000
"""The first of the seeds that are run only until all that is compared has happened."""
OFTEN = rate(20, 20)
"""Of a ledger with jobs that are released, tried and reclaimed for: it all happened in 20 of 20."""
ENDS_EARLY = rate(29, 40)
"""Of a ledger in which a pass ends early: in 29 of 40."""


class Compared(backfill._Ended):
    """Beside it the trial in which all jobs are released."""

    trials = found = spared = grouped = 0

    def __init__(self, state: CellState, demand: Demand, suited: int) -> None:
        super().__init__(state, demand, suited)
        self._all = ClusterView(state)

    def add(self, job: JobState) -> Fit | None:
        self._all.release(job)
        fit = super().add(job)
        nodes = sum({self._state.nodes[place.node_id].bit for place in living_places(job)})
        assert fit == (self._all.fit(self._demand) if nodes & self._suited else None)
        Compared.trials += 1
        Compared.found += fit is not None
        Compared.spared += bool(self._left)
        Compared.grouped += bool(job.sharing.group)
        return fit


@pytest.mark.parametrize("seed", range(4))
def test_a_loaded_cell_reserves_the_nodes_of_the_whole_trial(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups, gangs of several nodes and jobs that are being stopped come to their ends one after the
    other."""
    monkeypatch.setattr(backfill, "_Ended", Compared)
    Compared.trials = Compared.found = Compared.spared = Compared.grouped = 0

    def all_happened(seed: int) -> bool:
        ledger_of(seed, GPUS)
        return min(Compared.trials, Compared.found, Compared.spared, Compared.grouped) > 0

    assert any(map(all_happened, seeds_of(seed, OFTEN)))


@pytest.mark.parametrize("seed", range(4))
def test_ends_are_expected_by_the_state_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placer that has just started reserves the nodes that one would which has seen all changes, also
    behind jobs that take turns or once did."""
    compared = Counter[bool]()
    first = Reservation._first

    def restarted(self: Reservation, state: CellState, job: JobState) -> PlanUnit | None:
        ends = [(end_s, other.job_id) for end_s, other in self._by_their_ends(state)]
        assert ends == [
            (end_s, other.job_id) for end_s, other in Reservation(self._place)._by_their_ends(state)
        ]
        for other in state.holding.values():
            end_s = ends_s(other)
            if end_s is not None:
                left_s = max(0.0, end_s - state.now_ms / 1_000) * other.pace.speed
                assert remaining_s(state, other) == pytest.approx(left_s, abs=1e-3)
                compared[other.pace.speed != 1.0] += 1
        return first(self, state, job)

    monkeypatch.setattr(Reservation, "_first", restarted)
    assert any(ledger_of(one, GPUS) and compared[True] for one in seeds_of(seed, OFTEN))


@pytest.mark.parametrize("gpus", [GPUS, (0, 0, *GPUS)])
def test_a_loaded_cell_is_placed_as_if_all_jobs_were_tried(
    gpus: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the jobs that wait few fit; cores are lent to jobs without GPUs."""
    tried, reclaimed = Counter[bool](), Counter[bool]()

    def counting(answers: Counter[bool], judge: Callable[..., bool]) -> Callable[..., bool]:
        def counted(*args: Any, **more: Any) -> bool:
            found = judge(*args, **more)
            answers[found] += 1
            return found

        return counted

    def all_happened(seed: int) -> bool:
        """Compared with a ledger of which all jobs were tried."""
        with monkeypatch.context() as patch:
            patch.setattr(PassReservation, "may_start", counting(tried, PassReservation.may_start))
            patch.setattr(array_reclaim, "_reclaimable", counting(reclaimed, array_reclaim._reclaimable))
            found = ledger_of(seed, gpus)
        with monkeypatch.context() as patch:
            patch.setattr(PassReservation, "may_start", lambda *_: True)
            patch.setattr(array_reclaim, "_reclaimable", lambda *_, **__: True)
            assert ledger_of(seed, gpus) == found
        return min(tried[True], tried[False], reclaimed[False], reclaimed[True] or 0 not in gpus) > 0

    assert any(map(all_happened, seeds_of(0, OFTEN)))


@pytest.mark.parametrize("seed", range(3))
def test_a_pass_ends_only_where_no_other_job_has_a_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes are full, one is reserved, and jobs without GPUs wait, too: when a pass ends early each job
    it did not try is tried here."""
    answers = Counter[bool]()
    settled = Placing.settled

    def tested(self: Placing) -> bool:
        found, state, stage = settled(self), self._state, self._reclaiming._stage
        answers[found] += 1
        assert stage is not None
        for job_id in state.queue.values() if found else ():
            job = state.jobs[job_id]
            assert never_fits(state, job.demand) is None
            assert not self._reservation.may_start(state, job)
            assert stage.reclaim(state, job) is None
        return found

    def both_happened(seed: int) -> bool:
        """Compared with a ledger whose passes never end early."""
        gpus, cores = (0, 0, 0, *GPUS), (2, 8, 11)
        with monkeypatch.context() as patch:
            patch.setattr(Placing, "settled", tested)
            ledger = ledger_of(seed, gpus, cores)
        with monkeypatch.context() as patch:
            patch.setattr(Placing, "settled", lambda *_: False)
            assert ledger_of(seed, gpus, cores) == ledger
        return min(answers[True], answers[False]) > 0

    assert any(map(both_happened, seeds_of(seed, ENDS_EARLY)))


def seeds_of(first: int, p_hit: float) -> Iterator[int]:
    """That one, then as many as a sound product may take until all has happened, in each of four tests."""
    return chain([first], range(FURTHER * (first + 1), FURTHER * (first + 1) + seeds_for(p_hit, 4)))


def ledger_of(seed: int, gpus: Sequence[int], cores: Sequence[int] = ()) -> str:
    """`cores`: for each GPU of a job, one without GPUs has as many as with six; empty: they limit no job."""
    rng = np.random.Generator(np.random.PCG64(seed))
    jobs = [
        TraceJob(
            f"j{number}",
            60.0 * number,
            float(rng.uniform(600, 20_000)),
            int(rng.choice(gpus)),
            f"m{number % len(KINDS)}",
            stages=KINDS[number % len(KINDS)],
        )
        for number in range(JOBS)
    ]
    if cores:
        jobs = [job._replace(cores=float(rng.choice(cores) * (job.gpus or 6))) for job in jobs]
    settings = PlacerSettings(profile="penstock")
    simulation = Simulation(nodes_of("4x8"), settings, SteadyWork(Constant()), jobs)
    while simulation.step():
        pass
    return simulation.figures(0, 0).ledger_hash
