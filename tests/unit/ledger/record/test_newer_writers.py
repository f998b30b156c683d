"""Services of this version beside some of the next one: they leave out what they may, and name the version
where they may not."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from infra.codegen.examples import EXAMPLES
from penstock import __version__
from penstock.ledger.record.amendment import NotAmendable, propose
from penstock.ledger.record.record import RawFact, UndecodableRecord, record_id
from penstock.ledger.replica.snapshot import dump
from penstock.model.decisions.ledger_events import PlacementDecided, ProposalAnswered, StopDecided
from penstock.model.decisions.orders import AnswerJoin
from penstock.model.inputs.external_events import NodeJoined, NodeLeft, TaskExited
from penstock.model.nouns.nodes import GpuFault, Isolation, Measures
from penstock.model.schema.errors import Invalid, UnknownType, UnknownVersion
from penstock.model.schema.event import REGISTRY, Event, wire_type
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.model.wire import additions
from penstock.model.wire.additions import ANY, Addition, is_earlier, needed
from penstock.model.wire.codec import as_written, decode, encode
from penstock.model.wire.envelope import Headers, from_wire, headers
from penstock.model.wire.nearest import TOLERATED
from penstock_services.node_reporter.core.actions import Note
from penstock_services.node_reporter.core.inputs import OrderRead
from penstock_services.node_reporter.core.machine import step
from penstock_services.node_reporter.core.state import NodeState
from penstock_services.placer.core.answer import Input, Moment, answer_input
from tests.support.cluster.driver import CellDriver, node_spec
from tests.support.cluster.readers import Readers

NEXT = "99.0.0"
Rewrite = Callable[[dict[str, Any]], None]


def a_day() -> CellDriver:
    """Jobs that end well, fail and are cancelled, on a node that leaves and comes back."""
    cell = CellDriver()
    cell.join(node_spec("n1", 2), node_spec("n2", 1))
    for job_id in ("a", "b", "c", "d"):
        cell.submit(job_id)
    cell.start("a")
    cell.start("b")
    cell.exit("a.1.w0")
    cell.exit("b.1.w0", 3)
    cell.start("c")
    cell.feed(NodeLeft(node_id="n2", boot_id="b1", proof="fenced", by="ops", reason="burnt"))
    cell.join(node_spec("n2", 1, boot="b2"))
    cell.at(60_000)
    return cell


def of_next_version(values: list[bytes], *rewrites: Rewrite) -> Iterator[bytes]:
    """The ledger as a later placer would have written it: every record rewritten, in a chain of its own."""
    parent = json.loads(values[0])["parent"]
    for value in values:
        body = json.loads(value)
        body["parent"] = parent
        for rewrite in rewrites:
            rewrite(body)
        text = json.dumps(body, separators=(",", ":")).encode()
        parent = record_id(text)
        yield text


def with_fields(body: dict[str, Any]) -> None:
    """Optional fields everywhere: in the record, its cause, each fact and what lies in it."""

    def widen(value: Any) -> None:
        if isinstance(value, dict):
            for inner in list(value.values()):
                widen(inner)
            value["of_the_future"] = {"colour": ["green"]}
        elif isinstance(value, list):
            for inner in value:
                widen(inner)

    for fact in body["facts"]:
        widen(
            {name: inner for name, inner in fact["data"].items() if name != "spec"}
        )  # whose maps hold texts
        fact["data"]["of_the_future"] = 1
        fact["of_the_future"] = 1
    body["cause"]["of_the_future"] = "x"
    body["of_the_future"] = [1]


def with_facts(body: dict[str, Any]) -> None:
    """A fact of a new type before and behind the others; those of a term stay first (LAW 3)."""
    new = {"type": "penstock.colour.chosen.v1", "data": {"colour": "green"}, "needs": ANY}
    later = {"type": "penstock.job.queued.v7", "data": {"job": {"id": "a"}}, "needs": __version__}
    body["facts"] = [*body["facts"][:1], new, *body["facts"][1:], later]


def with_value(body: dict[str, Any]) -> None:
    """A fact with a value that only the next version knows: an exit counts, as one with the most careful
    cause; an answer is left out."""
    for fact in body["facts"]:
        if fact["type"] == wire_type(TaskExited) and fact["data"]["exit_code"] == 3:
            fact |= {"needs": ANY, "data": fact["data"] | {"exhausted": "patience"}}
    data = {"proposal_id": "p", "proposer": "x", "verdict": "later"}
    body["facts"].append({"type": wire_type(ProposalAnswered), "data": data, "needs": ANY})


def test_every_reader_goes_on_beside_a_newer_placer() -> None:
    """The placer is upgraded first. Whatever it adds that others may ignore, all of them go on, and their
    state is what it was."""
    cell, readers = a_day(), Readers()
    for value in of_next_version(cell.values, with_fields, with_facts, with_value):
        readers.take(value)
    readers.agree_with(cell.state)


@pytest.mark.parametrize("n", [1, 6, -1])
def test_every_reader_stops_where_it_needs_a_newer_version_and_names_it(n: int) -> None:
    """The next version gives a known fact another meaning. Nobody guesses: each service says which version it
    needs, and stays up."""
    cell, readers = a_day(), Readers()
    last = n % len(cell.values)

    def needing(body: dict[str, Any]) -> None:
        if body["seq"] == last + 1:
            body["facts"][0] |= {"needs": NEXT}

    values = list(of_next_version(cell.values, needing))
    for value in values[:last]:
        readers.take(value)
    before = dump(readers.cell.state)
    stops: list[Callable[[bytes, int], object]] = [
        readers.cell.take,
        readers.gateway.replica.take,
        readers.projection.take,
        readers.estimator.fold,
    ]
    for take in stops:
        with pytest.raises(UndecodableRecord) as stopped:
            take(values[last], last)
        assert f"this ledger needs Penstock {NEXT} or later; this is {__version__}" in str(stopped.value)
        assert stopped.value.remedy == f"run Penstock {NEXT} or later"
    assert dump(readers.cell.state) == before
    with pytest.raises(NotAmendable, match=f"run Penstock {NEXT} or later"):
        propose(values[last], last)


def test_a_fact_without_a_mark_is_never_left_out() -> None:
    """A bit flips in a type's name: that is no addition of anybody."""
    cell, readers = a_day(), Readers()

    def broken(body: dict[str, Any]) -> None:
        if body["seq"] == 5:
            body["facts"][0]["type"] = "penstock.job.sumbitted.v1"

    values = list(of_next_version(cell.values, broken))
    for value in values[:4]:
        readers.take(value)
    with pytest.raises(UndecodableRecord, match="is not an event of this version"):
        readers.cell.take(values[4], 4)


def test_a_writer_marks_what_is_new_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer gives `StopDecided` one more reason that folds must know, and tasks a field that others may
    ignore."""
    rows: dict[type[Event], tuple[Addition, ...]] = {
        StopDecided: (
            Addition(NEXT, "reason", frozenset({"drained"})),
            Addition(ANY, "grace_ms", above=60_000),
        ),
        PlacementDecided: (Addition(ANY, "tasks.gpu_share_milli", frozenset({500})),),
    }
    stop = StopDecided(job_id="a", attempt=1, reason="cancelled", grace_ms=1)
    placed = EXAMPLES[wire_type(PlacementDecided)]
    assert isinstance(placed, PlacementDecided)
    shared = replace(placed, tasks=(*placed.tasks, replace(placed.tasks[0], gpu_share_milli=500)))
    found = [
        needed(fact, rows)
        for fact in (
            stop,
            replace(stop, grace_ms=90_000),
            replace(stop, reason="drained", grace_ms=90_000),
            placed,
            shared,
        )
    ]
    assert found == ["", ANY, NEXT, "", ANY]
    monkeypatch.setattr("penstock.ledger.record.record.ADDITIONS", rows)
    monkeypatch.setattr("penstock.ledger.record.record.needed", lambda fact: needed(fact, rows))
    cell = a_day()
    marks = [fact.get("needs") for value in cell.values for fact in json.loads(value)["facts"]]
    assert set(marks) == {None}, "this day has none of them"
    assert additions.ADDITIONS is not rows


@pytest.mark.parametrize(
    ("earlier", "later"), [("0.1.0", "0.2.0"), ("0.9.0", "0.10.0"), ("1.0", "1.0.1"), ("0.1.0", "1.0.0rc1")]
)
def test_versions_have_an_order(earlier: str, later: str) -> None:
    assert is_earlier(earlier, later)
    assert not is_earlier(later, earlier)
    assert not is_earlier(later, later)


# ---------------------------------------------------------------------------------------------- the door


def on_wire(kind: str, data: dict[str, Any]) -> tuple[Headers, bytes]:
    return headers("e1", "/next", kind, "x", 1), json.dumps(data).encode()


WELL_ISOLATED = NodeJoined(
    node=replace(
        node_spec("n1", 1),
        isolation=Isolation(exits="cgroup", files=True, memory="task", devices="cgroup", bandwidth="resctrl"),
        measures=Measures(contention="pressure", memory_bandwidth="resctrl"),
    ),
    faults=(GpuFault(uuid="GPU-n1-0", fault="ecc"),),
)
TOLERANT = sorted(name for name, model in REGISTRY.items() if model.TYPE in TOLERATED)


@pytest.mark.parametrize("name", TOLERANT)
def test_a_report_with_an_unknown_value_counts_with_the_most_careful_one(name: str) -> None:
    """A newer node-reporter has one more cause of an exit, a larger machine, a longer text: its placer of
    last week must still free the GPUs."""
    example = WELL_ISOLATED if name == wire_type(NodeJoined) else EXAMPLES[name]
    data = spoilt(as_written(example), TOLERATED[example.TYPE])
    fact = RawFact(name, msgspec.Raw(json.dumps(data).encode()), ANY)
    assert type(fact.event()) is type(example), "as a marked fact of a ledger record"
    if example.TOPIC is not None:
        assert from_wire(*on_wire(name, data), example.TOPIC).data == fact.event()
        with pytest.raises(Invalid):
            from_wire(*on_wire(name, data))


def spoilt(value: Any, fields: Any) -> Any:
    """Each tolerated text with a value of the future."""
    if isinstance(value, list):
        return [spoilt(inner, fields) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "of_the_future"
        if isinstance(fields.get(key), str) and isinstance(inner, str)
        else spoilt(inner, fields)
        for key, inner in value.items()
    }


def test_an_exit_for_an_unknown_cause_is_no_success_and_frees_the_gpu() -> None:
    cell = CellDriver()
    cell.join(node_spec("n1", 1))
    cell.submit("a")
    cell.start("a")
    exited = TaskExited(
        node_id="n1",
        task_id="a.1.w0",
        token=cell.job("a").token,
        cause="exited",
        exit_code=0,
        started_ms=1,
        exited_ms=2,
    )
    data = as_written(exited) | {"cause": "solar_flare", "exit_code": 1_000, "detail": "x" * 9_999}
    answer = answered(cell, wire_type(TaskExited), data, Topic.NODES)
    assert answer.draft.outcome == "committed"
    [fact, *_] = answer.draft.facts
    assert (fact.cause, fact.exit_code, len(fact.detail)) == ("lost", 255, 1_024)
    assert cell.state.jobs["a"].attempt == 2, "it runs again"


def answered(cell: CellDriver, kind: str, data: dict[str, Any], topic: Topic) -> Any:
    moment = Moment(cell.head.seq + 1, cell.head.term, cell.now_ms)
    offset = cell.state.positions.get((topic, 0), 0)
    return answer_input(cell.core, moment, Input(topic, 0, offset, *on_wire(kind, data)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("token", 1 << 60), ("task_id", "not a name!"), ("node_id", 7), ("attempt", 0), ("started_ms", "soon")],
)
def test_what_identifies_or_proves_is_taken_as_it_is_or_not_at_all(field: str, value: Any) -> None:
    """A token beyond its range is no token: the nearest one would be somebody else's."""
    exited = as_written(EXAMPLES[wire_type(TaskExited)])
    joined = as_written(EXAMPLES[wire_type(NodeJoined)])
    for kind, data in ((TaskExited, exited), (NodeJoined, joined)):
        if field in data:
            with pytest.raises(Invalid):
                from_wire(*on_wire(wire_type(kind), data | {field: value}), Topic.NODES)
    with pytest.raises(Invalid):
        from_wire(*on_wire(wire_type(NodeJoined), joined | {"incarnation": 1 << 60}), Topic.NODES)
    left = {"node_id": "n1", "boot_id": "b1", "proof": "hearsay"}
    with pytest.raises(Invalid):
        from_wire(*on_wire(wire_type(NodeLeft), left), Topic.NODES)


@pytest.mark.parametrize("topic", INPUT_TOPICS)
def test_an_unknown_type_on_an_input_costs_that_event_alone(topic: Topic) -> None:
    """A newer gateway, reporter, estimator or proposer says something of a new kind; its placer answers it,
    and goes on."""
    cell = CellDriver()
    cell.join(node_spec("n1", 1))
    for kind, error in (
        ("penstock.colour.chosen.v1", UnknownType),
        ("penstock.job.submitted.v9", UnknownVersion),
    ):
        answer = answered(cell, kind, {"job_id": "a"}, topic)
        assert answer.draft.outcome == "dead_lettered"
        assert answer.letter[0] == error.reason
    assert cell.submit("a").outcome == "committed"


def test_a_machine_larger_than_this_version_knows_joins_with_what_it_knows() -> None:
    cell = CellDriver()
    spec = as_written(NodeJoined(node=node_spec("n1", 2), incarnation=5, version=NEXT))
    gpus = [{**spec["node"]["gpus"][0], "index": n, "uuid": f"GPU-{n}"} for n in range(40)]
    spec["node"] |= {"gpus": gpus, "cores": 1 << 20, "host_memory_mib": 1 << 50}
    spec["faults"] = [{"uuid": "GPU-1", "fault": "solar_flare", "code": 3}]
    answer = answered(cell, wire_type(NodeJoined), spec, Topic.NODES)
    assert answer.draft.outcome == "committed"
    node = cell.state.nodes["n1"]
    assert (len(node.spec.gpus), node.spec.cores, node.spec.host_memory_mib) == (16, 1_024, 1 << 30)
    assert node.faulted_gpu_mask == 0b10


def test_placer_and_reporter_of_two_versions_say_so_at_the_joining() -> None:
    """An operator wonders why a new measurement is nowhere: the reporter's log says that the placer is
    older."""
    for version, said in ((NEXT, True), (__version__, False), ("", False)):
        state = NodeState("n1", "b1", ())
        state.incarnation = 3
        answer = AnswerJoin(
            token=1,
            node_id="n1",
            boot_id="b1",
            incarnation=3,
            verdict="accepted",
            highest_incarnation=3,
            version=version,
        )
        notes = [found.text for found in step(state, OrderRead(answer, 1)) if isinstance(found, Note)]
        assert [version in text and __version__ in text for text in notes] == [True] * said


def test_fields_of_the_future_are_ignored_in_every_event() -> None:
    """Also in orders, telemetry, proposals and what else no ledger record holds."""
    for name, example in EXAMPLES.items():
        data = as_written(example) | {"of_the_future": {"colour": ["green"]}}
        assert encode(decode(name, json.dumps(data).encode())) == encode(example), name
