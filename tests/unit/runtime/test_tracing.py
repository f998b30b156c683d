"""Tracing: one connected trace per job, ids that survive a crash, and no cost when nobody listens."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from penstock.runtime.settings import Settings
from penstock.runtime.tracing import tracer as module
from penstock.runtime.tracing.context import from_traceparent, job_context, to_traceparent, well_formed
from penstock.runtime.tracing.tracer import HeldTracing, Tracing, tracing
from tests.support.waiting import wait_until

SETTINGS = Settings(log_url="postgresql://nowhere/log", otlp="http://127.0.0.1:9")
SUBMITTED_MS = 1_700_000_000_000


class System:
    """Services of one cell whose spans are gathered at the end."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exporters: list[InMemorySpanExporter] = []
        self.settings = Settings(log_url=SETTINGS.log_url, otlp=SETTINGS.otlp, trace_ratio=ratio)
        self.started: list[Tracing] = []

    def service(self, name: str) -> Tracing:
        self.exporters.append(InMemorySpanExporter())
        self.started.append(tracing(name, self.settings, exporter=self.exporters[-1]))
        return self.started[-1]

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.all_spans()}

    def all_spans(self) -> list[ReadableSpan]:
        for service in self.started:
            service.close()
        return [span for exporter in self.exporters for span in exporter.get_finished_spans()]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread that exports comes late; the bound has a test of its own."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 3_600.0)


@pytest.fixture
def system() -> Iterator[System]:
    made = System()
    yield made
    made.spans()


def travel(system: System, job_id: str = "job-1") -> None:
    """What the services write about one job that waits 5 ms, launches in 20 and runs for 900."""
    gateway, estimator, placer = (system.service(name) for name in ("gateway", "estimator", "placer"))
    at_ms = SUBMITTED_MS
    root = gateway.start_job_trace(job_id)
    submitted = gateway.span("submit", root, at_ms, at_ms + 1.5, key="submit-1")
    estimator.span(
        "estimate", submitted, at_ms + 2, at_ms + 2.25, {"penstock.tier": "user"}, key="estimate-1"
    )
    placer.decide(job_id, 7, at_ms + 4, {"penstock.winner": "node-2", "penstock.score": 0.25})
    for name, start_ms, end_ms in (("queue", 0, 5), ("launch", 5, 25), ("run", 25, 925)):
        placer.phase(name, job_id, 1, at_ms + start_ms, at_ms + end_ms)
    placer.end_job(job_id, at_ms, at_ms + 925, "succeeded")


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def test_one_job_is_one_connected_trace(system: System) -> None:
    """Three services know each other only by the header of a record; Jaeger shows one tree below `job`."""
    travel(system)
    spans = system.spans()
    assert {span.context.trace_id for span in spans.values() if span.context} == {
        job_context("job-1", 1).trace_id
    }
    assert parent_of(spans["job"]) is None
    for name in ("submit", "decide", "queue", "launch", "run"):
        assert parent_of(spans[name]) == span_id(spans["job"]), name
    assert parent_of(spans["estimate"]) == span_id(spans["submit"])
    assert spans["run"].start_time == (SUBMITTED_MS + 25) * 1_000_000
    assert spans["run"].end_time == (SUBMITTED_MS + 925) * 1_000_000
    assert spans["estimate"].resource.attributes["service.name"] == "penstock-estimator"
    assert dict(spans["decide"].attributes or {}) == {
        "penstock.job_id": "job-1",
        "penstock.ledger_seq": 7,
        "penstock.winner": "node-2",
        "penstock.score": 0.25,
    }


def test_spans_written_again_after_a_crash_are_the_same_spans() -> None:
    """The placer is killed after its dispatcher wrote the spans; its successor writes them once more."""

    def written() -> set[str]:
        system = System()
        travel(system)
        return {
            f"{span.name} {span_id(span):x} {parent_of(span)} {span.start_time} {span.end_time}"
            for span in system.spans().values()
        }

    first = written()
    assert first == written()
    assert len(first) == 7


def test_attempts_of_one_job_are_different_spans(system: System) -> None:
    """A job fails and is tried again: two `run` spans stand below one root."""
    placer = system.service("placer")
    placer.phase("run", "job-1", 1, SUBMITTED_MS, SUBMITTED_MS + 10, error="exit code 1")
    placer.phase("run", "job-1", 2, SUBMITTED_MS + 20, SUBMITTED_MS + 30)
    first, second = system.all_spans()
    assert span_id(first) != span_id(second)
    assert parent_of(first) == parent_of(second) == job_context("job-1", 1).span_id
    assert (first.status.status_code, second.status.status_code) == (StatusCode.ERROR, StatusCode.UNSET)


@pytest.mark.parametrize(
    ("outcome", "failed"),
    [
        ("succeeded", False),
        ("cancelled", False),
        ("failed", True),
        ("timed_out_running", True),
        ("unschedulable", True),
    ],
)
def test_a_failed_job_is_a_failed_trace(system: System, outcome: str, failed: bool) -> None:
    """Somebody searches Jaeger for errors: jobs that a user cancelled are not among them."""
    system.service("placer").end_job("job-1", SUBMITTED_MS, SUBMITTED_MS + 10, outcome, reason="exit code 1")
    status = system.spans()["job"].status
    assert status.is_ok is not failed
    assert status.description == ("exit code 1" if failed else None)


def test_sampling_is_decided_once_per_job_and_travels_in_the_flags() -> None:
    """At a ratio of 0.3 every service keeps the same jobs, and a higher ratio only adds some."""
    ids = [f"job-{number}" for number in range(2_000)]
    sampled = {ratio: {i for i in ids if job_context(i, ratio).sampled} for ratio in (0.0, 0.3, 0.6, 1.0)}
    assert not sampled[0.0]
    assert len(sampled[1.0]) == len(ids)
    assert sampled[0.3] < sampled[0.6]
    assert 520 < len(sampled[0.3]) < 680  # 600 ± 4 standard deviations
    for job_id in ids[:50]:
        header = to_traceparent(job_context(job_id, 0.3))
        assert header.endswith("-01" if job_id in sampled[0.3] else "-00")
        assert from_traceparent(header) == job_context(job_id, 0.3)


def test_the_decision_of_an_unsampled_job_is_exported_alone() -> None:
    """Under load only a part of the jobs is traced; why a job went where it went can still be found."""
    system = System(ratio=0.3)
    job_id = next(i for i in map(str, range(100)) if not job_context(i, 0.3).sampled)
    travel(system, job_id)
    spans = system.spans()
    assert set(spans) == {"decide"}
    assert parent_of(spans["decide"]) is None


def test_a_context_from_outside_cannot_disturb() -> None:
    """A producer of its own makes headers up; what breaks the specification is no context at all."""
    good = to_traceparent(job_context("job-1", 1))
    assert from_traceparent(good) is not None
    assert from_traceparent(f"01{good[2:]}-later") is not None
    zeros = f"00-{'0' * 32}-{'1' * 16}-01"
    for text in (
        None,
        "",
        "x",
        good[:-1],
        good.upper(),
        f"{good}-more",
        f"ff{good[2:]}",
        zeros,
        good + "\n",
        "é" * 55,
    ):
        assert from_traceparent(text) is None, text
    system = System()
    assert system.service("estimator").span("estimate", "nonsense", 1, 2) is None
    assert Tracing().span("estimate", good, 1, 2) == good
    assert Tracing().span("estimate", "x" * 10_000, 1, 2) is None
    assert system.spans() == {}


def test_a_span_never_ends_before_it_starts_nor_outside_of_what_otlp_carries(system: System) -> None:
    """A machine's clock is set back between two readings, another one is set to the year 287,396."""
    gateway = system.service("gateway")
    root = gateway.start_job_trace("job-1")
    gateway.span("back", root, SUBMITTED_MS, SUBMITTED_MS - 5_000)
    gateway.span("far", root, 0, 1 << 53)
    spans = system.spans()
    start = SUBMITTED_MS * 1_000_000
    assert (spans["back"].start_time, spans["back"].end_time) == (start, start + 1)
    assert spans["far"].end_time == (1 << 63) - 1


class Refusing(SpanExporter):
    """A collector that is down, or hangs on a batch that it has `begun` until it is `released`."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.batches = 0
        self.begun, self.released = threading.Event(), threading.Event()
        if not hangs:
            self.released.set()

    def export(self, spans: object) -> SpanExportResult:
        self.batches += 1
        self.begun.set()
        self.released.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def test_a_dead_collector_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The collector is down for a day; the service goes on and its log holds one line about that."""
    exporter = Refusing()
    placer = tracing("placer", SETTINGS, exporter=exporter)
    with caplog.at_level(logging.WARNING):
        for number in range(3 * module.BATCH_SPANS):
            placer.phase("run", f"job-{number}", 1, 1, 2)
        placer.close()
    assert exporter.batches >= 3
    assert [r.name for r in caplog.records] == ["penstock.runtime.tracing"]
    assert "http://127.0.0.1:9/v1/traces" in caplog.text


def test_a_collector_that_refuses_connections_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The real exporter against a closed port gives up by itself."""
    with caplog.at_level(logging.WARNING):
        with tracing("placer", SETTINGS) as placer:
            placer.phase("run", "job-1", 1, 1, 2)
        wait_until(lambda: caplog.records, "the warning")
    assert [r.name for r in caplog.records if r.levelno >= logging.WARNING] == ["penstock.runtime.tracing"]


def test_no_call_waits_for_a_collector_that_hangs_and_closing_only_for_its_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C while the collector hangs: the service ends after the bound, the spans are given up."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    exporter = Refusing(hangs=True)
    placer = tracing("placer", SETTINGS, exporter=exporter)
    placer.phase("run", "job-1", 1, 1, 2)
    exporter.begun.wait()
    placer.phase("run", "job-2", 1, 1, 2)
    began_s = time.monotonic()  # clock: waiting is asserted to last the bound at least, on no machine less
    placer.close()
    assert time.monotonic() - began_s >= 0.1  # clock: as above, at least the bound
    placer.close()
    assert placer.phase("run", "job-1", 1, 1, 2) is None
    assert not caplog.records, "it hangs still"
    exporter.released.set()
    wait_until(
        lambda: caplog.records, "its thread, which logs last: a line after this test would belong to none"
    )


@pytest.mark.parametrize(
    "settings", [Settings(log_url="x"), Settings(log_url="x", otlp="http://c:4318", trace_ratio=0)]
)
def test_without_a_listener_every_call_is_cheap(settings: Settings) -> None:
    """Nobody asked for traces: a call runs one function and hands the context on that it was given."""
    quiet = tracing("placer", settings)
    assert not quiet.enabled
    assert quiet.start_job_trace("job-1") is None
    assert quiet.span("estimate", "given", 1, 2) == "given"
    calls: list[Callable[[], object]] = [
        lambda: quiet.start_job_trace("job-1"),
        lambda: quiet.span("estimate", None, 1, 2, key="estimate-1"),
        lambda: quiet.decide("job-1", 7, 1, {"penstock.winner": "node-1"}),
        lambda: quiet.phase("run", "job-1", 1, 1, 2),
        lambda: quiet.end_job("job-1", 1, 2, "succeeded"),
    ]
    for call in calls:
        assert _functions_run_by(call) == 1


def _functions_run_by(call: Callable[[], object]) -> int:
    """Number of Python functions that it calls."""
    run: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: run.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len(run) - 1


def test_a_foreign_context_never_enters_a_jobs_trace(system: System) -> None:
    """A pipeline submits with its own trace's header: below that, the job's spans would be nowhere to be
    found."""
    placer = system.service("placer")
    own = placer.upcoming("submit", placer.start_job_trace("job-1"), "submit")
    foreign = f"00-{'1' * 32}-{'2' * 16}-01"
    assert placer.in_job("job-1", own) == own
    for text in (foreign, None, "x" * 10_000):
        assert placer.in_job("job-1", text) == placer.start_job_trace("job-1")
    silent = Tracing()
    assert silent.in_job("job-1", own) == own, (
        "the trace stays connected across a service that exports nothing"
    )
    assert silent.in_job("job-1", foreign) is None
    assert (well_formed(foreign), well_formed("x" * 10_000)) == (foreign, None)


@pytest.mark.parametrize("ratio", [1.0, 1e-9])
def test_a_context_can_be_handed_on_before_its_span_is_written(ratio: float) -> None:
    """The submission's record names the `submit` span, which ends only when the record is durable; the order
    names the `decide` span."""
    system = System(ratio)
    gateway = system.service("gateway")
    root = gateway.start_job_trace("job-1")
    upcoming = gateway.upcoming("submit", root, "submit")
    assert gateway.span("submit", root, 1, 2, key="submit") == upcoming
    decided = from_traceparent(gateway.decided("job-1", 7))
    gateway.decide("job-1", 7, 1, {})
    contexts = [span.get_span_context() for span in system.all_spans()]
    assert decided is not None
    assert decided.span_id in [context.span_id for context in contexts if context is not None]


def test_held_spans_are_exported_at_a_release_the_latest_alone() -> None:
    """A stand-by follows for months: only the latest spans wait, and nothing is exported before it takes
    over."""
    system = System()
    placer = system.service("placer")
    held = HeldTracing(placer, most=2)
    for seq in (1, 2, 3):
        held.decide("job-1", seq, 1, {})
    held.release()
    held.release()
    held.decide("job-1", 4, 1, {})
    exported = [(span.attributes or {}).get("penstock.ledger_seq") for span in system.all_spans()]
    assert exported == [2, 3, 4]
    assert not HeldTracing(Tracing(), 2).enabled
