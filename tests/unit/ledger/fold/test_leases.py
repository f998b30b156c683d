"""Stories of silent nodes: probes, and the proof that what ran there is dead (decision 40)."""

import pytest

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.lease import wait_ms
from penstock.log.port import Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.ledger_events import InputAccepted, TermStarted
from penstock.model.decisions.orders import AnswerJoin, ProbeNode, StartTask
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
    ProbeSent,
    RunningTask,
    TaskExited,
)
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.codec import decode, encode
from penstock.model.wire.envelope import from_wire
from penstock.runtime.keys.node_keys import PlacerKeys
from penstock.runtime.keys.signatures import SEED_BYTES
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock.why.explain import explain
from penstock_services.placer.shell.dispatch import Dispatcher
from penstock_services.placer.shell.ledger_trace import LedgerTrace
from tests.support.cluster.driver import CellDriver, job_spec, kinds, node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog

LEASE_MS = 40_000
EPOCH_MS = 1_000_000
SETTINGS = PlacerSettings(lease_ms=LEASE_MS)


@pytest.fixture
def cell() -> CellDriver:
    """Two nodes that keep leases; job `j` runs on the first."""
    found = CellDriver(SETTINGS)
    for number, name in enumerate(("n1", "n2")):
        found.feed(NodeJoined(node=node_spec(name, rack=f"r{number}"), incarnation=1, leases=True))
        if not number:
            found.submit("j")
            found.start("j")
    return found


def suspected(cell: CellDriver) -> int:
    """The probe's token."""
    step = cell.feed(NodeSuspected(node_id="n1", reason="its connection broke"))
    assert kinds(step) == ["node.suspected", "node.probed"]
    [probe] = [order for order in cell.orders() if isinstance(order, ProbeNode)]
    assert (probe.node_id, probe.incarnation) == ("n1", 1)
    return probe.token


def now_ms(cell: CellDriver) -> int:
    """As `CellDriver.at` counts."""
    return cell.state.now_ms - EPOCH_MS


def left(probe: int) -> NodeLeft:
    return NodeLeft(node_id="n1", boot_id="b1", proof="lease_outlived", incarnation=1, probe=probe)


def test_a_dead_machines_job_runs_elsewhere(cell: CellDriver) -> None:
    """A machine burns down at night, and no operator reports it. Its job has lost nothing but time."""
    probe = suspected(cell)
    sent_ms = now_ms(cell)
    assert cell.feed(left(probe)).reason == "probe_not_expired"
    assert "its probe is under way" in explain(cell.state, "j").text
    assert kinds(cell.feed(ProbeSent(node_id="n1", probe=probe))) == ["node.probe_sent", "timer.set"]
    assert cell.feed(ProbeSent(node_id="n1", probe=probe)).reason == "duplicate_probe"
    assert "proven dead in 50 s" in explain(cell.state, "j").text
    assert cell.at(sent_ms + 50_000 - 1) == []
    [expired] = cell.at(sent_ms + 50_000)
    assert kinds(expired) == ["timer.fired", "node.probe_expired"]
    assert cell.feed(left(probe + 1)).reason == "probe_not_expired"
    step = cell.feed(left(probe))
    assert kinds(step)[:4] == ["node.left", "task.lost", "job.requeued", "node.lost"]
    [start] = [order for order in cell.orders() if isinstance(order, StartTask)]
    assert (start.node_id, start.attempt, start.lease_ms) == ("n2", 2, LEASE_MS)
    assert not cell.state.nodes["n1"].placeable


async def test_a_proof_that_was_recorded_and_never_sent_is_sent_by_the_next_term(cell: CellDriver) -> None:
    """On Kafka the placer died between the record that a probe has expired and the departure that follows
    from it."""
    probe = suspected(cell)
    cell.feed(ProbeSent(node_id="n1", probe=probe))
    cell.at(now_ms(cell) + wait_ms(LEASE_MS))
    cell.feed(TermStarted(term=cell.state.term + 1, placer_id="p2", settings=SETTINGS))
    broker = MemoryBroker()
    broker.create(topic_partitions())
    settings = Settings(log_url="memory")
    log = MemoryLog(broker, "placer")
    keys = PlacerKeys(bytes(SEED_BYTES))
    await Dispatcher(log, cell.state, settings, LedgerTrace(Tracing()), keys, None).repeat_outstanding(
        cell.head.seq
    )
    found = [
        from_wire(record.headers, record.value, Topic.NODES).data
        for record in broker.records(Partition(Topic.NODES, 0))
    ]
    assert found == [ProbeSent(node_id="n1", probe=probe), left(probe)]
    assert [cell.feed(event).outcome for event in found] == ["committed", "committed"]
    assert not cell.state.nodes["n1"].placeable
    assert cell.state.jobs["j"].attempt == 2


async def test_a_refusal_that_was_recorded_and_never_sent_is_sent_by_the_next_term(cell: CellDriver) -> None:
    """A node has a new disk and a clock that is behind: its joining does not count. On Kafka the placer died
    before the node was told, which waits for an answer; a cell that is frozen until each node has joined
    would stay so."""
    node = cell.state.nodes["n1"]
    again = node_spec("n1", rack="r0", boot="b2")
    step = cell.feed(NodeJoined(node=again, incarnation=node.incarnation, leases=True))
    assert kinds(step) == ["node.join_refused"]

    async def told() -> list[tuple[str, str, int]]:
        cell.feed(TermStarted(term=cell.state.term + 1, placer_id="p2", settings=SETTINGS))
        broker = MemoryBroker()
        broker.create(topic_partitions())
        log, keys = MemoryLog(broker, "placer"), PlacerKeys(bytes(SEED_BYTES))
        trace = LedgerTrace(Tracing())
        settings = Settings(log_url="memory")
        await Dispatcher(log, cell.state, settings, trace, keys, None).repeat_outstanding(cell.head.seq)
        place = Partition(Topic.ORDERS, node_partition("n1"))
        orders = [
            from_wire(record.headers, record.value, Topic.ORDERS).data for record in broker.records(place)
        ]
        answers = [order for order in orders if isinstance(order, AnswerJoin)]
        return [(order.boot_id, order.verdict, order.highest_incarnation) for order in answers]

    assert await told() == [("b2", "stale_join", node.incarnation)]
    assert dump(load(dump(cell.state))) == dump(cell.state)
    cell.feed(NodeJoined(node=again, incarnation=node.incarnation + 1, leases=True))
    assert await told() == []


def test_an_answer_before_the_proof_keeps_the_node(cell: CellDriver) -> None:
    """The network was away for 49 s. The answer stands in the topic before what would give the node up."""
    probe = suspected(cell)
    cell.feed(ProbeSent(node_id="n1", probe=probe))
    cell.at(now_ms(cell) + wait_ms(LEASE_MS))
    task = RunningTask(task_id="j.1.w0", token=cell.job("j").token)
    cell.feed(NodeJoined(node=node_spec("n1", rack="r0"), incarnation=2, leases=True, tasks=(task,)))
    assert cell.feed(left(probe)).reason == "stale_leave"
    assert cell.state.nodes["n1"].status == "ready"
    assert not any(isinstance(order, ProbeNode) for order in cell.orders())


def test_a_report_of_before_the_silence_is_no_answer(cell: CellDriver) -> None:
    """An exit was on its way when the machine died: it counts for the job, and not as a sign of life."""
    suspected(cell)
    token = cell.job("j").token
    event = TaskExited(
        node_id="n1", task_id="j.1.w0", token=token, cause="exited", exit_code=0, started_ms=0, exited_ms=1
    )
    cell.feed(event)
    assert cell.state.ended["j"] == "succeeded"
    assert cell.state.nodes["n1"].status == "suspect"


def test_a_new_term_counts_anew(cell: CellDriver) -> None:
    """Between two terms only the log's stamps show how long no placer wrote, and they may be wrong by
    days."""
    probe = suspected(cell)
    cell.feed(ProbeSent(node_id="n1", probe=probe))
    cell.feed(TermStarted(term=cell.state.term + 1, placer_id="p2", settings=SETTINGS))
    later_ms = now_ms(cell) + 1_000_000
    [fired] = cell.at(later_ms)
    assert kinds(fired) == ["timer.fired"]
    assert kinds(cell.feed(ProbeSent(node_id="n1", probe=probe))) == ["node.probe_sent", "timer.set"]
    [expired] = cell.at(later_ms + 50_000)
    assert kinds(expired)[-1] == "node.probe_expired"


@pytest.mark.parametrize(
    ("before_ms", "after_ms", "waits_ms"), [(40_000, 8_000, 50_000), (8_000, 40_000, 10_000)]
)
def test_a_changed_lease_is_that_of_tasks_placed_from_then_on(
    before_ms: int, after_ms: int, waits_ms: int
) -> None:
    """An operator shortens the lease. What runs was ordered with the longer one, and its node keeps that."""
    cell = CellDriver(PlacerSettings(lease_ms=before_ms))
    cell.feed(NodeJoined(node=node_spec("n1"), incarnation=1, leases=True))
    cell.submit("j")
    cell.start("j")
    changed = TermStarted(
        term=cell.state.term + 1, placer_id="p2", settings=PlacerSettings(lease_ms=after_ms)
    )
    cell.feed(changed)
    probe, sent_ms = suspected(cell), now_ms(cell)
    cell.feed(ProbeSent(node_id="n1", probe=probe))
    assert cell.at(sent_ms + waits_ms - 1) == []
    assert kinds(cell.at(sent_ms + waits_ms)[0])[-1] == "node.probe_expired"


def test_what_runs_without_a_lease_is_never_proven_dead_by_one() -> None:
    """It was placed before leases were switched on."""
    cell = CellDriver(PlacerSettings(lease_ms=0))
    cell.feed(NodeJoined(node=node_spec("n1"), incarnation=1, leases=True))
    cell.submit("j")
    cell.start("j")
    cell.feed(TermStarted(term=cell.state.term + 1, placer_id="p2", settings=SETTINGS))
    probe = suspected(cell)
    assert kinds(cell.feed(ProbeSent(node_id="n1", probe=probe))) == ["node.probe_sent"]
    assert "no lease proves its end" in explain(cell.state, "j").text
    assert cell.at(now_ms(cell) + 10 * wait_ms(LEASE_MS)) == []


@pytest.mark.parametrize(("chars", "fires"), [(122, True), (123, False)])
def test_a_node_with_a_name_too_long_for_a_timer_gets_none(chars: int, fires: bool) -> None:
    """Answers are lost with the nodes' topic while such a node is silent: a record with its timer could not
    be read again."""
    cell = CellDriver(SETTINGS)
    name = "n" * chars
    cell.feed(NodeJoined(node=node_spec(name, gpus=0), incarnation=1, leases=True))
    cell.feed(NodeSuspected(node_id=name, reason="its connection broke"))
    lost = InputAccepted(topic=Topic.NODES, partition=0, position=2, offset=0, end=1, reason="a new topic")
    for state in (cell.state, cell.follower.state):
        evolve(state, lost)
    fired = [fact for step in cell.at(now_ms(cell)) for fact in step.facts]
    for fact in fired:
        assert decode(wire_type(type(fact)), encode(fact)) == fact
    assert [fact.TYPE for fact in fired] == ["penstock.timer.fired", "penstock.node.probed"] * fires


def test_a_reporter_of_an_earlier_version_is_not_probed() -> None:
    cell = CellDriver(SETTINGS)
    cell.join(node_spec("n1"))
    cell.submit("j")
    cell.start("j")
    assert kinds(cell.feed(NodeSuspected(node_id="n1", reason="silent"))) == ["node.suspected"]
    assert cell.job("j").tasks["j.1.w0"].lease_ms == 0


@pytest.mark.parametrize("how", ["start", "stop"])
def test_an_order_that_is_repeated_at_a_joining_is_waited_for_again(how: str) -> None:
    """A machine is cut off as a job is placed there, and so suspect. It comes back, is sent the order once
    more, and hangs."""
    cell = CellDriver(SETTINGS)
    cell.feed(NodeJoined(node=node_spec("n1"), incarnation=1, leases=True))
    cell.submit("j")
    if how == "stop":
        cell.feed(JobCancelRequested(job_id="j"))
    cell.at(200_000)
    assert cell.state.nodes["n1"].status == "suspect"
    cell.feed(NodeJoined(node=node_spec("n1"), incarnation=2, leases=True))
    assert cell.state.nodes["n1"].status == "ready"
    assert [order.TYPE.removesuffix("_task") for order in cell.orders()] == [f"penstock.order.{how}"]
    cell.at(400_000)
    assert cell.state.nodes["n1"].status == "suspect"


def test_a_joining_that_names_the_task_answers_its_order(cell: CellDriver) -> None:
    """It waits there for its predecessor's end, for as long as that takes."""
    cell.submit("k", job_spec(workers=4))
    cell.at(60_000)
    for name in ("n1", "n2"):
        tasks = [
            RunningTask(task_id=task_id, token=cell.state.jobs[job_id].token)
            for task_id, job_id in cell.state.nodes[name].tasks.items()
        ]
        rack = cell.state.nodes[name].spec.rack
        cell.feed(NodeJoined(node=node_spec(name, rack=rack), incarnation=2, leases=True, tasks=tuple(tasks)))
    cell.at(1_000_000)
    assert [node.status for node in cell.state.nodes.values()] == ["ready", "ready"]


def test_a_stop_that_stays_unanswered_makes_its_node_suspect(cell: CellDriver) -> None:
    """A user cancels, and waits: the machine is gone. So far only starts were missed."""
    event: Event = JobCancelRequested(job_id="j")
    assert kinds(cell.feed(event))[1:] == ["stop.decided", "timer.set"]
    due_ms = now_ms(cell) + job_spec().grace_ms + SETTINGS.launch_timeout_ms
    assert cell.at(due_ms - 1) == []
    [fired] = cell.at(due_ms)
    assert kinds(fired) == ["timer.fired", "node.suspected", "node.probed"]
