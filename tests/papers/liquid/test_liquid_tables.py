"""Liquid's tables through the real engine: one seed on five nodes in each run, all of it by `python -m
tests.papers.liquid.liquid_tables`."""

from statistics import fmean

import pytest

from tests.papers.liquid.liquid_tables import bounds, run, shortest_times
from tests.support.data import DATA_ROOT as DATA

pytestmark = pytest.mark.skipif(
    not (DATA / "muri/stage_profiles.csv").is_file(),
    reason=f"Muri's stage profiles are not in {DATA}; set PENSTOCK_DATA to the folder that holds muri/",
)


def test_a_planned_batch_ends_in_a_shorter_mean_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA))
    planned, one_by_one = (run("liquid/batch-5", "liquid", 0, batch=batch) for batch in (True, False))
    assert planned[0] < one_by_one[0]


def test_no_run_beats_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed from the job model alone; here on nodes where nobody waits for long, so that a bound that is
    too high would show."""
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA))
    least = bounds(5, 0)
    for profile in ("liquid", "random"):
        found = run("liquid/batch-5", profile, 0, batch=False)
        assert all(bound <= figure for bound, figure in zip(least, found, strict=True))
    alone = run("liquid/immediate", "liquid", 0, batch=False)[0]
    assert alone == pytest.approx(fmean(shortest_times("liquid/immediate", 0)), rel=0.02)
