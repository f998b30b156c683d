"""Stories of holds: a job that is held does not start, no clock runs against it, and no other job waits for
it."""

import pytest

from penstock.cluster.reasons import Reason
from penstock.ledger.check.check import check
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import StopDecided, TimerFired
from penstock.model.inputs.external_events import JobHoldRequested, JobReleaseRequested, NodeLeft
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.schema.event import Event
from penstock.why.explain import explain
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec


def hold(job_id: str = "j", tenant: str | None = None, after: int = 0) -> Event:
    return JobHoldRequested(job_id=job_id, reason="data", by="ops/ada", tenant=tenant, after=after)


def release(job_id: str = "j", tenant: str | None = None, after: int = 0) -> Event:
    return JobReleaseRequested(job_id=job_id, by="ops/ada", tenant=tenant, after=after)


@pytest.mark.parametrize("profile", ["liquid", "srtf", "drf"])
def test_a_held_job_starts_when_it_is_released(profile: str) -> None:
    """A user submits in the evening and holds the job until its data are there; under every kind of
    policy."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.submit("j")
    assert kinds(cell.feed(hold()))[0] == "job.hold_requested"
    cell.join(node_spec("n1", gpus=1))
    cell.at(1_000)
    assert cell.job("j").status is JobStatus.QUEUED
    why = explain(cell.state, "j", cell.state.now_ms)
    assert (why.reason, why.detail, why.position) == (Reason.HELD, "by ops/ada: data", None)
    assert "release" in why.next_step
    restored = load(dump(cell.state))
    assert (restored.jobs["j"].held, dict(restored.queue)) == (cell.job("j").held, {})
    cell.feed(release())
    cell.at(2_000)
    assert cell.job("j").status is JobStatus.LAUNCHING
    assert not list(check(cell.state))


def test_no_job_waits_behind_a_held_one() -> None:
    """The first in line was overtaken as often as it may be, and holds everything up; then its user holds
    it."""
    cell = CellDriver(PlacerSettings(max_overtakes=1, backfill_window=8))
    cell.join(node_spec("n1", gpus=2))
    cell.submit("runs", need=estimate(1))
    cell.start("runs")
    cell.submit("j", need=estimate(2))
    for name in ("over", "waits"):
        cell.submit(name, need=estimate(1))
    cell.start("over")
    cell.exit("over.1.w0", 0)
    assert cell.job("waits").status is JobStatus.QUEUED, "the head has been overtaken once"
    cell.feed(hold())
    assert cell.job("waits").status is JobStatus.LAUNCHING
    cell.feed(release())
    assert explain(cell.state, "j", cell.state.now_ms).position == 1, "at its place by submission"


def test_no_clock_runs_while_a_job_is_held() -> None:
    """Neither its queue time-out nor the grace of a job that fits nowhere; a release begins a new wait."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1))
    cell.submit("wide", need=estimate(9))
    assert cell.job("wide").unschedulable
    cell.feed(hold("wide"))
    cell.submit("fills", need=estimate(1))
    cell.start("fills")
    cell.submit("j", job_spec(queue_timeout_ms=5_000))
    cell.feed(hold())
    cell.at(10_000_000)
    assert {"j", "wide"} <= cell.state.jobs.keys()
    cell.feed(release())
    cell.feed(release("wide"))
    assert cell.job("wide").unschedulable
    cell.at(10_004_999)
    assert cell.job("j").status is JobStatus.QUEUED
    cell.at(10_005_000)
    assert cell.state.ended["j"] == "timed_out_queued"


def test_what_runs_of_a_held_job_runs_on_and_does_not_start_again() -> None:
    """An operator holds a job that hurts its node: its attempt may finish, but a retry waits."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    cell.join(node_spec("n2"))
    cell.submit("j", job_spec(queue_timeout_ms=5_000))
    cell.start("j")
    cell.feed(hold())
    assert cell.job("j").status is JobStatus.RUNNING
    assert "held (by ops/ada: data)" in explain(cell.state, "j", cell.state.now_ms).text
    [place] = (task.place for task in cell.job("j").tasks.values())
    cell.feed(NodeLeft(node_id=place.node_id, boot_id="b1", proof="deleted"))
    cell.at(20_000)
    assert cell.job("j").status is JobStatus.QUEUED
    cell.feed(release())
    assert cell.job("j").status is JobStatus.LAUNCHING


def test_commands_that_come_twice_late_or_from_others_are_refused() -> None:
    """A hold that is sent again after the release must not stop the job; an operator's hold is no tenant's to
    end."""
    cell = CellDriver()
    cell.submit("j", job_spec(owner="vision"))
    first = hold(tenant="vision", after=cell.state.seq)
    assert cell.feed(release()).reason == "not_held"
    assert cell.feed(hold(tenant="speech")).reason == "other_tenant"
    assert cell.feed(first).reason is None
    assert cell.feed(hold()).reason == "already_held"
    assert cell.feed(release(tenant="vision", after=cell.state.seq)).reason is None
    assert cell.feed(first).reason == "old_command"
    cell.feed(hold())
    assert cell.feed(release(tenant="vision")).reason == "held_by_operator"
    assert cell.feed(release()).reason is None
    assert cell.feed(hold("nowhere")).reason == "unknown_job"


def test_a_job_held_while_it_is_launched_does_not_time_out() -> None:
    """Its node does not answer the start, and its user holds it: the wait for a node is over when he releases
    it, not before."""
    cell = CellDriver(PlacerSettings(launch_timeout_ms=10_000))
    cell.join(node_spec("n1"))
    cell.submit("j", job_spec(queue_timeout_ms=15_000))
    cell.feed(hold())
    found = [fact for step in cell.at(60_000) for fact in step.facts]
    assert [fact.timer_id for fact in found if isinstance(fact, TimerFired)][-1] == "j:queue_timeout"
    assert not [fact for fact in found if isinstance(fact, StopDecided)]
    assert cell.job("j").status is JobStatus.LAUNCHING
