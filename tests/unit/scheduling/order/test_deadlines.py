"""Odds of a deadline: of a run time with an interval, before it begins and given that it is not over yet."""

from math import inf, log
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.job.progress import Pace
from penstock.ledger.state.job.remaining import remaining_of
from penstock.model.inputs.estimates import Bounds, EtaEstimated
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate, ResourceVector, ShapeOption
from penstock.scheduling.order.deadlines import CLOSE, SURE, RunTime, RunTimes, due_ms, time_left

MINUTE_MS = 60_000


def one_job(options: tuple[ShapeOption, ...] = (), **spec: Any) -> JobState:
    """Expected to take ten minutes."""
    estimate = Estimate(
        worker=ResourceVector(),
        confidence=1.0,
        tier="user",
        source="a test",
        run_ms=10 * MINUTE_MS,
        options=options,
    )
    return JobState("j", JobSpec(command=("x",), **spec), 1, submitted_ms=5_000, estimate=estimate, attempt=1)


def option(low: float = 80, high: float = 125) -> ShapeOption:
    return ShapeOption(workers=1, nodes=1, gpus_per_node=1, step_ms=100, low_ms=low, high_ms=high)


def running(job: JobState, running_ms: int = 100_000) -> JobState:
    job.status, job.running_ms, job.placed_ms = JobStatus.RUNNING, running_ms, running_ms
    return job


@pytest.mark.parametrize(
    ("spec", "after_ms"),
    [
        ({}, None),
        ({"qos": "urgent"}, None),
        ({"qos": "prior"}, 10 * MINUTE_MS),
        ({"qos": "normal"}, 20 * MINUTE_MS),
        ({"qos": "urgent", "deadline_ms": 7}, 7),
    ],
)
def test_when_it_should_be_done(spec: dict[str, Any], after_ms: int | None) -> None:
    """Eq. 4 of GENIE after the submission; a deadline wins; an urgent job, and one that names nothing, has no
    such time."""
    assert due_ms(one_job(**spec)) == (None if after_ms is None else 5_000 + after_ms)


def test_a_class_without_a_run_time_is_due_at_no_known_time() -> None:
    job = one_job(qos="prior")
    job.estimate = None
    assert due_ms(job) == inf


def test_the_interval_is_that_of_nine_in_ten() -> None:
    """It runs 10 minutes, 8 to 12.5 in nine of ten cases."""
    found = RunTime(0, 10 * MINUTE_MS, log(1.25) / 1.6449, log(1.25) / 1.6449)
    assert [found.odds(minutes * MINUTE_MS) for minutes in (0, 8, 10, 12.5, 1_000)] == pytest.approx(
        [0, 0.05, 0.5, 0.95, 1], abs=1e-4
    )
    assert found.by_ms(SURE) == pytest.approx(12.5 * MINUTE_MS, rel=1e-4)


@given(
    middle_ms=st.floats(1, 1e9),
    below=st.floats(0.01, 2),
    above=st.floats(0.01, 2),
    part=st.floats(0, 1.5),
    speed=st.floats(0.1, 1),
    odds=st.floats(0.01, 0.99),
)
def test_the_time_of_given_odds_has_these_odds(
    middle_ms: float, below: float, above: float, part: float, speed: float, odds: float
) -> None:
    """Whatever the interval, however long it has run already, and at whatever speed it goes on."""
    found = RunTime(1_000, middle_ms, below, above, part * middle_ms, speed)
    by_ms = found.by_ms(odds)
    assert (by_ms is None) == found.overdue
    if by_ms is not None:
        assert by_ms >= 1_000
        assert found.odds(by_ms) == pytest.approx(odds, abs=1e-3)


def test_a_job_that_runs_longer_than_expected_becomes_less_likely_in_time() -> None:
    """Due after 12.5 minutes. At its start that has odds of 95 %; that it is still running after 12 minutes
    speaks against it."""
    job, odds = running(one_job((option(),), deadline_ms=1)), []
    for ran_minutes in (0, 5, 12):
        found = time_left(job, 100_000 + ran_minutes * MINUTE_MS)
        assert found is not None
        odds.append(found.odds(100_000 + 12.5 * MINUTE_MS))
    assert odds[0] == pytest.approx(0.95, abs=1e-3)
    assert odds[0] == pytest.approx(odds[1], abs=1e-3), (
        "that it is not over after 5 minutes was to be expected"
    )
    assert odds[2] < 0.6
    late = time_left(job, 100_000 + 20 * MINUTE_MS)
    assert late is not None
    assert late.overdue
    assert late.odds(inf) == 0.0


def test_what_it_reports_comes_before_its_estimate() -> None:
    """The estimator answers from its steps: two minutes are left, one to four; the estimate said ten minutes
    in all."""
    job = running(one_job((option(),)))
    job.progress = replace(
        job.progress,
        eta=remaining_of(
            EtaEstimated(
                job_id="j",
                attempt=1,
                at_ms=400_000,
                done=1,
                left_ms=Bounds(middle=120_000, low=60_000, high=240_000),
                steps=Bounds(middle=1, low=1, high=1),
                step_ms=Bounds(middle=1, low=1, high=1),
                level=0.9,
                source="s",
            ),
            400_000,
        ),
    )
    found = time_left(job, 400_000)
    assert found is not None
    assert [found.odds(400_000 + ms) for ms in (60_000, 120_000, 240_000)] == pytest.approx(
        [0.05, 0.5, 0.95], abs=1e-3
    )
    job.attempt = 2
    found = time_left(job, 400_000)
    assert found is not None
    assert found.middle_ms == 10 * MINUTE_MS, "it is of an earlier attempt"


def test_in_a_group_it_goes_on_at_the_speed_of_its_turns() -> None:
    """At half of its speed it takes twice as long."""
    job = running(one_job((option(),)))
    alone = time_left(job, 100_000)
    job.pace = Pace(0.5, 100_000)
    shared = time_left(job, 100_000)
    assert alone is not None
    assert shared is not None
    assert shared.odds(100_000 + 20 * MINUTE_MS) == pytest.approx(alone.odds(100_000 + 10 * MINUTE_MS))


def test_without_an_interval_nothing_is_claimed() -> None:
    assert time_left(running(one_job()), 200_000) is None


@given(
    st.lists(
        st.tuples(st.floats(0, 1e7), st.floats(1e3, 1e7), st.floats(0.01, 1)),
        min_size=1,
        max_size=9,
    ),
    st.floats(0.01, 0.99),
)
def test_odds_of_several_starts_and_their_quantile_agree(
    found: list[tuple[float, float, float]], odds: float
) -> None:
    """Odds are the mean over the starts; by the time of a quantile they are reached, and a thousandth earlier
    they are not."""
    each = [RunTime(start, middle, spread, spread) for start, middle, spread in found]
    both = RunTimes(each)
    at = both.by_ms(odds)
    assert both.odds(at) == pytest.approx(sum(one.odds(at) for one in each) / len(each))
    assert both.odds(at) >= odds - 1e-9
    earlier = at - 1 - 2 * CLOSE * max(0.0, at - each[0].from_ms)
    assert both.odds(earlier) <= odds + 1e-9
