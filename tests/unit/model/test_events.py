"""Events at their doors: what we write can be read, and what we did not write can harm nobody."""

import ast
import json
import math
from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.codegen.examples import EXAMPLES
from infra.codegen.scenario import JOB, START_MS
from infra.codegen.schemas import ROOT
from penstock.ledger.record.record import Draft, Head, read, write
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import ModelTrained
from penstock.model.schema.errors import EventError, Invalid, TooBig, Undecodable, UnknownType, UnknownVersion
from penstock.model.schema.event import REGISTRY, Event, event, wire_type
from penstock.model.schema.topics import MAX_EVENT_BYTES, NODE_PARTITIONS, Topic, node_partition
from penstock.model.schema.validation import checked, checked_json
from penstock.model.wire.codec import decode, decode_fact, encode
from penstock.model.wire.envelope import Envelope, from_wire, rfc3339, to_wire, topic_of

NAMES = sorted(REGISTRY)


def golden(name: str) -> bytes:
    """The frozen bytes of this wire type."""
    return (ROOT / "schemas/examples" / f"{name}.json").read_bytes().rstrip(b"\n")


def test_every_event_is_of_one_room() -> None:
    """A new event without example would never be replayed: somebody adds one in a hurry on a Friday."""
    assert set(EXAMPLES) == set(REGISTRY)
    assert all(wire_type(type(example)) == name for name, example in EXAMPLES.items())


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes_survive_the_round_trip(name: str) -> None:
    """A placer of today reads a record of last year and a rebuilt projection must equal it byte for byte."""
    wire = golden(name)
    read_back = decode(name, wire)
    assert read_back == EXAMPLES[name]
    assert encode(read_back) == wire


@pytest.mark.parametrize("name", NAMES)
def test_decoding_and_validation_read_the_same(name: str) -> None:
    """Replay decodes by msgspec, an HTTP body is validated by the form: both must fold to one state."""
    assert checked_json(REGISTRY[name], golden(name)) == decode_fact(name, golden(name)) == EXAMPLES[name]


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_the_same_on_both_paths(name: str) -> None:
    """An older writer left optional fields out: decoding and validation must fill in the same."""
    required = {field.name for field in msgspec.structs.fields(REGISTRY[name]) if field.required}
    sparse = json.dumps({key: value for key, value in json.loads(golden(name)).items() if key in required})
    assert decode(name, sparse.encode()) == checked_json(REGISTRY[name], sparse)


@pytest.mark.parametrize("name", NAMES)
def test_strict_when_writing_tolerant_when_reading(name: str) -> None:
    """During an upgrade a newer service adds a field: older readers ignore it, nobody may write it by
    slip."""
    data = {**json.loads(golden(name)), "field_of_the_future": {"deep": [1, 2]}}
    assert encode(decode(name, json.dumps(data).encode())) == golden(name)
    with pytest.raises(ValidationError, match="field_of_the_future"):
        checked(REGISTRY[name], data)
    with pytest.raises(TypeError, match="field_of_the_future"):
        REGISTRY[name](**data)


def test_unknown_fields_are_ignored_at_every_depth() -> None:
    """The newer field sits inside the spec, not at the top."""
    data = json.loads(golden("penstock.job.submitted.v1"))
    data["spec"]["resources"]["tpus"] = 4
    assert (
        decode("penstock.job.submitted.v1", json.dumps(data).encode())
        == EXAMPLES["penstock.job.submitted.v1"]
    )


def test_events_are_frozen() -> None:
    """Two handlers share one event object; neither may change it under the other."""
    cancelled = external_events.JobCancelRequested(job_id=JOB)
    with pytest.raises(AttributeError):
        cancelled.reason = "another"  # type: ignore[misc]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused(number: float) -> None:
    """A diverging run reports loss NaN; a NaN in the ledger would make replays differ for ever."""
    with pytest.raises(ValidationError, match="finite"):
        checked(external_events.TelemetrySampled, {"node_id": "n", "at_ms": 1, "loss": number})
    trained = {"model_version": "m", "sha256": "0" * 64, "runs": 1, "first_run_ms": 1, "last_run_ms": 1}
    with pytest.raises(ValidationError, match="finite"):
        checked(ModelTrained, {**trained, "metrics": {"mape": number}})
    with pytest.raises(ValueError, match="JSON"):
        ledger_events.FactEntry(type="x", data={"deep": [{"score": number}]})
    wire = f'{{"node_id":"n","at_ms":1,"loss":{json.dumps(number)}}}'.encode()
    with pytest.raises(Invalid, match="loss"):
        decode("penstock.telemetry.sampled.v1", wire)


def test_every_bad_field_is_named_at_once() -> None:
    """A CI pipeline posts a broken job; its owner should need one round, not five."""
    data = json.loads(golden("penstock.job.submitted.v1"))
    data["spec"] |= {"command": ["a\0b"], "env": {"A=B": "1"}, "workers": 0, "owner": "no spaces please"}
    with pytest.raises(Invalid) as refused:
        decode("penstock.job.submitted.v1", json.dumps(data).encode())
    for field in ("spec.command", "spec.env", "spec.workers", "spec.owner"):
        assert f"{field}:" in str(refused.value)


def test_the_size_bound_holds_to_the_byte() -> None:
    """Somebody submits a job with a data set inside its environment: 64 KiB pass, one byte more does not."""
    wire = golden("penstock.job.queued.v1")
    exact = wire + b" " * (MAX_EVENT_BYTES - len(wire))
    assert decode("penstock.job.queued.v1", exact) == EXAMPLES["penstock.job.queued.v1"]
    with pytest.raises(TooBig, match="65537"):
        decode("penstock.job.queued.v1", exact + b" ")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("penstock.job.vanished.v1", UnknownType),
        ("penstock.job.submitted", UnknownType),
        ("", UnknownType),
        (".v1", UnknownType),
        ("penstock.job.submitted.v2", UnknownVersion),
        ("penstock.job.submitted.v0", UnknownVersion),
        ("penstock.job.submitted.v", UnknownVersion),
        ("penstock.job.submitted.v1.v1", UnknownType),
        ("penstock.job.submitted.v" + "9" * 5_000, UnknownVersion),
    ],
)
def test_types_that_nobody_knows(name: str, error: type[EventError]) -> None:
    """A newer gateway already writes version 2 while this placer still knows version 1."""
    for reader in (decode, decode_fact):
        with pytest.raises(error) as refused:
            reader(name, b"{}")
        assert len(str(refused.value)) < 1_024, "a dead letter's detail must be able to carry it"


def test_an_event_cannot_enter_by_a_foreign_door() -> None:
    """Whoever may write `nodes` slips a decision in there, hoping that some reader folds it."""
    forged = to_wire(Envelope("e-1", "/evil", START_MS, EXAMPLES["penstock.placement.decided.v1"]))
    with pytest.raises(Undecodable, match="does not belong on"):
        from_wire(*forged, topic=Topic.NODES)
    record = to_wire(Envelope("e-2", "/evil", START_MS, EXAMPLES["penstock.ledger.record.v1"]))
    with pytest.raises(Undecodable, match="does not belong on"):
        from_wire(*record, topic=Topic.JOBS)


@pytest.mark.parametrize("name", NAMES)
def test_headers_round_trip(name: str) -> None:
    """The trace and the correlation of a job must survive every hop, on every topic."""
    sent = Envelope(
        id=f"e-{name}",
        source="/penstock/gateway",
        time_ms=START_MS + 7,
        data=EXAMPLES[name],
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        causation_id="e-0",
        correlation_id=JOB,
    )
    topic = EXAMPLES[name].TOPIC
    assert from_wire(*to_wire(sent), topic=None if topic is None else str(topic)) == sent
    assert dict(to_wire(sent)[0])["ce_subject"].decode() == EXAMPLES[name].subject()


def test_optional_headers_may_be_absent() -> None:
    """A foreign producer sends the least that CloudEvents asks for."""
    headers = (
        ("ce_specversion", b"1.0"),
        ("ce_id", b"1"),
        ("ce_source", b"/ci"),
        ("ce_type", b"penstock.job.queued.v1"),
    )
    got = from_wire(headers, golden("penstock.job.queued.v1"))
    assert (got.time_ms, got.traceparent, got.causation_id, got.correlation_id) == (0, None, None, None)
    for name, _ in headers:
        with pytest.raises(Undecodable, match=name):
            from_wire(tuple(pair for pair in headers if pair[0] != name), b"{}")


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("2026-01-05T09:15:00Z", START_MS),
        ("2026-01-05T10:15:00.000+01:00", START_MS),
        ("1969-12-31T23:59:59Z", 0),
        (rfc3339(START_MS + 1), START_MS + 1),
        (rfc3339(START_MS + 999), START_MS + 999),
    ],
)
def test_times_are_read_in_any_offset(text: str, time_ms: int) -> None:
    """Producers write local time with an offset; no reader's own time zone may matter."""
    headers = dict(to_wire(Envelope("e", "/s", 0, EXAMPLES["penstock.job.queued.v1"]))[0])
    headers["ce_time"] = text.encode()
    assert from_wire(tuple(headers.items()), golden("penstock.job.queued.v1")).time_ms == time_ms


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-01-05T09:15:00", "2026-01-05", "2026-13-01T00:00:00Z"]
)
def test_times_without_offset_are_refused(text: str) -> None:
    """The same text would mean another instant on each machine."""
    headers = dict(to_wire(Envelope("e", "/s", 0, EXAMPLES["penstock.job.queued.v1"]))[0])
    headers["ce_time"] = text.encode()
    with pytest.raises(Undecodable, match="ce_time"):
        from_wire(tuple(headers.items()), golden("penstock.job.queued.v1"))


def test_two_models_cannot_share_a_type() -> None:
    """Two branches add the same event; the second merge must fail at import, not at midnight."""
    with pytest.raises(TypeError, match="already taken by JobSubmitted"):

        @event
        class Twin(Event):
            TYPE = "penstock.job.submitted"


def test_facts_have_no_topic() -> None:
    """A decision is published inside a ledger record or not at all."""
    with pytest.raises(TypeError, match="ledger records only"):
        topic_of(EXAMPLES["penstock.placement.decided.v1"])
    assert topic_of(EXAMPLES["penstock.job.submitted.v1"]) is Topic.JOBS


def test_the_ledgers_fast_writer_and_the_model_agree() -> None:
    """The placer writes records without building models; whoever reads with the model sees the same bytes."""
    model = EXAMPLES["penstock.ledger.record.v1"]
    assert isinstance(model, ledger_events.LedgerRecord)
    draft = Draft(
        term=model.term,
        now_ms=model.now_ms,
        cause=msgspec.structs.asdict(model.cause),
        outcome=model.outcome,
        reason=model.reason,
        facts=[decode(entry.type, json.dumps(entry.data).encode()) for entry in model.facts],
        explanation=model.explanation,
    )
    _, wire = write(Head(model.seq - 1, model.parent, model.term), draft)
    assert wire == encode(model)
    assert [fact.event().TYPE for fact in read(wire).facts] == [
        "penstock.job.estimated",
        "penstock.placement.decided",
    ]


def test_nodes_spread_over_the_partitions_the_same_everywhere() -> None:
    """A node computes its partition of the orders by itself: it must never depend on the process."""
    # The published test values of 32-bit FNV-1a: "a" is e40c292c, "foobar" is bf9cf968.
    assert (node_partition("a"), node_partition("foobar")) == (0xC, 0x8)
    spread = Counter(node_partition(f"node-{index}") for index in range(1_600))
    assert set(spread) == set(range(NODE_PARTITIONS))
    assert max(spread.values()) < 3 * 1_600 / NODE_PARTITIONS


def type_matches(tree: ast.AST) -> list[int]:
    """Lines that compare or look up the `TYPE` of an object; of a class it is allowed, for bytes not yet
    decoded."""
    lines = []
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            operands = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            operands = node.args
        elif isinstance(node, ast.Match):
            operands = [node.subject]
        for operand in operands:
            if isinstance(operand, ast.Attribute) and operand.attr == "TYPE":
                name = ast.unparse(operand.value).rpartition(".")[2]
                if not name[0].isupper() and name != "model":
                    lines.append(operand.lineno)
    return lines


def test_decoded_events_are_matched_by_class() -> None:
    """One way to distinguish events: a reader that knows the class needs no table of strings."""
    assert type_matches(ast.parse("if event.TYPE == JobEnded.TYPE: pass")) == [1]
    assert type_matches(ast.parse("HANDLERS.get(event.TYPE)\nHANDLERS[job.answer.TYPE]")) == [1, 2]
    assert type_matches(ast.parse("row['type'] == JobEnded.TYPE")) == []
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("libs", "services")
        for path in (ROOT / folder).rglob("*.py")
        for line in type_matches(ast.parse(path.read_text()))
    }
    assert found == set()


# --------------------------------------------------------------------------------- broken input, generated

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
Wire = tuple[Mapping[str, bytes], bytes]


@st.composite
def broken(draw: st.DrawFn) -> Wire:
    """A valid record with one thing broken: headers, type, bytes, a field, size or depth."""
    name = draw(st.sampled_from(NAMES))
    pairs, value = to_wire(Envelope("e-1", "/penstock/gateway", START_MS, EXAMPLES[name]))
    headers = dict(pairs)
    kind = draw(st.sampled_from(("header", "type", "cut", "flip", "field", "drop", "size", "depth", "bytes")))
    if kind == "header":
        headers[draw(st.sampled_from(sorted(headers)))] = draw(st.binary(max_size=300))
    elif kind == "type":
        headers["ce_type"] = draw(
            st.sampled_from([other.encode() for other in NAMES])
            | st.sampled_from(
                [b"penstock.job.submitted.v2", b"penstock.job.submitted.v", b".v1", b"x" * 70_000]
            )
            | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))
        )
    elif kind == "cut":
        value = value[: draw(st.integers(0, len(value) - 1))]
    elif kind == "flip":
        place = draw(st.integers(0, len(value) - 1))
        value = value[:place] + bytes([draw(st.integers(0, 255))]) + value[place + 1 :]
    elif kind == "size":
        value = value + b" " * draw(st.integers(MAX_EVENT_BYTES - len(value) + 1, MAX_EVENT_BYTES))
    elif kind == "depth":
        value = draw(st.sampled_from((b"[", b'{"a":'))) * draw(st.integers(1_000, 10_000))
    elif kind == "bytes":
        value = draw(st.binary(max_size=200))
    else:
        data = json.loads(value)
        field = draw(st.sampled_from(sorted(data)))
        if kind == "drop":
            del data[field]
        else:
            data[field] = draw(JSON_VALUES)
        value = json.dumps(data).encode()
    return headers, value


def test_nothing_broken_gets_past_the_door_or_breaks_it() -> None:
    """Anybody can post anything: whatever comes, the answer is an event or an error a dead letter can
    carry."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=1_500,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
    )
    @given(broken())
    def try_one(wire: Wire) -> None:
        headers, value = wire
        try:
            got = from_wire(tuple(headers.items()), value)
        except EventError as error:
            outcomes[error.reason] += 1
            return
        outcomes["read"] += 1
        assert decode(got.type, encode(got.data)) == got.data, "what was read can be written and read again"

    try_one()
    refused = sum(count for reason, count in outcomes.items() if reason != "read")
    assert refused >= 500, outcomes
    assert {"undecodable", "unknown_type", "unknown_version", "invalid", "too_large"} <= set(outcomes)
