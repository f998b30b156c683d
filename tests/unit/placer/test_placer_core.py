"""Stories of the placer's core: events in, exact facts out; invariants hold after every step (driver)."""

import random
from string import ascii_letters

import msgspec
import pytest

from penstock.ledger.fold.evolve import evolve
from penstock.model.decisions.ledger_events import JobEnded
from penstock.model.decisions.orders import Peer, StartTask, StopTask, pack_peers, unpack_peers
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCancelRequested,
    JobSubmitted,
    NodeChanged,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
    OrderRefused,
    RunningTask,
    TaskExited,
    TaskStarted,
)
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock.model.nouns.types import MAX_GANG_TASKS
from penstock.model.schema.event import wire_type
from penstock.model.schema.topics import MAX_EVENT_BYTES
from penstock.model.wire.codec import decode, encode
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec


@pytest.fixture
def cell() -> CellDriver:
    driver = CellDriver(PlacerSettings(unschedulable_grace_ms=5_000))
    driver.join(node_spec("n1"), node_spec("n2"), node_spec("n3", rack="r1"))
    return driver


def test_a_job_travels_from_submission_to_exit(cell: CellDriver) -> None:
    """The path of every job: submitted, estimated and placed at once, started, exited, ended."""
    assert kinds(cell.feed(JobSubmitted(job_id="j1", spec=job_spec()))) == ["job.submitted"]
    placed = cell.feed(JobEstimated(job_id="j1", estimate=estimate()))
    assert kinds(placed) == ["job.estimated", "placement.decided", "timer.set"]
    [order] = cell.orders()
    assert isinstance(order, StartTask)
    assert order.token == cell.head.seq
    cell.start("j1")
    assert cell.job("j1").status is JobStatus.RUNNING
    assert cell.orders() == []
    assert kinds(cell.exit("j1.1.w0")) == ["task.exited", "job.ended"]
    assert cell.state.ended == {"j1": "succeeded"}
    assert cell.state.timers == {}


def test_an_estimate_may_overtake_its_submission(cell: CellDriver) -> None:
    """Jobs and estimates are two topics: the estimate can be read first and must not be lost."""
    assert kinds(cell.feed(JobEstimated(job_id="j1", estimate=estimate()))) == ["job.estimated"]
    assert kinds(cell.feed(JobSubmitted(job_id="j1", spec=job_spec()))) == [
        "job.submitted",
        "placement.decided",
        "timer.set",
    ]


def test_duplicates_are_answered_and_change_nothing(cell: CellDriver) -> None:
    """At-least-once delivery repeats everything; each repeat gets its record and no effect."""
    cell.submit("j1")
    spec, token = job_spec(), cell.job("j1").token
    assert cell.feed(JobSubmitted(job_id="j1", spec=spec)).reason == "duplicate_job"
    assert cell.feed(JobEstimated(job_id="j1", estimate=estimate())).reason == "duplicate_estimate"
    place = cell.job("j1").tasks["j1.1.w0"].place
    started = TaskStarted(node_id=place.node_id, task_id="j1.1.w0", token=token, pid=1, started_ms=1)
    assert cell.feed(started).outcome == "committed"
    assert cell.feed(started).reason == "duplicate_start"
    cell.exit("j1.1.w0")
    exited = TaskExited(
        node_id=place.node_id,
        task_id="j1.1.w0",
        token=token,
        cause="exited",
        exit_code=0,
        started_ms=1,
        exited_ms=2,
    )
    assert cell.feed(exited).reason == "unknown_task"
    assert cell.feed(JobSubmitted(job_id="j1", spec=spec)).reason == "duplicate_job"
    assert cell.feed(JobEstimated(job_id="j1", estimate=estimate())).reason == "job_ended"


def test_a_gang_starts_together_or_not_at_all(cell: CellDriver) -> None:
    """12 GPUs in the cell, 3 taken: a gang of ten waits whole, and starts when the tenth GPU is free."""
    for name in ("a", "b", "c"):
        cell.submit(name)
        cell.start(name)
    assert kinds(cell.submit("gang", job_spec(workers=10))) == ["job.estimated"]
    assert cell.job("gang").tasks == {}
    step = cell.exit("a.1.w0")
    assert kinds(step) == ["task.exited", "job.ended", "placement.decided", "timer.set"]
    assert len(cell.job("gang").tasks) == 10
    assert {task.place.rank for task in cell.job("gang").tasks.values()} == set(range(10))


def test_one_failing_member_stops_its_gang_and_the_gang_is_tried_again(cell: CellDriver) -> None:
    """A worker dies of an exception: the others would wait for it for ever; they are stopped, then all
    retried."""
    cell.submit("g", job_spec(workers=2, attempts=2, backoff_ms=500))
    cell.start("g")
    assert kinds(cell.exit("g.1.w0", 3)) == ["task.exited", "stop.decided"]
    stops = cell.orders()
    assert [type(order) for order in stops] == [StopTask]
    assert kinds(cell.exit("g.1.w1", None, cause="stopped", signal=15)) == [
        "task.exited",
        "job.requeued",
        "timer.set",
    ]
    assert cell.job("g").status is JobStatus.BACKOFF
    [fired] = cell.at(500)
    assert kinds(fired) == ["timer.fired", "job.queued", "placement.decided", "timer.set"]
    cell.start("g")
    cell.exit("g.2.w1", 4)
    assert kinds(cell.exit("g.2.w0", None, cause="stopped", signal=15)) == ["task.exited", "job.ended"]
    assert cell.state.ended["g"] == "failed"


def test_parameter_servers_are_stopped_when_the_workers_are_done(cell: CellDriver) -> None:
    """A parameter server serves for ever; the job has succeeded when its workers have."""
    cell.submit("ps", job_spec(workers=1, ps=1))
    cell.start("ps")
    assert kinds(cell.exit("ps.1.w0")) == ["task.exited", "stop.decided"]
    assert kinds(cell.exit("ps.1.ps0", None, cause="stopped", signal=15)) == ["task.exited", "job.ended"]
    assert cell.state.ended["ps"] == "succeeded"


def test_a_success_names_what_its_node_has_ended(cell: CellDriver) -> None:
    """`nohup train.py &` is the last line of the script: "succeeded" alone would say that the training is
    done."""
    cell.submit("a")
    cell.start("a")
    step = cell.exit("a.1.w0", detail="1 process left running was ended")
    (ended,) = (fact for fact in step.facts if isinstance(fact, JobEnded))
    assert (ended.outcome, ended.reason) == ("succeeded", "1 process left running was ended")


def test_back_off_doubles_up_to_its_bound(cell: CellDriver) -> None:
    """A job that keeps failing must not hammer the cell."""
    cell.submit("f", job_spec(attempts=4, backoff_ms=1_000))
    waits = []
    for attempt in range(1, 4):
        cell.start("f")
        step = cell.exit(f"f.{attempt}.w0", 1)
        waits.append(step.facts[-1].at_ms - cell.now_ms)
        cell.at(cell.now_ms - 1_000_000 + waits[-1])
    assert waits == [1_000, 2_000, 4_000]


def test_cancel_waits_for_the_proof_of_exit(cell: CellDriver) -> None:
    """A cancelled job keeps its GPUs until its process is proven dead; a second cancel is refused."""
    cell.submit("j")
    cell.start("j")
    assert kinds(cell.feed(JobCancelRequested(job_id="j"))) == ["job.cancel_requested", "stop.decided"]
    assert sum(4 - n.free_gpu_mask.bit_count() for n in cell.state.nodes.values()) == 1
    assert cell.feed(JobCancelRequested(job_id="j")).reason == "already_stopping"
    cell.exit("j.1.w0", None, cause="stopped", signal=15)
    assert cell.state.ended["j"] == "cancelled"
    assert all(n.free_gpu_mask == 0b1111 for n in cell.state.nodes.values())


def test_cancel_of_a_waiting_job_is_immediate(cell: CellDriver) -> None:
    cell.feed(JobSubmitted(job_id="w", spec=job_spec()))
    assert kinds(cell.feed(JobCancelRequested(job_id="w"))) == ["job.cancel_requested", "job.ended"]
    assert cell.feed(JobCancelRequested(job_id="w")).reason == "job_ended"
    assert cell.feed(JobCancelRequested(job_id="nobody")).reason == "unknown_job"


def test_a_tenant_cancels_its_own_jobs_only(cell: CellDriver) -> None:
    """Two gateways, and the placer is down: one takes vision's job, the other speech's of the same id, and
    its cancellation."""
    cell.feed(JobSubmitted(job_id="w", spec=job_spec(owner="vision")))
    assert cell.feed(JobSubmitted(job_id="w", spec=job_spec(owner="speech"))).reason == "duplicate_job"
    assert cell.feed(JobCancelRequested(job_id="w", tenant="speech", by="speech/ci")).reason == "other_tenant"
    assert cell.state.jobs["w"].spec.owner == "vision"
    assert (
        kinds(cell.feed(JobCancelRequested(job_id="w", tenant="vision", by="vision/ci")))[-1] == "job.ended"
    )


def test_a_job_cancelled_at_the_moment_it_succeeds_is_one_of_both(cell: CellDriver) -> None:
    """The exit and the cancel race; whichever the ledger has first wins, the other is answered."""
    cell.submit("j")
    cell.start("j")
    cell.exit("j.1.w0")
    assert cell.feed(JobCancelRequested(job_id="j")).reason == "job_ended"


def test_a_larger_job_in_front_is_overtaken_only_so_often() -> None:
    """Backfill keeps GPUs busy, but a stream of small jobs must not starve the big one in front."""
    cell = CellDriver(PlacerSettings(max_overtakes=3))
    cell.join(node_spec("n1"))
    cell.submit("first")
    cell.start("first")
    cell.submit("big", need=estimate(4))
    for small in ("s1", "s2", "s3"):
        cell.submit(small)
        assert cell.job(small).status is JobStatus.LAUNCHING
        cell.start(small)
    cell.submit("s4")
    assert cell.job("s4").status is JobStatus.QUEUED
    for done in ("first", "s1", "s2"):
        cell.exit(f"{done}.1.w0")
        assert cell.job("s4").status is JobStatus.QUEUED
    cell.exit("s3.1.w0")
    assert cell.job("big").status is JobStatus.LAUNCHING


def test_the_backfill_window_bounds_the_search() -> None:
    """Beyond the window nobody is tried, however well it would fit."""
    cell = CellDriver(PlacerSettings(backfill_window=2))
    cell.join(node_spec("n1"))
    cell.submit("runs", need=estimate(2))
    cell.submit("big1", need=estimate(3))
    cell.submit("big2", need=estimate(4))
    cell.submit("small")
    assert cell.job("small").status is JobStatus.QUEUED
    cell.feed(JobCancelRequested(job_id="big2"))
    cell.start("runs")
    cell.exit("runs.1.w0")
    assert [cell.job(j).status for j in ("big1", "small")] == [JobStatus.LAUNCHING] * 2


def test_what_can_never_run_ends_after_its_grace_unless_a_node_joins(cell: CellDriver) -> None:
    """8 GPUs on one node are asked, nodes have 4. A fitting node in time saves it; else it ends, with the
    reason."""
    step = cell.submit("huge", need=estimate(8))
    assert kinds(step) == ["job.estimated", "job.found_unschedulable", "timer.set"]
    cell.submit("next")
    assert cell.job("next").status is JobStatus.LAUNCHING, "nobody waits behind a job that can never run"
    cell.join(node_spec("n8", 8))
    assert cell.job("huge").status is JobStatus.LAUNCHING
    cell.submit("huger", need=estimate(16))
    [ended] = cell.at(5_000)
    assert kinds(ended) == ["timer.fired", "job.ended"]
    assert cell.state.ended["huger"] == "unschedulable"


def test_queue_and_run_time_outs(cell: CellDriver) -> None:
    cell.submit("fills", job_spec(workers=12, run_timeout_ms=3_000))
    cell.start("fills")
    cell.submit("waits", job_spec(queue_timeout_ms=1_000))
    [expired] = cell.at(1_000)
    assert kinds(expired) == ["timer.fired", "job.ended"]
    assert cell.state.ended["waits"] == "timed_out_queued"
    [stopped] = cell.at(3_000)
    assert kinds(stopped) == ["timer.fired", "stop.decided"]
    for rank in range(12):
        cell.exit(f"fills.1.w{rank}", None, cause="stopped", signal=15)
    assert cell.state.ended["fills"] == "timed_out_running"


def test_silence_makes_a_node_suspect_and_its_word_restores_it(cell: CellDriver) -> None:
    """LAW 5: an unanswered order is silence, not death: nothing new goes there, nothing there is given up."""
    cell.submit("j")
    node_id = cell.job("j").tasks["j.1.w0"].place.node_id
    [fired] = cell.at(60_000)
    assert kinds(fired) == ["timer.fired", "node.suspected"]
    assert cell.state.nodes[node_id].status is NodeStatus.SUSPECT
    assert cell.job("j").status is JobStatus.LAUNCHING
    cell.submit("elsewhere")
    assert cell.job("elsewhere").tasks["elsewhere.1.w0"].place.node_id != node_id
    cell.start("j")
    assert cell.state.nodes[node_id].status is NodeStatus.READY


def test_a_node_that_left_gives_its_jobs_to_others(cell: CellDriver) -> None:
    """The cloud deleted the machine: proof. Its job is placed again without counting as the user's
    attempt."""
    cell.submit("j")
    cell.start("j")
    node_id = cell.job("j").tasks["j.1.w0"].place.node_id
    step = cell.feed(NodeLeft(node_id=node_id, boot_id="b1", proof="deleted"))
    assert kinds(step) == [
        "node.left",
        "task.lost",
        "job.requeued",
        "node.lost",
        "placement.decided",
        "timer.set",
    ]
    assert cell.job("j").tasks["j.2.w0"].place.node_id != node_id
    assert cell.job("j").retries.infrastructure == 1
    assert cell.feed(NodeLeft(node_id=node_id, boot_id="b0", proof="deleted")).reason == "older_boot"


def test_a_new_boot_id_proves_that_the_old_tasks_are_dead(cell: CellDriver) -> None:
    cell.submit("j")
    cell.start("j")
    node_id = cell.job("j").tasks["j.1.w0"].place.node_id
    cell.join(node_spec(node_id, boot="b2"))
    assert cell.job("j").attempt == 2


def test_a_rejoining_reporter_keeps_what_it_found_alive(cell: CellDriver) -> None:
    """The reporter was killed and re-attached: same boot, the task is in its list; nothing changes."""
    cell.submit("j")
    cell.start("j")
    job = cell.job("j")
    node_id, token = job.tasks["j.1.w0"].place.node_id, job.token
    cell.join(node_spec(node_id), tasks=[RunningTask(task_id="j.1.w0", token=token)])
    assert (job.attempt, job.status) == (1, JobStatus.RUNNING)


def test_when_most_nodes_vanish_at_once_nobody_is_evicted(cell: CellDriver) -> None:
    """A network split makes two of three nodes 'deleted': freeze, alarm, evict nothing; thaw when they
    return."""
    for name in ("a", "b", "c"):
        cell.submit(name, need=estimate(2))
        cell.start(name)
    gone = sorted(cell.state.nodes)[:2]
    cell.feed(NodeLeft(node_id=gone[0], boot_id="b1", proof="deleted"))
    attempts = {name: job.attempt for name, job in cell.state.jobs.items()}
    step = cell.feed(NodeLeft(node_id=gone[1], boot_id="b1", proof="deleted"))
    assert kinds(step) == ["node.left", "cell.frozen"]
    assert {name: job.attempt for name, job in cell.state.jobs.items()} == attempts
    cell.submit("late")
    assert cell.job("late").status is JobStatus.QUEUED
    node = cell.state.nodes[gone[1]]
    tasks = [RunningTask(task_id=t, token=cell.job(j).token) for t, j in node.tasks.items()]
    thawed = cell.feed(NodeJoined(node=node_spec(gone[1]), tasks=tuple(tasks)))
    assert kinds(thawed)[:2] == ["node.joined", "cell.thawed"]
    assert cell.job("late").status is JobStatus.LAUNCHING


def test_a_refused_order_is_proof_and_is_placed_again_after_a_pause(cell: CellDriver) -> None:
    """The node's disk knows a higher token: it will never start this task, so its GPUs are free again."""
    cell.submit("j")
    place, token = cell.job("j").tasks["j.1.w0"].place, cell.job("j").token
    refused = OrderRefused(
        node_id=place.node_id, task_id="j.1.w0", token=token, reason="stale_token", highest_token=token + 5
    )
    assert kinds(cell.feed(refused)) == ["order.refused", "job.requeued", "timer.set"]
    [fired] = cell.at(1_000)
    assert kinds(fired) == ["timer.fired", "job.queued", "placement.decided", "timer.set"]


def test_a_faulted_gpu_is_not_given_out_again(cell: CellDriver) -> None:
    for node_id in ("n1", "n2", "n3"):
        for gpu in range(3):
            cell.feed(GpuFaulted(node_id=node_id, gpu=gpu, fault="xid", code=79))
    cell.submit("two", need=estimate(2))
    assert cell.job("two").status is JobStatus.QUEUED
    cell.submit("one")
    assert cell.job("one").tasks["one.1.w0"].place.gpus == (3,)


def test_a_suspect_node_takes_nothing_new(cell: CellDriver) -> None:
    for node_id in ("n1", "n2", "n3"):
        cell.feed(NodeSuspected(node_id=node_id, reason="watch lost"))
    cell.submit("j")
    assert cell.job("j").status is JobStatus.QUEUED
    cell.join(node_spec("n2"))
    assert cell.job("j").tasks["j.1.w0"].place.node_id == "n2"


def test_messages_with_an_older_token_change_nothing(cell: CellDriver) -> None:
    """A start report of an attempt that was given up arrives late."""
    cell.submit("j")
    place = cell.job("j").tasks["j.1.w0"].place
    late = TaskStarted(node_id=place.node_id, task_id="j.1.w0", token=1, pid=1, started_ms=1)
    assert cell.feed(late).reason == "stale_token"


def test_the_largest_gang_gets_orders_that_its_nodes_can_read(cell: CellDriver) -> None:
    """512 members on nodes whose names and addresses are as long as they may be, and random; a node must not
    find its own order too large, nor the peers in it."""
    cell.submit("g")
    [order] = cell.orders()
    assert isinstance(order, StartTask)
    letters = random.Random(1)

    def random_name(length: int) -> str:
        return "".join(letters.choices(ascii_letters, k=length))

    peers = tuple(
        Peer(rank=rank, role="worker", node_id=random_name(128), address=random_name(255))
        for rank in range(MAX_GANG_TASKS)
    )
    large = msgspec.structs.replace(order, peers=(), peers_of=order.task_id, packed_peers=pack_peers(peers))
    value = encode(large)
    assert len(value) > MAX_EVENT_BYTES * 2
    assert decode(wire_type(StartTask), value) == large
    assert unpack_peers(large.packed_peers or "") == peers


def test_a_frozen_cell_waits_for_the_majority_however_long_it_takes(cell: CellDriver) -> None:
    """The split outlasts the freeze window: still nobody is evicted until most nodes are back."""
    cell.submit("a", need=estimate(4))
    cell.start("a")
    for node_id in ("n1", "n2"):
        cell.feed(NodeLeft(node_id=node_id, boot_id="b1", proof="deleted"))
    assert cell.state.frozen
    cell.at(600_000)
    step = cell.feed(NodeLeft(node_id="n3", boot_id="b1", proof="deleted"))
    assert kinds(step) == ["node.left"]
    cell.join(node_spec("n3"))
    assert cell.state.frozen == "", "n2 alone is awaited now: one of two"


def test_a_node_that_shrank_below_its_promises_takes_nothing_new(cell: CellDriver) -> None:
    """Memory was unplugged under a running task: what is left is less than what was promised."""
    cell.submit("a", need=estimate(1, memory_mib=100_000))
    cell.start("a")
    node_id = cell.job("a").tasks["a.1.w0"].place.node_id
    small = msgspec.structs.replace(node_spec(node_id), host_memory_mib=50_000)
    evolve(cell.state, NodeChanged(node=small))
    assert cell.state.nodes[node_id].free().host_memory_mib == 0


def test_a_drained_nodes_jobs_run_elsewhere_at_nobodys_expense(cell: CellDriver) -> None:
    """The reporter is drained: its tasks end as stopped without anybody having decided so. Not the job's
    fault."""
    cell.submit("g", job_spec(workers=2))
    cell.start("g")
    assert kinds(cell.exit("g.1.w0", None, cause="stopped", signal=15)) == ["task.exited", "stop.decided"]
    last = cell.exit("g.1.w1", None, cause="stopped", signal=15)
    assert kinds(last) == ["task.exited", "job.requeued", "placement.decided", "timer.set"]
    assert (cell.job("g").attempt, cell.job("g").retries.infrastructure) == (2, 1)


def test_the_first_failure_decides_even_when_a_node_is_lost_after_it(cell: CellDriver) -> None:
    """A bug in the program ends one worker; that the other's node dies meanwhile makes it no node's fault."""
    cell.submit("g", job_spec(workers=5))
    cell.start("g")
    cell.exit("g.1.w0", 3)
    for task_id in [
        t for t, task in cell.job("g").tasks.items() if task.place.node_id != "n1" and t != "g.1.w0"
    ]:
        cell.exit(task_id, None, cause="stopped", signal=15)
    cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="deleted"))
    assert cell.state.ended["g"] == "failed"


def test_a_late_goodbye_does_not_end_the_next_life_of_a_node(cell: CellDriver) -> None:
    """The reporter was drained and started again; a copy of its goodbye arrives after it has joined anew."""
    cell.feed(NodeJoined(node=node_spec("n1"), incarnation=5))
    goodbye = NodeLeft(node_id="n1", boot_id="b1", proof="shutdown", incarnation=5)
    cell.feed(goodbye)
    cell.feed(NodeJoined(node=node_spec("n1"), incarnation=6))
    assert cell.feed(goodbye).reason == "stale_leave"
    assert cell.state.nodes["n1"].status is NodeStatus.READY


def test_an_operator_who_fenced_the_nodes_ends_the_freeze(cell: CellDriver) -> None:
    """Two of three machines burnt; they will not come back. Whoever made sure of it reports it, and work goes
    on."""
    cell.submit("a", need=estimate(4))
    cell.start("a")
    home = cell.job("a").tasks["a.1.w0"].place.node_id
    away = sorted({"n1", "n2", "n3"} - {home})[0]
    for node_id in (away, home):
        cell.feed(NodeLeft(node_id=node_id, boot_id="b1", proof="deleted"))
    assert cell.state.frozen
    step = cell.feed(NodeLeft(node_id=home, boot_id="b1", proof="fenced"))
    assert kinds(step)[:5] == ["node.left", "task.lost", "job.requeued", "node.lost", "cell.thawed"]
    assert cell.job("a").status is JobStatus.LAUNCHING
    assert cell.feed(NodeLeft(node_id=home, boot_id="b1", proof="fenced")).reason == "already_gone"


def test_draining_node_after_node_never_fails_a_job(cell: CellDriver) -> None:
    """A rolling update drains every node, one after the other, more often than nodes may be lost."""
    cell.submit("j")
    for attempt in range(1, 25):
        cell.start("j")
        cell.exit(f"j.{attempt}.w0", None, cause="stopped", signal=15)
    assert cell.job("j").attempt == 25
    assert cell.job("j").retries.losses == 0
