"""Tracer: one trace per job, from submission to exit, over all services, exported as OTLP over HTTP.

Ideal: each service opens a span when work starts and closes it when it ends. Departure: spans are written
afterwards, with event times. The traced phases (waiting, launching, running) outlive the process in which
they began, and a service that is killed half-way must not leave a trace that never ends.

Ideal: the SDK's `Tracer` makes the spans. Departure: it takes their ids from an `IdGenerator` that does not
know the span's job, so a span written twice after a crash would appear twice. Finished `ReadableSpan`s with
derived ids (penstock.runtime.tracing.context) are passed to the SDK's batch processor instead.

Tracing never disturbs the service: no call here raises an error of the collector, blocks, or waits; without
an endpoint every call returns at once. Replay emits nothing, since no code that a fold calls uses this
module.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from penstock.runtime.settings import Settings
from penstock.runtime.tracing.context import (
    MAX_TRACEPARENT_CHARS,
    SpanContext,
    child,
    from_traceparent,
    job_context,
    to_traceparent,
)
from penstock.text.redaction import without_password

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

LOG = logging.getLogger("penstock.runtime.tracing")

SCHEDULE_MS = 200  # longest wait of a span for its batch: a trace can be read right after its job
QUEUE_SPANS = 16_384  # waiting for export, older ones are dropped; about 2 s at 1,000 jobs/s × 8 spans
BATCH_SPANS = 512
EXPORT_TIMEOUT_S = 2.0  # per batch with its retries; a slow collector costs spans, never memory
CLOSE_TIMEOUT_S = 2.0
MAX_TEXT_CHARS = 1_024  # per attribute; longer ones are cut
NANOSECONDS_PER_MS = 1_000_000
MAX_NANOSECONDS = (1 << 63) - 1  # OTLP's field; one time beyond it would cost its whole batch
SDK_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")

Attribute = str | bool | int | float | Sequence[str] | None
Attributes = Mapping[str, Attribute]


class Finished(NamedTuple):
    """One finished span; times in ms since the epoch. `error`: text of its failure."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_ms: float
    end_ms: float
    attributes: Attributes
    error: str | None
    links: Sequence[SpanContext] = ()


def _plan_context(proposer: str, proposal_id: str) -> SpanContext:
    """Context of a plan's span. Every plan is sampled, as plans are few."""
    return job_context(f"plan {proposer} {proposal_id}", 1.0)


def _nanoseconds(time_ms: float) -> int:
    """Nanoseconds since the epoch, clamped to OTLP's range."""
    return min(max(int(time_ms * NANOSECONDS_PER_MS), 0), MAX_NANOSECONDS)


class _Sink:
    """Sends finished spans to one exporter, on a thread of the SDK's batch processor.

    OpenTelemetry is imported here, at run time: a service that exports nothing does not load it.
    """

    def __init__(self, service: str, cell: str, exporter: "SpanExporter", endpoint: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, Status, StatusCode, TraceFlags
        from opentelemetry.trace import SpanContext as OtelContext

        class WarnOnce(SpanExporter):
            """Passes batches on; logs the first failure with its effect, and no further ones."""

            reported = False

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = exporter.export(spans)
                if result is not SpanExportResult.SUCCESS and not self.reported:
                    self.reported = True
                    LOG.warning(
                        "spans of %s cannot be exported to %s and are dropped; the service itself is not "
                        "affected. This is logged once",
                        service,
                        without_password(endpoint),
                    )
                return result

            def shutdown(self) -> None:
                exporter.shutdown()

        for name in SDK_LOGGERS:  # they log every failure; `WarnOnce` logs one
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = WarnOnce()
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=QUEUE_SPANS,
            schedule_delay_millis=SCHEDULE_MS,
            max_export_batch_size=BATCH_SPANS,
        )
        self._scope = InstrumentationScope("penstock.runtime.tracing")
        # Not `Resource.create`: that adds an id of this process, and the same span of two processes would
        # differ in it.
        self._resource = Resource(
            {"service.name": f"penstock-{service}", "service.namespace": "penstock", "penstock.cell": cell}
        )
        self._span, self._context, self._sampled = ReadableSpan, OtelContext, TraceFlags(TraceFlags.SAMPLED)
        self._link = Link
        self._unset = Status(StatusCode.UNSET)
        self._failed: Callable[[str], Status] = lambda text: Status(StatusCode.ERROR, text)

    def put(self, span: Finished) -> None:
        """Queues one finished span; never blocks.

        Clocks step back, and Jaeger takes 0 ns for a negative length: each span lasts 1 ns at least. A root
        lasts 1 ns more than reported, so that children in its last millisecond lie inside: Jaeger adds a
        warning about a child outside to the stored span, and then takes the same span written again for
        another one.
        """
        parent = span.parent
        start = min(_nanoseconds(span.start_ms), MAX_NANOSECONDS - 2)
        end = max(start + 1, _nanoseconds(span.end_ms))
        self._processor.on_end(
            self._span(
                span.name,
                context=self._context(span.context.trace_id, span.context.span_id, False, self._sampled),
                parent=parent and self._context(parent.trace_id, parent.span_id, True, self._sampled),
                resource=self._resource,
                attributes={
                    key: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
                    for key, value in span.attributes.items()
                    if value is not None
                },
                links=[
                    self._link(self._context(link.trace_id, link.span_id, True, self._sampled))
                    for link in span.links
                ],
                status=self._unset if span.error is None else self._failed(span.error[:MAX_TEXT_CHARS]),
                start_time=start,
                end_time=min(end + 1, MAX_NANOSECONDS) if parent is None else end,
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Flushes for at most CLOSE_TIMEOUT_S, then drops the rest."""
        flush = threading.Thread(target=self._processor.shutdown, name="traces-flush", daemon=True)
        flush.start()
        flush.join(CLOSE_TIMEOUT_S)
        if flush.is_alive():
            self._exporter.shutdown()  # ends the exporter's retries; its threads are daemons


class Tracing:
    """Writes the job traces of one service. Made by `tracing`; a context manager that flushes at its end.

    `parent`s and results are `traceparent` texts, as `Envelope.traceparent` carries them. Without an
    exporter, and for jobs that are not sampled, each call returns the context that it was given, so that a
    trace stays connected across a service that exports nothing; a text too long for a context is never passed
    on.
    """

    __slots__ = ("_ratio", "_sink")

    def __init__(self, sink: "_Sink | _Waiting | None" = None, ratio: float = 1.0) -> None:
        self._sink = sink
        self._ratio = ratio

    @property
    def enabled(self) -> bool:
        """False: every call is a no-op, and a caller need not collect attributes."""
        return self._sink is not None

    def start_job_trace(self, job_id: str) -> str | None:
        """The context of the job's root span, for the submission's envelope; None when nothing is exported.

        Nothing is written yet: `end_job` writes the root span when the job has ended. Any service may call
        it, at any time, and gets the same answer for the same ratio; a context in a record takes precedence.
        """
        if self._sink is None:
            return None
        return to_traceparent(job_context(job_id, self._ratio))

    def trace_id(self, job_id: str) -> str | None:
        """Trace id of the job, 32 hex digits; None when it is not exported."""
        context = job_context(job_id, self._ratio)
        return f"{context.trace_id:032x}" if self._sink is not None and context.sampled else None

    def in_job(self, job_id: str, traceparent: str | None) -> str | None:
        """`traceparent` if it lies in this job's trace, else the context of the job's root.

        For foreign contexts (a submitter's own trace): spans written under one of those would be
        missing in the job's trace, and unparsed text is not passed on.
        """
        if self._sink is None and traceparent is None:
            return None
        root = job_context(job_id, self._ratio)
        found = from_traceparent(traceparent)
        if found is not None and found.trace_id == root.trace_id:
            return traceparent
        return None if self._sink is None else to_traceparent(root)

    def upcoming(self, name: str, parent: str | None, key: str) -> str | None:
        """The context that `span` will return for these arguments:
        for events caused before the span can be written."""
        if self._sink is None:
            return parent if parent is None or len(parent) <= MAX_TRACEPARENT_CHARS else None
        above = from_traceparent(parent)
        if above is None or not above.sampled:
            return None if above is None else parent
        return to_traceparent(child(above, name, key))

    def decided(self, job_id: str, ledger_seq: int) -> str | None:
        """The context of the `decide` span that this record has, or will have, under the job's root."""
        if self._sink is None:
            return None
        return to_traceparent(child(job_context(job_id, self._ratio), "decide", str(ledger_seq)))

    def span(
        self,
        name: str,
        parent: str | None,
        start_ms: float,
        end_ms: float,
        attributes: Attributes | None = None,
        *,
        key: str | None = None,
        error: str | None = None,
    ) -> str | None:
        """Writes one finished span under `parent` and returns its context, the parent of spans that it
        caused.

        Times in ms since the epoch (fractions allowed). `key` distinguishes it from siblings of the same name
        and must be the same when it is written again; by default its start. `error`: marks it as failed.
        """
        if self._sink is None:
            return parent if parent is None or len(parent) <= MAX_TRACEPARENT_CHARS else None
        above = from_traceparent(parent)
        if above is None:
            return None
        if not above.sampled:
            return parent
        context = child(above, name, str(start_ms) if key is None else key)
        self._sink.put(Finished(name, context, above, start_ms, end_ms, attributes or {}, error))
        return to_traceparent(context)

    def plan_context(self, proposer: str, proposal_id: str) -> str | None:
        """The context of the `plan` span that this proposal has, or will have;
        None when nothing is exported."""
        return None if self._sink is None else to_traceparent(_plan_context(proposer, proposal_id))

    def plan(
        self, proposer: str, proposal_id: str, start_ms: float, end_ms: float, attributes: Attributes
    ) -> None:
        """Writes the `plan` span of one proposal, from the start of planning to the proposal in the log: the
        only span of a trace of its own, to which the placements of its units link."""
        if self._sink is not None:
            found = {"penstock.proposer": proposer, "penstock.proposal_id": proposal_id, **attributes}
            context = _plan_context(proposer, proposal_id)
            self._sink.put(Finished("plan", context, None, start_ms, end_ms, found, None))

    def decide(
        self,
        job_id: str,
        ledger_seq: int,
        at_ms: float,
        attributes: Attributes,
        plan: tuple[str, str] | None = None,
    ) -> None:
        """Writes the `decide` span of one ledger record about one job, without length, under the job's root.
        `plan`: proposer and id of the proposal that it follows, to whose span it links.

        Decisions are written even for a job that is not sampled: as the only span of its trace, without a
        parent.
        """
        if self._sink is None:
            return
        root = job_context(job_id, self._ratio)
        found = {"penstock.job_id": job_id, "penstock.ledger_seq": ledger_seq, **attributes}
        context, parent = child(root, "decide", str(ledger_seq)), root if root.sampled else None
        links = () if plan is None else (_plan_context(*plan),)
        self._sink.put(Finished("decide", context, parent, at_ms, at_ms, found, None, links))

    def decision(
        self,
        job_id: str | None,
        ledger_seq: int,
        n: int,
        at_ms: float,
        name: str,
        attributes: Attributes,
        plan: tuple[str, str] | None = None,
    ) -> None:
        """Writes the span of one decision other than a placement, without length: event `n` of its record.
        `job_id`: under its root if it is sampled; None: the decision is about the cell, and its span is the
        only one of a trace. `plan`: as for `decide`."""
        if self._sink is None:
            return
        root = (
            job_context(f"record {ledger_seq}", 1.0) if job_id is None else job_context(job_id, self._ratio)
        )
        if not root.sampled:
            return
        found = {"penstock.job_id": job_id, "penstock.ledger_seq": ledger_seq, **attributes}
        parent = None if job_id is None else root
        links = () if plan is None else (_plan_context(*plan),)
        context = child(root, name, f"{ledger_seq}.{n}")
        self._sink.put(Finished(name, context, parent, at_ms, at_ms, found, None, links))

    def phase(
        self,
        name: str,
        job_id: str,
        attempt: int,
        start_ms: float,
        end_ms: float,
        attributes: Attributes | None = None,
        *,
        error: str | None = None,
    ) -> None:
        """Writes one phase of an attempt (`queue`, `launch`, `run`) under the job's root, in ledger times."""
        if self._sink is not None and (root := job_context(job_id, self._ratio)).sampled:
            found = {"penstock.job_id": job_id, "penstock.attempt": attempt, **(attributes or {})}
            context = child(root, name, str(attempt))
            self._sink.put(Finished(name, context, root, start_ms, end_ms, found, error))

    def end_job(
        self,
        job_id: str,
        submitted_ms: float,
        ended_ms: float,
        outcome: str,
        attributes: Attributes | None = None,
        *,
        reason: str = "",
    ) -> None:
        """Writes the root span `job`, from submission to end, in ledger times.

        `outcome` as in `JobEnded`; anything but `succeeded` and `cancelled` marks the trace as failed.
        """
        if self._sink is not None and (root := job_context(job_id, self._ratio)).sampled:
            found = {"penstock.job_id": job_id, "penstock.outcome": outcome, **(attributes or {})}
            error = None if outcome in ("succeeded", "cancelled") else reason or outcome
            self._sink.put(Finished("job", root, None, submitted_ms, ended_ms, found, error))

    def close(self) -> None:
        """Flushes queued spans, for at most CLOSE_TIMEOUT_S; idempotent. Later calls are no-ops."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Flushes on a thread: other services may live on this loop."""
        await asyncio.to_thread(self.close)


class _Waiting:
    """Bounded buffer of the latest finished spans until `release`; later ones pass through."""

    def __init__(self, sink: "_Sink | _Waiting", most: int) -> None:
        self._sink = sink
        self._held: deque[Finished] = deque(maxlen=most)
        self._released = False

    def put(self, span: Finished) -> None:
        if self._released:
            self._sink.put(span)
        else:
            self._held.append(span)

    def release(self) -> None:
        self._released = True
        while self._held:
            self._sink.put(self._held.popleft())

    def close(self) -> None:
        """Does nothing: the sink belongs to the tracing from which this one was made."""


class HeldTracing(Tracing):
    """Buffers the latest spans, up to a bound, until `release` writes them; later spans are written at once.

    For a standby that follows the active placer's records: when it takes over it writes the latest spans once
    more, since the other may have died before it wrote them. (Ids are derived: a span written twice is one
    span.)
    """

    __slots__ = ("_waiting",)

    def __init__(self, tracing: Tracing, most: int) -> None:
        sink, ratio = tracing._sink, tracing._ratio
        self._waiting = None if sink is None else _Waiting(sink, most)
        super().__init__(self._waiting, ratio)

    def release(self) -> None:
        """Writes the buffered spans; idempotent."""
        if self._waiting is not None:
            self._waiting.release()


def tracing(service: str, settings: Settings, *, exporter: "SpanExporter | None" = None) -> Tracing:
    """The tracing of one service (`gateway`, `placer`, …), shown in Jaeger as `penstock-<service>`.

    Exports to `settings.otlp`; without it, or at a ratio of 0, nothing at all. `exporter`: instead of OTLP,
    for tests. All services of a cell share one ratio.
    """
    if settings.trace_ratio <= 0 or (settings.otlp is None and exporter is None):
        return Tracing()
    endpoint = f"{(settings.otlp or '').rstrip('/')}/v1/traces"
    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    return Tracing(_Sink(service, settings.cell, exporter, endpoint), settings.trace_ratio)
