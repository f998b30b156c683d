"""Old versions live for ever: each published one is replayed, and the chain itself is proven on a test
event."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.codegen.schemas import LOCK, ROOT
from penstock.model.schema.errors import Invalid, UnknownVersion
from penstock.model.schema.event import REGISTRY, Event
from penstock.model.wire import codec
from penstock.model.wire.codec import decode, decode_fact, encode
from penstock.model.wire.upcasters import UPCASTERS

GOLDEN = sorted((ROOT / "schemas/examples").glob("*.json"))


def optional_paths(data: Any, schema: dict[str, Any], root: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of the optional fields that are present, nested objects included."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    for name, inner in schema.get("properties", {}).items():
        if isinstance(data, dict) and name in data:
            if name not in schema.get("required", ()):
                yield (name,)
            yield from ((name, *path) for path in optional_paths(data[name], inner, root))


def without(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A copy that lacks one field."""
    copy: dict[str, Any] = json.loads(json.dumps(data))
    place = copy
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return copy


def test_every_published_version_has_its_golden_file() -> None:
    """A version that is published without a golden file would never be replayed."""
    lines = [line for line in (ROOT / "schemas" / LOCK).read_text().splitlines() if not line.startswith("#")]
    published = {line.partition("  ")[2] for line in lines}
    versions = {
        path.removeprefix("events/").removesuffix(".json").replace("/", ".")
        for path in published
        if path.startswith("events/")
    }
    assert versions == {path.stem for path in GOLDEN}
    assert versions >= set(REGISTRY)


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.stem)
def test_golden_files_of_every_version_replay(file: Path) -> None:
    """A ledger of years is replayed by today's code: each version's record becomes a current event."""
    wire = file.read_bytes()
    event = decode(file.stem, wire)
    current = f"{event.TYPE}.v{event.VERSION}"
    assert REGISTRY[current] is type(event)
    assert decode(current, encode(event)) == event
    if file.stem == current:
        assert encode(event) == wire.rstrip(b"\n")
    assert decode_fact(file.stem, wire) == event


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.stem)
def test_records_from_before_an_optional_field_replay(file: Path) -> None:
    """Optional fields came one by one; a record from before each of them must still be read."""
    data = json.loads(file.read_bytes())
    base, _, version = file.stem.rpartition(".v")
    schema = json.loads((ROOT / f"schemas/events/{base}/v{version}.json").read_text())
    for path in optional_paths(data, schema, schema):
        decode(file.stem, json.dumps(without(data, path)).encode())


def test_the_upcasters_form_whole_chains() -> None:
    """A gap in a chain would be noticed by the first user with an old ledger."""
    current = {model.TYPE: model.VERSION for model in REGISTRY.values()}
    for type_name, version in UPCASTERS:
        assert type_name in current
        for step in range(version, current[type_name]):
            assert (type_name, step) in UPCASTERS


# ------------------------------------------------------------------------------------ the chain, on a test
# event


class Renamed(Event, frozen=True, kw_only=True):
    """Version 1 had `seconds`; version 2 `duration_s`; version 3 counts milliseconds and has a mandatory
    unit."""

    TYPE = "test.run.measured"
    VERSION = 3

    duration_ms: int
    measured_by: str = "unknown"


def v1_to_v2(data: dict[str, Any]) -> dict[str, Any]:
    return {"duration_s": data["seconds"]}


def v2_to_v3(data: dict[str, Any]) -> dict[str, Any]:
    return {"duration_ms": data["duration_s"] * 1_000, "measured_by": data.get("by", "unknown")}


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test event is known for the length of one test; the product's registry is as before afterwards."""
    before = dict(REGISTRY)
    steps = {("test.run.measured", 1): v1_to_v2, ("test.run.measured", 2): v2_to_v3}
    with monkeypatch.context() as patch:
        patch.setitem(REGISTRY, "test.run.measured.v3", Renamed)
        patch.setattr(codec, "UPCASTERS", {**UPCASTERS, **steps})
        yield
    assert before == REGISTRY


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize(
    ("name", "wire", "expected"),
    [
        ("test.run.measured.v1", b'{"seconds": 90}', Renamed(duration_ms=90_000)),
        (
            "test.run.measured.v2",
            b'{"duration_s": 90, "by": "node-a1"}',
            Renamed(duration_ms=90_000, measured_by="node-a1"),
        ),
        ("test.run.measured.v3", b'{"duration_ms": 90000}', Renamed(duration_ms=90_000)),
    ],
)
def test_each_version_climbs_to_the_current_one(name: str, wire: bytes, expected: Event) -> None:
    """Records of three generations of writers lie in one ledger."""
    assert decode(name, wire) == expected
    assert decode_fact(name, wire) == expected


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize("version", ["0", "4", "01", "", "x"])
def test_versions_outside_the_chain_are_unknown(version: str) -> None:
    """A newer service is already running somewhere: its version 4 must not be guessed at."""
    for reader in (decode, decode_fact):
        with pytest.raises(UnknownVersion, match=r"writes test\.run\.measured\.v3"):
            reader(f"test.run.measured.v{version}", b"{}")


@pytest.mark.usefixtures("chain")
@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"{}",
        b"[]",
        b'{"seconds": null}',
        b'{"seconds": {}}',
        b'{"seconds": "x"}',
        b'{"seconds": NaN}',
        b'{"seconds": 90',
        b'{"seconds": ' + b"[" * 30_000,
        b'{"seconds": "\xff"}',
    ],
)
def test_broken_old_records_are_invalid_not_a_crash(wire: bytes) -> None:
    """An upcaster rests on the fields of its version; bytes that lack them go to the dead letters."""
    with pytest.raises(Invalid):
        decode("test.run.measured.v1", wire)
