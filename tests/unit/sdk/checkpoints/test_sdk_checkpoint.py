"""Checkpoints of training scripts: examples of the README as scripts, signals at any moment, half-written
folders."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from infra.codegen.schemas import ROOT
from penstock.sdk.checkpoint import SAVED_STATUS
from penstock_services.node_reporter.shell.process.savers import Savers, ask, savers
from tests.support.waiting import wait_until

LOOP = """
import json, os, pathlib, sys, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress

state = {"done": 0, "sum": 0}
go, mark = pathlib.Path("go"), pathlib.Path("mark")

def between():
    pass

def save(path):
    pathlib.Path(path, "first").write_text(json.dumps(state))
    between()
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
    if mark.exists():
        mark.unlink()
        print("marked", flush=True)
    progress(state["done"])
print("ended", json.dumps(state), flush=True)
"""
"""Trains until there is a file `go`; says so when it meets a file `mark`."""


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
            [sys.executable, str(path), *arguments],
            env={**clean, **given, "PYTHONPATH": str(ROOT / "libs"), **env},
            text=True,
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ends(self) -> tuple[int, str, str]:
        out, err = self.process.communicate()
        return self.process.returncode, out, err

    def complete(self) -> list[str]:
        return sorted(entry.name for entry in self.folder.iterdir() if entry.name != ".new")

    def until(self, what: Callable[[], object], named: str) -> None:
        """Waits for what it does while it runs."""
        wait_until(lambda: what() or self.process.poll() is not None, named)
        assert self.process.poll() is None, self.ends()

    def goes_on(self) -> None:
        """Waits until it has trained on from now, over some boundaries."""
        for _ in range(2):
            (self.folder.parent / "mark").touch()
            assert self.line() == "marked"


def test_a_stopped_script_saves_between_two_iterations_and_the_next_goes_on_there(tmp_path: Path) -> None:
    """The cell needs its GPU. What was added up before the stop is not added up again, and nothing is left
    out."""
    first = Script(tmp_path)
    assert first.line() == "fresh 0"
    first.goes_on()
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
    """`tilt/jobs/softmax.py` is moved to another node after a few epochs: its last loss and accuracy are
    those of a run in one go."""
    text = (ROOT / "tilt/jobs/softmax.py").read_text()
    flags = ("--learning-rate", "0.001", "--gpu-ms", "20", "--checkpoint", "--epochs")
    os.mkfifo(tmp_path / "progress")
    reported = os.open(tmp_path / "progress", os.O_RDWR)
    first = Script(tmp_path, text, *flags, "1000000", PENSTOCK_PHASE_FILE=str(tmp_path / "progress"))
    assert os.read(reported, 1), "an epoch has ended"
    os.close(reported)
    first.process.terminate()
    assert first.ends()[0] == SAVED_STATUS
    (name,) = first.complete()
    done = int(name.rpartition("-")[2])
    epochs = str(done + 5)
    whole = Script(tmp_path, text, *flags, epochs).ends()[1].splitlines()
    again = Script(
        tmp_path, text, *flags, epochs, PENSTOCK_RESUME=str(first.folder / name), PENSTOCK_ATTEMPT="2"
    )
    status, out, errors = again.ends()
    assert (status, errors) == (0, "")
    assert out.splitlines()[-1].split()[:6] == whole[-1].split()[:6]
    assert len(out.splitlines()) < len(whole), "what was learned is not learned again"


def test_asked_for_a_checkpoint_it_saves_and_trains_on(tmp_path: Path) -> None:
    """SIGUSR1, twice: the older is removed when the newer is complete."""
    script = Script(tmp_path)
    script.line()
    names = []
    for _ in range(2):
        before = script.complete()
        script.process.send_signal(signal.SIGUSR1)
        script.until(
            lambda before=before: len(script.complete()) == 1 and script.complete() != before, "the save"
        )
        names += script.complete()
    assert len(set(names)) == 2
    (tmp_path / "go").touch()
    assert script.ends()[0] == 0


DIES_WHILE_IT_SAVES = LOOP.replace(
    'print("restored"',
    """
import signal
moment = int(sys.argv[1])

def before(function):
    def call(*given, **named):
        global moment
        moment -= 1
        if not moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)
    return call

between = before(between)
for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
    setattr(os, name, before(getattr(os, name)))
print("restored\"""",
)
"""Is killed at the so-manieth moment of a save: between its files, or before a call that changes the disk."""


def test_a_script_that_is_killed_while_it_saves_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """Power cuts, at each moment of a save: what is there is whole, and the one before stays until then."""
    at, statuses = "0", []
    while SAVED_STATUS not in statuses:
        number = len(statuses) + 1
        known = sorted((tmp_path / "checkpoints").glob("attempt-*")) if statuses else []
        resume = {"PENSTOCK_RESUME": str(known[-1])} if known else {}
        script = Script(tmp_path, DIES_WHILE_IT_SAVES, str(number), PENSTOCK_ATTEMPT=f"{number:02}", **resume)
        assert script.line() == (f"restored {at}" if known else "fresh 0")
        script.process.terminate()
        statuses.append(script.ends()[0])
        found = [name for name in script.complete() if name != ".old"]
        assert found or not known, "the one before stays until the next is complete"
        if found:
            at = found[-1].rpartition("-")[2]
            texts = {(script.folder / found[-1] / name).read_text() for name in ("first", "second")}
            assert [json.loads(text)["done"] for text in texts] == [int(at)]
    assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [SAVED_STATUS]
    assert len(statuses) > 12


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
    """A power cut with the next one complete and half of the files of the one before gone: only the next one
    is there. What is left of the other goes with the next save."""
    script = Script(tmp_path, DIES_WHILE_IT_REMOVES)
    script.line()
    script.process.send_signal(signal.SIGUSR1)
    script.until(script.complete, "the save")
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
    """The disk is full when the operator asks; then when the job is stopped. Only the second ends the script,
    with status 1."""
    text = LOOP.replace(
        "    between()\n", "    if go.with_name('full').exists(): raise OSError(28, 'no space')\n"
    )
    script = Script(tmp_path, text)
    script.line()
    script.process.send_signal(signal.SIGUSR1)
    script.until(script.complete, "the save")
    before = script.complete()
    (tmp_path / "full").touch()
    script.process.send_signal(signal.SIGUSR1)
    assert script.process.stderr is not None
    said = next(line for line in script.process.stderr if "[Errno 28] no space" in line)
    script.goes_on()
    script.process.terminate()
    status, _, errors = script.ends()
    assert (status, script.complete()) == (1, before)
    assert (said + errors).count("[Errno 28] no space") == 2


def test_loaders_that_the_script_forked_end_when_they_are_told_to(tmp_path: Path) -> None:
    """They have inherited the handlers; `terminate()` of multiprocessing must not hang, nor be lost on one
    that has only been forked."""
    text = textwrap.dedent("""
        import multiprocessing, time
        from penstock.sdk.checkpoint import checkpoint
        checkpoint(print, print)
        for _ in range(30):
            loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,))
            loader.start()
            loader.terminate()
            loader.join()
            assert loader.exitcode == -15
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
    script.goes_on()
    (tmp_path / "go").touch()
    assert script.ends()[0] == 0
    assert script.complete() == []


def registered(tmp_path: Path, **env: str) -> Script:
    """A script that has registered with the node whose file `savers` this is."""
    (tmp_path / "savers").touch()
    script = Script(tmp_path, PENSTOCK_SAVERS=str(tmp_path / "savers"), **env)
    assert script.line() == "fresh 0"
    return script


def test_the_process_that_saves_is_known_behind_any_wrapper(tmp_path: Path) -> None:
    """The node asks the holder of the lock: rank 0, or a script without ranks. Its death frees the lock."""
    script = registered(tmp_path)
    path = str(tmp_path / "savers")
    assert savers(path) == Savers(frozenset({script.process.pid}), frozenset())
    assert ask(path).saving == {script.process.pid}
    script.process.kill()
    script.process.wait()
    assert savers(path) == savers(str(tmp_path / "none")) == Savers()
    os.mkfifo(tmp_path / "fifo")
    assert ask(str(tmp_path / "fifo")) == Savers(), "a hostile task has replaced the file"
    follower = registered(tmp_path, RANK="1")
    assert savers(path) == Savers(frozenset(), frozenset({follower.process.pid}))
    follower.process.terminate()
    assert follower.ends()[0] == -signal.SIGTERM, "the node tells it when rank 0 has ended"


@pytest.mark.parametrize("order", list(permutations((0, 1, 2))))
def test_the_rank_that_saves_is_found_in_whatever_order_ranks_register(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    """`torchrun` starts three ranks. The kernel lists locks by their holders: the other ranks hid rank 0,
    and its work was lost."""
    path, pids = tmp_path / "savers", [0, 0, 0]
    path.touch()
    alive, ends = os.pipe()
    for rank in order:
        locked, tells = os.pipe()
        if not (pid := os.fork()):
            os.close(ends)
            file = os.open(path, os.O_RDWR)
            fcntl.lockf(file, fcntl.LOCK_SH if rank else fcntl.LOCK_EX, 1, 100 - rank)
            os.write(tells, b"x")
            os.read(alive, 1)
            os._exit(0)
        pids[rank] = pid
        os.close(tells)
        assert os.read(locked, 1) == b"x"
        os.close(locked)
    found = savers(str(path))
    os.close(ends)
    os.close(alive)
    for pid in pids:
        os.waitpid(pid, 0)
    assert found == Savers(frozenset(pids[:1]), frozenset(pids[1:]))


def test_a_request_that_came_before_the_script_had_registered_is_answered_at_its_first_step(
    tmp_path: Path,
) -> None:
    """`penstock checkpoint` while the script still imports its framework."""
    (tmp_path / "savers").touch()
    assert ask(str(tmp_path / "savers")) == Savers()
    script = registered(tmp_path)
    script.until(script.complete, "the save")
    assert script.complete() == ["attempt-1-iteration-1"]
    (tmp_path / "go").touch()
    assert script.ends()[0] == 0
    assert (tmp_path / "savers").read_bytes() == b""


def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    """A script forwards the signal that the training has got already, before its save, in it and after it."""
    script = Script(
        tmp_path, LOOP.replace("    between()\n", "    print('saves', flush=True); time.sleep(0.3)\n")
    )
    script.line()
    for _ in range(2):
        script.process.terminate()
    assert script.line() == "saves"
    script.process.terminate()
    status, _, errors = script.ends()
    assert (status, errors, len(script.complete())) == (SAVED_STATUS, "", 1)


def test_a_script_that_a_wrapper_starts_again_does_not_go_back(tmp_path: Path) -> None:
    """`until python train.py; do :; done`: after a stop it begins at 0 once more, and is stopped before it
    is where it was."""
    whole = tmp_path / "checkpoints" / "attempt-1-iteration-900000"
    whole.mkdir(parents=True)
    script = Script(tmp_path)
    script.line()
    script.process.terminate()
    assert script.ends()[0] == SAVED_STATUS
    assert script.complete() == [whole.name]


README = (ROOT / "libs/penstock/sdk/README.md").read_text()
EXAMPLES = re.findall(r"```py checkpoint\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_the_examples_of_the_readme_are_stopped_and_go_on(tmp_path: Path, number: int) -> None:
    """Loops in the style of PyTorch, Keras and scikit-learn, as they stand there; their frameworks are played
    by a few lines."""
    text = (
        (ROOT / "tests/support/trainings/played_frameworks.py").read_text()
        + EXAMPLES[number]
        + "\nprint(model.history)\n"
    )
    whole = Script(tmp_path, text, PENSTOCK_CHECKPOINT_DIR="")
    status, expected, errors = whole.ends()
    assert status == 0, errors
    first = Script(tmp_path, text, HELD="1")
    first.until((tmp_path / "held").exists, "its first batches")
    first.process.terminate()
    (tmp_path / "go").touch()
    status, out, errors = first.ends()
    assert (status, out) == (SAVED_STATUS, ""), errors
    (name,) = first.complete()
    again = Script(tmp_path, text, PENSTOCK_RESUME=str(first.folder / name))
    status, out, errors = again.ends()
    assert (status, out) == (0, expected), errors
