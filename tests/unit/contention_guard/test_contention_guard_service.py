"""The contention-guard's shell on the log in memory: what it hears, what it sends, and that a restart loses
nothing that counts."""

# clocks: the whole file runs in virtual time

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from penstock.errors import LogError
from penstock.ledger.state.state import CellState
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.decisions.ledger_events import TermStarted
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.nouns.settings import Contention, PlacerSettings
from penstock.model.proposals import CoresProposed, ThrottleProposed
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.following.proposing import AFTER_BUG_S
from penstock.scheduling.acting import settling
from penstock.scheduling.acting.telemetry_windows import NodeWindow
from penstock_services.contention_guard.core.guard import ContentionGuard
from penstock_services.contention_guard.core.searches import Search
from penstock_services.contention_guard.shell import service
from penstock_services.contention_guard.shell.service import Watcher
from tests.support.cluster.driver import estimate, node_spec
from tests.support.cluster.proposing import WrittenCell, attempt
from tests.support.log.memory_log import MemoryBroker
from tests.unit.virtually import virtually

PROPOSALS = Partition(Topic.PROPOSALS, 0)
QUIET_MS = 200
"""As for tests: a speed settles sooner."""
TASK, HOG = "a.1.w0", "hog.1.w0"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "WINDOW_MS", QUIET_MS // settling.QUIET)


@pytest.fixture
def broker() -> MemoryBroker:
    found = MemoryBroker()
    found.create(topic_partitions())
    return found


class Cell(WrittenCell):
    """A training and a job without GPUs on one node; its ledger is in the broker."""

    def __init__(
        self,
        broker: MemoryBroker,
        contention: Contention | None = Contention(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__(broker, PlacerSettings(profile="fifo", contention=contention))
        self.join(node_spec("n1", cores=24))
        self.submit("a", need=estimate(1, cores=4))
        self.start("a")
        self.submit("hog", need=estimate(0, cores=8))
        self.start("hog")
        self.write()

    def answers(self, proposal: CoresProposed | ThrottleProposed) -> None:
        """The placer decides, and the node obeys."""
        self.feed(proposal)
        task = self.job(proposal.task_id.split(".")[0]).tasks[proposal.task_id]
        assert task.cores.adjusted is not None
        self.feed(
            TaskAdjusted(
                node_id="n1",
                task_id=proposal.task_id,
                token=self.job(proposal.task_id.split(".")[0]).token,
                order_token=task.cores.adjusted.token,
                what="cores",
                enforced="affinity",
            )
        )
        self.write()


def sends(
    broker: MemoryBroker, number: int, task_id: str | None = TASK, value: bytes | None = None, **values: float
) -> None:
    sample = TelemetrySampled(node_id="n1", task_id=task_id, at_ms=0, **values)  # type: ignore[arg-type]
    headers, body = to_wire(Envelope(id=f"s{number}", source="/n", time_ms=0, data=sample))
    partition = Partition(Topic.TELEMETRY, node_partition("n1"))
    broker.append("node-reporter", [Message(partition, body if value is None else value, headers)])


def watcher(broker: MemoryBroker) -> AbstractAsyncContextManager[Watcher]:
    return attempt(Watcher, broker)


def proposed(broker: MemoryBroker) -> list[CoresProposed | ThrottleProposed]:
    found = [from_wire(record.headers, record.value).data for record in broker.records(PROPOSALS)]
    return [one for one in found if isinstance(one, CoresProposed | ThrottleProposed)]


async def until(broker: MemoryBroker, count: int) -> CoresProposed | ThrottleProposed:
    while len(proposed(broker)) < count:
        await broker.changed(None)
    return proposed(broker)[count - 1]


async def settles(broker: MemoryBroker) -> None:
    sends(broker, 1, step_ms=1.0)
    await asyncio.sleep(2 * QUIET_MS / 1_000)


@virtually
async def test_a_training_whose_speed_has_settled_is_tried_with_other_cores(broker: MemoryBroker) -> None:
    """Each report counts when it comes, and nothing is done before none that differs has come for a while."""
    Cell(broker)
    async with watcher(broker):
        sends(broker, 1, step_ms=2.0)
        sends(broker, 2, value=b"\xff")
        await asyncio.sleep(0.1)
        assert proposed(broker) == []
        sends(broker, 3, step_ms=1.0)
        found = await until(broker, 1)
    assert isinstance(found, CoresProposed)
    assert (found.task_id, found.cores, found.cause) == (TASK, 8, "probe")


@virtually
async def test_where_faust_reads_nothing_the_logs_own_reader_does(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On Kafka Faust was given its partitions, and no record came: the guard was deaf, and nothing else
    showed it."""
    closed = []

    class Deaf:
        async def begin(self) -> list[NodeWindow]:
            raise LogError("Faust has read nothing for 30 s")

        async def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(service, "KAFKA", "memory")
    monkeypatch.setattr(service, "FaustWindows", lambda log_url, cell_index: Deaf())
    Cell(broker)
    async with watcher(broker):
        sends(broker, 1, step_ms=1.0)
        found = await until(broker, 1)
    assert found.task_id == TASK
    assert len(closed) == 1
    assert "telemetry is read without Faust: Faust has read nothing for 30 s" in caplog.text


@virtually
async def test_who_slows_a_training_is_slowed_and_let_go_when_it_ends(broker: MemoryBroker) -> None:
    cell = Cell(broker, Contention(search="none"))
    async with watcher(broker):
        await settles(broker)
        sends(broker, 10, cpu_stalled_percent=60.0, step_ms=2.0)
        found = await until(broker, 1)
        assert isinstance(found, CoresProposed)
        assert (found.task_id, found.cores, found.cause) == (HOG, 1, "contention")
        cell.answers(found)
        cell.exit(TASK)
        cell.write()
        released = await until(broker, 2)
    assert isinstance(released, CoresProposed)
    assert (released.task_id, released.cores, released.cause) == (HOG, 8, "released")


@virtually
async def test_a_bug_in_a_stage_costs_one_attempt_per_report(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new version's search raises: its traceback is in the log once for each report and its timer, not as
    often as the processor can."""
    calls = []

    def advance(search: Search, now_ms: int) -> None:
        calls.append(now_ms)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Search, "advance", advance)
    Cell(broker)
    async with watcher(broker):
        for number in range(3):
            sends(broker, number, step_ms=1.0)
            await asyncio.sleep(2 * QUIET_MS / 1_000)
        assert proposed(broker) == []
    assert len(calls) == 3
    assert caplog.text.count("ZeroDivisionError: a bug") == 3
    assert "nothing is proposed at seq" in caplog.text


@virtually
async def test_a_core_that_stays_due_after_a_bug_waits(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another bug: the core raises and is due at once all the same. The service does not spin."""
    calls = []

    class Stuck(ContentionGuard):
        def next(self, state: CellState, now_ms: int) -> CoresProposed | ThrottleProposed | None:
            calls.append(now_ms)
            raise ZeroDivisionError("a bug")

        def due_ms(self, state: CellState) -> int | None:
            return state.now_ms

    monkeypatch.setattr(service, "ContentionGuard", Stuck)
    Cell(broker)
    async with watcher(broker):
        await asyncio.sleep(AFTER_BUG_S / 2)
    assert len(calls) == 1


@virtually
async def test_a_restart_in_a_probe_gives_back_what_was_placed(broker: MemoryBroker) -> None:
    cell = Cell(broker)
    async with watcher(broker):
        await settles(broker)
        cell.answers(await until(broker, 1))
    async with watcher(broker):
        found = await until(broker, 2)
    assert isinstance(found, CoresProposed)
    assert (found.cores, found.cause) == (4, "settled")


@virtually
async def test_under_another_profile_nothing_is_heard_and_a_change_of_profile_is(
    broker: MemoryBroker,
) -> None:
    """The operator turns the setting on: the service begins to hear by itself."""
    cell = Cell(broker, None)
    async with watcher(broker):
        await settles(broker)
        assert proposed(broker) == []
        settings = PlacerSettings(profile="fifo", contention=Contention())
        cell.feed(TermStarted(term=2, placer_id="p2", settings=settings))
        cell.write()
        await asyncio.sleep(0.1)  # its attempt ends, and the next one hears
    async with watcher(broker):
        await settles(broker)
        assert (await until(broker, 1)).cause == "probe"
