"""Reports of a real cell: figures and charts of its own ledger, remaining times, and how accurate those
were."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ENDLESS, Installation, listed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def weekend(up: Installation, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report of a cell, and its page, after the first two jobs."""
    page = tmp_path_factory.mktemp("reports") / "weekend.html"
    needs = ("--cores", "1", "--gpus")
    empty = up.run("report", "-o", "json")
    assert empty.returncode == 2
    assert "it holds no submitted job" in empty.stderr
    gang = ("submit", "--model", "gang", "--workers", "2", *needs, "2", "--", "sleep", "0.5")
    assert up.run(*gang).returncode == 0
    assert up.run("submit", "--model", "broken", *needs, "1", "--", "sh", "-c", "exit 3").returncode == 10
    return listed(up, "report", "--report", str(page)), page.read_text()


def test_a_cell_draws_its_own_report(weekend: tuple[dict[str, Any], str]) -> None:
    """Monday morning: what did the weekend look like, on which GPUs, and who had to wait?"""
    reported, text = weekend
    assert (reported["finished_jobs"], reported["unfinished_jobs"]) == (1, 1), (
        "a job that failed was not finished"
    )
    assert reported["avg_jct_s"] >= 0.499, "in whole milliseconds"
    assert 0 < reported["gpu_allocation"] <= 1
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
import os, sys, time
from penstock.sdk.progress import progress
for step in range(1, 301):
    while step > 200 and not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
    time.sleep(0.02)
    progress(step, 300)
"""
"""Goes on beyond step 200 when somebody has seen its progress."""


@pytest.fixture(scope="module")
def answers(
    up: Installation, weekend: tuple[dict[str, Any], str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """All answers to the question when a training is done, until it has ended."""
    seen = tmp_path_factory.mktemp("training") / "seen"
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
    train = ("--name", "trains", "--", sys.executable, "-c", TRAIN, str(seen))
    assert up.run("submit", "--detach", *flags, *train).returncode == 0
    watching = up.started("eta", "trains", "--watch", "-o", "json")
    assert watching.stdout is not None
    found = []
    for line in watching.stdout:
        found.append(json.loads(line))
        if found[-1]["answer"] == "reported":
            seen.touch()
    _, errors = watching.communicate()
    assert watching.returncode == 0, errors
    return found


def test_a_training_that_tells_its_progress_has_a_remaining_time(
    up: Installation, answers: list[dict[str, Any]]
) -> None:
    """Somebody waits for a training and asks when it is done."""
    reported = [answer for answer in answers if answer["answer"] == "reported"]
    assert reported[-1]["source"] == "iterations asked for"
    left_ms = reported[-1]["left_ms"]
    assert 0 <= left_ms["low"] <= left_ms["middle"] <= left_ms["high"]
    assert (answers[-1]["answer"], answers[-1]["outcome"]) == ("ended", "succeeded")
    assert "ended" in up.run("eta", "trains").stdout
    assert "nlp, pipelined, 300 iterations" in up.run("describe", "job", "trains").stdout


@pytest.mark.usefixtures("answers")
def test_a_job_that_tells_nothing_has_none(up: Installation) -> None:
    """Nothing is known of its time."""
    silent = up.run("submit", "--detach", "--gpus", "0", "--cores", "1", "--", *ENDLESS).stdout.strip()

    def asked() -> "subprocess.CompletedProcess[str]":
        return up.run("eta", silent, "-o", "json")

    wait_until(lambda: json.loads(asked().stdout)["answer"] == "unknown", "its start")
    assert asked().returncode == 1
    assert "Remaining" in up.run("describe", "job", silent).stdout
    assert "LEFT" in up.run("get", "jobs", "-o", "wide").stdout
    up.run("cancel", silent)
    assert up.run("watch", silent).returncode == 11
    nobody = up.run("eta", "nobody")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "`penstock get jobs` lists them" in nobody.stderr


@pytest.mark.usefixtures("answers")
def test_how_well_a_real_cell_was_estimated_is_drawn(up: Installation, place: Path) -> None:
    """After the training: the page, and that no model has answered yet."""
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
