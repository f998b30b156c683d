"""Waits and measures that end by an event of their own: nothing rests on what happens next elsewhere."""

import pytest
from msgspec.structs import replace

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.adjustments import ADJUSTED_FOR_MS, MAX_THROTTLES
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted, NodeJoined
from penstock.model.nouns.settings import Contention, PlacerSettings
from penstock.model.proposals import CoresProposed, PlanProposed, ProposedJob, ProposedUnit, ThrottleProposed
from penstock.scheduling.acting.guard import PROPOSER
from penstock.scheduling.liveness import stalled
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.support.cluster.guarded_cell import GuardedCell, node


def test_who_waited_behind_a_cancelled_head_starts_at_once() -> None:
    """The head of the queue may not be overtaken any more, and its user loses patience. Nothing else
    happens."""
    cell = CellDriver(PlacerSettings(profile="fifo", max_overtakes=0))
    cell.join(node_spec("n1", 4))
    cell.submit("runs", need=estimate(3))
    cell.submit("head", need=estimate(4))
    cell.submit("small", need=estimate(1))
    assert cell.job("small").status == "queued"
    cell.feed(JobCancelRequested(job_id="head"))
    assert cell.job("small").status == "launching"


def test_cores_that_come_back_from_a_loan_go_to_who_waits_for_them() -> None:
    """A guard lends a training two cores for a probe and dies; the loan ends beside a job that needs the
    two."""
    cell = GuardedCell(Contention())
    cell.join(node(cores=6))
    task_id = cell.runs("a", cores=4)
    loan = CoresProposed(
        proposal_id="p", proposer=PROPOSER, task_id=task_id, cores=6, reason="a probe", cause="probe"
    )
    cell.feed(loan)
    cell.submit("waits", need=estimate(1, cores=2))
    assert (cell.cores(task_id), cell.job("waits").status) == (6, "queued")
    cell.at(cell.now_ms - 1_000_000 + ADJUSTED_FOR_MS)
    assert (cell.cores(task_id), cell.job("waits").status) == (4, "launching")


def hog(cores: int) -> GuardedCell:
    """A job without GPUs on a node that can cap memory bandwidth."""
    cell = GuardedCell(Contention(search="none"))
    cell.join(node(cores=48, caps="resctrl"))
    cell.runs("hog", gpus=0, cores=cores)
    return cell


def throttle(cell: GuardedCell, number: int, *, cores: int | None = None, percent: int | None = None) -> bool:
    """Whether the placer accepts it."""
    about = {
        "proposal_id": f"p{number}",
        "proposer": PROPOSER,
        "task_id": "hog.1.w0",
        "reason": "it was measured",
        "cause": "contention",
    }
    if cores is not None:
        cell.feed(CoresProposed(**about, cores=cores))
    else:
        cell.feed(ThrottleProposed(**about, memory_bandwidth_percent=percent))
    return cell.state.proposals[f"{PROPOSER} p{number}"].verdict == "accepted"


def test_the_end_of_a_throttle_is_no_affair_of_the_next_attempt() -> None:
    """The node restarts without the slowed task: its job queues again, and no timer of the attempt is
    left."""
    cell = hog(16)
    assert throttle(cell, 1, percent=50)
    assert "hog:adjustment" in cell.state.timers
    cell.feed(NodeJoined(node=node(cores=48, caps="resctrl"), tasks=()))
    assert cell.job("hog").attempt == 2
    assert "hog:adjustment" not in cell.state.timers


@pytest.mark.parametrize("by", ["cores", "bandwidth"])
def test_a_guard_that_errs_slows_a_job_so_often_and_no_more(by: str) -> None:
    cell = hog(40)
    for number in range(MAX_THROTTLES):
        given = {"cores": 39 - number} if by == "cores" else {"percent": 90 - number}
        assert throttle(cell, number, **given)
    assert not throttle(cell, 99, **({"cores": 3} if by == "cores" else {"percent": 10}))


def test_who_could_delay_another_job_is_no_stall() -> None:
    """One of two free GPUs would do for the small job, and the large one waits for both: the small one waits
    for its turn, and no alarm rings."""
    cell = CellDriver(PlacerSettings(profile="fifo", max_overtakes=0))
    cell.join(node_spec("n1", 2))
    cell.submit("runs", need=estimate(1))
    cell.start("runs")
    cell.submit("large", need=estimate(2))
    state = load(dump(cell.state))
    evolve(state, JobSubmitted(job_id="small", spec=job_spec()))
    evolve(state, JobEstimated(job_id="small", estimate=estimate(1)))
    assert stalled(state) is None


@pytest.mark.parametrize("profile", ["fifo", "srtf"])
def test_what_a_full_record_leaves_starts_in_the_next_one(profile: str) -> None:
    """A node with 64 cores joins, and 40 jobs wait for one core each: 32 starts fill a record. Nothing else
    happens."""
    cell = CellDriver(PlacerSettings(profile=profile))
    cell.join(node_spec("small", 1, cores=1))
    cell.submit("first", need=estimate(0, cores=1))
    for number in range(40):
        cell.submit(f"j{number}", need=estimate(0, cores=1))
    cell.at(0)
    cell.join(node_spec("large", 1, cores=64))
    cell.at(0)
    assert {cell.job(f"j{number}").status for number in range(40)} == {"launching"}


def test_what_a_plan_of_many_stops_leaves_is_stopped_in_the_next_record() -> None:
    """A short job needs what 40 long ones hold: 32 stops fill a record. Nothing else happens."""
    cell = CellDriver(PlacerSettings(profile="srtf"))
    cell.join(*(node_spec(f"n{number}", 10, cores=64) for number in range(4)))
    for number in range(40):
        need = replace(estimate(1, cores=1), run_ms=9_000_000)
        cell.submit(f"j{number}", replace(job_spec(), checkpoint="sdk"), need)
    cell.at(0)
    for number in range(40):
        cell.start(f"j{number}")
    cell.at(1_000_000)
    cell.submit("short", job_spec(workers=40), replace(estimate(1, cores=1), run_ms=1_000))
    cell.at(1_000_000)
    assert {cell.job(f"j{number}").status for number in range(40)} == {"stopping"}


def test_a_unit_starts_when_its_own_node_is_free_and_not_when_all_are() -> None:
    """Two nodes are being emptied for two units of a plan; the first is empty long before the second."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    cell.join(*(node_spec(f"n{number}", 1, cores=4) for number in (1, 2, 3)))
    for job_id in ("old1", "old2", "other"):
        cell.submit(job_id, need=estimate(0, cores=4))
        cell.start(job_id)
    nodes = {
        f"new{job_id[-1]}": cell.job(job_id).tasks[f"{job_id}.1.w0"].place.node_id
        for job_id in ("old1", "old2")
    }
    for job_id in nodes:
        cell.submit(job_id, need=estimate(0, cores=4))
    for job_id in ("old1", "old2"):
        cell.feed(JobCancelRequested(job_id=job_id))
    units = tuple(
        ProposedUnit(jobs=(ProposedJob(job_id=job_id, nodes=(node_id,)),), explanation="so")
        for job_id, node_id in nodes.items()
    )
    cell.feed(PlanProposed(proposal_id="p", proposer="batcher", units=units))
    assert list(cell.state.planned) == ["new1", "new2"]
    cell.exit("other.1.w0")
    assert list(cell.state.planned) == ["new1", "new2"]
    cell.exit("old1.1.w0", None, cause="stopped", signal=15)
    assert [cell.job(job_id).status for job_id in nodes] == ["launching", "queued"]
