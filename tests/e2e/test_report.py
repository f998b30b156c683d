"""Reports of a real cell: figures and charts of its own ledger, remaining times, and how accurate those were."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Installation

pytestmark = pytest.mark.postgres


def test_a_cell_draws_its_own_report(up: Installation, place: Path) -> None:
    """Monday morning: what did the weekend look like, on which GPUs, and who had to wait?"""
    needs = ("--cores", "1", "--gpus")
    page = place / "weekend.html"
    empty = up.run("report", "-o", "json")
    assert empty.returncode == 2
    assert "it holds no submitted job" in empty.stderr
    assert (
        up.run("submit", "--model", "gang", "--workers", "2", *needs, "2", "--", "sleep", "1").returncode == 0
    )
    assert up.run("submit", "--model", "broken", *needs, "1", "--", "sh", "-c", "exit 3").returncode == 10
    answer = up.run("report", "--report", str(page), "-o", "json")
    assert answer.returncode == 0, answer.stderr
    reported = json.loads(answer.stdout)
    assert (reported["finished_jobs"], reported["unfinished_jobs"]) == (1, 1), (
        "a job that failed was not finished"
    )
    assert 1.0 <= reported["avg_jct_s"] < 30
    assert 0 < reported["gpu_allocation"] <= 1
    text = page.read_text()
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert found is not None
    assert (reported["failed_jobs"], reported["running_jobs"], reported["waiting_jobs"]) == (1, 0, 0)
    bars = next(table for table in json.loads(found[1])["gantt-0-0"]["datasets"].values() if "group" in table)
    gang = [place for place, model in enumerate(bars["model"]) if model == "gang"]
    assert bars["group"] == bars.get("name", bars["job"]), "few jobs of one owner: each has its colour"
    heights = [bars["y2"][place] - bars["y"][place] for place in gang]
    assert heights == pytest.approx([1.86, 1.86]), "two bars of two GPUs each, one per node"
    assert bars["model"].count("broken") == 1


TRAIN = """
import time
from penstock.sdk.progress import progress
for step in range(1, 301):
    time.sleep(0.02)
    progress(step, 300)
"""


def test_a_training_that_tells_its_progress_has_a_remaining_time(up: Installation, place: Path) -> None:
    """Somebody waits for a training and asks when it is done; then how well such answers fare, and who gave them."""
    train = [sys.executable, "-c", TRAIN]
    flags = (
        "--gpus",
        "1",
        "--cores",
        "1",
        "--iterations",
        "300",
        "--category",
        "nlp",
        "--trait",
        "pipelined",
    )
    job_id = up.run("submit", "--detach", *flags, "--", *train).stdout.strip()
    watched = up.run("eta", job_id, "--watch", "-o", "json")
    assert watched.returncode == 0, watched.stderr
    answers = [json.loads(line) for line in watched.stdout.splitlines()]
    reported = [answer for answer in answers if answer["answer"] == "reported"]
    assert reported, answers
    assert reported[-1]["source"] == "iterations asked for"
    assert (
        reported[-1]["left_ms"]["low"]
        <= reported[-1]["left_ms"]["middle"]
        <= reported[-1]["left_ms"]["high"]
        < 20_000
    )
    assert (answers[-1]["answer"], answers[-1]["outcome"]) == ("ended", "succeeded")
    assert "ended" in up.run("eta", job_id).stdout
    described = up.run("describe", "job", job_id).stdout
    assert "nlp, pipelined, 300 iterations" in described

    silent = up.run("submit", "--detach", "--gpus", "0", "--cores", "1", "--", "sleep", "600").stdout.strip()
    for event in iter(lambda: up.run("eta", silent, "-o", "json"), None):
        if json.loads(event.stdout)["answer"] == "unknown":
            break
    assert event.returncode == 1, "nothing is known of its time"
    assert "Remaining" in up.run("describe", "job", silent).stdout
    assert "LEFT" in up.run("get", "jobs", "-o", "wide").stdout
    up.run("cancel", silent)
    assert up.run("watch", silent).returncode == 11
    nobody = up.run("eta", "nobody")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "`penstock get jobs` lists them" in nobody.stderr


def test_how_well_a_real_cell_was_estimated_is_drawn(up: Installation, place: Path) -> None:
    """After the training above: the page, and that no model has answered yet."""
    page, pictures = place / "estimates.html", place / "pictures"
    asked = ("estimator", "report", "--report", str(page), "--png", str(pictures), "-o", "json")
    answer = up.run(*asked)
    assert answer.returncode == 0, answer.stderr
    reported = json.loads(answer.stdout)
    assert reported["runs"] >= 2
    assert "Estimate against use" in page.read_text()
    assert (pictures / "pairs.png").is_file()
    models = up.run("estimator", "models")
    assert (models.returncode, models.stdout) == (
        0,
        "No model yet: one is trained once 50 runs have finished.\n",
    )
    jobs = json.loads(up.run("get", "jobs", "-o", "json").stdout)["jobs"]
    checked = up.run("estimator", "check", jobs[-1]["job_id"])
    assert checked.returncode == 0, checked.stderr
    assert "No model was asked" in checked.stdout
