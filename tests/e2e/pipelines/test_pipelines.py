"""Pipelines that are cancelled, or whose runner is lost, leave no job behind; one that tries a step again
gets a new job."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from penstock.model.inputs.followers import PIPELINE_GONE
from tests.e2e.conftest import ENDLESS, Installation, listed
from tests.support.cli.command_process import PENSTOCK, ROOT
from tests.support.waiting import await_until, wait_until

pytestmark = pytest.mark.postgres

AT_ONCE = 5
SURE_CHUNKS = 9
"""A look, the submission, a look at the job, the stream: each has a request and an answer, and the stream
frames."""
GITLAB = {"CI": "true", "CI_SERVER_HOST": "gitlab.acme"}


def ended(up: Installation, job_id: str) -> dict[str, Any]:
    return up.gateway.until_ended(job_id)


def until_running(up: Installation, name: str, process: "subprocess.Popen[str]") -> str:
    """The id of the job of this name, once it runs."""

    def found() -> str:
        assert process.poll() is None, process.communicate()
        jobs = listed(up, "get", "jobs", "--name", name)["jobs"]
        return str(jobs[0]["job_id"]) if jobs and jobs[0]["status"] == "running" else ""

    return wait_until(found, name)


def test_a_runner_that_hangs_up_cancels_its_job_and_a_killed_one_leaves_it_to_the_cell(
    up: Installation,
) -> None:
    """No flag is given: it is so in CI. The job of a killed command ends after its grace, with the reason."""
    for stop, reason in ((signal.SIGHUP, "its submit was interrupted"), (signal.SIGKILL, PIPELINE_GONE)):
        name = f"stopped-by-{stop.name.lower()}"
        line = ("submit", "-q", "--tied-grace", "1s", "--name", name, "--", *ENDLESS)
        before = signal.signal(
            signal.SIGHUP, signal.SIG_DFL
        )  # a child inherits it; who runs the tests may ignore it
        process = subprocess.Popen(
            [*PENSTOCK, *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**up.env, **GITLAB, "CI_JOB_ID": name, "PENSTOCK_SERVER": up.url},
        )
        signal.signal(signal.SIGHUP, before)
        job_id = until_running(up, name, process)
        process.send_signal(stop)
        process.communicate()
        found = ended(up, job_id)
        assert (found["outcome"], found["reason"].startswith(reason)) == ("cancelled", True), found["reason"]
    again = up.run("submit", "-d", *line[2:], **GITLAB, CI_JOB_ID=name)
    assert f"{job_id} has ended (cancelled: {PIPELINE_GONE}" in again.stderr, "the step is tried again"
    assert up.run("cancel", again.stdout.strip()).returncode == 0


def test_a_step_that_is_tried_again_runs_again(up: Installation) -> None:
    """`retry(3)` around a step whose data could not be fetched: the variables of CI stay the same."""
    marker = up.home / "tmp" / "marker"
    script = f"test -e {marker} && echo second try works || {{ touch {marker}; exit 3; }}"
    line = ("submit", "--gpus", "0", "--name", "flaky", "--", "sh", "-c", script)
    first, second, third = (up.run(*line, **GITLAB, CI_JOB_ID="99") for _ in range(3))
    marker.unlink()
    assert [done.returncode for done in (first, second, third)] == [10, 0, 0], second.stderr
    assert "second try works" in second.stdout
    assert "already submitted" in third.stderr
    jobs = listed(up, "get", "jobs", "--name", "flaky")["jobs"]
    assert [job["spec"]["retry_of"] for job in jobs] == [jobs[1]["job_id"], None]
    by_hand = up.run("retry", jobs[1]["job_id"])
    assert up.run("wait", by_hand.stdout.strip()).returncode == 10, "its marker is gone, too"
    marker.unlink()


DRIVER = """
env | grep -c penstock-job
penstock cancel {other}
child=$(penstock submit --detach --gpus 0 --name child --owner mallory -- sleep infinity) && echo child $child
penstock cancel $child
penstock submit --gpus 0 --name trial -- sh -c "env | grep PENSTOCK_SERVER"
cat $PENSTOCK_TOKEN_FILE
"""


def test_a_job_submits_jobs_and_only_while_it_runs(up: Installation) -> None:
    """The driver of a sweep, on a node whose tasks see nothing of the node's. Its token is in no event and
    no variable; printed into a log, it is worth nothing by then."""
    other = up.run("submit", "-d", "--gpus", "0", "--name", "other", "--", *ENDLESS).stdout.strip()
    script = DRIVER.format(other=other)
    # PROGRAMS: where these tests have their programs in /tmp, a task sees what its job names of it
    line = (
        "submit",
        "--gpus",
        "0",
        "--may-submit",
        "--name",
        "driver",
        "--env",
        f"PROGRAMS={sys.executable}",
    )
    done = up.run(*line, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    [token] = re.findall(r"penstock-job\.\S+", done.stdout)
    assert "\n0\n" in done.stdout, "so many variables hold a token"
    assert f"job {other} was not submitted by job " in done.stdout
    jobs = {name: listed(up, "get", "jobs", "--name", name)["jobs"] for name in ("driver", "child", "trial")}
    [driver], [child], [trial] = jobs.values()
    for job, outcome in ((child, "cancelled"), (trial, "failed")):
        assert (job["owner"], job["spec"]["parents"]) == ("ana", [driver["job_id"]])
        assert ended(up, job["job_id"])["outcome"] == outcome
    printed = up.home / "tmp" / "printed"
    printed.write_text(token)
    expired = up.run("get", "jobs", PENSTOCK_TOKEN_FILE=str(printed))
    printed.unlink()
    assert (expired.returncode, "ends with its task" in expired.stderr) == (21, True), expired.stderr
    events = up.run("events", driver["job_id"], "-o", "json").stdout
    assert (driver["job_id"] in events, token.partition(".")[2] in events) == (True, False)
    assert up.run("cancel", other).returncode == 0


def test_a_dry_run_says_what_no_node_could_run_and_a_node_tells_its_story(up: Installation) -> None:
    """A typing error in a GPU's model, found by the pipeline's check; an operator looks what became of a
    node."""
    check = ("submit", "--dry-run", "--gpus", "1", "--only-node", "node-0", "--gpu-model")
    for model, warned in (("A100", True), ("v100", False)):
        done = up.run(*check, model, "--", "true")
        assert (done.returncode, "warning: gpu_models can never be met here" in done.stderr) == (0, warned)
    here = ("--only-node", "rack=rack-1", "--exclude-node", "node-7", "--prefer-node", "node-1")
    placed = up.run("submit", "-q", "--gpus", "1", *here, "-o", "json", "--", "true")
    assert json.loads(placed.stdout)["nodes"] == ["node-1"], placed.stderr
    operates = {"PENSTOCK_SERVER": up.url}
    for act in ("cordon", "uncordon"):
        assert up.run("node", act, "node-1", "--reason", "new fans", **operates).returncode == 0
    told_ = up.run("events", "--node", "node-1")
    words = [line.split()[2] for line in told_.stdout.splitlines()]
    assert words == ["joined", "cordoned", "uncordoned"], told_.stdout + told_.stderr
    assert told_.stdout.count("new fans") >= 1
    kinds = [
        event["type"]
        for event in json.loads(up.run("events", "--node", "node-1", "-o", "json").stdout)["events"]
    ]
    assert [kind.rpartition(".")[2] for kind in kinds if "arrays" not in kind] == words
    unknown = up.run("events", "--node", "node-9")
    assert (unknown.returncode, "no node 'node-9' has ever joined" in unknown.stderr) == (1, True)
    for wrong in ((), ("job", "--node", "node-1")):
        assert "name a job, or a node with --node" in up.run("events", *wrong).stderr


async def killed_at(up: Installation, chunk: int, name: str) -> None:
    """A pipeline is killed when this chunk, of either direction, passes between it and the gateway."""
    host, _, port = up.url.removeprefix("http://").partition(":")
    seen = 0

    async def forward(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        nonlocal seen
        with suppress(OSError):
            while data := await source.read(65_536):
                seen += 1
                if seen == chunk:
                    process.kill()
                to.write(data)
                await to.drain()
        to.close()

    async def serve(here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        there, on = await asyncio.open_connection(host, port)
        await asyncio.gather(forward(here, on), forward(there, back))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        line = ("submit", "-q", "--tied", "--tied-grace", "1s", "--gpus", "0", "--name", name, "--", *ENDLESS)
        process = await asyncio.create_subprocess_exec(
            *PENSTOCK,
            *line,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**up.env, "PENSTOCK_SERVER": url},
        )
        assert await process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
async def test_pipelines_that_are_killed_at_any_moment_leave_no_job(up: Installation, kills: int) -> None:
    """Before the submission, between its answer and the stream, while the job queues or runs: kill -9, no
    signal for the client."""
    chance, name = random.Random(kills), f"killed-{kills}"
    for first in range(0, kills, AT_ONCE):
        number = min(AT_ONCE, kills - first)
        await asyncio.gather(*(killed_at(up, chance.randint(1, SURE_CHUNKS), name) for _ in range(number)))

    def jobs() -> list[dict[str, Any]]:
        return list(listed(up, "get", "jobs", "--name", name, "--limit", "1000")["jobs"])

    await await_until(lambda: all(job["outcome"] for job in jobs()), lambda: f"the ends of {jobs()}")
    assert len(jobs()) > kills // 4, "so many had come so far that they submitted their job"
    assert {job["reason"].partition(" since ")[0] for job in jobs()} == {PIPELINE_GONE}


def test_legs_of_a_matrix_that_are_one_job_are_told_so(up: Installation) -> None:
    """GitHub sets the same variables in all legs: three of four trainings of a sweep never ran, and all legs
    were green."""
    ci = {"GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1", "GITHUB_JOB": "train"}
    leg = ("submit", "--detach", "--", "true")
    first, second = up.run(*leg, **ci), up.run(*leg, **ci)
    assert first.stderr == ""
    assert second.stdout == first.stdout
    assert second.stderr.startswith("already submitted ")
    assert f" ago as {first.stdout.strip()}" in second.stderr
    assert "--idempotency-key" in second.stderr
    own = up.run(*leg[:2], "--idempotency-key", "7-1-train-2", *leg[2:], **ci)
    assert own.stdout != first.stdout
