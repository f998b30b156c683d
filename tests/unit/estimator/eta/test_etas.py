"""When the estimator says how long a running job still takes, and what it says then."""

import math

import msgspec
import numpy as np
import pytest

from penstock.model.inputs.estimates import EtaEstimated
from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.eta.remaining import Bounds
from penstock_services.estimator.core.eta_updates import (
    MAX_ENDED,
    MAX_LEFT_MS,
    MIN_MOVED_MS,
    EtaUpdates,
    moved,
)
from penstock_services.estimator.core.fold.progress import Published
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.records.history import key_of
from penstock_services.estimator.core.step_time.training import STEPS, Durations
from tests.support.chance import SURE
from tests.unit.estimator.reports import JOB, Reports, month, ran, true_ms, updates_of

HELD, OFF = (0.94, 0.036), (0.072, 0.0066)
"""Of what stands at half of a run: share that holds its end, median error.

Mean and standard deviation of 30 and of 25 draws.
"""
WIDEST = 0.9
"""Median width relative to what came: of five draws 0.45 ± 0.05."""


@pytest.fixture(scope="module")
def learned() -> InUse[Durations]:
    trained = STEPS.train(month(120), None)
    assert trained is not None
    return STEPS.read(trained.body, trained.sha256)


def report(etas: EtaUpdates, job_id: str = "job") -> EtaEstimated:
    found = etas.next(job_id)
    assert found is not None
    return found


def open_ended(**more: object) -> JobSpec:
    return msgspec.structs.replace(JOB, **{"iterations": None, **more})


def test_the_first_predicting_is_answered_from_the_model(learned: InUse[Durations]) -> None:
    """No window yet: the network is known on two such GPUs, and the job said how many iterations it runs."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    etas._steps.use(learned)
    cell.begin("job")
    assert etas.next("job") is None, "it told nothing yet"
    cell.report("job", 1)
    found = report(etas)
    assert found.left_ms.middle == pytest.approx(999 * true_ms((2,), 64), rel=0.15)
    assert found.left_ms.low < found.left_ms.middle < found.left_ms.high
    assert (found.attempt, found.done, found.at_ms) == (1, 1, cell.now_ms)
    assert (found.level, found.source) == (0.9, "iterations asked for")
    assert found.model_version == learned.version


def test_without_model_or_window_nothing_is_published() -> None:
    """Nobody knows how long a step takes; the second telling says it."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    cell.begin("job")
    cell.report("job", 1)
    assert etas.next("job") is None
    cell.report("job", 101, steps=100, step_ms=50.0)
    found = report(etas)
    assert found.left_ms.middle == pytest.approx(899 * 50)
    assert found.model_version is None
    assert etas.next("nobody") is None


def test_it_is_published_again_only_when_it_moved() -> None:
    """As was said: silence. A neighbour slows it down: said again, once."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    cell.begin("job", spec=msgspec.structs.replace(JOB, iterations=100_000))
    cell.report("job", 100, steps=100, step_ms=100.0)
    report(etas)
    done = 100
    for _ in range(10):
        done += 200
        cell.report("job", done, steps=200, step_ms=100.0)
        assert etas.next("job") is None
    cell.report("job", 2 * done, steps=done, step_ms=300.0)
    assert report(etas).left_ms.middle > 1.5 * 100_000 * 100
    assert etas.next("job") is None, "the same telling twice"


def test_after_a_restart_what_the_ledger_holds_is_not_published_again() -> None:
    """The estimator ends after it said something: its successor reads that in the ledger, and answers what
    came after."""
    cell = Reports()
    before = updates_of(cell.ledger)
    for job_id in ("answered", "waiting", "moved-on"):
        cell.begin(job_id, spec=msgspec.structs.replace(JOB, iterations=100_000))
        cell.report(job_id, 100, steps=100, step_ms=100.0)
    for job_id in ("answered", "moved-on"):
        cell.record(report(before, job_id))
    cell.report("moved-on", 200, steps=100, step_ms=900.0)
    after = updates_of(cell.ledger)
    assert sorted(after.open()) == ["moved-on", "waiting"]
    assert after.next("answered") is None
    assert after.next("waiting") is not None
    assert after.next("moved-on") is not None


def test_each_attempt_is_reported_anew() -> None:
    """Preempted and resumed on the same GPUs: the wait in between made what was said wrong."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    cell.begin("job")
    cell.report("job", 100, steps=99, step_ms=1_000.0)
    assert report(etas).attempt == 1
    cell.begin("job", attempt=2)
    assert etas.next("job") is None, "the new attempt told nothing yet"
    cell.report("job", 101, attempt=2)
    found = report(etas)
    assert (found.attempt, found.done) == (2, 101)
    assert found.left_ms.middle == pytest.approx(899_000)


def test_past_runs_predict_how_many_iterations_a_job_has() -> None:
    """It says nothing about its length; three earlier runs of it took about 2,000 iterations, on as many
    GPUs."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    spec = open_ended()
    for seq, total in ((1, 1_900.0), (2, 2_000.0), (3, 2_100.0)):
        run = ran(seq, ring=(2,), iterations=total, step_ms=100.0)
        cell.ledger.history.add(key_of(spec), run.measured, "ada")
    cell.begin("job", spec=spec)
    cell.report("job", 1)
    found = report(etas)
    assert found.source == "3 finished runs of the same job"
    assert found.steps.low < 2_000 < found.steps.high
    assert found.left_ms.middle == pytest.approx(2_000 * 100 + 1_000, rel=0.05), "and saving"


def test_a_loss_on_its_way_to_a_target() -> None:
    """It ends at a loss of 1.5, after a million iterations at the latest; the curve says about 1,600."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    cell.begin("job", spec=open_ended(target_loss=1.1, iterations=1_000_000))
    before = 0
    for done in (1, 2, 4, 8, 16, 32, 64, 128, 256, 400):
        cell.report("job", done, steps=done - before if before else 0, step_ms=10.0, loss=1 + 4 * done**-0.5)
        before = done
    found = report(etas)
    assert found.source.startswith("loss curve of")
    assert found.steps.low <= 1_200 <= found.steps.high
    assert found.steps.high < 1_000_000


@pytest.mark.parametrize("loss", [1e99, -1e99, 0.0, 2.0])
def test_losses_of_any_size_break_nothing(loss: float) -> None:
    """It diverges, or stands still; a target far away. What is said stays within what an event takes."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    cell.begin("job", spec=open_ended(target_loss=-1e99))
    answered = 0
    for done in range(1, 40):
        cell.report("job", done, steps=1, step_ms=10.0, loss=loss * (1 - 2 * (done % 2)))
        found = etas.next("job")
        if found is not None:
            answered += 1
            for bounds in (found.left_ms, found.steps, found.step_ms):
                assert 0 <= bounds.low <= bounds.middle <= bounds.high < math.inf
    assert answered


def test_the_longest_job_is_within_bounds() -> None:
    """2^53 iterations of ten minutes each."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    cell.begin("job", spec=msgspec.structs.replace(JOB, iterations=1 << 53))
    cell.report("job", 2, steps=1, step_ms=600_000.0, total=1 << 53)
    assert report(etas).left_ms.high == MAX_LEFT_MS


def test_wild_history_of_the_same_job_overflows_nothing() -> None:
    cell = Reports()
    etas = updates_of(cell.ledger)
    spec = open_ended()
    for seq, total in enumerate((1.0, 2.0**53) * 5):
        cell.ledger.history.add(key_of(spec), ran(seq, ring=(2,), iterations=total).measured, "ada")
    cell.begin("job", spec=spec)
    cell.report("job", 10)
    assert report(etas).left_ms.high <= MAX_LEFT_MS


def wobbling(cell: Reports, etas: EtaUpdates, number: int, rng: np.random.Generator) -> None:
    """One job whose steps wobble, slow down or speed up on the way; the placer commits what is said of it."""
    iterations, batch = int(10 ** rng.uniform(2.5, 4)), int(2 ** rng.integers(4, 8))
    ring, owner = ((1,), (2,), (4,))[number % 3], ("ada", "bob", "eve")[number % 3]
    job_id, more = f"job-{number}", {"batch_size": batch, "iterations": iterations, "owner": owner}
    cell.begin(job_id, ring, spec=msgspec.structs.replace(JOB, **{**more, "command": (f"{number % 11}.py",)}))
    cell.report(job_id, 1, total=iterations)
    each_ms, drift, wobble = true_ms(ring, batch) * np.exp(rng.normal(0, 0.05)), rng.normal(0, 0.1), 0.0
    done = 1
    while done < iterations:
        then = min(iterations, max(done + 1, int(done * 1.1)))
        wobble = 0.7 * wobble + rng.normal(0, 0.05)
        step_ms = float(each_ms * np.exp(drift * then / iterations + wobble))
        cell.report(job_id, then, steps=then - done, step_ms=step_ms, total=iterations)
        cell.now_ms -= 1_000  # of the record: here only steps take time
        done = then
        if (found := etas.next(job_id)) is not None:
            cell.record(found)
            cell.now_ms -= 1_000
    cell.end(job_id)


def test_what_stands_at_half_of_a_run_holds_what_it_promises() -> None:
    """Sixty jobs teach the model, 150 are told by it: nine of ten end within what stood in the ledger at
    their half."""
    cell, rng = Reports(), np.random.default_rng(3)
    etas = updates_of(cell.ledger)
    for number in range(210):
        if number == 60:
            trained = STEPS.train(cell.stored, None)
            assert trained is not None
            etas._steps.use(STEPS.read(trained.body, trained.sha256))
        wobbling(cell, etas, number, rng)
    predicted = [run.eta for run in cell.stored[60:] if run.eta is not None]
    assert len(predicted) == 150, "each job was told in time"
    held = sum(eta.low_ms <= eta.actual_ms <= eta.high_ms for eta in predicted) / len(predicted)
    mean, spread = HELD
    assert held > mean - SURE * spread
    assert np.median([(eta.high_ms - eta.low_ms) / eta.actual_ms for eta in predicted]) < WIDEST
    mean, spread = OFF
    assert np.median([abs(eta.left_ms / eta.actual_ms - 1) for eta in predicted]) < mean + SURE * spread


@pytest.mark.parametrize(("slow_ms", "most"), [(100.0, 6), (5_000.0, 60)])
def test_answers_are_far_fewer_than_reports(slow_ms: float, most: int) -> None:
    """Each answer is a record of the ledger, and under a profile that plans by remaining times a reason to
    plan anew.

    A steady job of ten million iterations; and one whose every other window takes fifty times as long. Both
    report as often as a node lets them.
    """
    cell = Reports()
    etas = updates_of(cell.ledger)
    total = 10_000_000
    cell.begin("job", spec=open_ended())
    cell.report("job", 1, total=total)
    done, answers, reports = 1, 0, 1
    while done < total:
        then = min(total, max(done + 1, int(done * 1.1)))
        step_ms = slow_ms if reports % 2 else 100.0
        cell.report("job", then, steps=then - done, step_ms=step_ms, total=total)
        done, reports = then, reports + 1
        if (found := etas.next("job")) is not None:
            answers += 1
            cell.record(found)
    assert reports > 150
    assert 1 <= answers <= most


def test_a_finished_job_is_reported_no_more() -> None:
    """Its last telling and its end came in one read."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    cell.begin("job")
    cell.report("job", 1_000, steps=900, step_ms=1.0)
    cell.end("job")
    assert cell.ledger.stepped == {}
    assert etas.next("job") is None


def test_what_was_published_of_ended_jobs_is_dropped() -> None:
    """A cell of years."""
    cell = Reports()
    etas = updates_of(cell.ledger)
    for number in range(MAX_ENDED + 50):
        cell.begin(f"job-{number}")
        cell.report(f"job-{number}", 100, steps=10, step_ms=50.0)
        report(etas, f"job-{number}")
        cell.end(f"job-{number}")
    assert len(etas._published) <= MAX_ENDED + 1


def test_what_moves_less_than_a_second_does_not_move() -> None:
    last = Published(0, Bounds(2_000, 1_900, 2_100))
    assert not moved(last, Published(1_000, Bounds(1_000 + MIN_MOVED_MS, 900, 1_500)))
    assert moved(last, Published(1_000, Bounds(1_001 + MIN_MOVED_MS, 900, 1_500)))
    wide = Published(0, Bounds(100_000, 0, 900_000))
    assert moved(wide, Published(0, Bounds(100_000, 90_000, 120_000))), "the same middle, but now it is known"
