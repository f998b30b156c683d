"""The command line in a pipeline: keys of steps that are tried again, signals of runners, and streams that
are closed."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.cli.output import Format
from penstock.cli.signals import exit_code, terminable
from penstock.cli.submission import ci
from penstock.cli.submission.submit import Submission
from penstock.client import Client, NotPermitted
from penstock.exits import Exit
from penstock.model.jobs.job_spec import JobSpec
from penstock.screen import console, plain_table
from tests.support.cli.command_process import PENSTOCK

JOB = JobSpec(command=("a",))
GITHUB = {"GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1", "GITHUB_JOB": "train"}
AZURE = {"SYSTEM_COLLECTIONID": "c", "BUILD_BUILDID": "1", "SYSTEM_JOBID": "j"}
JENKINS = {"JENKINS_URL": "http://ci/", "BUILD_TAG": "jenkins-train-17"}


def test_in_ci_a_repeated_step_submits_once_and_another_job_is_another() -> None:
    """A CI system restarts a step after its runner's network failed; the first submission had arrived."""
    assert ci.idempotency_key(JOB, GITHUB) == ci.idempotency_key(JOB, dict(reversed(GITHUB.items())))
    assert ci.idempotency_key(JOB, GITHUB) != ci.idempotency_key(JobSpec(command=("b",)), GITHUB)
    assert ci.idempotency_key(JOB, {}) != ci.idempotency_key(JOB, {}), "by hand each submission is a new job"
    assert ci.idempotency_key(JOB, {"GITHUB_RUN_ID": "7"}).startswith("cli-"), "half a CI is none"


@pytest.mark.parametrize(
    ("env", "name", "value"),
    [
        (GITHUB, "GITHUB_RUN_ATTEMPT", "2"),
        (GITHUB, "GITHUB_ACTION", "__run_2"),
        (AZURE, "BUILD_BUILDID", "2"),
        (AZURE, "SYSTEM_JOBATTEMPT", "2"),
        (JENKINS, "STAGE_NAME", "evaluate"),
    ],
)
def test_another_step_or_attempt_is_another_submission(env: Mapping[str, str], name: str, value: str) -> None:
    """Two steps of a pipeline run the same job; and a build of Azure has the job ids of the build before."""
    assert ci.idempotency_key(JOB, env) != ci.idempotency_key(JOB, {**env, name: value})


@pytest.mark.parametrize(
    ("outcome", "reason", "again"),
    [
        (None, None, False),
        ("succeeded", "", False),
        ("failed", "w0 exited with 1", True),
        ("timed_out_running", "", True),
        ("timed_out_queued", "", True),
        ("unschedulable", "", True),
        ("cancelled", "asked by the user", False),
        ("cancelled", ci.INTERRUPTED, True),
    ],
)
def test_a_step_is_tried_again_after_each_end_that_no_person_wanted(
    outcome: str | None, reason: str | None, again: bool
) -> None:
    """`retry(3)` of Jenkins: a job that failed is submitted again, one that somebody cancelled is not."""
    assert ci.is_tried_again({"outcome": outcome, "reason": reason}) is again


class Keys(Client):
    """A gateway that knows the jobs of some keys."""

    def __init__(self, **outcomes: str | None) -> None:
        super().__init__("http://127.0.0.1:9")
        self.outcomes, self.posts = outcomes, dict[str, Any]()

    def posted(self, path: str, body: Any = None, headers: Any = None, **_: Any) -> tuple[int, Any]:
        key = headers["Idempotency-Key"].partition(".")[2] or "1"
        self.posts[key] = body.get("retry_of")
        return (200 if f"k{key}" in self.outcomes else 202), {"job_id": f"k{key}"}

    def get(self, path: str, **_: Any) -> Any:
        job_id = path.rpartition("/")[2]
        return {
            "job_id": job_id,
            "outcome": self.outcomes[job_id],
            "reason": "",
            "now_ms": 5_000,
            "submitted_ms": 0,
        }


@pytest.mark.parametrize(
    ("known", "given", "posts", "said"),
    [
        ({}, None, {"1": None}, ""),
        ({"k1": "failed"}, None, {"1": None, "2": "k1"}, "k1 has ended (failed); submitted once more"),
        ({"k1": "failed", "k2": "failed"}, None, {"1": None, "2": "k1", "3": "k2"}, "k2 has ended"),
        (
            {"k1": "failed", "k2": "succeeded"},
            None,
            {"1": None, "2": "k1"},
            "already submitted 5.00 s ago as k2",
        ),
        ({"k1": None}, None, {"1": None}, "already submitted 5.00 s ago as k1"),
        ({"k1": "failed"}, "mine", {"1": None}, "already submitted 5.00 s ago as k1"),
    ],
)
def test_a_failed_job_of_the_same_step_is_submitted_under_the_next_key(
    known: dict[str, str | None],
    given: str | None,
    posts: dict[str, str | None],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The variables of CI do not change between the tries of a step: each failed job is followed by a
    further one, linked to it."""
    monkeypatch.setattr(ci, "idempotency_key", lambda spec: "ci")
    client = Keys(**known)
    submission = Submission(
        lambda: client,
        JOB,
        given,
        Format.TABLE,
        detach=True,
        propagate=False,
        cancels=True,
        quiet=False,
        strict=False,
    )
    assert submission.run() == 0
    assert client.posts == posts
    printed = capsys.readouterr()
    assert printed.out == f"k{list(posts)[-1]}\n"
    assert said in printed.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, Exit.TERMINATED), (signal.SIGHUP, Exit.HUNG_UP)]
)
def test_what_a_runner_sends_interrupts_a_command_as_ctrl_c_does(number: signal.Signals, code: Exit) -> None:
    """GitLab sends SIGTERM; a runner over ssh goes away, and its session sends SIGHUP."""
    before = signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore hang-ups
    try:
        with pytest.raises(KeyboardInterrupt) as stopped, terminable():
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, before)
    assert exit_code(stopped.value) is code


def test_under_nohup_a_hang_up_is_ignored() -> None:
    """`nohup penstock submit … &` before the laptop is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminable():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "1</dev/null"])
def test_a_closed_stream_gives_no_traceback(closed: str) -> None:
    """Cron jobs and daemons close what they do not read; one redirects the wrong way round."""
    line = f'"$@" version {closed}'
    done = subprocess.run(["sh", "-c", line, "sh", *PENSTOCK], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if closed == "1</dev/null" else 0), done.stderr


def test_a_terminal_without_unicode_shows_what_it_can() -> None:
    """A build agent with LANG=C and Python's coercion off: the help has letters beyond ASCII."""
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([*PENSTOCK, "--help"], capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert b"penstock" in done.stdout
    assert not done.stderr


def test_a_table_in_a_pipe_has_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    """`penstock describe job J > job.txt`: one long value would pad each other line to its length."""
    table = plain_table("NAME", "VALUE")
    table.add_row("command", "x" * 250)
    table.add_row("state", "queued")
    console().print(table)
    console().print("a line, ", end="")
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines[:-1] if line.endswith(" ")] == []
    assert lines[-1] == "a line, ", "the rest of it follows"


def test_a_job_that_its_pipeline_may_not_follow_is_not_tied(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline with a token for submissions alone: the cell would take it for gone."""

    class Blind(Keys):
        specs: ClassVar[list[Any]] = []

        def posted(self, path: str, body: Any = None, headers: Any = None, **more: Any) -> tuple[int, Any]:
            self.specs.append(body)
            return super().posted(path, body, headers, **more)

        def get(self, path: str, **_: Any) -> Any:
            raise NotPermitted("no role read")

    client, tied = Blind(), JobSpec(command=("a",), tied_to="follower")
    submission = Submission(
        lambda: client,
        tied,
        "key",
        Format.TABLE,
        detach=False,
        propagate=False,
        cancels=True,
        quiet=False,
        strict=False,
    )
    assert submission.run() == 0
    assert "tied_to" not in client.specs[0]
    assert "not tied to this command" in capsys.readouterr().err


SHADOWED = """
import asyncio
from penstock.runtime.pool import WorkerPool

async def main():
    pool = WorkerPool()
    print(await pool.run(len, "ok"))
    pool.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_worker_imports_nothing_from_the_folder_in_which_its_service_was_started(tmp_path: Path) -> None:
    """An ML repository has a queue.py and a random.py, and somebody starts a service in it."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        folder.mkdir()
    for name in ("queue", "random", "token", "select", "signal", "types", "logging"):
        (project / f"{name}.py").write_text("raise ImportError('a file of the user was executed')")
    (elsewhere / "main.py").write_text(SHADOWED)
    argv = [sys.executable, str(elsewhere / "main.py")]
    done = subprocess.run(argv, cwd=project, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("2\n", "")
