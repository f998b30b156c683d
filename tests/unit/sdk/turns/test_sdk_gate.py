"""The SDK's gate: `phase("train")` waits for a lock that somebody else holds, and for nothing else."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.sdk.checkpoint import FOLDER, SAVED_STATUS
from penstock.sdk.gate import GATE
from penstock.sdk.reporter.lines import FIFO

PASSES = """
import sys
from penstock.sdk.phases import phase
phase("launch")
print("launched", flush=True)
phase("train")
print("trains", flush=True)
"""
SAVES = """
from penstock.sdk.checkpoint import checkpoint
checkpoint(lambda path: print("saves", flush=True), lambda path: None)
"""
FORKS = """
import os
from penstock.sdk.phases import phase
print("launched", flush=True)
children = [os.fork() for _ in range(2)]
phase("train")
if 0 not in children:
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    print("trains", flush=True)
"""


def begin(script: str, **variables: str) -> "subprocess.Popen[str]":
    """Up to its gate, where it has one."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**own, **variables}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "launched\n"
    return process


def rest(process: "subprocess.Popen[str]") -> str:
    """What it still prints, up to its end."""
    assert process.stdout is not None
    text = process.stdout.read()
    process.wait()
    return text


@pytest.fixture
def gate(tmp_path: Path) -> Mapping[str, str]:
    path = tmp_path / "gate"
    path.touch()
    return {GATE: str(path)}


def lock(gate: Mapping[str, str]) -> int:
    """As a shim has it."""
    descriptor = os.open(gate[GATE], os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@pytest.mark.parametrize("script", [PASSES, FORKS])
def test_it_waits_until_the_lock_is_free(script: str, gate: Mapping[str, str]) -> None:
    """Also where a script has forked: all of its processes pass."""
    held = lock(gate)
    process = begin(script, **gate)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)  # clock: nothing happens: a slow machine can only miss a fault
    os.close(held)
    assert rest(process) == "trains\n"
    assert process.returncode == 0


def test_it_is_open_without_a_lock_and_outside(gate: Mapping[str, str]) -> None:
    for variables in (gate, {}):
        process = begin(PASSES, **variables)
        assert rest(process) == "trains\n"


def test_a_gate_that_is_gone_fails_the_script(tmp_path: Path) -> None:
    """Nobody knows whose the GPUs are: it does not train."""
    process = begin(PASSES, **{GATE: str(tmp_path / "gone")})
    assert rest(process) == ""
    assert process.returncode == 1


def test_a_job_that_saves_ends_at_once_where_it_waits(gate: Mapping[str, str], tmp_path: Path) -> None:
    """It is given back to the queue: its handler of SIGTERM saves between two iterations, of which it has
    none."""
    held = lock(gate)
    saves = tmp_path / "saves"
    saves.mkdir()
    process = begin(SAVES + PASSES, **gate, **{FOLDER: str(saves), FIFO: str(tmp_path / "none")})
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)  # clock: nothing happens: a slow machine can only miss a fault
    process.send_signal(signal.SIGTERM)
    assert rest(process) == ""
    assert process.returncode == SAVED_STATUS
    os.close(held)
