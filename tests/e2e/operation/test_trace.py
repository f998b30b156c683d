"""A job's trace through the whole system, as a real Jaeger gives it back."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.devservers.jaeger import JaegerServer, jaeger_server
from infra.devservers.kafka import kafka_broker
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import tracing
from tests.support.installation.system import Gateway, installation
from tests.support.waiting import left_s

FOREIGN = f"00-{'1' * 32}-{'2' * 16}-01"
SERVICES = {f"penstock-{name}" for name in ("gateway", "estimator", "placer", "node-reporter")}
CLOCK_MS = 1  # a node's and the ledger's times are whole milliseconds


@pytest.fixture(scope="module")
def jaeger() -> Iterator[JaegerServer]:
    with jaeger_server() as server:
        yield server


class Cell(NamedTuple):
    """An installation that is started, ended, and started again in the same folder."""

    start: Callable[[], Gateway]
    stop: Callable[[], None]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.slow])])
def cell(request: pytest.FixtureRequest, folder: Path, jaeger: JaegerServer) -> Iterator[Cell]:
    options = ["--otlp", jaeger.otlp_endpoint, "--nodes", "2"]
    with ExitStack() as servers, ExitStack() as running:
        if request.param == "kafka":
            options += ["--log", servers.enter_context(kafka_broker()).url()]
        yield Cell(lambda: running.enter_context(installation(folder / "penstock", *options)), running.close)


class Span(NamedTuple):
    """One span, times in ms since the epoch."""

    name: str
    service: str
    id: str
    parent: str | None
    start_ms: float
    end_ms: float
    attributes: dict[str, Any]
    failed: bool


def spans_of(jaeger: JaegerServer, row: dict[str, Any], at_least: int) -> list[Span]:
    """The job's trace, found by the id that the gateway gives, by start time."""
    found = [
        Span(
            span["name"],
            span["resource"]["service.name"],
            span["spanId"],
            span.get("parentSpanId") or None,
            int(span["startTimeUnixNano"]) / 1e6,
            int(span["endTimeUnixNano"]) / 1e6,
            {
                name.removeprefix("penstock."): value
                for name, value in span["attributes"].items()
                if name.startswith("penstock.")  # Jaeger adds remarks of its own
            },
            span.get("status", {}).get("code") == 2,
        )
        for span in jaeger.trace(row["trace_id"], left_s(), spans_at_least=at_least)
    ]
    return sorted(found, key=lambda span: (span.start_ms, span.id))


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def assert_connected(spans: list[Span]) -> None:
    """One root, each id once, every span reachable from the root, all services."""
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    assert [span.name for span in spans if span.parent is None] == ["job"]
    for span in spans:
        above, steps = span, 0
        while above.parent is not None:
            assert above.parent in by_id, f"{above.name} hangs below a span that nobody wrote"
            above, steps = by_id[above.parent], steps + 1
            assert steps <= len(spans)
        assert above.name == "job"
    assert {span.service for span in spans} == SERVICES


def assert_ledger_times(spans: list[Span], row: dict[str, Any]) -> None:
    """The last attempt's phases are what the ledger says, one after the other; the node's own times fit
    in."""
    [job] = named(spans, "job")
    queue, launch, run = (named(spans, name)[-1] for name in ("queue", "launch", "run"))
    for span, start, end in (
        (job, "submitted_ms", "ended_ms"),
        (queue, "queued_ms", "placed_ms"),
        (launch, "placed_ms", "running_ms"),
        (run, "running_ms", "ended_ms"),
    ):
        assert (span.start_ms, span.end_ms) == pytest.approx((row[start], row[end]), abs=0.01), span.name
    tasks = [task for task in named(spans, "task") if task.start_ms >= launch.start_ms - CLOCK_MS]
    for start in (span for span in named(spans, "start") if span.start_ms >= launch.start_ms - CLOCK_MS):
        assert start.end_ms <= launch.end_ms + CLOCK_MS
    assert tasks
    for task in tasks:
        assert task.end_ms <= job.end_ms + CLOCK_MS
    [submit] = named(spans, "submit")
    assert submit.start_ms <= job.start_ms + CLOCK_MS


def described(gateway: Gateway, job_id: str) -> str:
    """What `penstock describe job` prints."""
    argv = [
        str(Path(sys.executable).with_name("penstock")),
        "--server",
        gateway.url,
        "describe",
        "job",
        job_id,
    ]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.jaeger
def test_each_job_is_one_trace_over_all_services(cell: Cell, jaeger: JaegerServer) -> None:
    """A gang, a job that fails twice and one that is cancelled, submitted by a pipeline that has a trace of
    its own. An engineer opens each in Jaeger and sees one tree from submission to exit, once, though a
    restart has exported it again."""
    gateway = cell.start()
    gateway.until_nodes(2)
    gang_id = gateway.submit(["sleep", "0.3"], workers=2, headers={"traceparent": FOREIGN})
    failing_id = gateway.submit(["sh", "-c", "exit 3"], retry={"max_attempts": 2, "backoff_ms": 10})
    cancelled_id = gateway.submit(["sleep", "infinity"])
    gateway.until(cancelled_id, "running")
    gateway.post(f"/v1/jobs/{cancelled_id}/cancel", {"reason": "a typing error"})
    rows = {job_id: gateway.until_ended(job_id) for job_id in (gang_id, failing_id, cancelled_id)}
    assert f"Trace      {rows[gang_id]['trace_id']}" in described(gateway, gang_id)
    cell.stop()
    gateway = cell.start()
    again = gateway.until_ended(gateway.submit(["true"]))
    cell.stop()

    gang = spans_of(jaeger, rows[gang_id], at_least=11)
    assert_connected(gang)
    assert_ledger_times(gang, rows[gang_id])
    assert sorted(span.name for span in gang) == [
        "decide",
        "estimate",
        "job",
        "launch",
        "queue",
        "run",
        "start",
        "start",
        "submit",
        "task",
        "task",
    ]
    assert not any(span.failed for span in gang)
    assert named(gang, "submit")[0].attributes["caller"] == FOREIGN
    assert named(gang, "estimate")[0].attributes["tier"] == "default"
    [decide] = named(gang, "decide")
    assert {"candidates", "feasible", "winner", "score", "margin"} <= set(decide.attributes)
    assert decide.attributes["ledger_seq"] == rows[gang_id]["token"]
    assert decide.attributes["winner"] == ",".join(rows[gang_id]["nodes"])
    for task in named(gang, "task"):
        assert (task.parent, task.attributes["exit_code"]) == (decide.id, 0)
        assert task.end_ms - task.start_ms >= 300 - CLOCK_MS

    failing = spans_of(jaeger, rows[failing_id], at_least=15)
    assert_connected(failing)
    assert_ledger_times(failing, rows[failing_id])
    for name in ("decide", "queue", "launch", "run", "start", "task"):
        assert len(named(failing, name)) == 2, name
    assert [span.attributes["attempt"] for span in named(failing, "run")] == [1, 2]
    failed = {span.name for span in failing if span.failed}
    assert failed == {"job", "run", "task"}
    assert {span.attributes["exit_code"] for span in named(failing, "task")} == {3}

    cancelled = spans_of(jaeger, rows[cancelled_id], at_least=10)
    assert_connected(cancelled)
    assert_ledger_times(cancelled, rows[cancelled_id])
    assert named(cancelled, "cancel")[0].attributes["reason"] == "a typing error"
    assert named(cancelled, "task")[0].attributes["cause"] == "stopped"
    assert not any(span.failed for span in cancelled)

    assert_connected(spans_of(jaeger, again, at_least=9))


@pytest.mark.jaeger
def test_a_run_of_no_length_exported_again_is_shown_once(jaeger: JaegerServer) -> None:
    """A job fails in the very millisecond in which it runs. Somebody looks at its trace; the placer restarts
    and tells it again."""
    job_id, at_ms = "j-short", 1_795_263_493_083
    settings = Settings(log_url="memory://", otlp=jaeger.otlp_endpoint)
    for life in ("j-first-life", "j-second-life"):
        with tracing("placer", settings) as traces:
            traces.phase("run", job_id, 1, at_ms, at_ms, error="exit 3")
            traces.end_job(job_id, at_ms - 76, at_ms, "failed")
            traces.end_job(life, at_ms, at_ms, "succeeded")
            trace_id, last_id = traces.trace_id(job_id), traces.trace_id(life)
        assert trace_id is not None
        assert last_id is not None
        jaeger.trace(last_id, left_s())
        spans = jaeger.trace(trace_id, left_s(), spans_at_least=2)
        assert sorted(span["name"] for span in spans) == ["job", "run"]
        assert not [span for span in spans if "@jaeger@warnings" in span["attributes"]]
