"""Stories of one pass over the waiting jobs: who starts, who waits, and whose turn is next."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.plans import PlanUnit
from penstock.scheduling.scheduling_pass import (
    Failed,
    Full,
    Never,
    Reclaims,
    Reserved,
    Starts,
    Tried,
    Trying,
    Unreached,
    Waits,
    in_turn,
    scheduling_pass,
)
from penstock.scheduling.stages.protocols import Turns
from tests.support.cluster.driver import CellDriver, estimate


class Gpus(Trying[DemandKey, int]):
    """So many free GPUs, without nodes. Counts the jobs that are tried."""

    def __init__(self, free: int, total: int = 16) -> None:
        self.free, self.total = free, total
        self.tried: list[str] = []
        self.broken: set[str] = set()
        self.most = 16

    def alike(self, job: JobState) -> DemandKey:
        return job.demand_key

    def place(self, job: JobState, key: DemandKey) -> Tried[int]:
        if len(self.tried) == self.most:
            return Full(job)
        self.tried.append(job.job_id)
        if job.job_id in self.broken:
            return Failed(job, "a bug")
        gpus = job.demand.worker.gpus
        return Starts(job, gpus) if gpus <= self.free else Waits(job)

    def never(self, job: JobState) -> str | None:
        return "too few GPUs" if job.demand.worker.gpus > self.total else None


class Reserving(Gpus):
    """Reserves a node for the first job that waits; nothing is left for others then."""

    makes_room = True
    reserved: PlanUnit | None = None

    def make_room(self, job: JobState) -> Iterator[Reserved | Reclaims]:
        if self.reserved is None:
            self.reserved = PlanUnit(job_id=job.job_id, nodes=("n1",))
            yield Reserved(job, self.reserved)

    def settled(self) -> bool:
        return not self.free


@pytest.fixture
def jobs() -> Sequence[JobState]:
    """a, b, c, d, e with 4, 8, 8, 2 and 8 GPUs, in the order of their submission."""
    cell = CellDriver()
    for name, gpus in zip("abcde", (4, 8, 8, 2, 8), strict=True):
        cell.submit(name, need=estimate(gpus))
    return [cell.job(name) for name in "abcde"]


def results(turns: Turns, trying: Gpus, **bound: Any) -> list[tuple[str, type[Any]]]:
    """(job, kind of its result); GPUs of a job that starts are taken before the next result."""
    found = []
    for result in scheduling_pass(turns, trying, **bound):
        found.append((result.job.job_id, type(result)))
        if isinstance(result, Starts):
            trying.free -= result.place
    return found


def test_a_job_like_one_that_waits_is_not_tried(jobs: Sequence[JobState]) -> None:
    """Six GPUs are free. `b` needs eight, and so do `c` and `e`: they wait untried, and `d` passes them."""
    gpus = Gpus(6)
    kinds = [Starts, Waits, Waits, Starts, Waits]
    assert results(in_turn(jobs), gpus) == list(zip("abcde", kinds, strict=True))
    assert gpus.tried == ["a", "b", "d"]


def test_a_job_that_waits_for_a_reason_of_its_own_speaks_for_no_other(jobs: Sequence[JobState]) -> None:
    """A moldable job waits for more workers than it could have: a job of the same demand is tried all the
    same."""

    class Choosy(Gpus):
        def place(self, job: JobState, key: DemandKey) -> Tried[int]:
            found = super().place(job, key)
            return Waits(job, alone=True) if job.job_id == "b" else found

    gpus = Choosy(12)
    assert results(in_turn(jobs), gpus)[2] == ("c", Starts)


def test_the_window_ends_the_pass(jobs: Sequence[JobState]) -> None:
    """Two jobs may be passed over, whether they were tried or not: `d` would fit, and is not reached."""
    gpus = Gpus(6)
    assert results(in_turn(jobs), gpus, window=2)[-1] == ("d", Unreached)
    assert gpus.tried == ["a", "b"]


def test_a_bug_on_one_job_costs_its_place_and_no_other(jobs: Sequence[JobState]) -> None:
    """The policy raises on `b`: it counts as passed over, and `c` of the same demand starts."""
    gpus = Gpus(12)
    gpus.broken = {"b"}
    assert results(in_turn(jobs), gpus, window=1) == [
        ("a", Starts),
        ("b", Failed),
        ("c", Unreached),
    ]
    gpus = Gpus(12)
    gpus.broken = {"b"}
    assert results(in_turn(jobs), gpus)[:3] == [("a", Starts), ("b", Failed), ("c", Starts)]


def test_no_job_waits_for_one_that_can_never_run(jobs: Sequence[JobState]) -> None:
    """Nodes have left, and six GPUs are all. `b` is the first that waits: it is told, and does not count as
    passed over. `c` is alike, but only the first and the head of the queue are judged: `e` is the head."""
    gpus = Gpus(6, total=6)
    gpus.head = jobs[4]
    assert results(in_turn(jobs), gpus, window=3) == [
        ("a", Starts),
        ("b", Waits),
        ("b", Never),
        ("c", Waits),
        ("c", Never),
        ("d", Starts),
        ("e", Waits),
        ("e", Never),
    ]
    gpus = Gpus(1, total=6)
    gpus.head = jobs[4]
    kinds = [kind for _, kind in results(in_turn(jobs), gpus)]
    assert kinds == [Waits, Waits, Waits, Waits, Waits, Never]


def test_a_full_record_ends_the_pass_before_the_next_job(jobs: Sequence[JobState]) -> None:
    """The record holds two jobs: `d` is left to the next record, those that wait untried are not."""
    gpus = Gpus(6)
    gpus.most = 2
    assert results(in_turn(jobs), gpus)[-1] == ("d", Full)


def test_room_is_made_for_who_waits_and_the_pass_ends_when_nobody_can_start(jobs: Sequence[JobState]) -> None:
    """`b` gets a reservation; nothing is free behind `d`, so `e` is not looked at."""
    gpus = Reserving(4)
    assert results(in_turn(jobs), gpus) == [("a", Starts), ("b", Waits), ("b", Reserved)]
    gpus = Reserving(6)
    assert [name for name, _ in results(in_turn(jobs), gpus)] == ["a", "b", "b", "c", "d", "e"]


def test_the_order_hears_who_has_started(jobs: Sequence[JobState]) -> None:
    """A tenant's next job comes only if the last one has started."""
    heard: dict[str, bool] = {}

    def order() -> Turns:
        for job in jobs:
            heard[job.job_id] = yield job

    results(order(), Gpus(6))
    assert heard == {"a": True, "b": False, "c": False, "d": True, "e": False}
