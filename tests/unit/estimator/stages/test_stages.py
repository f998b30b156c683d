"""How measured usage over an iteration becomes stages. The samples are our own."""

import pytest

from penstock_services.estimator.core.stages.profile import Sample, stage_profile

ITERATION = [  # storage MB/s, CPU cores, GPU %, network MB/s; one iteration of a small vision model
    Sample(20, (800, 1, 2, 0)),
    Sample(15, (100, 14, 5, 0)),
    Sample(60, (50, 2, 95, 10)),
    Sample(10, (0, 1, 40, 1_100)),
    Sample(5, (0, 0.2, 3, 20)),
]


def test_each_instant_belongs_to_its_highest_resource() -> None:
    """Loading, preprocessing, computing, synchronising, and a wait of 5 ms under every threshold."""
    found = stage_profile(ITERATION * 12, 12)
    assert found[:4] == pytest.approx((20, 15, 60, 10))
    assert (found.idle_ms, found.iteration_ms) == pytest.approx((5, 110))
    assert found.iterations == 12


def test_usage_counts_against_its_own_peak() -> None:
    """Storage at its peak of 80 MB/s outranks a GPU at half of its own peak, whatever their units."""
    found = stage_profile([Sample(10, (80, 0, 50, 0)), Sample(10, (0, 0, 100, 0))], 1)
    assert found[:4] == (10, 0, 10, 0)


def test_what_is_small_against_the_machine_can_be_left_out() -> None:
    """A log file written at 1 MB/s while nothing else runs would be a storage stage; `least` says it is
    none."""
    samples = [Sample(10, (0, 0, 100, 0)), Sample(10, (1, 0, 2, 0))]
    assert stage_profile(samples, 1).storage_ms == 10
    found = stage_profile(samples, 1, least=(50, 0, 0, 0))
    assert (found.storage_ms, found.idle_ms) == (0, 10)


def test_ties_go_to_the_earlier_stage() -> None:
    """Loading overlaps fully with computing: both at their peak all the time."""
    assert stage_profile([Sample(10, (5, 0, 7, 0))], 1)[:4] == (10, 0, 0, 0)


def test_a_job_that_does_nothing_has_no_stage() -> None:
    assert stage_profile([Sample(10, (0, 0, 0, 0))], 1).idle_ms == 10
