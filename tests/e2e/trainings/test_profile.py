"""`penstock profile` on a live cell, then jobs of the profiled network with deadlines: what is known of them,
and which of them are refused."""

import json
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from penstock_services.gateway.core.forecasts.forecast_errors import LEAST
from tests.e2e.conftest import Installation, Start, listed

pytestmark = pytest.mark.postgres

TRAIN = """
import os, signal, sys
import penstock.sdk.progress as sdk

each, size, now_s = int(os.environ["PENSTOCK_BATCH_SIZE"]), int(os.environ["WORLD_SIZE"]), 0.0
sdk._METER._clock = lambda: now_s
steps = int(os.environ.get("STEPS", sys.argv[1]))
for done in range(1, min(steps, 60) + 1):
    now_s += 0.01 + 0.001 * each + (0.005 if size > 1 else 0)
    sdk.progress(done)
if steps > 60:
    signal.pause()
"""
"""Does what a training does to a clock, its own: computing grows with the batch of each worker, synchronising
comes on top. After 60 iterations it waits to be stopped, if it was to do more."""
LONG = 2_000_000
"""Iterations of a job that takes hours by its step time, whatever the machine does meanwhile."""


def test_few_runs_tell_what_jobs_may_promise(start: Start, tmp_path: Path) -> None:
    """Three batches on one, two and four GPUs are nine placements; five runs at most, and all nine are known
    with an interval. A job of the network then has odds, is warned of a deadline that it cannot meet, and is
    refused where it asks for that."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    tmp_path.chmod(0o755)
    here = start("--nodes", "1", "--virtual-gpus", "4")
    profile = ("profile", "napper", "--workers", "1,2,4", "--batches", "16,32,64", "--iterations", "60")
    command = ("--", sys.executable, str(script), "100000")
    plan = json.loads(here.run(*profile, "--dry-run", "-o", "json", *command).stdout)
    assert 1 <= len(plan["plan"]) <= 3 + 3 - 1
    assert plan["spread_after"] < plan["spread_before"]
    assert listed(here, "get", "jobs")["jobs"] == [], "a dry run submits nothing"
    answer = here.run(*profile, "--budget", "1000", "-o", "json", *command)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert [run["outcome"] for run in found["runs"]] == ["succeeded"] * len(plan["plan"])
    assert 0 < found["gpu_minutes"] < 1_000
    assert len(found["after"]) == 9
    assert all(cell["step_ms"] is None for cell in found["before"])
    for cell in found["after"]:  # how near that is: tests/unit/estimator/test_profiling.py
        assert 0 < cell["low_ms"] < cell["step_ms"] < cell["high_ms"], cell
    measured = {(cell["workers"], cell["batch"]) for cell in found["after"] if cell["runs"]}
    assert measured == {(run["workers"], run["batch"]) for run in found["runs"]}
    assert found["spread_after"] < found["spread_before"]
    _deadlines(here, command, found["runs"][0])


def _deadlines(here: Installation, command: tuple[str, ...], measured: dict[str, int]) -> None:
    """The same command with a measured number of workers and batch, 20,000 iterations of some ten
    milliseconds."""
    job = (
        "submit",
        "--name",
        "real",
        "--model",
        "napper",
        "--workers",
        str(measured["workers"]),
        "--gpus",
        "1",
        "--global-batch-size",
        str(measured["batch"]),
        "--iterations",
        "20000",
    )
    dry = here.run(*job, "--deadline", "1s", "--dry-run", *command)
    assert "in time with a probability of < 1 %" in dry.stderr
    assert "would be met with a probability of 95 %" in dry.stderr
    assert listed(here, "get", "jobs", "--deadline")["jobs"] == []
    refused = here.run(*job, "--deadline", "1s", "--strict-deadline", *command)
    assert refused.returncode != 0
    assert "Nothing was submitted" in refused.stderr
    accepted = here.run(*job, "--deadline", "10h", "--strict-deadline", "--detach", "-o", "json", *command)
    assert accepted.returncode == 0, accepted.stderr
    job_id = here.until("real", "running")["job_id"]
    assert here.gateway.get(f"/v1/jobs/{job_id}/eta")["deadline"]["odds"] > 0.99
    jobs = listed(here, "get", "jobs", "--deadline")["jobs"]
    assert [job["job_id"] for job in jobs] == [job_id]
    for command_shown in ("eta", "why"):
        assert "in time with a probability of > 99 %" in here.run(command_shown, "real").stdout
    here.run("cancel", "real")
    _forecasts_are_compared(here, job[:-1], command, 4 // measured["workers"])


def _forecasts_are_compared(
    here: Installation, job: tuple[str, ...], command: tuple[str, ...], at_once: int
) -> None:
    """Jobs that would take hours fill the cell, and short ones wait for them. The long ones are cancelled, so
    all short ones start earlier than forecast; who has to wait then is answered with odds that know how far
    the forecasts were off. `at_once`: as many as fit."""

    def submitted(name: str, iterations: int) -> dict[str, Any]:
        flags = ("--detach", "-o", "json", "--deadline", "9000h", "--name", name)
        answer = here.run(*job, str(iterations), "--env", f"STEPS={iterations}", *flags, *command)
        assert answer.returncode == 0, answer.stderr
        found: dict[str, Any] = json.loads(answer.stdout)["deadline"]
        return found

    def fill(name: str) -> list[str]:
        running = [submitted(f"{name}-{number}", LONG)["job_id"] for number in range(at_once)]
        for job_id in running:
            here.gateway.until(job_id, "running")
        return running

    def forecast(name: str) -> Iterator[dict[str, Any]]:
        """Of each job that has to wait. There is none where the estimator needs more than half a second."""
        for number in count():
            found = submitted(f"{name}-{number}", 5)
            if found["starts_ms"] is not None:
                yield found
            else:
                here.run("cancel", found["job_id"])

    long = fill("first")
    short = list(islice(forecast("short"), LEAST))
    assert {(one["learned"], one["starts_ms"] > one["now_ms"]) for one in short} == {(0, True)}
    here.run("cancel", *long)
    assert here.run("wait", *(one["job_id"] for one in short)).returncode == 0
    long = fill("then")
    waits = next(forecast("waits"))
    assert waits["learned"] == LEAST
    assert waits["ends_ms"] < waits["starts_ms"], "the eight did not wait for the end of the long ones"
    here.run("cancel", waits["job_id"], *long)
