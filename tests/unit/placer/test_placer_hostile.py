"""Stories of inputs that are legal at every door and yet must not lead the placer astray."""

import pytest

from penstock.model.decisions.orders import StopTask
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    JobSubmitted,
    NodeChanged,
    NodeLeft,
    OrderRefused,
    RunningTask,
    TaskExited,
)
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.model.schema.validation import checked
from penstock_services.placer.core.orders import orphan_orders, start_orders
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec


@pytest.fixture
def cell() -> CellDriver:
    driver = CellDriver(PlacerSettings(unschedulable_grace_ms=5_000))
    driver.join(node_spec("n1"))
    return driver


def test_a_stop_that_overtakes_its_start_ends_the_job(cell: CellDriver) -> None:
    """Ctrl-C within a millisecond of `submit`: placement and stop are decided before either order is sent.

    The node never hears of the start, only of the stop; it answers under the one token that it knows.
    """
    cell.submit("j1")
    placed = cell.head.seq
    cell.feed(JobCancelRequested(job_id="j1"))
    assert start_orders(cell.state, "j1", placed) == []
    [stop] = cell.orders()
    assert isinstance(stop, StopTask)
    exited = TaskExited(
        node_id="n1", task_id=stop.task_id, token=stop.token, cause="stopped", started_ms=1, exited_ms=1
    )
    assert kinds(cell.feed(exited)) == ["task.exited", "job.ended"]
    assert cell.state.ended["j1"] == "cancelled"


@pytest.mark.parametrize("length", [113, 114, 128])
def test_a_long_job_id_never_costs_anybody_elses_gpus(cell: CellDriver, length: int) -> None:
    """A CI system names jobs by branch and commit. Task and timer ids grow out of the job's: they must fit
    too."""
    cell.submit("small", need=estimate(4))
    cell.start("small")
    name = "x" * length
    step = cell.feed(JobSubmitted(job_id=name, spec=job_spec(queue_timeout_ms=9_000)))
    if length > 113:
        assert (step.outcome, step.reason) == ("rejected", "job_id_too_long")
        return
    cell.feed(JobEstimated(job_id=name, estimate=estimate(4)))
    cell.exit("small.1.w0")
    assert cell.job(name).status is JobStatus.LAUNCHING


def test_many_allowed_gpu_models_do_not_break_the_reason(cell: CellDriver) -> None:
    """A user lists every model of the shop; none is here. The reason names them all, within its bound."""
    models = [f"{number}-" + "m" * 120 for number in range(16)]
    cell.feed(JobSubmitted(job_id="j1", spec=job_spec(models=models)))
    step = cell.feed(JobEstimated(job_id="j1", estimate=estimate()))
    assert kinds(step) == ["job.estimated", "job.found_unschedulable", "timer.set"]


def test_a_wrong_plan_is_answered_however_much_it_names(cell: CellDriver) -> None:
    """A proposer computes a plan with hundreds of cores that the node does not have free."""
    cell.submit("big", need=estimate(4, cores=1))
    spec = job_spec()
    cell.feed(JobSubmitted(job_id="j1", spec=spec))
    cell.feed(JobEstimated(job_id="j1", estimate=estimate(0, cores=1_000, gpu_memory_mib=0)))
    unit = ProposedUnit(jobs=(ProposedJob(job_id="j1", nodes=("n1",)),), explanation="")
    plan = PlanProposed(proposal_id="p1", proposer="batcher", units=(unit,))
    assert kinds(cell.feed(plan)) == ["plan.proposed", "proposal.answered"]


def test_news_of_a_node_that_is_gone_changes_nothing(cell: CellDriver) -> None:
    """A NodeChanged is delivered after the node has left, another with an inventory from before its
    reboot."""
    cell.join(node_spec("n2", boot="b2"))
    assert cell.feed(NodeChanged(node=node_spec("n2", 2, boot="b1"))).reason == "older_boot"
    cell.feed(NodeLeft(node_id="n2", boot_id="b2", proof="shutdown"))
    assert cell.feed(NodeChanged(node=node_spec("n2", 2, boot="b2"))).reason == "node_gone"


def test_a_job_that_queued_before_any_node_came_does_not_block_the_cell_for_ever() -> None:
    """The cell is brought up with jobs waiting already; the first of them is too large for every node."""
    cell = CellDriver(PlacerSettings(unschedulable_grace_ms=5_000, max_overtakes=2))
    cell.submit("huge", need=estimate(8))
    for number in range(6):
        cell.submit(f"j{number}", need=estimate(1))
    cell.join(node_spec("n1", gpus=4))
    for number in range(3):
        cell.start(f"j{number}") if cell.job(f"j{number}").tasks else None
    cell.at(6_000)
    assert cell.state.ended.get("huge") == "unschedulable"
    assert cell.job("j2").tasks


def test_a_job_whose_node_left_for_good_does_not_block_the_cell_for_ever() -> None:
    """The only large node is taken out of service while a job for it waits at the head of the queue."""
    cell = CellDriver(PlacerSettings(unschedulable_grace_ms=5_000, max_overtakes=0))
    cell.join(node_spec("big", gpus=8), node_spec("small", gpus=1))
    cell.submit("first", need=estimate(8))
    cell.start("first")
    cell.submit("waits", need=estimate(8))
    cell.submit("behind", need=estimate(1))
    cell.feed(NodeLeft(node_id="big", boot_id="b1", proof="shutdown"))
    cell.at(6_000)
    assert cell.state.ended.get("waits") == "unschedulable"
    assert cell.job("behind").tasks


def test_a_stop_repeated_under_a_newer_token_is_answered_under_the_older_one(cell: CellDriver) -> None:
    """The stopped gang is cancelled as well: the node repeats its first answer, under the first stop's
    token."""
    cell.submit("g", job_spec(workers=2))
    cell.start("g")
    cell.exit("g.1.w0", 1)
    first = cell.job("g").stop.token
    cell.feed(JobCancelRequested(job_id="g"))
    exited = TaskExited(
        node_id="n1", task_id="g.1.w1", token=first, cause="stopped", started_ms=1, exited_ms=1
    )
    assert kinds(cell.feed(exited)) == ["task.exited", "job.ended"]


@pytest.mark.parametrize("kind", [OrderRefused, TaskExited])
def test_a_token_from_nowhere_frees_nothing(
    cell: CellDriver, kind: type[OrderRefused] | type[TaskExited]
) -> None:
    """Garbage with token 0, the value that a job without a stop has for its stop."""
    cell.submit("j1")
    fields: dict[str, object] = {"node_id": "n1", "task_id": "j1.1.w0", "token": 0}
    fields |= (
        {"reason": "occupied", "highest_token": 0}
        if kind is OrderRefused
        else {"cause": "stopped", "started_ms": 1, "exited_ms": 1}
    )
    assert cell.feed(checked(kind, fields)).reason == "stale_token"


def test_one_record_places_a_bounded_number_of_tasks() -> None:
    """The head of the queue blocked everybody for long; it is cancelled, and all gangs behind it fit at
    once."""
    cell = CellDriver(PlacerSettings(max_overtakes=0))
    cell.join(*(node_spec(f"n{number}", gpus=16) for number in range(100)))
    cell.submit("running", need=estimate(16))
    cell.submit("head", job_spec(workers=100), need=estimate(16))
    for number in range(10):
        cell.submit(f"gang-{number}", job_spec(workers=140))
    step = cell.feed(JobCancelRequested(job_id="head"))
    assert kinds(step).count("placement.decided") == 3
    later = [kinds(fired).count("placement.decided") for fired in cell.at(0)]
    assert later == [3, 3, 1]


def test_a_node_that_was_given_up_wrongly_stops_what_runs_elsewhere_by_now(cell: CellDriver) -> None:
    """An operator reports that a node is deleted, but only its network was: it returns with a task placed
    anew meanwhile."""
    cell.join(node_spec("n2"), node_spec("n3"))
    cell.submit("j1")
    cell.start("j1")
    token, [task] = cell.job("j1").token, cell.job("j1").tasks.values()
    node_id = task.place.node_id
    cell.feed(NodeLeft(node_id=node_id, boot_id="b1", proof="deleted"))
    assert cell.job("j1").tasks["j1.2.w0"].place.node_id != node_id
    running = (RunningTask(task_id="j1.1.w0", token=token),)
    cell.join(node_spec(node_id), tasks=running)
    joined = cell.head.seq
    [stop] = orphan_orders(cell.state, node_id, joined)
    assert isinstance(stop, StopTask)
    assert (stop.task_id, stop.token) == ("j1.1.w0", joined)
    assert stop in cell.orders(), "a placer that dies before it has reported so leaves it to the next one"
    other = cell.job("j1").tasks["j1.2.w0"].place.node_id
    running = (RunningTask(task_id="j1.2.w0", token=cell.job("j1").token),)
    cell.join(node_spec(other), tasks=running)
    assert list(orphan_orders(cell.state, other, cell.head.seq)) == []
