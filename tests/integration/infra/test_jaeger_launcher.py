"""A span goes out as services send it and is read back from a real Jaeger."""

import secrets
from pathlib import Path

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link

from infra.devservers.jaeger import CONFIG, JaegerServer, jaeger_server

pytestmark = pytest.mark.jaeger


def test_a_decision_is_read_back_with_its_attributes_parents_and_links(jaeger: JaegerServer) -> None:
    """An engineer asks why a job went where it went, and looks at the placer's `decide` span."""
    provider = TracerProvider(resource=Resource({"service.name": "placer"}))
    provider.add_span_processor(
        SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{jaeger.otlp_endpoint}/v1/traces"))
    )
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("estimate") as estimate:
        pass
    attributes = {"candidates": 5, "score": 0.75, "node": "n-1", "rejected": ["n-2", "n-3"], "sure": True}
    with tracer.start_as_current_span("job") as job:
        links = [Link(estimate.get_span_context())]
        with tracer.start_as_current_span("decide", attributes=attributes, links=links):
            pass
        jaeger.trace(f"{job.get_span_context().trace_id:032x}")  # before its parent arrives
    provider.shutdown()

    spans = {
        span["name"]: span
        for span in jaeger.trace(f"{job.get_span_context().trace_id:032x}", spans_at_least=2)
    }
    assert set(spans) == {"job", "decide"}
    decide = spans["decide"]
    assert decide["attributes"] == attributes
    assert decide["parentSpanId"] == spans["job"]["spanId"] == f"{job.get_span_context().span_id:016x}"
    assert decide["links"][0]["traceId"] == f"{estimate.get_span_context().trace_id:032x}"
    assert decide["resource"]["service.name"] == "placer"


def test_a_trace_that_never_arrives_is_a_timeout_and_not_an_empty_answer(jaeger: JaegerServer) -> None:
    """The exporter points at another host: the test that waits for its trace must fail, not pass on
    nothing."""
    with pytest.raises(TimeoutError, match="0 of ≥ 1 spans"):
        jaeger.trace(secrets.token_hex(16), timeout_s=0.3)  # clock: it never arrives, however long it waits


def test_jaeger_ends_at_once_and_leaves_no_process() -> None:
    """Every end-to-end test stops one: it ends by itself when it is asked to, without the 10 s that its own
    spans would cost."""
    with jaeger_server() as server:
        pid = server.pid
    settings = yaml.safe_load(CONFIG.read_text())
    assert settings["extensions"]["jaeger_query"]["enable_tracing"] is False
    assert not Path(f"/proc/{pid}").exists()
