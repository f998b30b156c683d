"""What is published stays readable: each guard of `schemas/` is shown a change that it must refuse."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pytest
import yaml
from msgspec import Meta

from infra.codegen.asyncapi import structure_problems
from infra.codegen.compatibility import breaks
from infra.codegen.examples import EXAMPLES
from infra.codegen.released import RELEASED, problems
from infra.codegen.schemas import LOCK, ROOT, Catalogue, check, event_schema, generate
from penstock.model.nouns.types import Identifier, ShortText, Value
from penstock.model.schema.event import REGISTRY, Event, wire_type
from penstock.model.schema.topics import Topic
from penstock.model.wire.additions import ANY, Addition
from penstock.model.wire.upcasters import UPCASTERS

CANCEL = "penstock.job.cancel_requested"
CANCEL_FILE = f"events/{CANCEL}/v1.json"
EXITED = "penstock.task.exited"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A copy of what is published, free to be spoilt."""
    return Path(shutil.copytree(ROOT / "schemas", tmp_path / "schemas"))


def lock_lines(folder: Path) -> list[str]:
    return (folder / LOCK).read_text().splitlines()


def with_model(model: type[Event], *upcasters: tuple[str, int]) -> Catalogue:
    """The product's catalogue, but for one event, which somebody changed."""
    models = {name: old for name, old in REGISTRY.items() if old.TYPE != model.TYPE}
    examples = {name: old for name, old in EXAMPLES.items() if old.TYPE != model.TYPE}
    example = model(**{key: value for key, value in EXAMPLE_FIELDS.items() if key in model.__struct_fields__})
    return Catalogue(
        models | {wire_type(model): model}, examples | {wire_type(model): example}, (*UPCASTERS, *upcasters)
    )


EXAMPLE_FIELDS = {"job_id": "job-resnet50-7f3a91", "reason": "wrong learning rate", "asked_by": "alice"}


class Cancel(Event, frozen=True, kw_only=True):
    """As published, to be spoilt by subclasses."""

    TYPE = CANCEL
    TOPIC = Topic.JOBS

    job_id: Identifier
    reason: ShortText = "asked by the user"
    by: ShortText = ""
    tenant: Identifier | None = None


class CancelWithMore(Cancel, frozen=True, kw_only=True):
    asked_by: Identifier | None = None


class CancelDemandingMore(Cancel, frozen=True, kw_only=True):
    asked_by: Identifier


class CancelWithLess(Event, frozen=True, kw_only=True):
    TYPE = CANCEL
    TOPIC = Topic.JOBS

    job_id: Identifier


class CancelShorter(Cancel, frozen=True, kw_only=True):
    reason: Annotated[str, Meta(max_length=64)] = "asked by the user"


class CancelOtherwise(Cancel, frozen=True, kw_only=True):
    reason: ShortText = "the user went away"


class CancelDemanded(Cancel, frozen=True, kw_only=True):
    reason: ShortText


class CancelLonger(Cancel, frozen=True, kw_only=True):
    reason: Annotated[str, Meta(max_length=2_048)] = "asked by the user"


class Exited(Event, frozen=True, kw_only=True):
    """As published, as far as these tests spoil it."""

    TYPE = EXITED
    TOPIC = Topic.NODES

    cause: Literal["exited", "stopped", "start_failed", "out_of_memory", "lost", "evicted"]


class Left(Event, frozen=True, kw_only=True):
    TYPE = "penstock.node.left"
    TOPIC = Topic.NODES

    proof: Literal["shutdown", "deleted", "fenced", "lease_outlived", "hearsay"]


class Stopped(Event, frozen=True, kw_only=True):
    TYPE = "penstock.stop.decided"

    reason: str


class Answered(Event, frozen=True, kw_only=True):
    TYPE = "penstock.order.answer_join"
    TOPIC = Topic.ORDERS

    verdict: Literal["accepted", "stale_join", "other_machine", "gpu_of_another_node", "drained"]


class CancelSecond(Cancel, frozen=True, kw_only=True):
    VERSION = 2

    asked_by: Identifier


# ----------------------------------------------------------------------------------------- as it stands


def test_nothing_has_drifted() -> None:
    """Somebody changed a model and forgot `make schemas`."""
    assert check(ROOT / "schemas", Catalogue.current()) == []


def test_the_command_answers_for_ci() -> None:
    """CI runs the command; its exit status is the gate."""
    done = subprocess.run(
        [sys.executable, "-m", "infra.codegen.schemas", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{len(REGISTRY)} events" in done.stdout


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_examples_fit_their_schema(name: str) -> None:
    """Another team generates its producer from our schema: it must accept what we ourselves write."""
    model = REGISTRY[name]
    schema = json.loads((ROOT / f"schemas/events/{model.TYPE}/v{model.VERSION}.json").read_text())
    example = json.loads((ROOT / f"schemas/examples/{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(example)
    assert schema["$id"] == name
    validator.validate({**example, "field_of_the_future": 1})
    for field in schema.get("required", ()):
        with pytest.raises(jsonschema.ValidationError, match=field):
            validator.validate({key: value for key, value in example.items() if key != field})


def test_generating_again_writes_nothing(published: Path) -> None:
    """Two people run `make schemas`: the second one's working tree stays clean."""
    assert generate(published, Catalogue.current()) == ([], [])


def test_generating_from_nothing_gives_the_same_files(tmp_path: Path) -> None:
    """Every file is a function of the models, on any machine."""
    written, refused = generate(tmp_path, Catalogue.current())
    assert not refused
    for path in written:
        assert (tmp_path / path).read_bytes() == (ROOT / "schemas" / path).read_bytes(), path
    assert check(tmp_path, Catalogue.current()) == []


# -------------------------------------------------------------------------------------- edits of the files


def test_an_edit_of_a_published_schema_is_refused(published: Path) -> None:
    """Somebody loosens a bound in the JSON file, since that is where the error message pointed."""
    file = published / CANCEL_FILE
    file.write_text(file.read_text().replace("1024", "4096"))
    (problem,) = check(published, Catalogue.current())
    assert CANCEL_FILE in problem
    assert "edited" in problem
    assert "git checkout" in problem
    assert generate(published, Catalogue.current()) == ([], [problem]), "generating must not heal it silently"


def test_an_edit_of_a_golden_example_is_refused(published: Path) -> None:
    """Somebody makes a failing replay test pass by changing the golden file."""
    file = published / f"examples/{CANCEL}.v1.json"
    file.write_text(file.read_text().replace("learning", "burning"))
    (problem,) = check(published, Catalogue.current())
    assert f"examples/{CANCEL}.v1.json" in problem


def test_a_removed_file_is_refused(published: Path) -> None:
    """A clean-up deletes a schema that nobody seemed to use."""
    (published / CANCEL_FILE).unlink()
    problems = check(published, Catalogue.current())
    assert any(CANCEL_FILE in text and "missing" in text for text in problems)
    assert generate(published, Catalogue.current())[0] == []


def test_a_stray_file_is_refused(published: Path) -> None:
    """A schema is written by hand for an event that does not exist."""
    (published / "events/penstock.job.dreamt").mkdir()
    (published / "events/penstock.job.dreamt/v1.json").write_text("{}")
    (problem,) = check(published, Catalogue.current())
    assert "penstock.job.dreamt" in problem
    assert "delete it" in problem


def test_an_edit_of_the_asyncapi_file_is_drift(published: Path) -> None:
    """It is derived and not locked: generating repairs it."""
    file = published / "asyncapi.yaml"
    file.write_text(file.read_text() + "# mine\n")
    (problem,) = check(published, Catalogue.current())
    assert "asyncapi.yaml" in problem
    assert "make schemas" in problem
    assert generate(published, Catalogue.current()) == (["asyncapi.yaml"], [])
    assert check(published, Catalogue.current()) == []


# ------------------------------------------------------------------------------------ changes of the models


def test_a_new_optional_field_adds_a_revision(published: Path) -> None:
    """The common good change: the file is written again, the lock only grows, and the old line stays."""
    catalogue, before = with_model(CancelWithMore), lock_lines(published)
    problems = check(published, catalogue)
    assert any(CANCEL_FILE in text and "make schemas" in text for text in problems)
    written, refused = generate(published, catalogue)
    assert refused == []
    assert CANCEL_FILE in written
    after = lock_lines(published)
    assert after[: len(before)] == before
    digest = sha256((published / CANCEL_FILE).read_bytes()).hexdigest()
    assert f"{digest}  {CANCEL_FILE}" in after[len(before) :]
    assert check(published, catalogue) == []


@pytest.mark.parametrize(
    ("model", "field", "text"),
    [
        (CancelDemandingMore, "asked_by", "a new field is required"),
        (CancelWithLess, "reason", "the field was removed"),
        (CancelShorter, "reason", "maxLength was tightened from 1024 to 64"),
        (CancelOtherwise, "reason", "its default changed"),
        (CancelDemanded, "reason", "an optional field became required"),
    ],
)
def test_incompatible_changes_are_refused(published: Path, model: type[Event], field: str, text: str) -> None:
    """A year of ledger was written under version 1; this change would make it unreadable or mean another
    thing."""
    before = {path: path.read_bytes() for path in published.rglob("*") if path.is_file()}
    problems = check(published, with_model(model))
    reported = [problem for problem in problems if f"field {field}:" in problem]
    assert len(reported) == 1
    assert CANCEL_FILE in reported[0]
    assert text in reported[0]
    assert "raise VERSION" in reported[0]
    assert "upcaster" in reported[0]
    assert generate(published, with_model(model))[0] == []
    assert {path: path.read_bytes() for path in published.rglob("*") if path.is_file()} == before


def test_a_new_version_needs_an_upcaster(published: Path) -> None:
    """The version was raised, but old records would be dead-lettered on the next restart."""
    problems = check(published, with_model(CancelSecond))
    assert any(CANCEL_FILE in text and "nothing reads it any more" in text for text in problems)
    upcast = with_model(CancelSecond, (CANCEL, 1))
    assert ["is new, and readers of 0.1.0 stop at it" in text for text in generate(published, upcast)[1]] == [
        True
    ]
    upcast = replace(upcast, additions={**upcast.additions, CancelSecond: [Addition(ANY)]})
    written, refused = generate(published, upcast)
    assert refused == []
    assert f"events/{CANCEL}/v2.json" in written
    assert (published / CANCEL_FILE).read_bytes() == (ROOT / "schemas" / CANCEL_FILE).read_bytes()
    assert check(published, upcast) == []


@pytest.mark.parametrize(
    ("model", "field", "what", "remedy"),
    [
        (CancelLonger, "reason", "its bound was widened from 1024 to 2048", "penstock.model.wire.additions"),
        (Exited, "cause", "new values: evicted", "penstock.model.wire.additions"),
        (Left, "proof", "new values: hearsay", "they lose the whole report; say it in a new optional field"),
        (Stopped, "reason", "any value is allowed now", "penstock.model.wire.additions"),
        (Answered, "verdict", "new values: drained", "raise VERSION"),
    ],
)
def test_what_readers_of_the_release_refuse_is_refused(
    model: type[Event], field: str, what: str, remedy: str
) -> None:
    """A field gets one more value under the same version: the services of last week would stop at its first
    record."""
    schemas = {model: event_schema(model)}
    [problem] = problems(ROOT / "schemas" / RELEASED, schemas, {})
    assert problem.startswith(f"{wire_type(model)} field {field}: {what}; readers of 0.1.0 refuse that: ")
    assert remedy in problem
    row = Addition(ANY, field, frozenset({"evicted"}))
    left = problems(ROOT / "schemas" / RELEASED, schemas, {model: [row]})
    assert left == ([] if "additions" in remedy else [problem])


@pytest.mark.parametrize(
    ("version", "text"), [("0.0.9", "released without it"), ("9.9.9", "and this is 0.1.0")]
)
def test_a_mark_names_the_next_version(version: str, text: str) -> None:
    """A developer adds a value of today and names the version of last month, or one that nobody will
    write."""
    row = Addition(version, "cause", frozenset({"evicted"}))
    [problem] = problems(ROOT / "schemas" / RELEASED, {Exited: event_schema(Exited)}, {Exited: [row]})
    assert text in problem


def test_a_published_event_cannot_vanish(published: Path) -> None:
    """An event that nobody writes any more is deleted, while ledgers are full of it."""
    current = Catalogue.current()
    models = {name: model for name, model in current.models.items() if model.TYPE != CANCEL}
    problems = check(published, Catalogue(models, current.examples, ()))
    assert any(CANCEL_FILE in text and "nothing reads it any more" in text for text in problems)


def test_an_event_without_example_is_refused(published: Path) -> None:
    """Its replay would never be tested."""
    catalogue = with_model(CancelSecond, (CANCEL, 1))
    bare = Catalogue(catalogue.models, EXAMPLES, catalogue.upcasters)
    (problem,) = check(published, bare)
    assert f"{CANCEL}.v2: the event has no example" in problem
    assert "examples.py" in problem


# -------------------------------------------------------------------------- the compatibility rules, one by
# one


def schema_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": sorted(properties)}


OPTIONAL_INT = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ({"type": "string", "enum": ["a", "b"]}, {"type": "string", "enum": ["a"]}, "values were removed: b"),
        ({"type": "string"}, {"type": "string", "enum": ["a"]}, "only some values are allowed now"),
        ({"type": "string", "enum": ["a", "b"]}, {"type": "string", "const": "a"}, "values were removed: b"),
        ({"type": "number"}, {"type": "integer"}, "type narrowed: number"),
        ({"type": "integer"}, {"type": "string"}, "type narrowed: integer"),
        ({}, {"type": "string"}, "type narrowed: any"),
        (OPTIONAL_INT, {"type": "integer", "minimum": 0}, "type narrowed: null"),
        (
            OPTIONAL_INT,
            {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
            "minimum was tightened",
        ),
        ({"type": "integer", "maximum": 9}, {"type": "integer", "maximum": 8}, "maximum was tightened"),
        ({"type": "integer"}, {"type": "integer", "exclusiveMaximum": 8}, "exclusiveMaximum was tightened"),
        ({"type": "string"}, {"type": "string", "pattern": "^a"}, "pattern changed"),
        ({"type": "array"}, {"type": "array", "items": {"type": "string"}}, "items was narrowed"),
        (
            {"type": "array", "items": {"type": "number"}},
            {"type": "array", "items": {"type": "integer"}},
            "type narrowed",
        ),
        (
            {"type": "object"},
            {"type": "object", "additionalProperties": False},
            "additionalProperties was narrowed",
        ),
        ({"type": "string"}, {"type": "string", "format": "uuid"}, "cannot be judged"),
    ],
)
def test_each_narrowing_is_found(old: dict[str, Any], new: dict[str, Any], text: str) -> None:
    """Each of these passes a careless review."""
    found = breaks(schema_of(field=old), schema_of(field=new))
    assert [place for place, _ in found] in (["field"], ["field[]"], ["field.*"])
    assert text in found[0].text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a", "b"]}),
        ({"type": "integer"}, {"type": "number"}),
        ({"type": "integer", "minimum": 0}, OPTIONAL_INT),
        ({"type": "integer", "minimum": 1}, {"type": "integer", "minimum": 0}),
        ({"type": "string", "pattern": "^a"}, {"type": "string"}),
        ({"type": "string"}, {"type": "string", "description": "Now with words."}),
        ({"type": "object", "default": {"a": 1}}, {"type": "object", "default": {"a": 1, "b": None}}),
    ],
)
def test_widenings_are_allowed(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Growth must stay easy, or people will work around the guard."""
    assert breaks(schema_of(field=old), schema_of(field=new)) == []


class Cause(Value, frozen=True, kw_only=True):
    kind: Literal["exited", "lost"]


class Before(Event, frozen=True, kw_only=True):
    TYPE = "test.nested"

    causes: tuple[Cause, ...]


class NarrowCause(Value, frozen=True, kw_only=True):
    kind: Literal["exited"]
    code: int


class After(Event, frozen=True, kw_only=True):
    TYPE = "test.nested"

    causes: tuple[NarrowCause, ...]


def test_breaks_are_found_inside_lists_of_nouns() -> None:
    """The change hides in a noun that an event uses; nobody thinks of the event."""
    assert breaks(event_schema(Before), event_schema(After)) == [
        ("causes[].kind", "values were removed: lost"),
        ("causes[].code", "a new field is required"),
    ]


# --------------------------------------------------------------------------------------------- AsyncAPI


def asyncapi_document() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "schemas/asyncapi.yaml").read_text())
    return document


def test_asyncapi_is_about_every_topic_and_event() -> None:
    """Whoever integrates reads this one file: topic, key, who may write, messages."""
    document = asyncapi_document()
    assert structure_problems(document, ROOT / "schemas") == []
    by_address = {channel["address"]: channel for channel in document["channels"].values()}
    assert set(by_address) == {str(topic) for topic in Topic}
    assert by_address["penstock.ledger.v1"]["x-written-by"] == ["placer"], "LAW 1"
    assert by_address["penstock.orders.v1"]["x-key"] == "node"
    messages = {name for channel in by_address.values() for name in channel["messages"]}
    facts = set(document["x-ledger-facts"]["facts"])
    assert messages | facts == set(REGISTRY)
    assert not messages & facts


def test_asyncapi_examples_fit_headers_and_payload() -> None:
    """The examples are what people copy."""
    document = asyncapi_document()
    headers = document["components"]["messageTraits"]["cloudEvent"]["headers"]
    for message in document["components"]["messages"].values():
        schema = json.loads((ROOT / "schemas" / message["payload"]["schema"]["$ref"]).read_text())
        for example in message["examples"]:
            jsonschema.validate(example["headers"], headers)
            jsonschema.validate(example["payload"], schema)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda d: d.update(asyncapi="2.6.0"), "version 3"),
        (lambda d: d["info"].pop("version"), "info: version is missing"),
        (lambda d: d["channels"].pop("ledger"), "topic penstock.ledger.v1 has no channel"),
        (lambda d: d["channels"]["jobs"].pop("address"), "channels.jobs: address is missing"),
        (lambda d: d["channels"]["jobs"].update(publish={}), "publish is no field"),
        (lambda d: d["operations"]["placer.writes.ledger"].update(action="publish"), "send or receive"),
        (
            lambda d: d["operations"]["placer.writes.ledger"].update(channel={"$ref": "#/channels/jobs"}),
            "not of its channel",
        ),
        (lambda d: d["components"]["messages"].pop("penstock.job.submitted.v1"), "leads nowhere"),
        (
            lambda d: d["components"]["messages"]["penstock.job.submitted.v1"]["payload"]["schema"].update(
                {"$ref": "events/none/v1.json"}
            ),
            "events/none/v1.json leads nowhere",
        ),
    ],
)
def test_the_structural_check_notices(spoil: Any, text: str) -> None:
    """Each way in which the file could stop being AsyncAPI 3 without anybody seeing it."""
    document = asyncapi_document()
    spoil(document)
    assert any(text in problem for problem in structure_problems(document, ROOT / "schemas"))
