"""The placer's shell with its estimator and nodes, in one process on the log in memory."""

# clocks: the tests run in virtual time

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import wraps

import pytest

from penstock import __version__
from penstock.errors import OffsetTaken
from penstock.ledger.check.check import check
from penstock.ledger.fold.evolve import FOLD_VERSION
from penstock.ledger.record.record import Draft, write
from penstock.ledger.replica.replica import Replica
from penstock.log.port import MAX_READ_RECORDS, Log, Message, Partition, Reader, Record
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.ledger_events import TermStarted
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.shell import standby
from penstock_services.placer.shell.ledger_trace import LedgerTrace
from penstock_services.placer.shell.replay import Replayer
from penstock_services.placer.shell.service import run as run_placer
from tests.support.cluster.driver import node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.fake_nodes import FakeNodes
from tests.support.node_reporter.forgeries import WRITERS, forged_records_change_nothing
from tests.support.story import told
from tests.support.virtual_time import run_virtually
from tests.support.waiting import await_until

SETTINGS = Settings(log_url="memory")
LEDGER = Partition(Topic.LEDGER, 0)
MOST_TOLD = 40


class Cell:
    """A whole small system on one broker."""

    def __init__(self, *, conditional: bool = False) -> None:
        self.broker = MemoryBroker(conditional=conditional)
        self.broker.create(topic_partitions())
        self.nodes = FakeNodes(self.log("node-reporter"), [node_spec(f"n{i}") for i in range(3)], run_ms=5)
        self._sent = 0

    def log(self, identity: str) -> Log:
        return MemoryLog(self.broker, identity)

    async def submit(self, job_id: str, gpus: int = 1) -> None:
        request = ResourceRequest(gpus=gpus, cores=1, host_memory_mib=64, gpu_memory_mib=64, bandwidth_mbps=0)
        await self.send(JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",), resources=request)))

    async def send(self, event: Event) -> None:
        self._sent += 1
        headers, value = to_wire(Envelope(id=f"t{self._sent}", source="/test", time_ms=1, data=event))
        await self.log("gateway").append([Message(Partition(event.TOPIC or "", 0), value, headers)])

    def fold(self) -> Replica:
        replica = Replica()
        for record in self.broker.records(LEDGER):
            replica.take(record.value, record.offset)
        assert check(replica.state) == []
        return replica

    async def until(self, holds: Callable[[Replica], bool]) -> Replica:
        """Waits until it is so in the ledger."""
        await await_until(lambda: holds(self.fold()), self.story)
        return self.fold()

    def story(self) -> str:
        """The ledger's last records."""
        return "\n".join(str(record.value) for record in self.broker.records(LEDGER)[-MOST_TOLD:])

    @asynccontextmanager
    async def placer(self) -> AsyncIterator[asyncio.Event]:
        """One placer, stopped at the end; its `stop` event can also be set earlier."""
        stop, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(run_placer(SETTINGS, stop, log=self.log("placer"), ready=ready))
        await first_of(ready.wait(), asyncio.shield(task))
        try:
            yield stop
        finally:
            stop.set()
            await task


@asynccontextmanager
async def working_cell(conditional: bool) -> AsyncIterator[Cell]:
    cell = Cell(conditional=conditional)
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(run_estimator(SETTINGS, stop, log=cell.log("estimator"))),
        asyncio.create_task(cell.nodes.run()),
    ]
    with told("the ledger's last records", cell.story):
        yield cell
    stop.set()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert cell.nodes.seen.collisions == []


def on_both_logs(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test in virtual time: on a log like Kafka's, where orders follow the record read back, and on one
    with compare-and-append."""

    @pytest.mark.parametrize("conditional", [False, True], ids=["read-back", "one-commit"])
    @wraps(scenario)
    def test(conditional: bool, **given: object) -> None:
        async def run() -> None:
            async with working_cell(conditional) as cell:
                await scenario(cell, **given)

        run_virtually(run())

    _, *others = inspect.signature(scenario).parameters.values()
    conditional = inspect.Parameter("conditional", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = inspect.Signature(
        [conditional, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others)]
    )  # type: ignore[attr-defined]
    return test


def ended(count: int) -> Callable[[Replica], bool]:
    return lambda replica: len(replica.state.ended) == count


@on_both_logs
async def test_jobs_travel_from_submission_to_exit(cell: Cell) -> None:
    """Thirty jobs on twelve GPUs: all of them run once, and replay decides the same, byte for byte."""
    async with cell.placer():
        for number in range(30):
            await cell.submit(f"j{number}")
        replica = await cell.until(ended(30))
    assert set(replica.state.ended.values()) == {"succeeded"}
    assert len(cell.nodes.seen.started) == 30
    report = await Replayer(cell.log("replay"), 0).run()
    assert (report.different, report.identical) == (0, replica.head.seq)


@on_both_logs
async def test_a_restarted_placer_goes_on_where_the_ledger_ends(cell: Cell) -> None:
    """The placer is stopped in the middle and another takes the next term; nothing is lost or run twice."""
    for number in range(20):
        await cell.submit(f"j{number}")
    async with cell.placer():
        await cell.until(lambda replica: len(replica.state.ended) >= 5)
    async with cell.placer():
        replica = await cell.until(ended(20))
    assert replica.state.term == 2
    assert len(cell.nodes.seen.started) == 20
    assert (await Replayer(cell.log("replay"), 0).run()).different == 0


class OvertakenLog(MemoryLog):
    """Just before its first record of a term, another placer begins the next one."""

    overtaken = False

    async def append(self, messages: Sequence[Message]) -> list[int]:
        if not self.overtaken and any(message.at is not None for message in messages):
            self.overtaken = True
            replica = Replica()
            for record in self._broker.records(LEDGER):
                replica.take(record.value, record.offset)
            began = TermStarted(term=replica.head.term + 1, placer_id="other", settings=PlacerSettings())
            draft = Draft(
                began.term, replica.state.now_ms, {"placer_id": "other"}, "committed", None, [began]
            )
            self._broker.append("placer", [Message(LEDGER, write(replica.head, draft)[1])])
            with pytest.raises(OffsetTaken):
                await super().append(messages)
        return await super().append(messages)


def test_a_record_that_loses_takes_its_orders_with_it() -> None:
    """One commit for record and orders: a placer was replaced without noticing. What it writes next is
    refused as a whole, it stands by, and it takes over again only because the other never answers."""
    run_virtually(overtaken())


async def overtaken() -> None:
    cell = Cell(conditional=True)
    stop = asyncio.Event()
    await cell.submit("early")
    log = OvertakenLog(cell.broker, "placer")
    tasks = [
        asyncio.create_task(run_estimator(SETTINGS, stop, log=cell.log("estimator"))),
        asyncio.create_task(cell.nodes.run()),
        asyncio.create_task(run_placer(SETTINGS, stop, log=log)),
    ]
    replica = await cell.until(lambda replica: replica.state.term == 2)
    assert (replica.head.seq, dict(replica.state.jobs)) == (2, {}), "its own first record is not there"
    began_s = asyncio.get_running_loop().time()
    replica = await cell.until(ended(1))
    assert asyncio.get_running_loop().time() - began_s > standby.TAKEOVER_MS / 2_000, "it did not stand by"
    assert replica.state.term == 3
    assert replica.head.seq == len(cell.broker.records(LEDGER)), "no record is void"
    stop.set()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@on_both_logs
async def test_a_replaced_placer_stands_by(cell: Cell) -> None:
    """A second placer starts while the first lives: the first's next records are void, it stands by for
    good."""
    async with cell.placer(), cell.placer():
        for number in range(10):
            await cell.submit(f"j{number}")
        replica = await cell.until(ended(10))
    assert replica.state.term == 2
    assert len(cell.nodes.seen.started) == 10


class LateReader:
    """Reads inputs at once, and the ledger only for who waits longer than a standby's patience."""

    def __init__(self, inputs: Reader, ledger: Reader) -> None:
        self._inputs, self._ledger = inputs, ledger

    def position(self, partition: Partition) -> int:
        return (self._ledger if partition == LEDGER else self._inputs).position(partition)

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        if timeout_ms is not None and timeout_ms > standby.TAKEOVER_MS:
            return await self._ledger.read(max_records=max_records, timeout_ms=timeout_ms)
        return await self._inputs.read(max_records=max_records, timeout_ms=timeout_ms)

    async def close(self) -> None:
        await self._inputs.close()
        await self._ledger.close()


class LateLog(MemoryLog):
    """The connection of a standby that has no time to read all that is there."""

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        inputs = {partition: offset for partition, offset in start.items() if partition != LEDGER}
        if not inputs or LEDGER not in start:
            return super().reader(start, batch_ms=batch_ms)
        return LateReader(super().reader(inputs), super().reader({LEDGER: start[LEDGER]}))


@on_both_logs
async def test_a_standby_that_reads_late_blames_nobody(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees an input, and for its whole patience no answer, which has long been in the ledger: it reads
    that to its end before it takes over. Whoever really does not answer is still replaced."""
    monkeypatch.setattr(standby, "TAKEOVER_MS", 300)
    replica = Replica()
    trace = LedgerTrace(Tracing())
    async with cell.placer():
        await cell.submit("early")
        await cell.until(ended(1))
        standing = asyncio.create_task(standby.stand_by(LateLog(cell.broker, "placer"), replica, 0, trace))
        await asyncio.sleep(0.05)
        await cell.submit("answered")
        await cell.until(ended(2))
        await asyncio.sleep(4 * standby.TAKEOVER_MS / 1_000)
        assert not standing.done(), "it blamed a placer that had answered"
    await cell.submit("unanswered")
    await standing
    assert replica.head == cell.fold().head, "who takes over has read all"


@pytest.mark.parametrize("after_write", [True, False])
@on_both_logs
async def test_an_append_of_unknown_outcome_begins_a_new_term(cell: Cell, after_write: bool) -> None:
    """The broker fails in the middle of a write: the placer drops its state and asks the log what is true."""
    async with cell.placer():
        await cell.submit("a")
        await cell.until(ended(1))
        cell.broker.fail_next_append(after_write=after_write)
        for number in range(10):
            try:
                await cell.submit(f"j{number}")
            except Exception:  # noqa: BLE001 - the fault may hit the test's own append: then send again
                await cell.submit(f"j{number}")
        await cell.until(ended(11))
    assert (await Replayer(cell.log("replay"), 0).run()).different == 0


@on_both_logs
async def test_garbage_is_answered_and_stored(cell: Cell) -> None:
    """Bytes that are not an event get a ledger record and a dead letter; the next job is not held up."""
    async with cell.placer():
        for topic in (Topic.JOBS, Topic.NODES, Topic.ESTIMATES, Topic.PROPOSALS):
            await cell.log("x").append([Message(Partition(topic, 0), b"\xff not json", (("ce_type", b"?"),))])
        await cell.submit("after")
        await cell.until(ended(1))
    outcomes = [r.value for r in cell.broker.records(LEDGER) if b'"dead_lettered"' in r.value]
    assert len(outcomes) == 4
    assert len(cell.broker.records(Partition(Topic.DEAD_LETTERS, 0))) == 4


@on_both_logs
async def test_replay_says_what_another_version_decided(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release changed a reason's wording: replay finds the difference and names the release that wrote the
    record."""
    with monkeypatch.context() as older:
        older.setattr("penstock_services.placer.shell.term.__version__", "0.0.9")
        older.setattr("penstock_services.placer.core.answer.MAX_REASON", 7)
        async with cell.placer():
            await cell.log("x").append([Message(Partition(Topic.JOBS, 0), b"\xff not json")])
            await cell.until(lambda replica: replica.state.positions.get((Topic.JOBS, 0)) == 1)
    async with cell.placer():
        await cell.submit("now")
        await cell.until(ended(1))
    report = await Replayer(cell.log("replay"), 0).run()
    then, now = f"0.0.9 (fold {FOLD_VERSION})", f"{__version__} (fold {FOLD_VERSION})"
    assert (report.version, report.different, list(report.decided_by)) == (now, 1, [then, now])
    [difference] = report.differences
    assert (difference["field"], difference["decided_by"]) == ("reason", then)
    assert report.decided_by[then]["different"] == 1
    assert report.decided_by[now]["different"] == 0
    assert report.decided_by[now]["last_seq"] == report.head_seq


@on_both_logs
async def test_an_input_that_cannot_be_applied_is_set_aside(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug makes the answer to one input fail every time: it is dead-lettered once, and the cell goes on
    without it."""
    original = Decider._cancel

    def broken(self: Decider, state: object, event: JobCancelRequested) -> object:
        if event.job_id == "poison":
            raise RuntimeError("a bug")
        return original(self, state, event)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock_services.placer.core.decide.CHOICES", _with(JobCancelRequested, broken))
    cell.nodes.run_ms = 300
    async with cell.placer():
        await cell.submit("poison")
        await cell.until(lambda replica: "poison" in replica.state.jobs)
        await cell.send(JobCancelRequested(job_id="poison"))
        await cell.submit("after")
        replica = await cell.until(ended(2))
    assert replica.state.term == 1
    [letter] = cell.broker.records(Partition(Topic.DEAD_LETTERS, 0))
    assert b"a bug" in letter.value


def _with(kind: type[Event], choice: object) -> dict[type[Event], object]:
    from penstock_services.placer.core.decide import CHOICES

    return {**CHOICES, kind: choice}


@pytest.mark.postgres
async def test_forged_records_change_nothing(dsn: str) -> None:
    """The embedded log's password is stolen; the same on Kafka is in test_kafka_acls.py."""
    log = await EmbeddedLog(dsn, "mallory").start()
    await log.create(topic_partitions())
    try:
        await forged_records_change_nothing(Settings(log_url=dsn), dict.fromkeys(WRITERS, log))
    finally:
        await log.close()
