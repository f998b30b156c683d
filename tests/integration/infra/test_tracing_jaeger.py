"""The traces of three services, as a real Jaeger gives them back."""

import os

import pytest

from infra.devservers.jaeger import JaegerServer
from penstock.clock import wall_ms
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.context import job_context
from penstock.runtime.tracing.tracer import Tracing, tracing

pytestmark = pytest.mark.jaeger


def _services(jaeger: JaegerServer) -> dict[str, Tracing]:
    settings = Settings(log_url="postgresql://nowhere/log", otlp=jaeger.otlp_endpoint)
    return {name: tracing(name, settings) for name in ("gateway", "estimator", "placer")}


def _dispatch(placer: Tracing, job_id: str, at_ms: int) -> None:
    placer.decide(job_id, 7, at_ms + 3, {"penstock.winner": "node-2", "penstock.score": 0.25})
    for name, start_ms, end_ms in (("queue", 2, 4), ("launch", 4, 30), ("run", 30, 400)):
        placer.phase(name, job_id, 1, at_ms + start_ms, at_ms + end_ms)
    placer.end_job(job_id, at_ms, at_ms + 400, "failed", reason="exit code 3")


def test_three_services_make_one_connected_trace(jaeger: JaegerServer) -> None:
    """Gateway, estimator and placer export on their own; the placer dies after its spans and a successor
    writes them again. Jaeger shows one root, every other span below it, and each span once."""
    job_id, at_ms = f"job-{os.getpid()}", wall_ms()
    services = _services(jaeger)
    root = services["gateway"].start_job_trace(job_id)
    submitted = services["gateway"].span("submit", root, at_ms, at_ms + 1, key="submit")
    services["estimator"].span(
        "estimate", submitted, at_ms + 1, at_ms + 2, {"penstock.tier": "user"}, key="e"
    )
    _dispatch(services["placer"], job_id, at_ms)
    for service in services.values():
        service.close()
    successor = _services(jaeger)
    _dispatch(successor["placer"], job_id, at_ms)
    for service in successor.values():
        service.close()

    context = job_context(job_id, 1)
    spans = jaeger.trace(f"{context.trace_id:032x}", spans_at_least=7)
    marker = _services(jaeger)["placer"]
    marker.phase("run", f"{job_id}-marker", 1, at_ms, at_ms + 1)
    marker.close()
    jaeger.trace(
        f"{job_context(f'{job_id}-marker', 1).trace_id:032x}"
    )  # what was sent before it is stored by now
    spans = jaeger.trace(f"{context.trace_id:032x}", spans_at_least=7)
    by_id = {span["spanId"]: span for span in spans}
    assert sorted(span["name"] for span in spans) == [
        "decide",
        "estimate",
        "job",
        "launch",
        "queue",
        "run",
        "submit",
    ]
    assert [span["name"] for span in spans if not span.get("parentSpanId")] == ["job"]
    assert all(span["parentSpanId"] in by_id for span in spans if span["name"] != "job")
    found = {span["name"]: span for span in spans}
    assert found["job"]["status"] == {"code": 2, "message": "exit code 3"}
    assert int(found["run"]["endTimeUnixNano"]) - int(found["run"]["startTimeUnixNano"]) == 370_000_000
    assert found["decide"]["attributes"]["penstock.winner"] == "node-2"
    assert {span["resource"]["service.name"] for span in spans} == {
        "penstock-gateway",
        "penstock-estimator",
        "penstock-placer",
    }
