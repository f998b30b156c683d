"""What the placer exports as traces, over a kill, from a stand-by, and in a replay."""

import asyncio
import http.server
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import NODE_PARTITIONS, Topic
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.context import from_traceparent
from penstock.runtime.tracing.tracer import Tracing, tracing
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.placer.shell import service
from penstock_services.placer.shell.replay import Replayer
from tests.support.cluster.driver import node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.fake_nodes import FakeNodes
from tests.support.virtual_time import run_virtually
from tests.support.waiting import await_until

SETTINGS = Settings(log_url="memory", otlp="http://127.0.0.1:9")
JOB_SPANS = ["decide", "job", "launch", "queue", "run"]


class TracedCell:
    """Estimator, three nodes, and as many placers as a test starts, each with an exporter of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = MemoryBroker()
        self.broker.create(topic_partitions())
        self.nodes = FakeNodes(self.log("nodes"), [node_spec(f"n{i}") for i in range(3)], run_ms=5)
        self.exporters: list[InMemorySpanExporter] = []
        self.patch = monkeypatch

    def log(self, identity: str) -> MemoryLog:
        return MemoryLog(self.broker, identity)

    async def submit(self, *job_ids: str) -> None:
        need = ResourceRequest(gpus=1, cores=1, host_memory_mib=64, gpu_memory_mib=64, bandwidth_mbps=0)
        for job_id in job_ids:
            event = JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",), resources=need))
            headers, value = to_wire(Envelope(id=f"submit-{job_id}", source="/test", time_ms=1, data=event))
            await self.log("gateway").append([Message(Partition(Topic.JOBS, 0), value, headers)])

    async def until_ended(self, count: int) -> None:
        await await_until(lambda: len(self.fold().state.ended) >= count, f"the end of {count} jobs")

    def fold(self) -> Replica:
        replica = Replica()
        for record in self.broker.records(Partition(Topic.LEDGER, 0)):
            replica.take(record.value, record.offset)
        return replica

    @asynccontextmanager
    async def placer(self, settings: Settings = SETTINGS, *, exported: bool = True) -> AsyncIterator[None]:
        """`exported`: into this cell's list, else where the settings send it."""
        exporter = InMemorySpanExporter()
        self.exporters.append(exporter)

        def traced(name: str, found: Settings) -> Tracing:
            return tracing(name, found, exporter=exporter)

        self.patch.setattr(service, "tracing", traced if exported else tracing)
        stop, ready = asyncio.Event(), asyncio.Event()
        work = asyncio.create_task(service.run(settings, stop, log=self.log("placer"), ready=ready))
        await first_of(ready.wait(), asyncio.shield(work))
        try:
            yield
        finally:
            stop.set()
            await work

    def exported(self, placer: int, *job_ids: str) -> set[tuple[str, str, int]]:
        """(job, span's name, span's id) of these jobs, as this placer exported them."""
        spans = self.exporters[placer].get_finished_spans()
        found = [(str((span.attributes or {}).get("penstock.job_id")), span) for span in spans]
        return {
            (job_id, span.name, span.context.span_id)
            for job_id, span in found
            if job_id in job_ids and span.context is not None
        }


def virtually(scenario: Callable[[TracedCell], Awaitable[None]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A test in virtual time."""

    def test(monkeypatch: pytest.MonkeyPatch) -> None:
        async def run() -> None:
            async with working(monkeypatch) as cell:
                await scenario(cell)

        run_virtually(run())

    test.__doc__ = scenario.__doc__
    return test


@asynccontextmanager
async def working(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TracedCell]:
    cell = TracedCell(monkeypatch)
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(run_estimator(Settings(log_url="memory"), stop, log=cell.log("estimator"))),
        asyncio.create_task(cell.nodes.run()),
    ]
    yield cell
    stop.set()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def names(spans: set[tuple[str, str, int]], job_id: str) -> list[str]:
    return sorted(name for job, name, _ in spans if job == job_id)


@virtually
async def test_a_successor_exports_again_what_a_killed_placer_may_not_have_exported(cell: TracedCell) -> None:
    """The first placer is killed before its batch of spans is exported. The second folds the ledger, writes
    the same spans under the same ids, and goes on with the job that the first had placed."""
    async with cell.placer():
        await cell.submit("a", "b")
        await cell.until_ended(2)
        cell.nodes.run_ms = 300
        await cell.submit("c")
        await await_until(lambda: len(cell.nodes.seen.started) == 3, "the start of c")
    async with cell.placer():
        await cell.until_ended(3)
    first, second = cell.exported(0, "a", "b"), cell.exported(1, "a", "b")
    assert names(first, "a") == names(first, "b") == JOB_SPANS
    assert second == first
    assert names(cell.exported(1, "c"), "c") == JOB_SPANS


@virtually
async def test_a_stand_by_exports_what_it_has_followed(cell: TracedCell) -> None:
    """A spare placer has read along for an hour when the one in office dies: nothing of it was exported twice
    meanwhile, and the latest is exported once it takes over."""
    async with cell.placer():
        cell.patch.setenv("PENSTOCK_STANDBY", "1")
        spare = cell.placer()
        await spare.__aenter__()
        await cell.submit("a")
        await cell.until_ended(1)
        assert cell.exported(1, "a") == set()
    await cell.submit("b")
    await cell.until_ended(2)
    await spare.__aexit__(None, None, None)
    assert cell.exported(1, "a") == cell.exported(0, "a")
    assert names(cell.exported(1, "a", "b"), "a") == names(cell.exported(1, "b"), "b") == JOB_SPANS


@virtually
async def test_orders_carry_the_decision_that_they_follow_from(cell: TracedCell) -> None:
    """The node's spans are to hang below the decision: also those of an order that is repeated later."""
    async with cell.placer():
        await cell.submit("a")
        await cell.until_ended(1)
    [(_, _, decide)] = [span for span in cell.exported(0, "a") if span[1] == "decide"]
    orders = [
        from_wire(record.headers, record.value)
        for index in range(NODE_PARTITIONS)
        for record in cell.broker.records(Partition(Topic.ORDERS, index))
    ]
    contexts = [from_traceparent(order.traceparent) for order in orders if isinstance(order.data, StartTask)]
    assert [context.span_id for context in contexts if context is not None] == [decide]


class Collector:
    """Counts what is posted to it as OTLP."""

    def __init__(self) -> None:
        self.posts = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.posts += 1
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


async def test_replay_exports_nothing(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engineer replays last night's ledger on a machine whose environment names the collector: not one
    span reaches it, while the placer that wrote the ledger reached it by the same settings."""
    monkeypatch.setenv("PENSTOCK_OTLP", collector.url)
    async with working(monkeypatch) as cell:
        async with cell.placer(Settings(log_url="memory", otlp=collector.url), exported=False):
            await cell.submit("a", "b")
            await cell.until_ended(2)
        assert collector.posts > 0
        before = collector.posts
        report = await Replayer(cell.log("replay"), 0).run()
        assert (report.different, report.records > 10) == (0, True)
        await asyncio.sleep(0.5)  # clock: longer than an exporter waits for more spans
        assert collector.posts == before
