"""Stories of stages: how long an iteration of a script uses storage, CPU, GPU and network."""

import itertools
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.inputs.external_events import StagesMeasured
from penstock.sdk.reporter.lines import FIFO, LINE_BYTES
from penstock.sdk.sharing.core_waits import CoreWaits
from penstock.sdk.stages import ITERATIONS, MAX_LINES, STAGES, WARM_UP, Recorder
from penstock_services.node_reporter.core.reports.progress import ProgressParser
from tests.support.trainings import training_script
from tests.support.trainings.training_script import Clock, Pipe

fifo, clock = training_script.fifo, training_script.clock


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(clock)


def iterate(recorder: Recorder, clock: Clock, **seconds: float) -> None:
    """One iteration with these stages one after the other; `idle` is outside of all."""
    recorder.iteration()
    spend(recorder, clock, seconds)


def spend(recorder: Recorder, clock: Clock, seconds: Mapping[str, float]) -> None:
    for name, lasts in seconds.items():
        if name == "idle":
            clock.pass_(lasts)
            continue
        with recorder.stage(name):  # type: ignore[arg-type]
            clock.pass_(lasts)


def test_after_twenty_whole_iterations_their_stages_are_reported(
    fifo: Pipe, clock: Clock, recorder: Recorder
) -> None:
    """The first ones, which load and compile, are not counted; what is outside of all stages is idle."""
    for number in range(23):
        slow = 30.0 if number < 3 else 0.0
        iterate(recorder, clock, storage=0.5 + slow, cpu=0.25, gpu=1.0, idle=0.125)
        assert fifo.text() == b"", f"reported before iteration {number} is over"
    recorder.iteration()
    (reported,) = fifo.lines()
    assert reported["iterations"] == 20
    assert reported["samples"] == [
        [10_000.0, 1, 0, 0, 0],
        [5_000.0, 0, 1, 0, 0],
        [20_000.0, 0, 0, 1, 0],
        [2_500.0, 0, 0, 0, 0],
    ]


def test_short_iterations_are_gathered_for_half_a_second(
    fifo: Pipe, clock: Clock, recorder: Recorder
) -> None:
    """Twenty steps of a millisecond are mostly noise."""
    for _ in range(600):
        iterate(recorder, clock, gpu=0.001)
    (reported,) = fifo.lines()
    assert 500 <= reported["iterations"] <= 502
    assert reported["samples"] == [[float(reported["iterations"]), 0, 0, 1, 0]]


def test_a_stage_inside_another_takes_its_own_time_out(fifo: Pipe, clock: Clock, recorder: Recorder) -> None:
    """Gradients are exchanged within the backward pass; an error that the script handles ends its block."""
    for _ in range(24):
        recorder.iteration()
        with recorder.stage("gpu"):
            clock.pass_(0.5)
            with suppress(ConnectionError), recorder.stage("network"):
                clock.pass_(0.25)
                raise ConnectionError
            clock.pass_(0.125)
    (reported,) = fifo.lines()
    assert reported["samples"] == [[12_500.0, 0, 0, 1, 0], [5_000.0, 0, 0, 0, 1]]


def test_stages_of_other_threads_do_not_count(fifo: Pipe, clock: Clock, recorder: Recorder) -> None:
    """A loader decodes in the background while the GPU computes: the training does not wait for it."""

    def load() -> None:
        recorder.iteration()
        with recorder.stage("cpu"):
            clock.pass_(0.25)

    for _ in range(24):
        recorder.iteration()
        with recorder.stage("gpu"):
            clock.pass_(0.5)
            loader = threading.Thread(target=load)
            loader.start()
            loader.join()
    (reported,) = fifo.lines()
    assert reported == {"iterations": 20, "samples": [[15_000.0, 0, 0, 1, 0]]}


def test_a_change_is_reported_once_it_lasts(fifo: Pipe, clock: Clock, recorder: Recorder) -> None:
    """One window with a checkpoint in it is none; the data that moved to a slow disk are."""

    def window(seconds: Mapping[str, float], count: int = 20) -> list[dict[str, Any]]:
        for _ in range(count):
            spend(recorder, clock, seconds)
            recorder.iteration()
        return fifo.lines()

    recorder.iteration()
    steady = {"storage": 0.5, "gpu": 1.0}
    assert window(steady, 3) == []
    assert len(window(steady)) == 1
    assert window({**steady, "idle": 5.0}) == []
    for _ in range(5):
        assert window({"storage": 0.55, "gpu": 0.95}) == []
    slower = {"storage": 1.0, "gpu": 1.0}
    assert window(slower) == []
    (reported,) = window(slower)
    assert reported["samples"] == [[20_000.0, 1, 0, 0, 0], [20_000.0, 0, 0, 1, 0]]
    assert window(slower) == []


def test_waiting_for_a_core_is_no_part_of_a_stage(fifo: Pipe, clock: Clock) -> None:
    """Other programs of the machine have the core for four fifths of the time: the stages are those of an
    idle machine. A count that exceeds the time that has passed is cut."""
    waited_s = 0.0
    recorder = Recorder(clock, core_waits=lambda: lambda: waited_s)
    recorder.iteration()
    for _ in range(WARM_UP + ITERATIONS):
        with recorder.stage("cpu"):
            clock.pass_(0.5)
            waited_s += 0.4
        with recorder.stage("gpu"):
            clock.pass_(0.2)
            waited_s += 0.3
        recorder.iteration()
    [reported] = fifo.lines("stages")
    assert reported["samples"] == [[2_000.0, 0, 1, 0, 0]]


def test_the_kernel_counts_what_a_thread_waits_for_a_core(tmp_path: Path) -> None:
    """ns on a core, ns waited for one, number of times. A kernel without the count is one where nobody
    waits."""
    count = tmp_path / "schedstat"
    count.write_text("7000000000 1500000000 12\n")
    waits = CoreWaits(str(count))
    assert waits() == 1.5
    count.write_text("7000000000 2500000000 13\n")
    assert waits() == 2.5
    count.write_text("something else")
    assert waits() == 2.5
    assert CoreWaits(str(tmp_path / "absent"))() == 0.0


def test_a_script_that_changes_all_the_time_is_profiled_16_times(
    fifo: Pipe, clock: Clock, recorder: Recorder
) -> None:
    """Afterwards a block costs nothing any more."""
    reported = 0
    for number in range(5_000):
        iterate(recorder, clock, gpu=1.0 + number // 100 % 2)
        reported += len(fifo.lines())
    assert reported == MAX_LINES
    recorder.stage("gpu").__enter__()
    assert recorder.stage("gpu") is recorder.stage("storage")


def test_iterations_without_a_stage_and_stages_without_an_iteration_tell_nothing(
    fifo: Pipe, clock: Clock
) -> None:
    """A script that uses half of it, and one with a typing error."""
    for name in (None, "disk"):
        recorder = Recorder(clock)
        for _ in range(50):
            recorder.iteration()
            clock.pass_(1.0)
            if name is not None:
                with recorder.stage(name):  # type: ignore[arg-type]
                    clock.pass_(1.0)
    recorder = Recorder(clock)
    for _ in range(50):
        with recorder.stage("gpu"):
            clock.pass_(1.0)
    assert fifo.text() == b""


PART = st.tuples(st.sampled_from((*STAGES, "idle")), st.floats(0, 400))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(PART, min_size=1, max_size=12), st.integers(1, 4))
def test_whatever_iterations_do_the_node_understands_their_line(
    parts: list[tuple[str, float]], each: int
) -> None:
    """All time of the reported iterations is in the samples, and the line fits."""
    clock, lines = Clock(), list[str]()
    recorder = Recorder(clock, lambda line: not lines.append(line))  # type: ignore[func-returns-value]
    began = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FIFO, "/dev/null")
        patch.delenv("RANK", raising=False)
        source = itertools.cycle(parts)
        for _ in range(70):
            iterate(recorder, clock, **dict(itertools.islice(source, each)))
            began.append(clock.now)
    parser = ProgressParser("n1", "job-1.1.0", 1, leads=True)
    for line in lines:
        assert len(line) < LINE_BYTES
        (reported,) = parser.parse(f"{line}\n".encode(), 5)
        assert isinstance(reported.event, StagesMeasured)
        count = reported.event.iterations
        took = [1_000 * (end - start) for start, end in zip(began, began[count:], strict=False)]
        reported_ms = sum(sample.lasted_ms for sample in reported.event.samples)
        assert any(reported_ms == pytest.approx(one, abs=0.01) for one in took)
