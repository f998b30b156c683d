"""Which step times of a script a node publishes: what differs, at a bounded rate, for as long as the job
runs."""

import itertools
import json
import math
import random

import pytest

from penstock.model.inputs.external_events import TelemetrySampled
from penstock_services.node_reporter.core.reports.progress import ProgressParser
from penstock_services.node_reporter.core.reports.rates import TokenBucket
from penstock_services.node_reporter.core.reports.step_times import BURST, PER_S, StepFilter

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def parser(*, leads: bool = True) -> ProgressParser:
    return ProgressParser("n1", "job-1.1.0", 7, leads=leads)


def line(step_ms: object) -> bytes:
    return json.dumps({"window": {"steps": 20, "step_ms": step_ms}}).encode() + b"\n"


def test_a_window_becomes_a_sample_of_its_task() -> None:
    (report,) = parser().parse(line(60.5), NOW_MS)
    assert report.name == f"step_ms/{NOW_MS}"
    assert report.event == TelemetrySampled(node_id="n1", task_id="job-1.1.0", at_ms=NOW_MS, step_ms=60.5)


def test_of_a_gang_rank_0_alone_has_step_times() -> None:
    """A worker writes the line by hand."""
    assert parser(leads=False).parse(line(60.5), NOW_MS) == []


@pytest.mark.parametrize("step_ms", [0, -1, 1e10, "60", None, math.nan, math.inf, True])
def test_what_is_no_step_time_is_ignored_and_counted(step_ms: object) -> None:
    found = parser()
    assert found.parse(line(step_ms), NOW_MS) == []
    assert found.garbage == 1
    assert len(found.parse(line(1.0), NOW_MS)) == 1


def test_what_the_filter_leaves_out_is_published_when_it_is_repeated() -> None:
    """A slow-down comes right after another change: the SDK reports the same again half a minute later."""
    found = StepFilter()
    assert found.passes(10.0, NOW_MS)
    assert not found.passes(30.0, NOW_MS + 500)
    assert found.passes(30.0, NOW_MS + 30_500)
    assert not found.passes(31.0, NOW_MS + 60_500)
    assert found.passes(10.0, NOW_MS + 62_500)


def test_a_job_of_a_month_still_reports_and_a_hostile_one_is_bounded() -> None:
    """Ten lines a second, each another step time, for a day; then as many as a lifetime maximum would have
    let through come on the next day, too."""
    found, chance = StepFilter(), random.Random(7)
    for day in (0, 30):
        begun_ms = NOW_MS + day * DAY_MS
        times = range(begun_ms, begun_ms + DAY_MS // 24, 100)
        passed = [at_ms for at_ms in times if found.passes(chance.uniform(1, 1e6), at_ms)]
        assert 0.9 * PER_S * 3_600 <= len(passed) <= PER_S * 3_600 + BURST + 1
        assert min(later - at_ms for at_ms, later in itertools.pairwise(passed)) >= 1_000


def test_a_node_whose_clock_is_set_back_goes_on() -> None:
    found = StepFilter()
    assert found.passes(10.0, NOW_MS)
    assert not found.passes(20.0, NOW_MS - DAY_MS)
    assert found.passes(20.0, NOW_MS - DAY_MS + 1_000)


@pytest.mark.parametrize("step_ms", [math.nan, math.inf, -math.inf, 0.0, -3.0])
def test_never_what_is_no_number(step_ms: float) -> None:
    assert not StepFilter().passes(step_ms, NOW_MS)


def test_a_bucket_allows_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(per_s=2.0, burst=3.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(at_s) for at_s in (10.4, 10.5, 10.5, 5.0, 5.5)] == [False, True, False, False, True]
    assert [bucket.take(1_000.0) for _ in range(4)] == [True, True, True, False]
