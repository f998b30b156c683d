"""A whole installation as a user has it: `penstock up` as a process, and commands beside it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.command_process import PENSTOCK, ROOT, in_process
from tests.support.installation.system import Gateway, file_ends, url_in
from tests.support.processes import processes_with
from tests.support.story import told
from tests.support.waiting import wait_until

SHADOWS = {f"{name}.py" for name in ("logging", "queue", "random", "select", "signal", "token", "types")}
"""Files in the folder where `penstock up` is started, as in an ML repository, that have names of the
standard library."""
ENDLESS = ("sleep", "infinity")
"""A job that runs until somebody stops it."""


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
    """None, in the end: a helper process ends when it reads that its parent has."""
    wait_until(lambda: not processes_of(folder), lambda: f"the end of {processes_of(folder)}")
    return []


def left_in(home: Path) -> list[str]:
    """Files in a user's home and folder for temporary files, which Penstock must not touch."""
    return sorted(
        str(entry.relative_to(home))
        for entry in home.rglob("*")
        if not entry.is_dir() and entry.name not in SHADOWS
    )


class Installation:
    """A `penstock up` that was started; `run` is the user beside it. Tests have it from `start`, `installed`
    or `up`."""

    url: str
    gateway: Gateway
    """For what another process has to be asked again and again; a command takes a hundred times as long."""

    def __init__(self, place: Path, *arguments: str, **env: str) -> None:
        self.folder, self.home = place / "state", place / "home"
        self.token_file, self.output = place / "token", place / "up.out"
        self.env = environment(
            self.home, PENSTOCK_TOKEN_FILE=str(self.token_file), PENSTOCK_TOKENS=str(place / "tokens"), **env
        )
        self.token_file.write_text(self._token())
        for name in SHADOWS:
            (self.home / name).write_text("raise ImportError('a file of the user was executed')\n")
        installed = (sys.executable, str(Path(sys.executable).with_name("penstock")))  # the console script
        command = [*installed, "up", "--folder", str(self.folder), "--port", "0", *arguments]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=self.env, cwd=self.home
            )

    def _token(self) -> str:
        """For a user who may do everything."""
        made = in_process(("token", "--roles", "submit,read,operate", "--tenant", "ana"), self.env)
        assert made.returncode == 0, made.stderr
        return made.stdout

    def until_up(self) -> None:
        """Returns once it is ready. Fails where it ends."""

        def found() -> str:
            ended = self.process.poll() is not None
            url = url_in(self.printed())
            assert url or not ended, f"not up: {self.printed()}\n{file_ends(self.folder.glob('logs/*.log'))}"
            return url

        self.url = wait_until(found, lambda: f"`penstock up`: {self.printed()}")
        self.gateway = Gateway(self.url, self.token_file.read_text().strip())

    def printed(self) -> str:
        """Everything that it has printed."""
        return self.output.read_text()

    def run(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """A command as a script runs it, without the start of a process, which takes most of its processor
        time.

        Where the process is the point (its signals, its pipe, its end), tests start `PENSTOCK` themselves.
        """
        return in_process(arguments, {**self.env, "PENSTOCK_SERVER": self.url, **env})

    def started(self, *arguments: str) -> "subprocess.Popen[str]":
        """A command as a process of its own."""
        return subprocess.Popen(
            [*PENSTOCK, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.env, "PENSTOCK_SERVER": self.url},
            cwd=ROOT,
        )

    def until(self, job: str, status: str) -> dict[str, Any]:
        """The job, by id or name, once it has this status. Fails where it ends with another one."""
        job_id = str(listed(self, "describe", "job", job)["job_id"])
        return self.gateway.until(job_id, status)

    def pid(self, job: str) -> int:
        """Of the job's only task, once it can be read."""

        def started() -> list[int]:
            return [task["pid"] for task in listed(self, "describe", "job", job)["tasks"] if task["pid"]]

        [found] = wait_until(started, f"the process of {job}")
        return found

    def stop(self) -> None:
        """Ctrl-C, and its end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        wait_until(lambda: self.process.poll() is not None, lambda: f"its end: {self.printed()}")


@contextmanager
def installed(place: Path, *arguments: str, **env: str) -> Iterator[Installation]:
    """A running installation in this folder. Failures tell what it printed, its logs, and its last events."""
    running = Installation(place, *arguments, **env)
    logs = running.folder / "logs"
    try:
        with (
            told("penstock up", running.output),
            told("services.log", logs / "services.log"),
            told("the nodes' logs", lambda: file_ends(logs.glob("node-*.log"))),
            told("the cell's last events", lambda: running.gateway.last_events()),
        ):
            running.until_up()
            yield running
            running.stop()
    finally:
        running.process.kill()
        running.process.wait()


Start = Callable[..., Installation]


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Starts installations in the test's folder, one after the other."""
    with ExitStack() as stack:
        yield lambda *arguments, **env: stack.enter_context(installed(place, *arguments, **env))


@pytest.fixture(scope="module")
def up() -> Iterator[Installation]:
    """One installation for all tests of a module; it must leave nothing behind."""
    place = new_place()
    size = ("--nodes", "2", "--virtual-gpus", "2")
    with installed(place, *size, PENSTOCK_UNSCHEDULABLE_GRACE_MS="300") as running:
        yield running
        running.stop()
        assert running.process.returncode == 0, running.printed()
        assert survivors(place) == []
        assert left_in(running.home) == []
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def no_job_stays(up: Installation) -> Iterator[None]:
    """What a test leaves in the queue, or running where it has failed, is no matter of those behind it."""
    yield
    jobs = up.gateway.get("/v1/jobs?limit=1000")["jobs"]
    left = [job["job_id"] for job in jobs if job["outcome"] is None]
    for job_id in left:
        up.run("cancel", job_id)  # refused where it has ended meanwhile
    if left:
        up.run("wait", *left)


def listed(up: Installation, *arguments: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    answer = up.run(*arguments, "-o", "json")
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def until_there(gate: Path) -> tuple[str, ...]:
    """A job that runs until the file is there: for as long as a test needs, however slow the machine is."""
    return ("sh", "-c", f"until test -e {gate}; do sleep 0.05; done")


def until_made(place: Path, pattern: str, process: "subprocess.Popen[str]") -> None:
    """Waits for a file that the process makes: a moment of its life, however fast the machine is."""

    def made() -> bool:
        ended = process.poll() is not None
        there = any(place.glob(pattern))
        assert there or not ended, process.communicate()
        return there

    wait_until(made, pattern)


def until_line(process: "subprocess.Popen[str]", word: str) -> str:
    """The next line with the word."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"it ended, and never printed {word!r}: {process.communicate()}")


@pytest.fixture(scope="module")
def succeeded(up: Installation) -> str:
    """The name of a job that has succeeded."""
    answer = up.run("submit", "--name", "done", "--gpus", "1", "--", "true")
    assert answer.returncode == 0, answer.stderr
    return "done"
