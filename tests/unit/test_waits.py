"""Stories of deadlines: each wait in the queue counts, and deadlines of jobs on silent nodes."""

from penstock.model.external_events import NodeCordoned, NodeLeft
from penstock.model.transitions import JobStatus
from tests.support.driver import CellDriver, estimate, job_spec, node_spec


def test_a_job_that_lost_its_node_waits_no_longer_than_it_may() -> None:
    """Its node is deleted after an hour; nothing else has room. Its user asked to give up after 5 s of waiting."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j", job_spec(queue_timeout_ms=5_000))
    cell.start("j")
    cell.at(3_600_000)
    cell.join(node_spec("n2", gpus=4))
    cell.submit("fills", need=estimate(4))
    cell.start("fills")
    cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="deleted"))
    assert cell.job("j").status is JobStatus.QUEUED
    cell.at(3_604_999)
    assert cell.job("j").status is JobStatus.QUEUED
    cell.at(3_605_000)
    assert cell.state.ended["j"] == "timed_out_queued"


def test_a_pause_before_a_retry_is_no_wait_in_the_queue() -> None:
    """It failed and pauses for a minute; the wait begins when it queues again."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1))
    cell.submit("j", job_spec(attempts=2, backoff_ms=60_000, queue_timeout_ms=5_000))
    cell.start("j")
    cell.exit("j.1.w0", 1)
    cell.submit("fills", need=estimate(1))
    cell.start("fills")
    cell.at(64_999)
    assert cell.job("j").status is JobStatus.QUEUED
    cell.at(65_000)
    assert cell.state.ended["j"] == "timed_out_queued"


def test_a_drained_job_waits_no_longer_than_it_may() -> None:
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j", job_spec(queue_timeout_ms=5_000))
    cell.start("j")
    cell.feed(NodeCordoned(node_id="n1", drain=True, by="ada", reason=""))
    cell.exit("j.1.w0", None, cause="stopped", signal=15)
    assert cell.job("j").status is JobStatus.QUEUED
    cell.at(5_000)
    assert cell.state.ended["j"] == "timed_out_queued"
