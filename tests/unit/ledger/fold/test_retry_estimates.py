"""A retry after a failure that was no matter of memory: while it backs off, it is estimated anew, and waits
for no estimate."""

import msgspec
import pytest

from penstock.model.inputs.estimates import JobEstimated
from penstock.model.nouns.transitions import JobStatus
from penstock_services.placer.core.guard import refusal
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

BACKOFF_MS = 1_000


@pytest.fixture
def cell() -> CellDriver:
    """One node of 4 GPUs, on which the first attempt of job `j` has failed."""
    driver = CellDriver()
    driver.join(node_spec("n1"))
    driver.submit("j", job_spec(attempts=3), estimate(1))
    driver.start("j")
    assert kinds(driver.exit("j.1.w0", 1)) == ["task.exited", "job.requeued", "timer.set"]
    assert driver.job("j").status is JobStatus.BACKOFF
    return driver


def test_a_retry_runs_with_what_was_learned_while_it_backed_off(cell: CellDriver) -> None:
    """Another run of the same command ended meanwhile and has shown that it needs 2 GPUs: the retry gets
    them, once its back-off is over."""
    step = cell.feed(JobEstimated(job_id="j", estimate=estimate(2), attempt=2))
    assert kinds(step) == ["job.estimated"]
    assert cell.job("j").status is JobStatus.BACKOFF, "an estimate shortens no back-off"
    [step] = cell.at(BACKOFF_MS)
    assert kinds(step) == ["timer.fired", "job.queued", "placement.decided", "timer.set"]
    assert len(cell.job("j").tasks["j.2.w0"].place.gpus) == 2


def test_a_retry_waits_for_no_estimator(cell: CellDriver) -> None:
    """The estimator is down: the next attempt has the estimate of the one before, and what it answers later
    is refused."""
    cell.at(BACKOFF_MS)
    assert len(cell.job("j").tasks["j.2.w0"].place.gpus) == 1
    late = JobEstimated(job_id="j", estimate=estimate(2), attempt=2)
    assert cell.feed(late).reason == "late_estimate"
    assert cell.job("j").estimate == estimate(1), "what a running attempt was promised does not change"


def test_a_retry_is_estimated_once(cell: CellDriver) -> None:
    """The estimator restarts and answers again; the first attempt's estimate comes once more."""
    again = JobEstimated(job_id="j", estimate=estimate(2), attempt=2)
    assert refusal(cell.state, again) is None
    cell.feed(again)
    other = JobEstimated(job_id="j", estimate=estimate(3), attempt=2)
    assert cell.feed(other).reason == "duplicate_estimate"
    assert cell.feed(msgspec.structs.replace(other, attempt=0)).reason == "duplicate_estimate"
    assert cell.feed(msgspec.structs.replace(other, attempt=3)).reason == "duplicate_estimate"
    assert cell.job("j").estimate == estimate(2)


def test_a_retry_that_has_become_too_large_is_found_when_it_queues(cell: CellDriver) -> None:
    """No node has 5 GPUs: the job is parked, as a new one would be."""
    cell.feed(JobEstimated(job_id="j", estimate=estimate(5), attempt=2))
    [step] = cell.at(BACKOFF_MS)
    assert "job.found_unschedulable" in kinds(step)
