"""The migrator's shell on the log in memory: whom it hears, what it sends, and that a restart comes to the
same."""

# clocks: the whole file runs in virtual time

import asyncio
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.clock import wall_ms
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.ledger_events import TermStarted
from penstock.model.inputs.external_events import StepsMeasured, TelemetrySampled
from penstock.model.nouns.settings import Convergence, PlacerSettings
from penstock.model.proposals import MigrationProposed
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock.scheduling.acting.convergence import Category
from penstock_services.migrator.shell.service import Watcher
from tests.support.cluster.driver import estimate, job_spec, node_spec
from tests.support.cluster.proposing import WrittenCell, attempt
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.unit.virtually import virtually

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
    """Five jobs on two nodes, three of them on n1, under `specon` or another profile; its ledger is in the
    broker."""

    def __init__(self, broker: MemoryBroker, profile: str = "specon") -> None:
        convergence = Convergence(interval_ms=INTERVAL_MS)
        super().__init__(broker, PlacerSettings(profile=profile, convergence=convergence))
        self.join(node_spec("n1"), node_spec("n2"))
        for name in "abcde":
            self.submit(name, need=estimate(1))
            self.start(name)
        self.write()


class PastCell(WrittenCell):
    """Two nodes of eight GPUs. All that happens there is in the log before a migrator starts, with the log's
    time stamps as if it had just ended."""

    INTERVAL_MS = 30_000

    def __init__(self, profile: str) -> None:
        self.stamp_ms = 0
        self.reported = list[tuple[int, TelemetrySampled]]()
        broker = MemoryBroker(clock=lambda: self.stamp_ms)
        broker.create(topic_partitions())
        convergence = Convergence(interval_ms=self.INTERVAL_MS)
        super().__init__(broker, PlacerSettings(profile=profile, convergence=convergence))
        self.join(node_spec("n1", 8), node_spec("n2", 8))

    def runs(self, *jobs: str) -> None:
        for job_id in jobs:
            self.submit(job_id, job_spec(checkpoint="signal"), replace(estimate(1), run_ms=600_000))
            self.start(job_id)

    def where(self, job_id: str) -> str:
        return next(iter(self.job(job_id).tasks.values())).place.node_id

    def reports(self, job_id: str, *losses: float) -> None:
        """One at the beginning of each interval."""
        for loss in losses:
            task_id = next(iter(self.job(job_id).tasks))
            found = TelemetrySampled(node_id=self.where(job_id), task_id=task_id, at_ms=0, loss=loss)
            self.reported.append((self.now_ms, found))
            self.now_ms += self.INTERVAL_MS

    def steps(self, job_id: str, done: int, step_ms: float) -> None:
        """It reports its mean step time since the last report, a minute ago."""
        self.now_ms += 60_000
        task_id, steps = next(iter(self.job(job_id).tasks)), int(60_000 / step_ms)
        self.feed(
            StepsMeasured(
                node_id=self.where(job_id),
                task_id=task_id,
                token=self.job(job_id).token,
                at_ms=0,
                done=done,
                total=10_000,
                steps=steps,
                step_ms=step_ms,
            )
        )

    def moved(self, job_id: str) -> None:
        """An operator moves it to the other node, where it starts ten minutes later."""
        there = "n2" if self.where(job_id) == "n1" else "n1"
        asked = MigrationProposed(
            proposal_id=f"by-hand-{self.state.seq}",
            proposer="gateway",
            job_id=job_id,
            by="ops/ana",
            reason="x",
            nodes=(there,),
        )
        self.feed(asked)
        self.exit(f"{job_id}.{self.job(job_id).attempt}.w0", None, cause="stopped", signal=15)
        self.now_ms += 600_000
        self.start(job_id)
        assert self.where(job_id) == there

    def has_happened(self) -> MemoryBroker:
        began_ms = wall_ms() - self.now_ms
        for number, (at_ms, found) in enumerate(self.reported):
            self.stamp_ms = began_ms + at_ms
            telemetry(self.broker, number, found)
        self.stamp_ms = began_ms + self.state.now_ms
        self.write()
        return self.broker


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
    while not proposed(broker):
        await broker.changed(None)
    await asyncio.sleep(0.001)  # the append has returned to its caller, which writes the trace at once
    return proposed(broker)[0]


@virtually
async def test_a_job_whose_loss_hardly_falls_is_proposed_to_move(broker: MemoryBroker) -> None:
    """Its node publishes a loss a second; two others on its node still gain, and the other node has less to
    do."""
    Cell(broker)
    async with watcher(broker):
        for number, loss in enumerate(LOSSES):
            telemetry(broker, number, sample(loss))
            await asyncio.sleep(INTERVAL_MS / 1_000)
        found = await until_proposed(broker)
    assert (found.job_id, found.nodes, found.cause) == ("a", ("n2",), "converged")


@virtually
async def test_the_trace_of_a_move_shows_the_losses_that_caused_it(broker: MemoryBroker) -> None:
    """The proposal's span, to which the placer's decision links, has the evaluated windows below it: one
    after the other, each with its loss and its growth."""
    Cell(broker)
    exporter = InMemorySpanExporter()
    traces = tracing("migrator", Settings(log_url="memory"), exporter=exporter)
    async with attempt(Watcher, broker, traces):
        for number, loss in enumerate(LOSSES):
            telemetry(broker, number, sample(loss))
            await asyncio.sleep(INTERVAL_MS / 1_000)
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


@virtually
async def test_a_restart_hears_what_was_reported_and_comes_to_the_same(broker: MemoryBroker) -> None:
    """All losses are in the topic before it starts: they are looked at by the times at which the log took
    them, and not by nodes' clocks."""
    Cell(broker)
    for number, loss in enumerate(LOSSES[:5]):
        telemetry(broker, number, sample(loss, at_ms=(1 << 40) - number))
        await asyncio.sleep(INTERVAL_MS / 1_000)
    async with watcher(broker) as first:
        kind = first._migrator.categories().get("a")
        async with watcher(broker) as second:
            assert second._migrator.categories().get("a") is kind
    assert kind is not Category.PROGRESSING


@pytest.mark.parametrize("profile", ["specon", "balance"])
@virtually
async def test_a_restart_reads_the_losses_of_all_attempts_in_their_order(profile: str) -> None:
    """A job is moved from one node to the other and back: the middle of its curve is in another partition.
    Its first losses give the range by which the last ones hardly fall."""
    cell = PastCell(profile)
    cell.runs("a")
    cell.reports("a", 1.0, 0.5)
    cell.moved("a")
    cell.reports("a", 0.2, 0.1)
    cell.moved("a")
    cell.reports("a", 0.0995, 0.0985, 0.0977, 0.0970, 0.0963)
    assert len({node_partition(found.node_id) for _, found in cell.reported}) == 2
    async with watcher(cell.has_happened()) as found:
        assert found._migrator.observed == len(cell.reported)
        assert found._migrator.categories() == {"a": Category.CONVERGED}


@virtually
async def test_the_trace_of_a_move_by_predicted_times_shows_the_losses_too() -> None:
    """Under `balance` the gain that a move needs depends on how far its job has converged: the span of the
    proposal has the windows of its loss below it."""
    cell = PastCell("balance")
    cell.runs("a", "b", "c", "d", "e")
    assert [cell.where(job_id) for job_id in "ace"] == ["n1", "n1", "n1"]
    cell.steps("a", 200, 300.0)
    cell.exit("c.1.w0")
    cell.steps("a", 500, 200.0)
    cell.exit("e.1.w0")
    cell.steps("a", 1_100, 100.0)
    cell.runs("f", "g", "h", "i")
    left = [job_id for job_id in "bdfghi" if cell.where(job_id) == "n2"]
    crowd = ["a", *(job_id for job_id in "fghi" if cell.where(job_id) == "n1")]
    for job_id in left:
        cell.exit(f"{job_id}.1.w0")
    assert len(crowd) > 2
    for job_id in crowd:
        cell.reports(job_id, 1.0, 0.5, 0.497)
    exporter = InMemorySpanExporter()
    traces = tracing("migrator", Settings(log_url="memory"), exporter=exporter)
    broker = cell.has_happened()
    async with attempt(Watcher, broker, traces):
        found = await until_proposed(broker)
    traces.close()
    assert found.cause == "faster"
    spans = exporter.get_finished_spans()
    [plan] = [span.context for span in spans if span.name == "plan"]
    assert plan is not None
    windows = [span for span in spans if span.name == "loss_window"]
    assert {span.parent and span.parent.span_id for span in windows} == {plan.span_id}
    shown: list[dict[str, Any]] = [dict(span.attributes or {}) for span in windows]
    assert {one["penstock.job_id"] for one in shown} == {found.job_id}
    assert found.reason.startswith(f"{shown[-1]['penstock.category']}; ")


@virtually
async def test_what_it_cannot_read_is_passed_over(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage, another kind of event, samples without a loss or of nobody: it goes on, and hears the next
    one."""
    Cell(broker)
    telemetry(broker, 1, sample(1.0), b"not json")
    telemetry(broker, 2, sample(1.0, task_id="nobody.1.w0"))
    telemetry(broker, 3, TelemetrySampled(node_id="n1", task_id="a.1.w0", at_ms=0, cpu_percent=9.0))
    telemetry(broker, 4, sample(1.0))
    async with watcher(broker) as found:
        assert found._migrator.categories().get("a") is Category.PROGRESSING
        assert [record.name for record in caplog.records if record.levelname == "WARNING"] == [
            "penstock.runtime.following.telemetry"
        ]
        assert not proposed(broker)


@virtually
async def test_under_a_profile_that_moves_nobody_it_reads_no_telemetry(broker: MemoryBroker) -> None:
    """And sends nothing."""
    Cell(broker, "fifo")
    telemetry(broker, 1, sample(1.0))
    async with watcher(broker) as found:
        await asyncio.sleep(60)
        assert found._migrator.observed == 0
        assert not proposed(broker)


@virtually
async def test_a_profile_that_begins_to_move_jobs_makes_it_start_again(broker: MemoryBroker) -> None:
    """A new term has another profile: the attempt ends, and the next one hears the telemetry from its
    beginning."""
    cell = Cell(broker, "fifo")
    found, ready = (
        Watcher(Settings(log_url="memory"), MemoryLog(broker), Tracing(), Replica()),
        asyncio.Event(),
    )
    work = asyncio.ensure_future(found.work(ready))
    await ready.wait()
    cell.feed(TermStarted(term=2, placer_id="p2", settings=PlacerSettings(profile="specon")))
    cell.write()
    await work
