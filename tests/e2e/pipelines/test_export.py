"""A real cell's jobs become a trace, and the trace runs in the simulator."""

import csv
import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ENDLESS, Installation, listed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def test_what_a_cell_ran_is_replayed_under_another_policy(up: Installation, place: Path) -> None:
    """An operator wants to know what shortest-job-first would have done with the jobs that the cell has
    run."""
    needs, gate = ("--owner", "ana", "--cores", "1", "--gpus"), place / "gate"
    fails = ("sh", "-c", f"until test -e {gate}; do sleep 0.05; done; exit 3")
    broken = up.run("submit", "-d", "--name", "broken", "--model", "broken", *needs, "2", "--", *fails)
    assert broken.returncode == 0, broken.stderr
    up.until("broken", "running")
    gate.touch()
    ran = {
        "short": up.run("submit", "--model", "short", *needs, "1", "--name", "short", "--", "sleep", "0.3"),
        "gang": up.run("submit", "--model", "gang", "--workers", "2", *needs, "1", "--", "true"),
        "broken": up.run("wait", "broken"),
        "never": up.run("submit", "--model", "never", *needs, "16", "--", "true"),
    }
    assert {model: answer.returncode for model, answer in ran.items()} == {
        "short": 0,
        "gang": 0,
        "broken": 10,
        "never": 13,
    }
    long = up.run("submit", "--name", "long", "--model", "long", "--detach", *needs, "1", "--", *ENDLESS)
    assert long.returncode == 0, long.stderr
    assert up.run("submit", "--model", "last", *needs, "1", "--", "true").returncode == 0
    up.until("long", "running")

    trace, nodes = place / "month.csv", place / "nodes.csv"
    answer = up.run("export", "--nodes", str(nodes), "-o", str(trace))
    assert answer.returncode == 0, answer.stderr
    assert (
        "5 jobs written; 1 of them still run, and stand there with the time so far; 1 never ran"
        in answer.stderr
    )
    found = rows_of(trace)
    assert {model: (row["gpus"], row["workers"], row["outcome"]) for model, row in found.items()} == {
        "short": ("1", "1", "succeeded"),
        "gang": ("2", "2", "succeeded"),
        "broken": ("2", "1", "failed"),
        "long": ("1", "1", "running"),
        "last": ("1", "1", "succeeded"),
    }
    assert {row["owner"] for row in found.values()} == {"ana"}
    short = listed(up, "describe", "job", "short")
    assert float(found["short"]["duration_s"]) == max(1, short["ended_ms"] - short["running_ms"]) / 1_000
    assert 0 <= float(found["long"]["duration_s"]), "as long as it had run when it was asked"
    assert float(found["broken"]["submit_s"]) == 0.0, "times count from the first job"

    def long_s() -> float:
        assert up.run("export", "-o", str(trace)).returncode == 0
        return float(rows_of(trace)["long"]["duration_s"])

    before_s = float(found["long"]["duration_s"])
    wait_until(lambda: long_s() > before_s, "a later time, though nothing is recorded meanwhile")

    replay = up.run("simulate", str(trace), "--cluster", str(nodes), "--profile", "sjf", "-o", "json")
    assert replay.returncode == 0, replay.stderr
    assert json.loads(replay.stdout)["finished_jobs"] == 5

    none = up.run("export", "--until", "1999-01-01", "-o", str(place / "none.csv"))
    assert (none.returncode, (place / "none.csv").exists()) == (2, False)
    assert "no job that ran was submitted in this time" in none.stderr
    other = up.run("export", "--cell", "elsewhere")
    assert other.returncode == 1
    assert "not elsewhere" in other.stderr
    assert up.run("cancel", "--reason", "done", "long").returncode == 0
