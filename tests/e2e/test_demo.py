"""`penstock demo` as a visitor sees it: it must work the first time, and leave nothing behind whenever it is left."""

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import STOP_S, environment, left_in, survivors, until_made
from tests.support.command_process import PENSTOCK, ROOT

pytestmark = pytest.mark.postgres

DEMO_S = 640.0  # it ends itself after ten minutes; how long it took, it prints
TAKEN, RETURNED, LEFT_OUT = "cores are taken", "cores are given back", "left out"
"""What the summary has of the contention-guard: on a busy machine how fast the training is alone may not be known, or a run end too early."""
MOVED = (
    r"migrator  digits-converges: (?P<here>node-\d) → (?P<there>node-\d), asked for by migrator: its loss falls slower and slower, and \d of 3 jobs .*",
    r"migrator  digits-converges: moved from (?P<here>node-\d); its stop took .+ and cost .*; it goes on at iteration (?P<saved>[\d,]+)",
    r"migrator  digits-converges: loss (?P<first>\S+) at iteration 1; (?P<before>\S+) at (?P<last>[\d,]+), its last report before the stop; "
    r"(?P<after>\S+) at (?P<back>[\d,]+), its first after it",
)
"""What the summary has of a move."""
NAMES = ("digits-gang", "digits-ps", "diverges", "too-big", "softmax-endless", "digits-mlp-again")


def start(place: Path, *options: str) -> "subprocess.Popen[str]":
    """The demo in a folder and checkout of its own, so that its processes can be distinguished from all others."""
    shutil.copytree(ROOT / "tilt", place / "checkout" / "tilt", dirs_exist_ok=True)
    return subprocess.Popen(
        [*PENSTOCK, "demo", "--folder", str(place / "state"), "--jobs", str(place / "checkout"), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=place / "checkout", env=environment(place / "home", PENSTOCK_TOKENS="/nowhere"),
    )  # fmt: skip


def watched(place: Path, *options: str) -> tuple[str, str]:
    """(all output, the summary) of a demo that ends well and leaves no process or file of its own elsewhere."""
    demo = start(place, *options)
    output, _ = demo.communicate(timeout=DEMO_S)
    assert demo.returncode == 0, output
    assert survivors(place) == []
    assert left_in(place / "home") == []
    return output, output.partition("Summary")[2]


def shown(line: str) -> str:
    """What one line of the summary is about the contention-guard."""
    if re.fullmatch(r"guard  left out: \S.*", line):
        return LEFT_OUT
    found = re.fullmatch(r"guard  augment: (\d+) → (\d+) cores?, asked for by contention-guard: (\S.*)", line)
    assert found, line
    before, after, why = int(found[1]), int(found[2]), found[3]
    assert ("softmax-slowed has lost" if after < before else "any more") in why, line
    return TAKEN if after < before else RETURNED


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_demo_runs_real_jobs_to_their_expected_ends_and_explains_them(place: Path) -> None:
    """A visitor types one command, without a terminal as in a CI job."""
    output, summary = watched(place)
    for name in NAMES:
        assert name in summary
    assert "jobs ended as expected" in summary
    assert "one worker needs 8 GPUs" in summary
    assert "penstock why digits-gang" in summary
    guard = [line for line in summary.splitlines() if line.startswith("guard ")]
    assert list(dict.fromkeys(map(shown, guard))) in ([TAKEN, RETURNED], [TAKEN], [LEFT_OUT]), guard
    logs = {path.parent.name: path.read_text() for path in (place / "state" / "task-logs").rglob("*w0.log")}
    assert sum("accuracy" in text for text in logs.values()) >= 12, "the jobs really trained"
    again = next(line for line in output.splitlines() if "digits-mlp-again" in line and "estimated" in line)
    assert "from earlier runs" in again, "its needs were learned from the first run"
    weights = {
        line.rpartition(" ")[2]
        for path in (place / "state" / "task-logs").rglob("*.log")
        for line in path.read_text().splitlines()
        if ": weights " in line
    }
    assert len(weights) == 1, "the gang's workers exchanged gradients and ended with the same weights"
    assert [entry.name for entry in (place / "checkout").iterdir()] == ["tilt"]
    second = start(place)
    assert second.stdout is not None
    first_line = second.stdout.readline()
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=3 * STOP_S)
    assert first_line.startswith("Penstock demo: "), "it empties the folder that the first one has left"


@pytest.mark.timeout(700)
def test_the_batcher_lets_four_jobs_take_turns_on_one_gpu(place: Path) -> None:
    """First each alone, so that its stages are known; then all at once. Nobody proposes anything but the batcher, and nobody is restarted."""
    _, summary = watched(place, "--turns")
    assert "All 8 jobs ended as expected" in summary
    assert summary.count("proposed by batcher: take turns") >= 2
    assert "penstock why gpu-together" in summary


@pytest.mark.timeout(700)
def test_the_migrator_moves_a_training_that_has_converged_and_its_loss_goes_on(place: Path) -> None:
    """Three trainings on one node, two on the other, all of them with the SDK's checkpoints. Where other programs leave them no time one line is the reason."""
    _, summary = watched(place, "--moves")
    assert "All 5 jobs ended as expected" in summary
    assert "penstock why digits-converges" in summary
    assert "penstock events digits-converges" in summary
    lines = [line.strip() for line in summary.splitlines() if line.startswith("migrator ")]
    if not lines[0].startswith("migrator  left out: "):
        decided, cost, losses = (re.fullmatch(shape, line) for shape, line in zip(MOVED, lines, strict=True))
        assert decided, lines
        assert cost, lines
        assert losses, lines
        assert decided["here"] == cost["here"] != decided["there"]
        (first, before, after), (last, back) = (
            [float(losses[name]) for name in ("first", "before", "after")],
            [int(losses[name].replace(",", "")) for name in ("last", "back")],
        )
        assert last <= int(cost["saved"].replace(",", "")) < back, "no iteration is done again"
        assert after < before + 0.01 * (first - before), "its loss goes on"
        assert before < first / 2, "it has learned something before"


def test_two_demonstrations_at_once_are_refused(place: Path) -> None:
    """Nothing is started, and no folder emptied."""
    demo = start(place, "--turns", "--moves")
    output, _ = demo.communicate(timeout=180)
    assert demo.returncode == 2
    assert output == "penstock: --turns and --moves are two demonstrations: leave one of them out\n"
    assert not (place / "state").exists()


@pytest.mark.parametrize("made", ["state/up.lock", "state/logs/node-*.log", "state/task-logs/*/*w0.log"])
def test_ctrl_c_at_any_moment_leaves_nothing(place: Path, made: str) -> None:
    """While it starts, while it submits, while a dozen processes train."""
    demo = start(place)
    until_made(place, made, demo)
    began = time.monotonic()
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=3 * STOP_S)
    assert time.monotonic() - began <= STOP_S
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert survivors(place) == []
    assert left_in(place / "home") == []


def test_the_demo_empties_no_folder_that_is_not_its_own(place: Path) -> None:
    """Somebody names the folder with the thesis in it."""
    precious = place / "state" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("42")
    demo = start(place)
    output, _ = demo.communicate(timeout=180)
    assert demo.returncode == 2
    assert "thesis.tex" in output
    assert precious.read_text() == "42"
