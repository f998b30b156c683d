"""`penstock demo` as a visitor sees it: it must work the first time, and leave nothing behind whenever it is
left."""

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import environment, left_in, survivors
from tests.support.cli.command_process import PENSTOCK, ROOT
from tests.support.story import told
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres

TAKEN, RETURNED = "cores are taken", "cores are given back"
"""What the summary has of the contention-guard."""
LEFT_OUT = r"guard  left out: (this machine has one core|node-\d measures|node-\d gives out) .*"
"""Why a machine cannot show the contention-guard, however long the demo waits."""
GROUPED = r"batcher  (?P<members>.+) share the GPU, asked for by batcher: take turns, efficiency .+"
TOGETHER = {f"{bound}-together" for bound in ("storage", "cpu", "gpu", "network")}
MOVED = (
    r"migrator  digits-converges: (?P<here>node-\d) → (?P<there>node-\d), asked for by migrator: its loss "
    r"converges, and \d of 3 jobs .*",
    r"migrator  digits-converges: moved from (?P<here>node-\d); its stop took .+ and cost .*; it goes on at "
    r"iteration (?P<saved>[\d,]+)",
    r"migrator  digits-converges: loss (?P<first>\S+) at iteration 1; (?P<before>\S+) at (?P<last>[\d,]+), "
    r"its last report before the stop; "
    r"(?P<after>\S+) at (?P<back>[\d,]+), its first after it",
)
"""What the summary has of a move."""
NAMES = ("digits-gang", "digits-ps", "diverges", "too-big", "softmax-endless", "digits-mlp-again")


class Demo:
    """A process of `penstock demo`, in a folder and checkout of its own, so that its processes can be
    distinguished from all others."""

    def __init__(self, place: Path, *options: str) -> None:
        self._output = place / "demo.out"
        shutil.copytree(ROOT / "tilt", place / "checkout" / "tilt", dirs_exist_ok=True)
        arguments = ["--folder", str(place / "state"), "--jobs", str(place / "checkout"), *options]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*PENSTOCK, "demo", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=place / "checkout",
                env=environment(place / "home", PENSTOCK_TOKENS="/nowhere"),
            )

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        wait_until(lambda: self.process.poll() is not None, lambda: f"the end of the demo: {self.printed}")
        return self.process.returncode


@contextmanager
def demo(place: Path, *options: str) -> Iterator[Demo]:
    """One for a block, at whose end it does not run any more."""
    found = Demo(place, *options)
    with (
        told("the demo", lambda: found.printed),
        told("its services", place / "state" / "logs" / "services.log"),
    ):
        try:
            yield found
        finally:
            found.process.send_signal(signal.SIGINT)
            found.process.wait()


def watched(place: Path, *options: str) -> tuple[str, list[str]]:
    """(all output, lines of the summary) of a demo that ends well and leaves no process or file of its own
    elsewhere."""
    with demo(place, *options) as running:
        assert running.ended() == 0, running.printed
        output = running.printed
    assert survivors(place) == []
    assert left_in(place / "home") == []
    return output, [line.strip() for line in output.partition("Summary")[2].splitlines()]


def shown(line: str) -> str:
    """What one line of the summary is about the contention-guard."""
    found = re.fullmatch(r"guard  augment: (\d+) → (\d+) cores?, asked for by contention-guard: (\S.*)", line)
    assert found, line
    before, after, why = int(found[1]), int(found[2]), found[3]
    assert ("softmax-slowed has lost" if after < before else "any more") in why, line
    return TAKEN if after < before else RETURNED


@pytest.mark.slow
def test_the_demo_runs_real_jobs_to_their_expected_ends_and_explains_them(place: Path) -> None:
    """A visitor types one command, without a terminal as in a CI job."""
    output, lines = watched(place)
    summary = "\n".join(lines)
    for name in NAMES:
        assert name in summary
    assert "jobs ended as expected" in summary
    assert "one worker needs 8 GPUs" in summary
    assert "penstock why digits-gang" in summary
    guard = [line for line in lines if line.startswith("guard ")]
    if not re.fullmatch(LEFT_OUT, guard[0]):
        assert list(dict.fromkeys(map(shown, guard))) == [TAKEN, RETURNED], guard
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
    with demo(place) as second:
        wait_until(lambda: second.printed.count("\n"), "the second demo's first line")
        assert second.printed.startswith("Penstock demo: "), (
            "it empties the folder that the first one has left"
        )


def test_the_batcher_lets_four_jobs_take_turns_on_one_gpu(place: Path) -> None:
    """First each alone, so that its stages are known; then all at once. Nobody proposes anything but the
    batcher. Which of them share the GPU at first depends on who comes first and what was measured; in the end
    each has."""
    _, lines = watched(place, "--turns")
    assert any(line.startswith("All 8 jobs ended as expected") for line in lines)
    assert any(line.startswith("penstock why gpu-together") for line in lines)
    groups = [line for line in lines if line.startswith("batcher ")]
    members = [found["members"].split(", ") for line in groups if (found := re.fullmatch(GROUPED, line))]
    assert len(members) == len(groups), "the batcher alone grouped them, and predicted their speeds"
    assert {name for group in members for name in group} == TOGETHER


def test_the_migrator_moves_a_training_that_has_converged_and_its_loss_goes_on(place: Path) -> None:
    """Three trainings on one node, two on the other, all of them with the SDK's checkpoints. However long the
    loss takes to its end, the demo waits for the move."""
    _, summary = watched(place, "--moves")
    assert any(line.startswith("All 5 jobs ended as expected") for line in summary)
    assert any(line.startswith("penstock why digits-converges") for line in summary)
    assert any(line.startswith("penstock events digits-converges") for line in summary)
    lines = [line for line in summary if line.startswith("migrator ")]
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
    with demo(place, "--turns", "--moves") as refused:
        assert refused.ended() == 2
    assert refused.printed == "penstock: --turns and --moves are two demonstrations: leave one of them out\n"
    assert not (place / "state").exists()


@pytest.mark.parametrize("made", ["state/up.lock", "state/logs/node-*.log", "state/task-logs/*/*w0.log"])
def test_ctrl_c_at_any_moment_leaves_nothing(place: Path, made: str) -> None:
    """While it starts, while it submits, while a dozen processes train."""

    def is_made(running: Demo) -> bool:
        assert running.process.poll() is None, running.printed
        return any(place.glob(made))

    with demo(place) as running:
        wait_until(lambda: is_made(running), f"a file {made}")
        running.process.send_signal(signal.SIGINT)
        assert running.ended() == 130, running.printed
    assert "Traceback" not in running.printed
    assert survivors(place) == []
    assert left_in(place / "home") == []


def test_the_demo_empties_no_folder_that_is_not_its_own(place: Path) -> None:
    """Somebody names the folder with the thesis in it."""
    precious = place / "state" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("42")
    with demo(place) as refused:
        assert refused.ended() == 2
    assert "thesis.tex" in refused.printed
    assert precious.read_text() == "42"
