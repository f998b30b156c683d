"""A real cell's report: what ran on its nodes, drawn from its own ledger."""

import json
import re
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
    assert "nobody has submitted a job" in empty.stderr
    assert (
        up.run("submit", "--model", "gang", "--workers", "2", *needs, "2", "--", "sleep", "1").returncode == 0
    )
    assert up.run("submit", "--model", "broken", *needs, "1", "--", "sh", "-c", "exit 3").returncode == 10
    answer = up.run("report", "--report", str(page), "-o", "json")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert (told["finished_jobs"], told["unfinished_jobs"]) == (1, 1), "a job that failed was not finished"
    assert 1.0 <= told["avg_jct_s"] < 30
    assert 0 < told["gpu_allocation"] <= 1
    text = page.read_text()
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)
    assert found is not None
    traces = {trace["name"]: trace for trace in json.loads(found[1])["gantt-0"]["data"]}
    assert traces["gang"]["width"] == pytest.approx([1.86, 1.86]), "two bars of two GPUs each, one per node"
    assert len(traces["broken"]["x"]) == 1
