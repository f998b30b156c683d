"""The judge itself must find violations: forged histories, one violation each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import judge_task
from tests.faults.processes.judge import Verdict, judge_jobs, judge_runs
from tests.support.waiting import wait_until

FOR_EVER = "1e6"  # seconds: until the test kills it
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "honest": [
        {"kind": "start", "at_ns": 1, "gpus": [0], "job": "a", "attempt": 1, "task": "a.1.w0", "token": 5},
        {"kind": "exit", "at_ns": 2, "job": "a", "task": "a.1.w0", "token": 5, "code": 0},
        {"kind": "start", "at_ns": 3, "gpus": [0], "job": "b", "attempt": 1, "task": "b.1.w0", "token": 9},
        {"kind": "exit", "at_ns": 4, "job": "b", "task": "b.1.w0", "token": 9, "code": 0},
    ],
    "two on one GPU": [
        {"kind": "start", "at_ns": 1, "gpus": [0, 1], "job": "a", "attempt": 1, "task": "a.1.w0", "token": 5},
        {"kind": "start", "at_ns": 2, "gpus": [1], "job": "b", "attempt": 1, "task": "b.1.w0", "token": 9},
        {"kind": "exit", "at_ns": 3, "job": "a", "task": "a.1.w0", "token": 5, "code": 0},
    ],
    "two attempts at once": [
        {"kind": "start", "at_ns": 1, "gpus": [0], "job": "a", "attempt": 1, "task": "a.1.w0", "token": 5},
        {"kind": "start", "at_ns": 2, "gpus": [1], "job": "a", "attempt": 2, "task": "a.2.w0", "token": 9},
        {"kind": "exit", "at_ns": 3, "job": "a", "task": "a.1.w0", "token": 5, "code": 0},
    ],
    "started twice": [
        {"kind": "start", "at_ns": 1, "gpus": [], "job": "a", "attempt": 1, "task": "a.1.w0", "token": 5},
        {"kind": "exit", "at_ns": 2, "job": "a", "task": "a.1.w0", "token": 5, "code": 1},
        {"kind": "start", "at_ns": 3, "gpus": [], "job": "a", "attempt": 1, "task": "a.1.w0", "token": 5},
    ],
}


@pytest.mark.parametrize(
    ("name", "gpu", "attempt"),
    [("honest", 0, 0), ("two on one GPU", 1, 0), ("two attempts at once", 0, 1), ("started twice", 0, 1)],
)
def test_histories(tmp_path: Path, name: str, gpu: int, attempt: int) -> None:
    lines = [json.dumps({"node": "n1", **entry}) for entry in HISTORIES[name]]
    (tmp_path / "n1.jsonl").write_text("\n".join([*lines, '{"cut sho']))
    verdict = Verdict()
    judge_runs(verdict, tmp_path)
    assert (verdict.count("gpu"), verdict.count("attempt")) == (gpu, attempt), verdict
    assert len(verdict.violations) == gpu + attempt


def test_a_job_without_an_end_is_lost() -> None:
    """It was acknowledged, and nobody ever heard of it again."""
    verdict = Verdict()
    judge_jobs(verdict, {}, {"a": frozenset({"succeeded"})}, {"a"})
    assert verdict.count("outcome") == 1


def test_a_task_notices_whom_it_meets(tmp_path: Path) -> None:
    """Attempt 1 still runs on GPU 0 when attempt 2 starts there: both violations are in the history."""

    def start(attempt: int) -> "subprocess.Popen[bytes]":
        env = {
            "PENSTOCK_NODE_ID": "n1",
            "PENSTOCK_JOB_ID": "a",
            "PENSTOCK_ATTEMPT": str(attempt),
            "PENSTOCK_TASK_ID": f"a.{attempt}.w0",
            "PENSTOCK_TOKEN": str(attempt),
            "PENSTOCK_GPUS": "GPU-0",
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-S", judge_task.__file__, str(tmp_path), FOR_EVER],
            env={**os.environ, **env},
        )

    def history() -> str:
        path = tmp_path / "n1.jsonl"
        return path.read_text() if path.exists() else ""

    def ran(attempts: int, latest: "subprocess.Popen[bytes]") -> bool:
        assert latest.poll() is None, history()
        return history().count('"ran"') == attempts

    children: list[subprocess.Popen[bytes]] = []
    try:
        for attempt in (1, 2):
            children.append(start(attempt))
            wait_until(lambda: ran(attempt, children[-1]), f"the start of attempt {attempt}")  # noqa: B023
    finally:
        for child in children:
            child.kill()
            child.wait()
    verdict = Verdict()
    judge_runs(verdict, tmp_path)
    assert (verdict.count("double"), verdict.count("twice")) == (1, 1), verdict
