"""`penstock up` ends in every way, and begins again: nothing is left, nothing is lost."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import ENDLESS, Start, environment, left_in, listed, survivors, until_made
from tests.support.cli.command_process import PENSTOCK, ROOT

pytestmark = pytest.mark.postgres


def test_what_happened_survives_a_restart(start: Start, place: Path) -> None:
    """A user restarts the machine over lunch and asks in the afternoon why the morning's job failed."""
    first = start("--nodes", "1")
    assert first.run("submit", "--name", "morning", "--", "sh", "-c", "exit 4").returncode == 10
    first.run("submit", "-d", "--name", "under-way", "--", *ENDLESS)
    first.stop()
    second = start("--nodes", "1")
    [morning] = listed(second, "get", "jobs", "--name", "morning")["jobs"]
    assert (morning["outcome"], morning["exit_code"]) == ("failed", 4)
    assert second.run("submit", "--", "true").returncode == 0, "and it goes on"
    assert second.run("projections", "verify").returncode == 0
    second.stop()
    assert survivors(place) == []


@pytest.mark.parametrize(
    "made", ["state/postgres/data*", "state/postgres/data/postmaster.pid", "state/nodes/*"]
)
def test_ctrl_c_while_it_starts_leaves_nothing(place: Path, made: str) -> None:
    """The impatient: wrong folder noticed, Ctrl-C before it is up; while its cluster is made, its services or
    its nodes start."""
    home = place / "home"
    process = subprocess.Popen(
        [*PENSTOCK, "up", "--folder", str(place / "state"), "--port", "0"],
        cwd=home,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(home),
    )
    until_made(place, made, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert "Traceback" not in output
    assert process.returncode == 0, output
    assert survivors(place) == []
    assert left_in(home) == []


@pytest.mark.parametrize(("command", "code"), [("up", 0), ("demo", 130)])
def test_a_stop_during_the_imports_is_the_end(place: Path, command: str, code: int) -> None:
    """Just installed, nothing is compiled yet: the imports take a minute on a busy machine, and there is
    nothing to end in order."""
    home, begun = place / "home", place / "begun"
    (place / "uvloop.py").write_text(f"import time; open({str(begun)!r}, 'w').close(); time.sleep(600)")
    process = subprocess.Popen(
        [*PENSTOCK, command, "--folder", str(place / "state")],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(home, PYTHONPATH=str(place)),
        cwd=ROOT,
    )
    until_made(place, begun.name, process)
    process.terminate()
    assert process.communicate() == ("", None)
    assert process.returncode == code
    assert not (place / "state").exists()


def test_a_killed_up_takes_everything_with_it(start: Start, place: Path) -> None:
    """kill -9: no process is left to clean up, so every child must have arranged for its own end."""
    running = start("--nodes", "2")
    job_id = running.run("submit", "-d", "--", *ENDLESS).stdout.strip()
    running.until(job_id, "running")
    running.process.kill()
    running.process.wait()
    assert survivors(place) == []
    again = start("--nodes", "2")
    assert again.run("submit", "--", "true").returncode == 0, "and the folder can be used again"
    again.stop()
    assert survivors(place) == []
