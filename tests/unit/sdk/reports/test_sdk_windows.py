"""Step times of a training script within seconds: what others do to it is seen, what it does itself between
iterations is not."""

import os
from typing import Any

import pytest

from penstock.model.inputs.external_events import StepsMeasured
from penstock.sdk import progress as module
from penstock.sdk.progress import Meter
from penstock.sdk.reporter.lines import write_line
from penstock.sdk.sharing.turns import Waits
from penstock_services.node_reporter.core.reports.progress import ProgressParser
from tests.support.trainings import training_script
from tests.support.trainings.training_script import Clock, Pipe

fifo = training_script.fifo


class Training:
    """Iterations on a clock of their own."""

    def __init__(self, fifo: Pipe) -> None:
        self.clock = Clock()
        self.waited_s = 0.0
        self.meter = Meter(self.clock, waits=lambda: Waits(self.waited_s, 0))
        self._fifo = fifo
        self._done = 0

    def run(self, seconds: float, step_s: float) -> list[tuple[float, float]]:
        """Trains for so long; the windows that it writes: (second since the begin, ms)."""
        begun = self.clock.now
        found: list[tuple[float, float]] = []
        while self.clock.now - begun < seconds:
            self.clock.pass_(step_s)
            self._done += 1
            self.meter.step(self._done, None, None)
            at_s = self.clock.now - begun
            found += [(at_s, line["step_ms"]) for line in self._fifo.lines("window")]
        return found


@pytest.fixture
def training(fifo: Pipe) -> Training:
    return Training(fifo)


def test_a_steady_training_writes_its_step_time_once_and_repeats_it_seldom(training: Training) -> None:
    """An hour of 10 ms each: a line is lost now and then, so it comes again every half minute."""
    found = training.run(3_600, 0.010)
    assert all(ms == pytest.approx(10.0) for _, ms in found)
    assert found[0][0] == pytest.approx(2.0, abs=0.6)
    assert 100 <= len(found) <= 121, found[:10]


@pytest.mark.parametrize("slower", [1.06, 3.0, 10.0])
def test_a_training_that_others_slow_down_says_so_within_seconds(training: Training, slower: float) -> None:
    """A job of preprocessing takes its cores, and ends."""
    training.run(60, 0.010)
    seen = training.run(20, 0.010 * slower)
    exact = next(at_s for at_s, ms in seen if ms == pytest.approx(10.0 * slower))
    assert exact <= 4.0 + 0.5 * slower
    assert training.run(20, 0.010)[-1][1] == pytest.approx(10.0)


def test_what_differs_by_less_than_a_twentieth_is_not_written(training: Training) -> None:
    """Steps vary by themselves."""
    training.run(20, 0.010)
    assert [ms for _, ms in training.run(8, 0.0104)] == []


def test_steps_longer_than_a_window_are_windows_of_their_own(training: Training) -> None:
    """A large model: 5 s each."""
    training.run(60, 5.0)
    assert training.run(30, 7.0)[0] == (pytest.approx(7.0), pytest.approx(7_000.0))


def test_waiting_for_turns_does_not_make_a_training_slow(training: Training) -> None:
    """Half of each iteration waits for another member of its group, whose turn it is: by design, not by
    contention."""
    training.run(20, 0.010)
    for _ in range(50):
        training.waited_s += 0.1
        training.clock.pass_(0.1)
        assert all(ms == pytest.approx(10.0) for _, ms in training.run(0.1, 0.010))


def test_a_checkpoint_is_no_part_of_a_step(training: Training) -> None:
    """Saving takes a minute, once."""
    training.run(20, 0.010)
    for _ in range(3):
        training.run(1, 0.010)
        training.clock.pass_(60.0)
        training.meter.interrupted()
        assert all(ms == pytest.approx(10.0) for _, ms in training.run(10, 0.010))


def test_progress_begins_a_new_window_after_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(module.SAVER, "asked", True)
    monkeypatch.setattr(module.SAVER, "boundary", lambda done: called.append("saved"))
    monkeypatch.setattr(module._METER, "interrupted", lambda: called.append("window"))
    module.progress(1)
    assert called == ["saved", "window"]


def test_a_window_that_could_not_be_written_is_written_with_the_next(training: Training) -> None:
    """The FIFO is full while the reporter is down: what was not written does not count as known."""
    training.run(20, 0.010)
    training.meter._write = lambda line: False
    assert training.run(10, 0.030) == []
    training.meter._write = write_line
    assert training.run(4, 0.030)[0][1] == pytest.approx(30.0)


def test_only_some_iterations_look_at_the_clock(fifo: Pipe) -> None:
    """Its price is that of a comparison: of a million iterations of 2 ms some thousands ask for the time."""
    clock, asked = Clock(), 0

    def counted() -> float:
        nonlocal asked
        asked += 1
        return clock()

    meter = Meter(counted)
    for done in range(1, 1_000_001):
        clock.pass_(0.002)
        meter.step(done, None, None)
        if done % 10_000 == 0:
            fifo.text()
    assert asked < 6_000


@pytest.mark.parametrize("backwards", [-5.0, float("nan")])
def test_a_clock_that_cannot_be_writes_nothing_wrong(fifo: Pipe, backwards: float) -> None:
    """A window without time in it, or with a negative one."""
    clock = Clock()
    meter = Meter(clock)
    written: list[Any] = []
    for done in range(1, 2_000):
        clock.pass_(0.01 if done % 100 else backwards)
        meter.step(done, None, None)
        written += fifo.lines("window")
    assert all(0 < line["step_ms"] < 1e9 for line in written)


def test_the_node_reports_what_a_member_of_a_group_waits_for_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone until its fourth iteration; then half of each step is waiting, and one stage has no turn."""
    monkeypatch.setenv("PENSTOCK_PHASE_FILE", os.devnull)
    monkeypatch.delenv("RANK", raising=False)
    now, lines = [100.0], bytearray()
    waited = [Waits()] * 4 + [Waits(1.0, 0), Waits(2.0, 1)]

    def write(line: str) -> bool:
        lines.extend(f"{line}\n".encode())
        return True

    meter = Meter(lambda: now[0], write, lambda: waited[done - 1])
    for done in range(1, 7):
        now[0] += 1.0 if done < 5 else 2.0
        meter.step(done, None, None)
    steps = ProgressParser("n1", "job-1.1.0", 9, leads=True).parse(bytes(lines), 77)
    found = [one.event for one in steps if isinstance(one.event, StepsMeasured)]
    assert [(one.step_ms, one.waited_ms, one.missed_turns) for one in found] == [
        (0.0, 0.0, 0),
        *[(1_000.0, 0.0, 0)] * 3,
        (2_000.0, 1_000.0, 0),
        (2_000.0, 1_000.0, 1),
    ]
