"""Losses that a training script reports beside its progress: by time, seldom, and never in its way."""

import itertools

import pytest

from penstock.sdk.progress import Meter
from tests.support.trainings import training_script
from tests.support.trainings.training_script import Clock, Pipe

fifo, clock, meter = training_script.fifo, training_script.clock, training_script.meter


def test_between_lines_of_progress_the_loss_is_reported_by_time(
    fifo: Pipe, clock: Clock, meter: Meter
) -> None:
    """An hour of iterations of 10 ms: whether its loss still falls is seen every few seconds, though a tenth
    more takes minutes by then."""
    for done in range(1, 360_001):
        clock.pass_(0.01)
        meter.step(done, None, 1.0 / done)
        if done == 350_000:
            fifo.text()
    losses = [line for line in fifo.lines("steps", "loss") if "step_ms" not in line]
    assert 15 <= len(losses) <= 25
    for before, line in itertools.pairwise(losses):
        assert 2.5 <= 0.01 * (line["done"] - before["done"]) <= 10
    assert all(line["loss"] == 1.0 / line["done"] for line in losses)


def test_a_script_that_stalls_reports_its_loss_again_soon(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """Steps of a millisecond, then of ten seconds: the number of iterations to wait shrinks with them."""
    for done in range(1, 20_001):
        clock.pass_(0.001)
        meter.step(done, None, 1.0)
    fifo.text()
    seen = []
    for done in range(20_001, 26_001):
        clock.pass_(10.0)
        meter.step(done, None, 1.0)
        seen += [line["done"] for line in fifo.lines("steps", "loss")]
    assert len(seen) > 900
    assert seen[0] <= 26_000


def test_without_a_loss_nothing_is_written_between(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """And a loss that cannot be is left out."""
    for done in range(1, 5_001):
        clock.pass_(1.0)
        meter.step(done, None, None if done % 2 else float("nan"))
    assert all("step_ms" in line or line["done"] == 1 for line in fifo.lines("steps", "loss"))


def test_another_number_of_cores_begins_a_new_window_which_is_written_whatever_it_is(
    fifo: Pipe, clock: Clock
) -> None:
    """The contention-guard tries a job with more cores that do not help: without a line it could not know
    that it has been tried."""
    cores = [4]
    meter = Meter(clock, count=lambda: cores[0])
    for done in range(1, 2_000):
        clock.pass_(0.01)
        meter.step(done, None, None)
    [first] = fifo.lines("window")
    assert (first["step_ms"], first["cores"]) == (pytest.approx(10), 4)
    cores[0] = 8
    for done in range(2_000, 3_000):
        clock.pass_(0.01)
        meter.step(done, None, None)
    [second] = fifo.lines("window")
    assert (second["step_ms"], second["cores"]) == (pytest.approx(10), 8)
    assert second["steps"] >= 200, "nothing of the time with four cores is in it"
