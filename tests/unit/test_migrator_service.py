"""The migrator's shell on the log in memory: whom it hears, what it sends, and that a restart comes to the same."""

import asyncio
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.ledger.replica import Replica
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.envelope import Envelope, from_wire, to_wire
from penstock.model.event import Event
from penstock.model.external_events import TelemetrySampled
from penstock.model.ledger_events import TermStarted
from penstock.model.proposals import MigrationProposed
from penstock.model.settings import Convergence, PlacerSettings
from penstock.model.topics import Topic, node_partition
from penstock.policies.convergence import Category
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock_services.migrator.shell.service import Watcher
from tests.support.driver import estimate, node_spec
from tests.support.memory_log import MemoryBroker, MemoryLog
from tests.support.proposing import WAIT_S, WrittenCell, attempt

PROPOSALS = Partition(Topic.PROPOSALS, 0)
INTERVAL_MS = 1_000
LOSSES = (1.0, 0.5, 0.497, 0.4945, 0.4925, 0.491, 0.490)
"""What converges by one look after the other."""


@pytest.fixture
def broker() -> MemoryBroker:
    found = MemoryBroker()
    found.create(topic_partitions())
    return found


class Cell(WrittenCell):
    """Five jobs on two nodes, three of them on n1, under `specon` or another profile; its ledger is in the broker."""

    def __init__(self, broker: MemoryBroker, profile: str = "specon") -> None:
        convergence = Convergence(interval_ms=INTERVAL_MS)
        super().__init__(broker, PlacerSettings(profile=profile, convergence=convergence))
        self.join(node_spec("n1"), node_spec("n2"))
        for name in "abcde":
            self.submit(name, need=estimate(1))
            self.start(name)
        self.write()


def telemetry(broker: MemoryBroker, number: int, event: Event, value: bytes | None = None) -> None:
    node_id = getattr(event, "node_id", "n1")
    headers, body = to_wire(Envelope(id=f"s{number}", source="/n", time_ms=0, data=event))
    partition = Partition(Topic.TELEMETRY, node_partition(node_id))
    broker.append("node-reporter", [Message(partition, body if value is None else value, headers)])


def sample(loss: float, task_id: str = "a.1.w0", at_ms: int = 0) -> TelemetrySampled:
    return TelemetrySampled(node_id="n1", task_id=task_id, at_ms=at_ms, loss=loss)


def watcher(broker: MemoryBroker) -> AbstractAsyncContextManager[Watcher]:
    return attempt(Watcher, broker)


def proposed(broker: MemoryBroker) -> list[MigrationProposed]:
    found = [from_wire(record.headers, record.value).data for record in broker.records(PROPOSALS)]
    return [one for one in found if isinstance(one, MigrationProposed)]


async def until_proposed(broker: MemoryBroker) -> MigrationProposed:
    async with asyncio.timeout(WAIT_S):
        while not proposed(broker):
            await asyncio.sleep(0.02)
    return proposed(broker)[0]


async def test_a_job_whose_loss_hardly_falls_is_proposed_to_move(broker: MemoryBroker) -> None:
    """Its node publishes a loss a second; two others on its node still gain, and the other node has less to do."""
    Cell(broker)
    async with watcher(broker):
        for number, loss in enumerate(LOSSES):
            telemetry(broker, number, sample(loss))
            await asyncio.sleep(INTERVAL_MS / 1_000)
            if proposed(broker):
                break
        found = await until_proposed(broker)
    assert (found.job_id, found.nodes, found.cause) == ("a", ("n2",), "converged")


async def test_the_trace_of_a_move_shows_the_losses_that_caused_it(broker: MemoryBroker) -> None:
    """The proposal's span, to which the placer's decision links, has the evaluated windows below it: one after the other, each with its loss and its growth."""
    Cell(broker)
    exporter = InMemorySpanExporter()
    traces = tracing("migrator", Settings(log_url="memory"), exporter=exporter)
    async with attempt(Watcher, broker, traces):
        for number, loss in enumerate(LOSSES):
            telemetry(broker, number, sample(loss))
            await asyncio.sleep(INTERVAL_MS / 1_000)
            if proposed(broker):
                break
        found = await until_proposed(broker)
    traces.close()
    spans = exporter.get_finished_spans()
    [plan] = [span.context for span in spans if span.name == "plan"]
    assert plan is not None
    windows = sorted(
        (span for span in spans if span.name == "loss_window"), key=lambda span: span.start_time or 0
    )
    assert {span.parent and span.parent.span_id for span in windows} == {plan.span_id}
    shown: list[dict[str, Any]] = [dict(span.attributes or {}) for span in windows]
    assert {one["penstock.job_id"] for one in shown} == {found.job_id}
    assert [one["penstock.category"] for one in shown][-2:] == ["converged", "converged"]
    assert all(before.end_time == after.start_time for before, after in pairwise(windows))
    assert all(before["penstock.loss"] == after["penstock.before"] for before, after in pairwise(shown)), (
        "each begins where the one before it ended"
    )
    assert shown[-1]["penstock.growth"] < shown[-1]["penstock.threshold"]
    assert {one["penstock.loss"] for one in shown} <= set(LOSSES)


async def test_a_restart_hears_what_was_reported_and_comes_to_the_same(broker: MemoryBroker) -> None:
    """All losses are in the topic before it starts: they are looked at by the times at which the log took them, and not by nodes' clocks."""
    Cell(broker)
    for number, loss in enumerate(LOSSES[:5]):
        telemetry(broker, number, sample(loss, at_ms=(1 << 40) - number))
        await asyncio.sleep(INTERVAL_MS / 1_000)
    async with watcher(broker) as first:
        kind = first._migrator.categories().get("a")
        async with watcher(broker) as second:
            assert second._migrator.categories().get("a") is kind
    assert kind is not Category.PROGRESSING


async def test_what_it_cannot_read_is_passed_over(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage, another kind of event, samples without a loss or of nobody: it goes on, and hears the next one."""
    Cell(broker)
    telemetry(broker, 1, sample(1.0), b"not json")
    telemetry(broker, 2, sample(1.0, task_id="nobody.1.w0"))
    telemetry(broker, 3, TelemetrySampled(node_id="n1", task_id="a.1.w0", at_ms=0, cpu_percent=9.0))
    telemetry(broker, 4, sample(1.0))
    async with watcher(broker) as found:
        assert found._migrator.categories().get("a") is Category.PROGRESSING
        assert [record.name for record in caplog.records if record.levelname == "WARNING"] == [
            "penstock.runtime.telemetry"
        ]
        assert not proposed(broker)


async def test_under_a_profile_that_moves_nobody_it_reads_no_telemetry(broker: MemoryBroker) -> None:
    """And sends nothing."""
    Cell(broker, "fifo")
    telemetry(broker, 1, sample(1.0))
    async with watcher(broker) as found:
        await asyncio.sleep(0.1)
        assert found._migrator.observed == 0
        assert not proposed(broker)


async def test_a_profile_that_begins_to_move_jobs_makes_it_start_again(broker: MemoryBroker) -> None:
    """A new term has another profile: the attempt ends, and the next one hears the telemetry from its beginning."""
    cell = Cell(broker, "fifo")
    found, ready = (
        Watcher(Settings(log_url="memory"), MemoryLog(broker), Tracing(), Replica()),
        asyncio.Event(),
    )
    work = asyncio.ensure_future(found.work(ready))
    await asyncio.wait_for(ready.wait(), WAIT_S)
    cell.feed(TermStarted(term=2, placer_id="p2", settings=PlacerSettings(profile="specon")))
    cell.write()
    await asyncio.wait_for(work, WAIT_S)
