"""What a user is answered about a deadline: in a queue, for a job that is not submitted yet, and in the
list."""

from copy import copy
from math import exp, log
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.cli.queries import deadlines
from penstock.ledger.replica.snapshot import dump
from penstock.ledger.state.job.job_state import JobState
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector, ShapeOption
from penstock.why.forecast import expected_start, expected_starts
from penstock_services.gateway.core.forecasts.deadline import (
    NO_ESTIMATE,
    NO_INTERVAL,
    Outlook,
    outlook,
    outlooks,
    proposed,
    tried,
    warning,
)
from penstock_services.gateway.core.forecasts.forecast_errors import LEAST, MAX_OPEN, NEWEST, ForecastErrors
from tests.support.cluster.driver import CellDriver, node_spec
from tests.unit.scheduling.make_room.test_preemption import settle

HOUR_MS = 3_600_000


def estimate(run_ms: int | None = HOUR_MS, steps: dict[int, float] | None = None) -> Estimate:
    """Of a job of one GPU per worker, each interval a quarter either way. `steps`: workers → ms."""
    found = {1: 100.0} if steps is None else steps
    options = tuple(
        ShapeOption(workers=n, nodes=1, gpus_per_node=n, step_ms=ms, low_ms=ms / 1.25, high_ms=ms * 1.25)
        for n, ms in found.items()
    )
    return Estimate(
        worker=ResourceVector(gpus=1),
        confidence=1.0,
        tier="user",
        source="a test",
        run_ms=run_ms,
        options=options,
    )


def spec(**more: Any) -> JobSpec:
    return JobSpec(command=("x",), **more)


def moldable(most: int = 4, **more: Any) -> JobSpec:
    return spec(workers=most, min_workers=1, global_batch_size=64, **more)


def cell(profile: str = "genie", gpus: int = 4) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile))
    driver.join(node_spec("n1", gpus))
    return driver


def of(driver: CellDriver, job_id: str) -> Outlook:
    found = outlook(driver.state, driver.job(job_id), driver.now_ms, ForecastErrors())
    assert found is not None
    return found


def test_a_job_in_the_queue_is_judged_by_its_start_and_its_run_time() -> None:
    """One GPU is busy for another hour; the job behind it takes an hour and is due in two and a quarter."""
    driver = cell("fifo", 1)
    driver.submit("first", spec(), estimate())
    driver.start("first")
    driver.submit("second", spec(deadline_ms=round(2.25 * HOUR_MS)), estimate())
    found = of(driver, "second")
    assert found.starts_ms == driver.now_ms + HOUR_MS
    assert found.ends_ms == pytest.approx(driver.now_ms + 2 * HOUR_MS, abs=2)
    assert found.odds == pytest.approx(0.95, abs=1e-3)
    assert found.deadline_ms == pytest.approx(2.25 * HOUR_MS, rel=1e-3), "the shortest that holds"
    assert (found.qos, found.workers, found.unknown) == ("", 1, "")
    assert warning(found) is None


def test_a_deadline_that_cannot_be_met_is_answered_with_one_that_can() -> None:
    """Half an hour for a job of an hour: it is said at once, with the deadline that holds, which then
    does."""
    driver = cell("fifo", 1)
    driver.submit("first", spec(), estimate())
    driver.start("first")
    driver.submit("second", spec(deadline_ms=HOUR_MS // 2), estimate())
    found = of(driver, "second")
    assert found.odds == 0.0
    doubt = warning(found)
    assert doubt is not None
    assert doubt.field == "deadline"
    assert doubt.message == "is met with a probability of less than 1 %"
    assert (
        doubt.remedy
        == "a deadline of 135m would be met with a probability of 95 % with 1 worker, given the present queue"
    )
    again = tried(driver.state, spec(deadline_ms=135 * 60_000), estimate(), driver.now_ms, ForecastErrors())
    assert again is not None
    assert again.odds is not None
    assert again.odds < 0.5, "behind the one that waits already"
    alone = cell("fifo", 1)
    alone.submit("first", spec(), estimate())
    alone.start("first")
    assert (
        tried(alone.state, spec(deadline_ms=135 * 60_000), estimate(), alone.now_ms, ForecastErrors()).odds
        >= 0.95
    )  # type: ignore[union-attr]


def test_more_workers_may_hold_an_earlier_deadline() -> None:
    """Alg. 1 gives a job that cannot be in time the best ratio, one GPU; with four it would be done after
    half an hour."""
    driver = cell()
    driver.submit("full", spec(workers=4, global_batch_size=64), estimate(steps={4: 100.0}))
    driver.start("full")
    driver.submit("late", moldable(deadline_ms=60_000), estimate(steps={1: 100.0, 2: 90.0, 4: 50.0}))
    found = of(driver, "late")
    assert found.workers == 1
    assert (found.odds, found.sure_workers) == (0.0, 4)
    assert found.starts_ms == driver.now_ms + HOUR_MS
    assert found.deadline_ms == pytest.approx(1.625 * HOUR_MS, rel=1e-3)
    before = dump(driver.state)
    of(driver, "late")
    assert dump(driver.state) == before, "a question changes nothing"


def test_of_a_job_that_runs_the_interval_shrinks_with_what_is_over() -> None:
    driver = cell("fifo", 1)
    driver.submit("runs", spec(deadline_ms=round(1.25 * HOUR_MS)), estimate())
    driver.start("runs")
    assert of(driver, "runs").odds == pytest.approx(0.95, abs=1e-3)
    driver.at(round(1.2 * HOUR_MS))
    late = of(driver, "runs")
    assert late.odds is not None
    assert late.odds < 0.6
    driver.at(2 * HOUR_MS)
    assert (of(driver, "runs").odds, of(driver, "runs").unknown) == (None, "it takes longer than estimated")


def test_what_is_not_known_is_named() -> None:
    """Not estimated, no interval, no run time; an urgent job has an expected end and no odds; one without a
    deadline is not asked about."""
    driver = cell("fifo", 1)
    driver.submit("first", spec(), estimate())
    driver.start("first")
    driver.submit("no-steps", spec(deadline_ms=1), estimate(steps={}))
    driver.submit("urgent", spec(qos="urgent"), estimate())
    driver.submit("no-time", spec(qos="prior"), estimate(run_ms=None))
    driver.submit("plain", spec(), estimate())
    assert of(driver, "no-steps").unknown == NO_INTERVAL
    assert "unknown" in of(driver, "no-time").unknown
    assert of(driver, "no-time").due_ms is None
    urgent = of(driver, "urgent")
    assert (urgent.qos, urgent.due_ms, urgent.odds, urgent.unknown) == ("urgent", None, None, "")
    assert urgent.ends_ms is not None
    assert outlook(driver.state, driver.job("plain"), driver.now_ms, ForecastErrors()) is None
    assert "as soon as can be" in deadlines.in_a_line(urgent._asdict())


def test_the_list_has_those_first_that_are_hardly_in_time() -> None:
    """Two GPUs: one job runs in good time, one is over, one waits with even odds, of one nothing is known;
    each as if asked about alone."""
    driver = cell("fifo", 2)
    driver.submit("fine", spec(deadline_ms=10 * HOUR_MS), estimate())
    driver.submit("over", spec(deadline_ms=1), estimate())
    driver.start("fine")
    driver.start("over")
    driver.submit("even", spec(deadline_ms=2 * HOUR_MS), estimate())
    driver.submit("unknown", spec(deadline_ms=2 * HOUR_MS), estimate(steps={}))
    driver.submit("behind", spec(deadline_ms=3 * HOUR_MS), estimate())
    driver.submit("plain", spec(), estimate())
    found = outlooks(driver.state, driver.state.jobs.values(), driver.now_ms, ForecastErrors())
    assert [one.job_id for one in found] == ["over", "even", "behind", "fine", "unknown"]
    for one in found:
        assert one == of(driver, one.job_id)._replace(
            sure_ms=one.sure_ms, sure_workers=one.sure_workers, deadline_ms=one.deadline_ms
        )
    texts = [deadlines.percent(one.odds) for one in found]
    assert texts == ["< 1 %", "50 %", "50 %", "> 99 %", "–"]


def learned(*factors: float, wait_ms: int = HOUR_MS) -> ForecastErrors:
    """Of jobs that waited so many times as long as forecast."""
    errors = ForecastErrors()
    for number, factor in enumerate(factors):
        errors.asked(f"was-{number}", 0, wait_ms)
        errors.placed(f"was-{number}", round(factor * (wait_ms + 1_000)) - 1_000)
    return errors


def test_odds_follow_how_far_the_cells_forecasts_were_off() -> None:
    """The job behind one of an hour is due in two and a quarter: 95 % where it starts as forecast. Of eight
    jobs before it four waited as long as forecast and four twice as long, in which case it would be late for
    certain: half of the odds. The deadline that holds is that of the late ones, but not of the latest of a
    hundred."""
    driver = cell("fifo", 1)
    driver.submit("first", spec(), estimate())
    driver.start("first")
    driver.submit("second", spec(deadline_ms=round(2.25 * HOUR_MS)), estimate())
    errors = learned(1, 2, 1, 2, 1, 2, 1, 2)
    found = outlook(driver.state, driver.job("second"), driver.now_ms, errors)
    assert found is not None
    assert (found.starts_ms, found.learned) == (driver.now_ms + HOUR_MS, LEAST)
    assert found.odds == pytest.approx(0.95 / 2, abs=1e-3)
    assert found.deadline_ms is not None
    assert found.deadline_ms > 3 * HOUR_MS
    doubt = warning(found)
    assert doubt is not None
    assert "48 %" in doubt.message
    [listed] = [
        one
        for one in outlooks(driver.state, driver.state.jobs.values(), driver.now_ms, errors)
        if one.job_id == "second"
    ]
    assert listed.odds == found.odds
    again = tried(driver.state, spec(deadline_ms=HOUR_MS), estimate(), driver.now_ms, errors)
    assert again is not None
    assert again.learned == LEAST
    holds = outlook(
        driver.state, replace_deadline(driver, "second", found.deadline_ms), driver.now_ms, errors
    )
    assert holds is not None
    assert holds.odds == pytest.approx(0.95, abs=1e-3)


def replace_deadline(driver: CellDriver, job_id: str, deadline_ms: int) -> JobState:
    job = copy(driver.job(job_id))
    job.spec = replace(job.spec, deadline_ms=deadline_ms)
    return job


def test_a_job_that_starts_at_once_is_promised_as_before() -> None:
    driver = cell("fifo", 2)
    driver.submit("first", spec(), estimate())
    driver.start("first")
    driver.submit("second", spec(deadline_ms=round(1.25 * HOUR_MS)), estimate())
    found = outlook(driver.state, driver.job("second"), driver.now_ms, learned(*[9.0] * NEWEST))
    assert found is not None
    assert found.odds == pytest.approx(0.95, abs=1e-3)
    assert found.learned == 0


def test_what_is_learned_of_forecasts() -> None:
    """Fewer than eight are not enough; the newest 32 count; who was held or has ended without a place says
    nothing, and a job counts once."""
    assert learned(*[2.0] * (LEAST - 1)).starts(0, 1_000) == (1_000,)
    errors = learned(*[9.0] * 10, *[2.0] * NEWEST)
    assert errors.starts(500, 1_500) == [2_500] * NEWEST
    errors.asked("cancelled", 0, HOUR_MS)
    errors.forget("cancelled")
    errors.placed("cancelled", 100 * HOUR_MS)
    errors.placed("was-3", 100 * HOUR_MS)
    errors.asked("at-once", 7, 7)
    errors.placed("at-once", 100 * HOUR_MS)
    assert errors.starts(500, 1_500) == [2_500] * NEWEST
    errors.asked("again", 0, 1_000)
    errors.asked("again", 500, 90_000)
    errors.placed("again", 1_000)
    assert errors.starts(0, 1_000)[-1] == 1_000
    crowded = learned(*[2.0] * LEAST)
    for number in range(MAX_OPEN + 1):
        crowded.asked(f"waits-{number}", 0, 1_000)
    crowded.placed("waits-0", 1_000)
    assert crowded.learned == LEAST, "the oldest of too many that wait is not remembered"
    crowded.placed("waits-1", 1_000)
    assert crowded.learned == LEAST + 1


@pytest.mark.parametrize("profile", ["fifo", "penstock", "srtf", "genie"])
def test_one_forecast_of_all_is_that_of_each(profile: str) -> None:
    """Ten jobs of several lengths wait for two GPUs."""
    driver = cell(profile, 2)
    for number in range(12):
        driver.submit(f"j{number:02}", spec(), estimate(run_ms=HOUR_MS * (1 + number * 7 % 5)))
    settle(driver)
    ends = {job.job_id: driver.now_ms + 1_000 for job in driver.state.holding.values()}
    waiting = [driver.job(job_id) for job_id in driver.state.queue.values()]
    assert len(waiting) == 10
    together = expected_starts(driver.state, waiting, ends, driver.now_ms)
    each = {job.job_id: expected_start(driver.state, job, ends, driver.now_ms) for job in waiting}
    assert together == {name: start.starts_ms for name, start in each.items() if start and start.starts_ms}


def test_a_job_that_waits_for_its_choice_is_forecast_so() -> None:
    """Under `genie` a job of one to four workers waits for the four that it is given; the one behind it
    starts when they have ended."""
    driver = cell("genie", 4)
    driver.submit("full", spec(workers=4, global_batch_size=64), estimate(steps={4: 100.0}))
    driver.start("full")
    four = estimate(steps={1: 400.0, 4: 20.0})
    driver.submit("wide", moldable(qos="prior"), four)
    driver.submit("next", spec(deadline_ms=10 * HOUR_MS), estimate())
    assert of(driver, "wide").workers == 4
    starts = of(driver, "next").starts_ms
    assert starts is not None
    assert starts - driver.now_ms == pytest.approx(HOUR_MS + HOUR_MS * 20 / 400, abs=2)


def test_a_job_that_the_cell_can_never_hold_is_not_promised_anything() -> None:
    driver = cell("fifo", 1)
    found = tried(
        driver.state, spec(workers=9, deadline_ms=HOUR_MS), estimate(), driver.now_ms, ForecastErrors()
    )
    assert found is not None
    assert found.odds is None
    assert found.unknown
    assert tried(driver.state, spec(), estimate(), driver.now_ms, ForecastErrors()) is None


def test_an_estimate_that_has_not_come_yet() -> None:
    driver = cell("fifo", 1)
    driver.submit("j", spec(deadline_ms=1), estimate())
    driver.job("j").estimate = None
    driver.job("j").status = driver.job("j").status.SUBMITTED
    assert of(driver, "j").unknown == NO_ESTIMATE


@pytest.mark.parametrize(
    ("ms", "text"), [(1, "1s"), (39_001, "40s"), (599_999, "10m"), (600_001, "11m"), (7_200_000, "2h")]
)
def test_a_proposed_deadline_is_round_and_no_shorter(ms: int, text: str) -> None:
    assert proposed(ms) == text


def test_the_interval_of_the_model_is_what_counts() -> None:
    """The wider the interval, the later the deadline that holds; the middle stays."""
    driver = cell("fifo", 1)
    ends = []
    for wide in (1.05, 2.0):
        option = ShapeOption(
            workers=1, nodes=1, gpus_per_node=1, step_ms=100, low_ms=100 / wide, high_ms=100 * wide
        )
        found = tried(
            driver.state,
            spec(deadline_ms=1),
            replace(estimate(), options=(option,)),
            driver.now_ms,
            ForecastErrors(),
        )
        assert found is not None
        assert found.ends_ms == pytest.approx(driver.now_ms + HOUR_MS, abs=2)
        ends.append(found.deadline_ms)
    assert ends == pytest.approx([HOUR_MS * exp(log(wide)) for wide in (1.05, 2.0)], rel=1e-3)
