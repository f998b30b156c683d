# clocks: measures a promise in seconds, alone on the machine (`make live`)
"""Ctrl-C ends an installation within five seconds, whatever its jobs do. Run by `make live`."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Start, environment, survivors, until_made
from tests.support.cli.command_process import PENSTOCK, ROOT

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

PROMISED_S = 5.0
"""Source: libs/penstock/local/README.md."""
STUBBORN = ("sh", "-c", "trap '' TERM; while :; do sleep 1; done")
"""A job that does not end at SIGTERM."""
JOBS = 6


@pytest.mark.parametrize("command", [("true",), STUBBORN], ids=["idle", "stubborn-jobs"])
def test_up_ends_in_time(start: Start, place: Path, command: tuple[str, ...]) -> None:
    """Somebody wants the machine back at once: idle, or with jobs that would not end by themselves."""
    up = start("--nodes", "2", "--virtual-gpus", "4")
    jobs = [up.run("submit", "-d", "--", *command).stdout.strip() for _ in range(JOBS)]
    for job in jobs:
        up.until(job, "running" if command == STUBBORN else "succeeded")
    began_s = time.monotonic()
    up.process.send_signal(signal.SIGINT)
    up.process.wait()
    assert survivors(place) == []
    assert time.monotonic() - began_s < PROMISED_S


def test_the_demo_ends_in_time(place: Path) -> None:
    """Seen enough, while a dozen trainings run."""
    home = place / "home"
    process = subprocess.Popen(
        [*PENSTOCK, "demo", "--folder", str(place / "state")],
        env=environment(home),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until_made(place, "state/task-logs/*/*w0.log", process)
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait()
    assert survivors(place) == []
    assert time.monotonic() - began_s < PROMISED_S
