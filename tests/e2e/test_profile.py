"""`penstock profile` on a live cell, then jobs of the profiled network with deadlines: what is known of them, and which of them are refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock_services.gateway.core.forecast_errors import LEAST
from tests.e2e.conftest import Installation, eventually, installed, listed

pytestmark = pytest.mark.postgres

TRAIN = """
import os, sys, time
from penstock.sdk.progress import progress

each, size = int(os.environ["PENSTOCK_BATCH_SIZE"]), int(os.environ["WORLD_SIZE"])
for done in range(1, int(os.environ.get("STEPS", sys.argv[1])) + 1):
    time.sleep(0.01 + 0.001 * each + (0.005 if size > 1 else 0))
    progress(done)
"""
"""Does what a training does to a clock: computing grows with the batch of each worker, synchronising comes on top."""


def test_few_runs_tell_what_jobs_may_promise(tmp_path: Path) -> None:
    """Three batches on one, two and four GPUs are nine placements; five runs at most, and all nine are known with an interval. A job of the
    network then has odds, is warned of a deadline that it cannot meet, and is refused where it asks for that."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    tmp_path.chmod(0o755)
    with installed("--nodes", "1", "--virtual-gpus", "4") as here:
        profile = ("profile", "napper", "--workers", "1,2,4", "--batches", "16,32,64", "--iterations", "60")
        command = ("--", sys.executable, str(script), "100000")
        plan = json.loads(here.run(*profile, "--dry-run", "-o", "json", *command).stdout)
        assert 1 <= len(plan["plan"]) <= 3 + 3 - 1
        assert plan["spread_after"] < plan["spread_before"]
        assert listed(here, "get", "jobs")["jobs"] == [], "a dry run submits nothing"
        answer = here.run(*profile, "--budget", "5", "-o", "json", *command)
        assert answer.returncode == 0, answer.stderr
        found = json.loads(answer.stdout)
        assert [run["outcome"] for run in found["runs"]] == ["succeeded"] * len(plan["plan"])
        assert 0 < found["gpu_minutes"] < 5
        assert len(found["after"]) == 9
        assert all(cell["step_ms"] is None for cell in found["before"])
        for cell in found["after"]:  # how near that is: tests/unit/estimator/test_profiling.py
            assert 0 < cell["low_ms"] < cell["step_ms"] < cell["high_ms"], cell
        measured = {(cell["workers"], cell["batch"]) for cell in found["after"] if cell["runs"]}
        assert measured == {(run["workers"], run["batch"]) for run in found["runs"]}
        assert found["spread_after"] < found["spread_before"]
        _deadlines(here, command, found["runs"][0])


def _deadlines(here: Installation, command: tuple[str, ...], measured: dict[str, int]) -> None:
    """The same command with a measured number of workers and batch, 20,000 iterations of some ten milliseconds."""
    job = ("submit", "--name", "real", "--model", "napper", "--workers", str(measured["workers"]), "--gpus", "1",
           "--global-batch-size", str(measured["batch"]), "--iterations", "20000")  # fmt: skip
    dry = here.run(*job, "--deadline", "1s", "--dry-run", *command)
    assert "in time with a probability of < 1 %" in dry.stderr
    assert "would hold with a probability of 95 %" in dry.stderr
    assert listed(here, "get", "jobs", "--deadline")["jobs"] == []
    refused = here.run(*job, "--deadline", "1s", "--strict-deadline", *command)
    assert refused.returncode != 0
    assert "Nothing was submitted" in refused.stderr
    accepted = here.run(*job, "--deadline", "10h", "--strict-deadline", "--detach", "-o", "json", *command)
    assert accepted.returncode == 0, accepted.stderr
    deadline = json.loads(accepted.stdout)["deadline"]
    assert deadline["odds"] > 0.99
    jobs = json.loads(here.run("get", "jobs", "--deadline", "-o", "json").stdout)["jobs"]
    assert [job["job_id"] for job in jobs] == [deadline["job_id"]]
    for command_shown in ("eta", "why"):
        assert "in time with a probability of > 99 %" in here.run(command_shown, "real").stdout
    here.run("cancel", "real")
    _forecasts_are_compared(here, job[:-1], command)


def _forecasts_are_compared(here: Installation, job: tuple[str, ...], command: tuple[str, ...]) -> None:
    """Jobs that would take minutes fill the cell, and eight short ones wait for them. The long ones are cancelled, so all eight start earlier than forecast; who has to wait then is answered with
    odds that know how far eight forecasts were off."""

    def submitted(name: str, iterations: int) -> dict[str, Any]:
        flags = ("--detach", "-o", "json", "--deadline", "10h", "--name", name)
        answer = here.run(*job, str(iterations), "--env", f"STEPS={iterations}", *flags, *command)
        assert answer.returncode == 0, answer.stderr
        found: dict[str, Any] = json.loads(answer.stdout)["deadline"]
        assert found["starts_ms"] is not None, json.dumps(found)
        return found

    def fill(name: str) -> list[str]:
        """As many as run at once; the one after them waits and is cancelled."""
        running = []
        while (found := submitted(f"{name}-{len(running)}", 20_000))["starts_ms"] <= found["now_ms"]:
            running.append(found["job_id"])
            eventually(lambda: _status(here, running[-1]) == "running", "it does not start")
        here.run("cancel", found["job_id"])
        return running

    long = fill("first")
    short = [submitted(f"short-{number}", 5) for number in range(LEAST)]
    assert {(one["learned"], one["starts_ms"] > one["now_ms"]) for one in short} == {(0, True)}
    for job_id in long:
        here.run("cancel", job_id)
    for one in short:
        eventually(lambda one=one: _status(here, one["job_id"]) == "succeeded", "it does not end")  # type: ignore[misc]
    long = fill("then")
    waits = submitted("waits", 5)
    assert waits["learned"] == LEAST
    assert waits["ends_ms"] < waits["starts_ms"], "the eight did not wait for the end of the long ones"
    for job_id in (waits["job_id"], *long):
        here.run("cancel", job_id)


def _status(here: Installation, job_id: str) -> str:
    found: str = json.loads(here.run("describe", "job", job_id, "-o", "json").stdout)["status"]
    return found
