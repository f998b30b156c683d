"""Stories of deadlines: each wait in the queue counts, and deadlines of jobs on silent nodes."""

from penstock.model.decisions.ledger_events import StopDecided
from penstock.model.inputs.external_events import JobCancelRequested, NodeCordoned, NodeLeft, NodeSuspected
from penstock.model.nouns.transitions import JobStatus
from penstock.why.explain import explain
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def fill(cell: CellDriver, gpus: int) -> None:
    """Another job takes so many GPUs, all that are free."""
    cell.submit("fills", need=estimate(gpus))
    cell.start("fills")


def times_out_at(cell: CellDriver, at_ms: int) -> None:
    """Job `j` waits until this moment, and not longer."""
    cell.at(at_ms - 1)
    assert cell.job("j").status is JobStatus.QUEUED
    cell.at(at_ms)
    assert cell.state.ended["j"] == "timed_out_queued"


def test_a_job_that_lost_its_node_waits_no_longer_than_it_may() -> None:
    """Its node is deleted after an hour; nothing else has room. Its user asked to give up after 5 s of
    waiting."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j", job_spec(queue_timeout_ms=5_000))
    cell.start("j")
    cell.at(3_600_000)
    cell.join(node_spec("n2", gpus=4))
    fill(cell, 4)
    cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="deleted"))
    assert cell.job("j").status is JobStatus.QUEUED
    times_out_at(cell, 3_605_000)


def test_a_pause_before_a_retry_is_no_wait_in_the_queue() -> None:
    """It failed and pauses for a minute; the wait begins when it queues again."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1))
    cell.submit("j", job_spec(attempts=2, backoff_ms=60_000, queue_timeout_ms=5_000))
    cell.start("j")
    cell.exit("j.1.w0", 1)
    fill(cell, 1)
    times_out_at(cell, 65_000)


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


def silent_cell(**times: int) -> CellDriver:
    """A job runs on n1, whose node no longer answers; n2 is there, too."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j", job_spec(**times))
    cell.start("j")
    cell.feed(NodeSuspected(node_id="n1", reason="its connection broke"))
    cell.join(node_spec("n2"))
    return cell


def test_a_cancelled_job_on_a_silent_node_says_what_is_not_proven() -> None:
    """Its user cancels it. No record shows whether it still runs, so its GPUs stay taken; the node's next
    boot proves its end."""
    cell = silent_cell()
    cell.feed(JobCancelRequested(job_id="j"))
    assert cell.job("j").status is JobStatus.STOPPING
    why = explain(cell.state, "j")
    assert why.unproven == [{"task_id": "j.1.w0", "node_id": "n1", "node": "suspect", "task": "stopping"}]
    assert "It ends as cancelled" in why.text
    assert "n1 is silent: whether w0 still runs there is not proven" in why.text
    assert "penstock node fence n1" in why.next_step
    cell.join(node_spec("n1", boot="b2"))
    assert cell.state.ended["j"] == "cancelled"


def test_a_run_time_out_on_a_silent_node_ends_when_its_end_is_proven() -> None:
    cell = silent_cell(run_timeout_ms=60_000)
    cell.at(60_000)
    assert (cell.job("j").status, cell.job("j").stop.reason) == (JobStatus.STOPPING, "run_timeout")
    assert "It ends as timed out running" in explain(cell.state, "j").text
    cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="fenced", by="ada", reason=""))
    assert cell.state.ended["j"] == "timed_out_running"


def test_a_job_whose_node_never_answered_its_start_gives_up_as_asked() -> None:
    """The machine died a second before the order came. The job has not started, so its user's patience goes
    on."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j", job_spec(queue_timeout_ms=90_000))
    cell.at(60_000)
    assert cell.state.nodes["n1"].status == "suspect"
    assert cell.job("j").status is JobStatus.LAUNCHING
    assert "n1 is silent: whether w0 was started there is not proven" in explain(cell.state, "j").text
    [fired] = cell.at(90_000)
    assert [fact.reason for fact in fired.facts if isinstance(fact, StopDecided)] == ["queue_timeout"]
    assert "It ends as timed out queued" in explain(cell.state, "j").text
    cell.join(node_spec("n1", boot="b2"))
    assert cell.state.ended["j"] == "timed_out_queued"


def test_a_start_that_comes_late_ends_the_wait() -> None:
    """The node was slow, not dead: it answers after a minute, and the job runs on past its time-out for
    waiting."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.submit("j", job_spec(queue_timeout_ms=90_000))
    cell.at(60_000)
    cell.start("j")
    cell.at(200_000)
    assert cell.job("j").status is JobStatus.RUNNING


def test_a_running_job_on_a_silent_node_shows_it() -> None:
    why = explain(silent_cell().state, "j")
    assert why.status == "running"
    assert "n1 is silent" in why.text
    assert [row["node_id"] for row in why.unproven] == ["n1"]
