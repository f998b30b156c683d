"""Liquid's tables through the real engine: one seed on five nodes in each run, all of it by `python -m tests.papers.liquid_tables`."""

import os
from pathlib import Path

import pytest

from tests.papers.liquid_tables import run

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))

pytestmark = pytest.mark.skipif(
    not (DATA / "muri/stage_profiles.csv").is_file(),
    reason=f"Muri's stage profiles are not in {DATA}; set PENSTOCK_DATA to the folder that holds muri/",
)


def test_a_planned_batch_ends_in_a_shorter_mean_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA))
    planned, one_by_one = (run("liquid/batch-5", "liquid", 0, batch=batch) for batch in (True, False))
    assert planned[0] < one_by_one[0]
