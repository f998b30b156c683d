"""Progress reports of a training script: into a real FIFO, seldom, and whatever happens they never disturb
the training."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.model.inputs.external_events import StepsMeasured, TelemetrySampled
from penstock.model.schema.validation import checked
from penstock.sdk.phases import phase
from penstock.sdk.progress import PROFILE_ITERATIONS, Meter
from penstock.sdk.reporter.lines import FIFO, LINE_BYTES, write_line
from penstock.sdk.stages import Recorder
from penstock_services.node_reporter.core.reports.progress import ProgressParser
from tests.support.trainings import training_script
from tests.support.trainings.training_script import Clock, Pipe
from tests.unit.sdk.reports.test_sdk_stages import iterate

fifo, clock, meter = training_script.fifo, training_script.clock, training_script.meter


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(clock)


# ------------------------------------------------------------------------------------------------ progress


def test_the_first_iteration_is_reported_then_the_mean_of_windows(
    fifo: Pipe, clock: Clock, meter: Meter
) -> None:
    """The first step compiles kernels for a minute; it is in no window."""
    for done in range(1, 6):
        clock.pass_(60.0 if done == 1 else 2.0)
        meter.step(done, 100, 3.5 / done)
    assert fifo.lines("steps") == [
        {"done": 1, "total": 100, "loss": 3.5},
        *({"done": n, "total": 100, "steps": 1, "step_ms": 2_000.0, "loss": 3.5 / n} for n in range(2, 6)),
    ]


def test_a_long_training_is_reported_in_few_lines(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """A million iterations of 2 ms: never two lines within half a second, each a tenth further, and the last
    one."""
    reported: list[dict[str, Any]] = []
    for done in range(1, 1_000_001):
        clock.pass_(0.002)
        meter.step(done, 1_000_000, None)
        if done % 10_000 == 0 or done == 300:
            reported += fifo.lines("steps")
    assert 60 <= len(reported) <= 120
    assert reported[-1]["done"] == 1_000_000
    for before, line in itertools.pairwise(reported[:-1]):
        assert line["done"] - before["done"] == line["steps"] >= 250
        assert 10 * line["done"] >= 11 * before["done"]
        assert line["step_ms"] == pytest.approx(2.0)


def test_a_resumed_script_is_reported_from_where_it_resumes(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """From the checkpoint at 90,000 of 100,000; its step time must be known long before a tenth more is
    done."""
    for done in range(90_001, 90_101):
        clock.pass_(1.0)
        meter.step(done, 100_000, None)
    reported = [line["done"] - 90_000 for line in fifo.lines("steps")]
    assert reported[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13]
    assert reported[-1] > 90


def test_what_is_not_more_than_before_is_not_reported(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """The script calls it twice per iteration, or goes back to a checkpoint after the loss has exploded."""
    for done in (1, 1, 5, 2, 3, 4, 5, 6):
        clock.pass_(1.0)
        meter.step(done, None, None)
    assert [(line["done"], line.get("steps")) for line in fifo.lines("steps")] == [(1, None), (5, 4), (6, 1)]


def test_the_loss_is_only_looked_at_when_a_line_is_written(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """A loss on a GPU must be waited for; that may not happen in every iteration."""

    class OnGpu:
        looked_at = 0

        def __float__(self) -> float:
            OnGpu.looked_at += 1
            return 0.25

    for done in range(1, 1_001):
        clock.pass_(0.01)
        meter.step(done, None, OnGpu())
    reported = fifo.lines("steps", "loss")
    assert len(reported) == OnGpu.looked_at < 20
    assert {line["loss"] for line in reported} == {0.25}


def test_a_tensor_is_read_without_its_gradient(fifo: Pipe, meter: Meter) -> None:
    """PyTorch warns in the job's output of each `float(loss)` of a loss that has a gradient."""

    class Tensor:
        def detach(self) -> float:
            return 0.5

        def __float__(self) -> float:
            raise AssertionError("a warning")

    meter.step(1, 10, Tensor())
    assert fifo.lines("steps") == [{"done": 1, "total": 10, "loss": 0.5}]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf"), 1e200, "much", [1, 2], 10**400])
def test_a_loss_that_is_no_number_is_left_out(fifo: Pipe, meter: Meter, loss: Any) -> None:
    """The training diverges: that it goes on is still reported."""
    meter.step(1, 10, loss)
    assert fifo.lines("steps") == [{"done": 1, "total": 10}]


@pytest.mark.parametrize("done", [0, -3, None, "7", float("nan"), float("inf"), [], 1 << 60])
def test_nonsense_is_neither_reported_nor_fails(
    fifo: Pipe, clock: Clock, done: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script under development; it must not die of its progress bar."""
    meter = Meter(clock)
    meter.step(done, 5, None)
    meter.finish()
    assert fifo.text() == b""
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("total", "reported"), [(3, None), (0, None), ("many", None), (1 << 60, None), (10, 10)]
)
def test_a_total_that_cannot_be_is_left_out(
    fifo: Pipe, meter: Meter, total: Any, reported: int | None
) -> None:
    """More was done than was planned; a total from a config file as text."""
    meter.step(4, total, None)
    assert [line.get("total") for line in fifo.lines("steps")] == [reported]


def test_a_full_fifo_costs_lines_and_never_blocks(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """The reporter is down for a day: what does not fit is lost, the next line counts from the last one that
    got away."""
    meter.step(1, None, None)
    assert len(fifo.lines("steps")) == 1
    while write_line("x" * (LINE_BYTES - 1)):
        pass
    for done in range(2, 50):
        clock.pass_(1.0)
        meter.step(done, None, None)
    while fifo.text():
        pass
    clock.pass_(1.0)
    meter.step(50, None, None)
    assert fifo.lines("steps") == [{"done": 50, "steps": 49, "step_ms": 1_000.0}]


@pytest.mark.parametrize(
    "ranks",
    [
        {"RANK": "1"},
        {"RANK": "7", "LOCAL_RANK": "0", "NODE_RANK": "7"},
        {"NODE_RANK": "0", "LOCAL_RANK": "1"},
        {"RANK": "0", "NODE_RANK": "0", "LOCAL_RANK": "3"},
    ],
)
def test_of_a_gang_only_rank_0_tells(
    fifo: Pipe, clock: Clock, ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers run the same script and are as far. Lightning starts further processes of a worker with
    a LOCAL_RANK, and with the RANK of that worker."""
    for name, rank in ranks.items():
        monkeypatch.setenv(name, rank)
    meter, recorder = Meter(clock), Recorder(clock)
    for done in range(1, 100):
        clock.pass_(1.0)
        iterate(recorder, clock, gpu=1.0)
        meter.step(done, None, None)
    assert fifo.text() == b""
    for name in ranks:
        monkeypatch.setenv(name, "0")
    Meter(clock).step(1, None, None)
    assert len(fifo.lines("steps")) == 1


SCRIPT = """
import sys
from penstock.sdk.phases import phase
from penstock.sdk.progress import progress
from penstock.sdk.stages import iteration, stage
phase("train")
for done in range(1, 106):
    iteration()
    with stage("gpu"):
        pass
    progress(done, 1_000, 1.0 / done)
{end}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('diverged')", "pass"])
def test_the_last_iteration_is_reported_when_the_script_ends_early(fifo: Pipe, end: str) -> None:
    """Early stopping at iteration 105 of 1,000, or a crash: how far it came is worth knowing."""
    run(SCRIPT.format(end=end), {FIFO: str(fifo.path)})
    first, *lines = fifo.text().splitlines()
    assert first == b"train"
    reported = [json.loads(line)["steps"] for line in lines]
    assert [line["done"] for line in reported] == [1, 105]
    assert reported[1]["total"] == 1_000


def test_outside_of_penstock_it_does_nothing(tmp_path: Path) -> None:
    """The same script on a laptop; and one whose node is gone, so that the path leads nowhere."""
    for where in ({}, {FIFO: str(tmp_path / "gone")}, {FIFO: ""}):
        done = run(SCRIPT.format(end="pass"), where)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_fifo_that_nobody_holds_is_not_waited_for(tmp_path: Path) -> None:
    """The shim was killed: opening a FIFO without a reader would block for ever."""
    os.mkfifo(tmp_path / "phases")
    done = run(SCRIPT.format(end="pass"), {FIFO: str(tmp_path / "phases")})
    assert (done.returncode, done.stderr) == (0, "")


def run(script: str, more: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """A script in a process of its own, without our own task's variables."""
    env = {name: value for name, value in os.environ.items() if name not in (FIFO, "RANK")}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**env, **more},
    )


def test_what_a_script_imports_needs_nothing_but_python() -> None:
    """The training's own environment may have no pydantic, or another one."""
    script = (
        "import sys, penstock.sdk.progress, penstock.sdk.stages, penstock.sdk.phases; print(*sys.modules)"
    )
    modules = run(script, {}).stdout.split()
    assert "penstock.sdk.progress" in modules
    outside = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert not outside & {"pydantic", "msgspec", "orjson", "numpy"}
    assert {name for name in modules if name.startswith("penstock.")} <= {
        "penstock.sdk",
        "penstock.sdk.reporter",
        "penstock.sdk.sharing",
        "penstock.sdk.checkpoint",
        "penstock.sdk.sharing.core_waits",
        "penstock.sdk.cores",
        "penstock.sdk.gate",
        "penstock.sdk.reporter.lines",
        "penstock.sdk.phases",
        "penstock.sdk.progress",
        "penstock.sdk.stages",
        "penstock.sdk.sharing.chief",
        "penstock.sdk.gpu_memory",
        "penstock.sdk.reporter.savers",
        "penstock.sdk.sharing.turns",
    }


# --------------------------------------------------------------------------------------------------- lines


def test_phases_are_lines_as_ever(fifo: Pipe) -> None:
    phase("launch")
    phase("train")
    assert fifo.text() == b"launch\ntrain\n"


def test_the_node_understands_what_the_sdk_writes(fifo: Pipe, clock: Clock, meter: Meter) -> None:
    """Both ends of the FIFO in one sitting."""
    meter.step(1, 500, 0.75)
    clock.pass_(3.0)
    meter.step(4, 500, float("nan"))
    first, _, second, window = ProgressParser("n1", "job-1.1.0", 9, leads=True).parse(fifo.text(), 77)
    about = {"node_id": "n1", "task_id": "job-1.1.0", "token": 9, "at_ms": 77, "total": 500}
    assert first.event == checked(StepsMeasured, {**about, "done": 1, "loss": 0.75})
    assert second.event == checked(StepsMeasured, {**about, "done": 4, "steps": 3, "step_ms": 1_000.0})
    assert (first.name, second.name) == ("steps/1", "steps/4")
    assert window.event == TelemetrySampled(node_id="n1", task_id="job-1.1.0", at_ms=77, step_ms=1_000.0)


def test_a_line_too_long_to_be_whole_is_not_written(fifo: Pipe) -> None:
    """Above PIPE_BUF a write may be torn by another process's."""
    assert not write_line("x" * LINE_BYTES)
    assert write_line("x" * (LINE_BYTES - 1))
    assert len(fifo.text()) == LINE_BYTES


def test_a_run_that_only_measures_ends_after_its_iterations(fifo: Pipe) -> None:
    """`penstock profile` starts a script of 105 iterations, which has no option for it, and wants 20: it ends
    well, with its last one reported."""
    done = run(SCRIPT.format(end="sys.exit(3)"), {FIFO: str(fifo.path), PROFILE_ITERATIONS: "20"})
    assert (done.returncode, done.stderr) == (0, "")
    reported = [json.loads(line)["steps"] for line in fifo.text().splitlines()[1:]]
    assert [line["done"] for line in reported] == [1, 20]
    for wrong in ("", "0", "many", "-1"):
        assert run(SCRIPT.format(end="sys.exit(3)"), {PROFILE_ITERATIONS: wrong}).returncode == 3
