"""Remaining times in the ledger: the estimator's answers are folded, count by the ledger's clock, and decide
who runs."""

import msgspec
import pytest

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.inputs.estimates import Bounds, EtaEstimated
from penstock.model.inputs.external_events import JobProgress, NodeCordoned, NodeLeft, WorkProgressed
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.scheduling.remaining_time import remaining_s
from penstock.why.explain import explain
from penstock_services.gateway.core.forecasts.eta import ends_ms, remaining
from tests.support.cluster.driver import CellDriver, estimate, kinds, node_spec

SECOND = 1_000


def cell(profile: str = "fifo", gpus: int = 2) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile))
    driver.join(node_spec("n0", gpus))
    return driver


def run(driver: CellDriver, job_id: str, gpus: int = 1) -> None:
    driver.submit(job_id, None, estimate(gpus))
    driver.at(driver.now_ms - 1_000_000)
    driver.start(job_id)


def answer(driver: CellDriver, job_id: str, left_s: float, **more: int) -> EtaEstimated:
    """As the estimator answers a report that the ledger holds of now."""
    left = left_s * SECOND
    steps = Bounds(middle=left, low=left, high=left)
    return EtaEstimated(
        job_id=job_id,
        attempt=more.get("attempt", driver.job(job_id).attempt),
        at_ms=more.get("at_ms", driver.now_ms),
        done=100,
        left_ms=Bounds(middle=left, low=0.9 * left, high=1.2 * left),
        steps=steps,
        step_ms=Bounds(middle=1.0, low=1.0, high=1.0),
        level=0.9,
        source="iterations asked for",
    )


def left_s(driver: CellDriver, job_id: str) -> float:
    return remaining_s(driver.state, driver.job(job_id))


def pass_s(driver: CellDriver, seconds: int) -> None:
    """Time passes, and the ledger hears of it."""
    driver.at(driver.now_ms - 1_000_000 + seconds * SECOND)
    driver.feed(WorkProgressed(node_id="n0", jobs=(JobProgress(job_id="nobody", attained_s=0.0),)))


def stopped(driver: CellDriver, job_id: str) -> None:
    """Its node ends it, as asked."""
    for task_id in list(driver.job(job_id).tasks):
        driver.exit(task_id, None, cause="stopped", signal=15)


def test_it_counts_down_while_the_job_runs_and_stands_still_while_it_waits() -> None:
    """Ten minutes left of a run of a job that nobody knew; its node is then drained, and the job waits for
    another one.

    The work of the attempt that was stopped is lost: what it had done comes back to what is left.
    """
    driver = cell()
    run(driver, "job")
    assert left_s(driver, "job") == float("inf")
    pass_s(driver, 60)
    driver.feed(answer(driver, "job", 600))
    pass_s(driver, 100)
    assert left_s(driver, "job") == 500
    restored = load(dump(driver.state))
    assert remaining_s(restored, restored.jobs["job"]) == 500, "a placer that restarts knows it, too"
    driver.feed(NodeCordoned(node_id="n0", drain=True, by="ada", reason="new fans"))
    stopped(driver, "job")
    assert driver.job("job").status is JobStatus.QUEUED
    assert left_s(driver, "job") == 660
    pass_s(driver, 1_000)
    assert left_s(driver, "job") == 660, "it waits"
    driver.join(node_spec("n1"))
    driver.start("job")
    pass_s(driver, 60)
    assert left_s(driver, "job") == 600


def test_it_never_falls_below_nothing() -> None:
    """The last iterations take longer than all before."""
    driver = cell()
    run(driver, "job")
    driver.feed(answer(driver, "job", 30))
    pass_s(driver, 40)
    assert left_s(driver, "job") == 0


def test_what_a_job_reports_of_itself_counts_before_the_estimate() -> None:
    """A job that knows its own remaining time reports it; the estimator's guess from its steps comes all the
    time as well."""
    driver = cell()
    run(driver, "job")
    driver.feed(answer(driver, "job", 600))
    report = JobProgress(job_id="job", attained_s=0.0, remaining_s=50.0)
    driver.feed(WorkProgressed(node_id="n0", jobs=(report,)))
    assert left_s(driver, "job") == 50
    driver.feed(answer(driver, "job", 600))
    assert left_s(driver, "job") == 50, "its own report of this attempt is better"
    driver.feed(WorkProgressed(node_id="n0", jobs=(msgspec.structs.replace(report, remaining_s=None),)))
    driver.feed(answer(driver, "job", 600))
    assert left_s(driver, "job") == 600, "it does not know it any more"


def test_a_report_of_an_earlier_attempt_gives_way() -> None:
    """A job reported what is left and then lost its node; the next attempt reports its steps only."""
    driver = cell()
    run(driver, "job")
    report = JobProgress(job_id="job", attained_s=0.0, remaining_s=50.0)
    driver.feed(WorkProgressed(node_id="n0", jobs=(report,)))
    driver.join(node_spec("n1"))
    driver.feed(NodeLeft(node_id="n0", boot_id="b1", proof="fenced", by="ada", reason="burnt"))
    assert driver.job("job").attempt == 2
    pass_s(driver, 1)
    driver.start("job")
    driver.feed(answer(driver, "job", 900))
    assert left_s(driver, "job") == 900


def test_an_answer_that_comes_after_its_attempt_says_nothing_of_the_next() -> None:
    """The estimator answers the last report of an attempt that has just been stopped."""
    driver = cell()
    run(driver, "job")
    late = answer(driver, "job", 600)
    driver.feed(NodeCordoned(node_id="n0", drain=True, by="ada", reason="new fans"))
    stopped(driver, "job")
    driver.feed(late)
    assert left_s(driver, "job") == float("inf")
    driver.join(node_spec("n1"))
    assert driver.feed(late).reason == "stale_attempt"


def test_an_answer_from_the_future_counts_from_now() -> None:
    """Whatever time an estimator writes, the ledger's clock counts."""
    driver = cell()
    run(driver, "job")
    driver.feed(answer(driver, "job", 600, at_ms=driver.now_ms + 10**9))
    pass_s(driver, 60)
    assert left_s(driver, "job") == 540


def test_a_live_srtf_stops_the_longer_job_and_not_the_one_that_is_nearly_done() -> None:
    """Two jobs of unknown length run, both came without an estimate of their time; a short one comes.

    One has reported its steps and is nearly through: the other one, of which the estimator has said that it
    takes an hour, is stopped. `why` names the times that decided.
    """
    driver = cell("srtf")
    run(driver, "nearly-done")
    run(driver, "long")
    pass_s(driver, 10)
    driver.at(driver.now_ms - 1_000_000)
    step = driver.feed(answer(driver, "nearly-done", 3_000))
    assert kinds(step) == ["job.eta_estimated", "timer.set"], "it is a reason to plan anew"
    driver.feed(answer(driver, "long", 3_600))
    pass_s(driver, 2_900)
    driver.feed(answer(driver, "nearly-done", 60))
    driver.feed(answer(driver, "long", 3_600))
    driver.at(driver.now_ms - 1_000_000)
    assert [job.status for job in driver.state.jobs.values()] == [JobStatus.RUNNING] * 2
    short = msgspec.structs.replace(estimate(1), run_ms=300 * SECOND)
    driver.submit("short", None, short)
    driver.at(driver.now_ms - 1_000_000)
    assert driver.job("nearly-done").status is JobStatus.RUNNING
    assert (driver.job("long").status, driver.job("long").stop.reason) == (JobStatus.STOPPING, "preempted")
    stopped(driver, "long")
    driver.at(driver.now_ms - 1_000_000)
    driver.start("short")
    why = explain(driver.state, "long").detail
    assert why.startswith(
        "number 3 of 3 in the order of profile srtf "
        "(1 h 48 min left (1 h 42 min to 2 h), by iterations asked for)"
    )
    assert "nearly-done (1 min left (54 s to 1 min 12 s), by iterations asked for)" in why
    assert "short (5 min left, as estimated)" in why


@pytest.mark.parametrize("told", [True, False])
def test_a_forecast_and_an_answer_agree(told: bool) -> None:
    """`why` of a waiting job names when others end; `eta` of those says the same."""
    driver = cell()
    driver.submit("job", None, msgspec.structs.replace(estimate(1), run_ms=900 * SECOND))
    driver.start("job")
    if told:
        driver.feed(answer(driver, "job", 600))
    pass_s(driver, 30)
    job, now_ms = driver.job("job"), driver.now_ms + 7_000
    row = {"job_id": "job", "status": job.status, "attempt": job.attempt, "running_ms": job.running_ms}
    found = remaining(row, job.estimate, job.progress.eta, now_ms)
    assert (
        found["ends_ms"]["middle"] == ends_ms(job, now_ms) == driver.now_ms + (570 if told else 870) * SECOND
    )
