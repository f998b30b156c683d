"""Checkpoints of training scripts: examples of the README as scripts, signals at any moment, half-written folders."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from infra.codegen.schemas import ROOT
from penstock.sdk.checkpoint import SAVED_STATUS

LOOP = """
import json, os, pathlib, sys, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress

state = {"done": 0, "sum": 0}
pause_s, go = float(sys.argv[1]), pathlib.Path(sys.argv[2])

def save(path):
    pathlib.Path(path, "first").write_text(json.dumps(state))
    time.sleep(pause_s)
    pathlib.Path(path, "second").write_text(json.dumps(state))

def restore(path):
    texts = {pathlib.Path(path, name).read_text() for name in ("first", "second")}
    (text,) = texts
    state.update(json.loads(text))

print("restored" if checkpoint(save, restore) else "fresh", state["done"], flush=True)
while not go.exists():
    state["done"] += 1
    state["sum"] += state["done"]
    time.sleep(0.002)
    progress(state["done"])
print("ended", json.dumps(state), flush=True)
"""


class Script:
    """A training script as a node starts it, without the node."""

    def __init__(self, place: Path, text: str = LOOP, *arguments: str, **env: str) -> None:
        self.folder = place / "checkpoints"
        self.folder.mkdir(exist_ok=True)
        path = place / "train.py"
        path.write_text(text)
        given = {"PENSTOCK_CHECKPOINT_DIR": str(self.folder), "PENSTOCK_PHASE_FILE": os.devnull, "RANK": "0"}
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [sys.executable, str(path), *(arguments or ("0", str(place / "go")))],
            env={**clean, **given, "PYTHONPATH": str(ROOT / "libs"), **env}, text=True, cwd=place,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ends(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=180)
        return self.process.returncode, out, err

    def complete(self) -> list[str]:
        return sorted(entry.name for entry in self.folder.iterdir() if entry.name != ".new")


def until(what: object) -> None:
    assert callable(what)
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_stopped_script_saves_between_two_iterations_and_the_next_goes_on_there(tmp_path: Path) -> None:
    """The cell needs its GPU. What was added up before the stop is not added up again, and nothing is left out."""
    first = Script(tmp_path)
    assert first.line() == "fresh 0"
    time.sleep(0.1)
    first.process.terminate()
    status, _, errors = first.ends()
    assert (status, errors) == (SAVED_STATUS, "")
    (name,) = first.complete()
    done = int(name.rpartition("-")[2])
    assert done > 0
    again = Script(tmp_path, PENSTOCK_RESUME=str(first.folder / name), PENSTOCK_ATTEMPT="2")
    assert again.line() == f"restored {done}"
    (tmp_path / "go").touch()
    status, out, _ = again.ends()
    state = json.loads(out.removeprefix("ended "))
    assert status == 0
    assert state["done"] >= done
    assert state["sum"] == sum(range(1, state["done"] + 1))


def test_the_sample_training_learns_the_same_when_it_is_stopped(tmp_path: Path) -> None:
    """`tilt/jobs/softmax.py` is moved to another node after a few epochs: its last loss and accuracy are those of a run in one go."""
    text = (ROOT / "tilt/jobs/softmax.py").read_text()
    flags = ("--epochs", "12", "--learning-rate", "0.001", "--gpu-ms", "20", "--checkpoint")
    _, whole, _ = Script(tmp_path, text, *flags).ends()
    first = Script(tmp_path, text, *flags)
    assert first.line().startswith("epoch    1/12")
    first.process.terminate()
    assert first.ends()[0] == SAVED_STATUS
    (name,) = first.complete()
    assert 1 <= int(name.rpartition("-")[2]) < 12
    again = Script(tmp_path, text, *flags, PENSTOCK_RESUME=str(first.folder / name), PENSTOCK_ATTEMPT="2")
    status, out, errors = again.ends()
    assert (status, errors) == (0, "")
    assert out.splitlines()[-1].split()[:6] == whole.splitlines()[-1].split()[:6]
    assert len(out.splitlines()) < len(whole.splitlines()), "what was learned is not learned again"


def test_asked_for_a_checkpoint_it_saves_and_trains_on(tmp_path: Path) -> None:
    """SIGUSR1, twice: the older is removed when the newer is complete."""
    script = Script(tmp_path)
    script.line()
    names = []
    for _ in range(2):
        before = script.complete()
        script.process.send_signal(signal.SIGUSR1)
        until(lambda before=before: len(script.complete()) == 1 and script.complete() != before)
        names += script.complete()
    assert len(set(names)) == 2
    (tmp_path / "go").touch()
    assert script.ends()[0] == 0


def test_a_script_that_is_killed_while_it_saves_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """Power cuts, at twelve moments of a save of 60 ms: what is there is whole, and the one before stays until then."""
    at = "0"
    for attempt in range(1, 13):
        known = sorted((tmp_path / "checkpoints").glob("attempt-*")) if attempt > 1 else []
        resume = {"PENSTOCK_RESUME": str(known[-1])} if known else {}
        script = Script(
            tmp_path, LOOP, "0.06", str(tmp_path / "go"), PENSTOCK_ATTEMPT=f"{attempt:02}", **resume
        )
        assert script.line() == (f"restored {at}" if known else "fresh 0")
        time.sleep(0.02)
        script.process.send_signal(signal.SIGUSR1)
        time.sleep(0.008 * attempt)
        script.process.kill()
        script.ends()
        found = script.complete()
        assert found or not known, "the one before stays until the next is complete"
        if found:
            at = found[-1].rpartition("-")[2]
            texts = {(script.folder / found[-1] / name).read_text() for name in ("first", "second")}
            assert [json.loads(text)["done"] for text in texts] == [int(at)]
    assert at != "0", "some saves were over in time"


DIES_WHILE_IT_REMOVES = f"""
import os, shutil, signal
real = shutil.rmtree

def rmtree(path, **options):
    if os.path.exists(os.path.join(path, "second")):
        os.remove(os.path.join(path, "first"))
        os.kill(os.getpid(), signal.SIGKILL)
    real(path, **options)

shutil.rmtree = rmtree
{LOOP}"""


def test_a_script_that_is_killed_while_it_removes_the_checkpoint_before_leaves_no_half_one(
    tmp_path: Path,
) -> None:
    """A power cut with the next one complete and half of the files of the one before gone: only the next one is there. What is left of the other goes with the next save."""
    script = Script(tmp_path, DIES_WHILE_IT_REMOVES)
    script.line()
    script.process.send_signal(signal.SIGUSR1)
    until(script.complete)
    script.process.send_signal(signal.SIGUSR1)
    assert script.ends()[0] == -signal.SIGKILL
    whole = [entry for entry in script.folder.glob("attempt-*") if (entry / "first").exists()]
    assert sorted(script.folder.glob("attempt-*")) == whole
    assert len(whole) == 1
    again = Script(tmp_path, PENSTOCK_RESUME=str(whole[0]), PENSTOCK_ATTEMPT="2")
    again.line()
    again.process.terminate()
    assert again.ends()[0] == SAVED_STATUS
    assert len(list(script.folder.iterdir())) == 1


def test_a_save_that_fails_costs_no_training_and_not_the_checkpoint_before(tmp_path: Path) -> None:
    """The disk is full when the operator asks; then when the job is stopped. Only the second ends the script, with status 1."""
    text = LOOP.replace(
        "    time.sleep(pause_s)\n", "    if go.with_name('full').exists(): raise OSError(28, 'no space')\n"
    )
    script = Script(tmp_path, text)
    script.line()
    script.process.send_signal(signal.SIGUSR1)
    until(script.complete)
    before = script.complete()
    (tmp_path / "full").touch()
    script.process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    assert script.process.poll() is None
    script.process.terminate()
    status, _, errors = script.ends()
    assert (status, script.complete()) == (1, before)
    assert errors.count("[Errno 28] no space") == 2


def test_a_loader_that_the_script_forked_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """It has inherited the handlers; `terminate()` of multiprocessing must not hang."""
    text = textwrap.dedent("""
        import multiprocessing, time
        from penstock.sdk.checkpoint import checkpoint
        checkpoint(print, print)
        loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        loader.start()
        time.sleep(0.1)
        loader.terminate()
        loader.join(10)
        raise SystemExit(loader.exitcode != -15)
    """)
    assert Script(tmp_path, text).ends() == (0, "", "")


def test_outside_of_penstock_it_only_restores(tmp_path: Path) -> None:
    """On a laptop: SIGTERM ends the script as always, and a checkpoint that was copied there can be used."""
    script = Script(tmp_path, PENSTOCK_CHECKPOINT_DIR="")
    script.line()
    script.process.terminate()
    assert script.ends()[0] == -signal.SIGTERM
    assert script.complete() == []
    gone = Script(tmp_path, PENSTOCK_CHECKPOINT_DIR="", PENSTOCK_RESUME="/no/such/checkpoint")
    status, out, errors = gone.ends()
    assert (status, out) == (1, "")
    assert "unset it to begin anew" in errors


def test_a_job_that_did_not_say_so_is_warned(tmp_path: Path) -> None:
    script = Script(tmp_path, PENSTOCK_CHECKPOINT_DIR="", PENSTOCK_JOB_ID="job-1")
    script.line()
    (tmp_path / "go").touch()
    status, _, errors = script.ends()
    assert status == 0
    assert "submit it with `checkpoint: sdk`" in errors


def test_of_a_gang_rank_0_alone_saves_and_the_others_wait_for_it(tmp_path: Path) -> None:
    """SIGTERM comes to all; rank 1 may not leave before rank 0 has reached its boundary."""
    script = Script(tmp_path, RANK="1")
    script.line()
    script.process.terminate()
    time.sleep(0.2)
    assert script.process.poll() is None
    (tmp_path / "go").touch()
    assert script.ends()[0] == 0
    assert script.complete() == []


README = (ROOT / "libs/penstock/sdk/README.md").read_text()
EXAMPLES = re.findall(r"```py checkpoint\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_the_examples_of_the_readme_are_stopped_and_go_on(tmp_path: Path, number: int) -> None:
    """Loops in the style of PyTorch, Keras and scikit-learn, as they stand there; their frameworks are played by a few lines."""
    text = (
        (ROOT / "tests/support/played_frameworks.py").read_text()
        + EXAMPLES[number]
        + "\nprint(model.history)\n"
    )
    whole = Script(tmp_path, text, PENSTOCK_CHECKPOINT_DIR="")
    status, expected, errors = whole.ends()
    assert status == 0, errors
    first = Script(tmp_path, text)
    time.sleep(0.35)
    first.process.terminate()
    status, out, errors = first.ends()
    assert (status, out) == (SAVED_STATUS, ""), errors
    (name,) = first.complete()
    again = Script(tmp_path, text, PENSTOCK_RESUME=str(first.folder / name))
    status, out, errors = again.ends()
    assert (status, out) == (0, expected), errors
