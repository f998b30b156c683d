"""What jobs that share a GPU take from each other, learned from their step times and sent with estimates."""

import math

import pytest
from msgspec.structs import replace

from penstock.model.decisions.ledger_events import JobEnded
from penstock.model.nouns.types import MAX_PAIRS
from penstock_services.estimator.core.interference import Interference, Kind, Measured
from tests.unit.estimator.disturbed_cell import USED, Disturbed
from tests.unit.estimator.reports import JOB


class Shared(Disturbed):
    """`known`: its records were folded before, and what they taught is stored."""

    def __init__(self, known: bool = False) -> None:
        super().__init__()
        self.ledger.learning = not known

    def ends(self, job_id: str, run_ms: int) -> None:
        self.exit(job_id, USED, run_ms, rank=0, attempt=1)
        self.record(JobEnded(job_id=job_id, outcome="succeeded"))


def met(milli: int, *, guest_steps: bool = True, known: bool = False) -> Shared:
    """Alone the job takes 100 ms for a step; beside a guest of its kind 200 ms, and the guest 250 ms."""
    cell = Shared(known)
    cell.start("job", milli=milli)
    cell.report("job", 1)
    cell.report("job", 101, steps=100, step_ms=100.0)
    cell.start("guest", milli=milli)
    cell.report("job", 111, steps=10, step_ms=150.0)
    cell.report("guest", 1)
    cell.report("job", 211, steps=100, step_ms=200.0)
    if guest_steps:
        cell.report("guest", 81, steps=80, step_ms=250.0)
    cell.ends("guest", 60_000)
    cell.ends("job", 90_000)
    return cell


def test_speeds_beside_each_other_reach_the_next_estimate_once() -> None:
    """The guest never ran alone, but jobs of its kind did."""
    (pair,) = met(500).ledger.interference.of(JOB)
    assert (pair.model, pair.batch_size, pair.gpu_model, pair.runs) == ("resnet50", 64, "T4", 1)
    assert (pair.own, pair.other) == pytest.approx((0.4, 0.5))


def test_members_of_a_group_teach_no_pair() -> None:
    """They take turns on the whole GPU."""
    assert met(1_000).ledger.interference.of(JOB) == ()


def test_a_guest_without_steps_teaches_no_pair_and_other_owners_learn_nothing() -> None:
    assert met(500, guest_steps=False).ledger.interference.of(JOB) == ()
    assert met(500).ledger.interference.of(replace(JOB, owner="eve")) == ()


def test_what_is_stored_already_is_not_learned_again_as_the_ledger_is_folded_again() -> None:
    again = met(500, known=True).ledger.interference
    assert again.of(JOB) == ()
    again.put(met(500).ledger.interference.take())
    assert again.of(JOB) == met(500).ledger.interference.of(JOB)
    assert again.take().rows == 0, "nothing new is to be stored"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-9])
def test_times_that_cannot_be_true_teach_nothing(bad: float) -> None:
    learned, kind = Interference(), Kind("ada", "net", 1, "T4")
    assert not learned.together(Measured(kind, 100.0, bad), Measured(kind, 100.0, 200.0))
    learned.alone(kind, bad)
    assert not learned.together(Measured(kind, math.nan, 200.0), Measured(kind, 100.0, 200.0)) or bad == 1e-9


def test_runs_are_averaged_and_an_estimate_stays_bounded() -> None:
    learned, kind = Interference(), Kind("ada", "net", 1, "T4")
    for number in range(3 * MAX_PAIRS):
        other = Kind("ada", f"other-{number}", 1, "T4")
        for beside_ms in (100.0, 200.0):
            assert learned.together(Measured(kind, 100.0, beside_ms), Measured(other, 100.0, 125.0))
    found = learned.of(replace(JOB, model="net", batch_size=1))
    assert len(found) == MAX_PAIRS
    assert (found[0].own, found[0].other, found[0].runs) == pytest.approx((0.75, 0.8, 2))
