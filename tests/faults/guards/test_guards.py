"""One scenario per guard, such that the system without that guard fails it (see test_mutants)."""

# clocks: all of it runs in virtual time

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from msgspec import structs

from penstock.errors import AppendFailed
from penstock.ledger.record.record import GENESIS, Draft, Head, read_valid, write
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message, Partition
from penstock.model.decisions.ledger_events import PlacementDecided, TermStarted
from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    JobSubmitted,
    NodeJoined,
    NodeLeft,
    TaskExited,
    TaskStarted,
)
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.model.wire.speakers import by_operator
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell import service as estimator
from penstock_services.placer.core.orders import start_orders
from penstock_services.placer.shell import service as placer
from tests.faults.processes.fault_cell import TOPICS
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.forgeries import GATEWAYS, proofs
from tests.support.virtual_time import run_virtually

SETTINGS = Settings(log_url="memory", trace_ratio=0.0)
LEDGER = Partition(Topic.LEDGER, 0)
ORDERS = Partition(Topic.ORDERS, node_partition("n1"))
SOON_S = 20.0  # of virtual time


# ------------------------------------------------------------------------------------------- the chain


def chain(*terms: int) -> Head:
    """The head of a ledger of `TermStarted` records."""
    head = GENESIS
    for term in terms:
        head, _ = write(head, started(term))
    return head


def started(term: int, who: str = "p") -> Draft:
    fact = TermStarted(term=term, placer_id=who, settings=PlacerSettings())
    return Draft(term, 1, {"placer_id": who}, "committed", None, [fact])


def plain(term: int) -> Draft:
    return Draft(term, 1, {"timer_id": "t"}, "rejected", "timer_gone", [])


def test_a_record_must_name_its_parent() -> None:
    """A zombie decided on a head that another placer has replaced; seq and term are right by accident."""
    head = chain(1)
    _, foreign = write(structs.replace(head, id="f" * 32), plain(1))
    assert read_valid(head, foreign) is None
    assert read_valid(head, write(head, plain(1))[1]) is not None


def test_a_record_must_be_the_next_one() -> None:
    head = chain(1)
    _, skipping = write(structs.replace(head, seq=head.seq + 1), plain(1))
    assert read_valid(head, skipping) is None


def test_a_record_must_be_of_the_current_term() -> None:
    """Only `TermStarted` raises the term, by one; nothing else may be written under an old or invented
    one."""
    head = chain(1, 2)
    for term in (1, 3):
        assert read_valid(head, write(head, plain(term))[1]) is None
    for term in (2, 4):
        assert read_valid(head, write(head, started(term))[1]) is None
    assert read_valid(head, write(head, started(3))[1]) is not None


# -------------------------------------------------------------------------------------------- the core


@pytest.fixture
def cell() -> CellDriver:
    return CellDriver()


def test_a_second_submission_starts_no_second_job(cell: CellDriver) -> None:
    """The gateway did not hear that its append succeeded, and appends again: while the job runs, and
    after."""
    cell.join(node_spec("n1"))
    cell.submit("a")
    again = JobSubmitted(job_id="a", spec=job_spec())
    assert cell.feed(again).reason == "duplicate_job"
    cell.start("a")
    cell.exit("a.1.w0")
    assert cell.feed(again).reason == "duplicate_job"
    assert not cell.state.jobs


def test_a_message_with_another_token_is_refused(cell: CellDriver) -> None:
    """A node reports the end of a task under the token of a placement that is not the current one."""
    cell.join(node_spec("n1"))
    cell.submit("a")
    for token in (cell.job("a").token - 1, cell.job("a").token + 1):
        late = TaskExited(
            node_id="n1",
            task_id="a.1.w0",
            token=token,
            cause="exited",
            exit_code=0,
            started_ms=1,
            exited_ms=2,
        )
        assert cell.feed(late).reason == "stale_token"
    assert cell.job("a").status is JobStatus.LAUNCHING


def test_a_cancellation_does_not_undo_success(cell: CellDriver) -> None:
    """All workers have succeeded, the parameter server is being stopped; now the user's cancellation
    arrives."""
    cell.join(node_spec("n1"))
    cell.submit("a", job_spec(ps=1))
    cell.start("a")
    cell.exit("a.1.w0")
    assert cell.feed(JobCancelRequested(job_id="a")).reason == "already_stopping"
    step = cell.exit("a.1.ps0", None, cause="stopped", signal=15)
    assert kinds(step)[-1] == "job.ended"
    assert cell.state.ended["a"] == "succeeded"


def test_most_nodes_vanishing_evicts_nobody(cell: CellDriver) -> None:
    """A switch dies and the lease watcher declares four of five nodes dead within a second (LAW 5)."""
    cell.join(*(node_spec(f"n{i}") for i in range(5)))
    for i in range(5):
        cell.submit(f"j{i}", need=estimate(4))
        cell.start(f"j{i}")
    for i in range(4):
        cell.feed(NodeLeft(node_id=f"n{i}", boot_id="b1", proof="lease_outlived"))
    assert cell.state.frozen
    evicted = [job.job_id for job in cell.state.jobs.values() if job.status is not JobStatus.RUNNING]
    assert len(evicted) <= 2, evicted  # those lost before it was most of them


def test_the_head_of_the_queue_is_overtaken_only_so_often() -> None:
    """A job of 4 GPUs waits; small ones pass it, but not for ever: after two it gets what becomes free."""
    cell = CellDriver(PlacerSettings(max_overtakes=2))
    cell.join(node_spec("n1"))
    cell.submit("first", need=estimate(3))
    cell.start("first")
    cell.submit("large", need=estimate(4))
    for i in range(4):
        cell.submit(f"small{i}")
        if cell.job(f"small{i}").status is JobStatus.LAUNCHING:
            cell.start(f"small{i}")
            cell.exit(f"small{i}.1.w0")
    assert [job.job_id for job in cell.state.jobs.values() if job.status is JobStatus.QUEUED] == [
        "large",
        "small2",
        "small3",
    ]
    cell.exit("first.1.w0")
    assert cell.job("large").status is JobStatus.LAUNCHING


def test_a_task_lost_to_a_reboot_is_not_ordered_under_the_new_boot(cell: CellDriver) -> None:
    """The machine boots while the placement's record is on its way back from the log: the fold has run ahead,
    and the order derived from that record must not start a task that the ledger has already declared lost."""
    cell.join(node_spec("n1"))
    cell.submit("a", job_spec(workers=2))
    token = cell.job("a").token
    assert len(start_orders(cell.state, "a", token)) == 2
    cell.join(node_spec("n2"))
    cell.submit("b", job_spec(workers=6))
    assert {task.place.node_id for task in cell.job("b").tasks.values()} == {"n1", "n2"}
    cell.feed(NodeJoined(node=node_spec("n1", boot="b2")))
    ordered = start_orders(cell.state, "b", cell.job("b").token)
    assert [order.task_id for order in ordered if order.node_id == "n1"] == []


# ---------------------------------------------------------------------------------- shells, in virtual time


class Stage:
    """A cell whose log, nodes and users the test plays itself."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.broker.create(TOPICS)
        self.log = MemoryLog(self.broker, "test")
        self.stop = asyncio.Event()
        self.services: list[asyncio.Task[None]] = []

    def start(self, run: Callable[..., Awaitable[None]]) -> MemoryLog:
        """Starts a service; returns its connection."""
        log = MemoryLog(self.broker, "service")
        self.services.append(asyncio.ensure_future(run(SETTINGS, self.stop, log=log)))
        return log

    def fail_once(self, log: MemoryLog, topic: Topic, *, after_write: bool) -> list[Sequence[Message]]:
        """The connection's next append to this topic fails; returns a list that then holds it."""
        real_append = log.append
        failed: list[Sequence[Message]] = []

        async def append(messages: Sequence[Message]) -> list[int]:
            if not failed and messages[0].partition.topic == topic:
                failed.append(messages)
                self.broker.fail_next_append(after_write=after_write)
            return await real_append(messages)

        log.append = append  # type: ignore[method-assign]
        return failed

    async def send(self, *events: Event) -> None:
        for event in events:
            envelope = Envelope(f"{event.subject()}-{event.TYPE}", "/test", 1, event)
            headers, value = to_wire(envelope)
            assert event.TOPIC is not None
            if by_operator(event):
                headers = (*headers, *proofs(GATEWAYS, envelope, value))
            await self.log.append([Message(Partition(event.TOPIC, 0), value, headers)])

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Fails after SOON_S."""
        deadline = asyncio.get_running_loop().time() + SOON_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, f"not within {SOON_S} s: {what}"
            await asyncio.sleep(0.01)

    def replica(self) -> Replica:
        found = Replica()
        for record in self.broker.records(LEDGER):
            found.take(record.value, record.offset)
        return found

    def orders(self) -> list[StartTask]:
        records = self.broker.records(ORDERS)
        found = [from_wire(record.headers, record.value, Topic.ORDERS).data for record in records]
        return [order for order in found if isinstance(order, StartTask)]

    async def close(self) -> None:
        self.stop.set()
        await asyncio.gather(*self.services, return_exceptions=True)


def play(scenario: Callable[[Stage], Awaitable[None]]) -> None:
    """Plays a scenario in virtual time; whatever it started is stopped."""

    async def whole() -> None:
        stage = Stage()
        try:
            await scenario(stage)
        finally:
            await stage.close()

    run_virtually(whole())


def submission(job_id: str) -> Sequence[Event]:
    return JobSubmitted(job_id=job_id, spec=job_spec()), JobEstimated(job_id=job_id, estimate=estimate())


@pytest.mark.parametrize("after_write", [False, True])
def test_a_failed_append_to_the_ledger_costs_no_decision(after_write: bool) -> None:
    """The broker's leader changes at the very moment of the append: the record is lost, or only its
    answer."""

    async def scenario(stage: Stage) -> None:
        log = stage.start(placer.run)
        await stage.send(NodeJoined(node=node_spec("n1")))
        await stage.until(lambda: "n1" in stage.replica().state.nodes, "the node is known")
        failed = stage.fail_once(log, Topic.LEDGER, after_write=after_write)
        await stage.send(*submission("a"))
        await stage.until(lambda: len(stage.orders()) > 0, "the order arrives")
        assert failed

    play(scenario)


@pytest.mark.parametrize("after_write", [False, True])
def test_a_failed_append_of_orders_loses_none(after_write: bool) -> None:
    """The ledger's record is written, then the broker stumbles over the order that follows from it."""

    async def scenario(stage: Stage) -> None:
        log = stage.start(placer.run)
        await stage.send(NodeJoined(node=node_spec("n1")))
        await stage.until(lambda: "n1" in stage.replica().state.nodes, "the node is known")
        failed = stage.fail_once(log, Topic.ORDERS, after_write=after_write)
        await stage.send(*submission("a"))
        await stage.until(lambda: len(stage.orders()) > 0, "the order arrives")
        assert failed

    play(scenario)


def test_an_order_follows_only_from_a_record_that_was_read_back() -> None:
    """Another placer took over a moment ago; ours decides once more before it learns of that. Its record is
    void, so nothing may be ordered from it: the successor has given the GPU to somebody else."""

    async def scenario(stage: Stage) -> None:
        log = stage.start(placer.run)
        await stage.send(NodeJoined(node=node_spec("n1")))
        await stage.until(lambda: "n1" in stage.replica().state.nodes, "the node is known")
        real_append, usurped = log.append, []

        async def append(messages: Sequence[Message]) -> list[int]:
            decides = any(PlacementDecided.TYPE.encode() in message.value for message in messages)
            if decides and not usurped:
                _, value = write(stage.replica().head, started(2, "usurper"))
                usurped.extend(await stage.log.append([Message(LEDGER, value)]))
            return await real_append(messages)

        log.append = append  # type: ignore[method-assign]
        await stage.send(*submission("a"))
        await stage.until(lambda: stage.replica().head.term >= 3, "ours takes over again")
        await stage.until(lambda: len(stage.orders()) > 0, "the order arrives")
        replica = stage.replica()
        assert {order.token for order in stage.orders()} == {replica.state.jobs["a"].token}

    play(scenario)


def test_a_dead_letter_survives_a_crash_beside_its_record() -> None:
    """Record and letter go to two partitions: the broker takes the record, and the placer dies before the
    rest."""

    async def scenario(stage: Stage) -> None:
        log = stage.start(placer.run)
        await stage.until(lambda: stage.replica().head.term == 1, "it is in office")
        real_append, failed = log.append, []

        async def append(messages: Sequence[Message]) -> list[int]:
            records = [message for message in messages if message.partition.topic == Topic.LEDGER]
            if records and not failed:
                failed.append(messages)
                await real_append(records)
                raise AppendFailed("written in part")
            return await real_append(messages)

        log.append = append  # type: ignore[method-assign]
        await stage.log.append([Message(Partition(Topic.JOBS, 0), b"garbage")])
        await stage.until(lambda: stage.replica().head.term == 2, "it starts again")
        assert stage.replica().state.positions[Topic.JOBS, 0] == 1
        assert len(stage.broker.records(Partition(Topic.DEAD_LETTERS, 0))) > 0

    play(scenario)


def test_a_replaced_placer_stands_by() -> None:
    """Fenced, it must leave the office and keep still while its successor answers."""

    async def scenario(stage: Stage) -> None:
        stage.start(placer.run)
        await stage.until(lambda: stage.replica().head.term == 1, "it is in office")
        _, value = write(stage.replica().head, started(2, "successor"))
        await stage.log.append([Message(LEDGER, value)])
        await asyncio.sleep(10)
        assert stage.replica().head.term == 2
        before = len(stage.broker.records(LEDGER))
        await stage.send(NodeJoined(node=node_spec("n1")))
        await asyncio.sleep(0.3)  # its patience is longer
        assert len(stage.broker.records(LEDGER)) == before, "it answered although it was replaced"

    play(scenario)


def test_a_placer_decides_only_once_its_own_term_was_read_back() -> None:
    """Two placers start at once: the loser's `TermStarted` is void, and so would be all that it wrote
    after."""

    async def scenario(stage: Stage) -> None:
        log = MemoryLog(stage.broker, "service")
        real_append, usurped = log.append, []

        async def append(messages: Sequence[Message]) -> list[int]:
            if not usurped:
                _, value = write(stage.replica().head, started(1, "quicker"))
                usurped.extend(await stage.log.append([Message(LEDGER, value)]))
            return await real_append(messages)

        log.append = append  # type: ignore[method-assign]
        await stage.send(NodeJoined(node=node_spec("n1")), *submission("a"))
        stage.services.append(asyncio.ensure_future(placer.run(SETTINGS, stage.stop, log=log)))
        await stage.until(lambda: len(stage.orders()) > 0, "the order arrives")
        assert stage.replica().head.term == 2
        void = len(stage.broker.records(LEDGER)) - stage.replica().head.seq
        assert void == 1, "only the losing TermStarted may be void"

    play(scenario)


def test_an_estimate_is_sent_until_it_arrives() -> None:
    """The broker refuses the estimator's first append: without the estimate the job would wait for ever."""

    async def scenario(stage: Stage) -> None:
        log = stage.start(estimator.run)
        await asyncio.sleep(0.1)
        failed = stage.fail_once(log, Topic.ESTIMATES, after_write=False)
        await stage.send(JobSubmitted(job_id="a", spec=job_spec()))
        await stage.until(
            lambda: len(stage.broker.records(Partition(Topic.ESTIMATES, 0))) > 0, "the estimate"
        )
        assert failed

    play(scenario)


def test_a_late_copy_of_a_joining_kills_nobody(cell: CellDriver) -> None:
    """A node's append of its joining timed out, but the broker writes it seconds later, after the retry and
    after a task has started: taken at its word, that task would be lost, and its GPU given away under it."""
    joins = [NodeJoined(node=node_spec("n1", boot=boot), incarnation=n) for n, boot in ((1, "b1"), (2, "b2"))]
    for join in joins:
        cell.feed(join)
    cell.submit("a")
    cell.start("a")
    for join in joins:
        assert cell.feed(join).reason == "stale_join"
    assert cell.job("a").status is JobStatus.RUNNING


def test_started_twice_counts_once(cell: CellDriver) -> None:
    """A node repeats its start after its own restart: nothing may be folded twice."""
    cell.join(node_spec("n1"))
    cell.submit("a")
    start = TaskStarted(node_id="n1", task_id="a.1.w0", token=cell.job("a").token, pid=1, started_ms=1)
    assert cell.feed(start).outcome == "committed"
    assert cell.feed(start).reason == "duplicate_start"
