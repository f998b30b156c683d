"""A whole installation as a user has it: `penstock up` as a process, and commands beside it."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command_process import PENSTOCK, in_process
from tests.support.processes import processes_with

READY_S = 120.0
PATIENCE_S = 120.0
FAILED = pytest.StashKey[bool]()
STOP_S = 60.0  # `penstock up` ends within 5 s on a quiet machine; a busy one must not fail the test


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user's environment without ours; `home` shows what is written outside the folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    return {**inherited, "HOME": str(home), "TMPDIR": str(home / "tmp"), **more}


def new_place() -> Path:
    """A folder that the database's own user can reach when we are root; pytest's own are closed to others."""
    place = Path(tempfile.mkdtemp(prefix="e2e-penstock-"))
    place.chmod(0o755)
    return place


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for one test, removed afterwards."""
    found = new_place()
    yield found
    shutil.rmtree(found, ignore_errors=True)


def processes_of(folder: Path) -> list[str]:
    """Living processes that have to do with the folder."""
    return [f"{pid}: {command[:150]}" for pid, command in processes_with(str(folder).encode()).items()]


def survivors(folder: Path) -> list[str]:
    """Those still alive a while after the end: a helper process ends when it reads that its parent has."""
    deadline = time.monotonic() + STOP_S
    while (found := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def left_in(home: Path) -> list[str]:
    """Files in a user's home and folder for temporary files, which Penstock must not touch."""
    return sorted(str(entry.relative_to(home)) for entry in home.rglob("*") if not entry.is_dir())


class Installation:
    """A running `penstock up`; `run` is the user beside it."""

    def __init__(self, place: Path, *arguments: str, **env: str) -> None:
        self.folder, self.home = place / "state", place / "home"
        self.token_file = place / "token"
        self.env = environment(
            self.home, PENSTOCK_TOKEN_FILE=str(self.token_file), PENSTOCK_TOKENS=str(place / "tokens"), **env
        )
        self.token_file.write_text(self._token())
        self.output = (place / "up.out").open("w+")
        command = [*PENSTOCK, "up", "--folder", str(self.folder), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=self.output, env=self.env, cwd=self.home
        )
        self.url = self._url()

    def _token(self) -> str:
        """For a user who may do everything."""
        made = in_process(("token", "--roles", "submit,read,operate", "--tenant", "ana"), self.env)
        assert made.returncode == 0, made.stderr
        return made.stdout

    def _url(self) -> str:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.printed().splitlines():
                if line.strip().startswith("export PENSTOCK_SERVER="):
                    return line.strip().partition("=")[2]
            time.sleep(0.05)
        raise AssertionError(f"not up: {self.printed()}")

    def printed(self) -> str:
        """Everything that it has printed."""
        self.output.flush()
        return Path(self.output.name).read_text()

    def run(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """A command as a script runs it, without the start of a process, which takes most of its processor time.

        Where the process is the point (its signals, its pipe, its end), tests start `PENSTOCK` themselves.
        """
        return in_process(arguments, {**self.env, "PENSTOCK_SERVER": self.url, **env})

    def stop(self) -> float:
        """Ctrl-C; returns the seconds it took. Raises when it does not end in time."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(3 * STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return time.monotonic() - began


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """For fixtures that clear up after a failed test."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@contextmanager
def installed(*arguments: str, **env: str) -> Iterator[Installation]:
    """One for this test alone."""
    place = new_place()
    running = Installation(place, *arguments, **env)
    try:
        yield running
        running.stop()
    finally:
        running.process.kill()
        running.process.wait()
        running.output.close()
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def up() -> Iterator[Installation]:
    """One installation for all tests of a module; it must leave nothing behind."""
    place = new_place()
    running = Installation(
        place, "--nodes", "2", "--virtual-gpus", "2", PENSTOCK_UNSCHEDULABLE_GRACE_MS="300"
    )
    try:
        yield running
        took_s = running.stop()
        assert running.process.returncode == 0, running.printed()
        assert took_s <= STOP_S, f"took {took_s:.1f} s"
        assert survivors(place) == []
        assert left_in(running.home) == []
    finally:
        running.process.kill()
        running.process.wait()
        running.output.close()
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def no_job_stays(request: pytest.FixtureRequest, up: Installation) -> Iterator[None]:
    """What a failed test has left running would make those behind it fail, too."""
    yield
    if request.node.stash.get(FAILED, False):
        jobs = json.loads(up.run("get", "jobs", "--limit", "1000", "-o", "json").stdout)["jobs"]
        left = [job["job_id"] for job in jobs if job["outcome"] is None]
        if left:
            up.run("cancel", *left)


def listed(up: Installation, *arguments: str) -> dict[str, object]:
    """What a command prints as JSON."""
    answer = up.run(*arguments, "-o", "json")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert isinstance(found, dict)
    return found


def until_there(gate: Path) -> tuple[str, ...]:
    """A job that runs until the file is there: for as long as a test needs, however slow the machine is."""
    return ("sh", "-c", f"until test -e {gate}; do sleep 0.1; done")


def until_made(place: Path, pattern: str, process: "subprocess.Popen[str]") -> None:
    """Waits for a file that the process makes: a moment of its life, however fast the machine is."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(place.glob(pattern)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {pattern} within {PATIENCE_S:g} s"
        time.sleep(0.002)


def eventually(what: Callable[[], bool], output: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {output}"
        time.sleep(0.1)
