"""What the readers of the latest release know, and whether they can go on beside the present writers.

`schemas/released.json` holds, for each event and field, the closed list of values and the largest bound that
the release reads. `python -m infra.codegen.released` writes the file when a version is released; nothing else
does. An old reader refuses a value that is not in there. So what is new needs a row that says what such a
reader does (decision 127):

| where | what is needed |
|---|---|
| facts of ledger records | a row in `penstock.model.wire.additions` |
| reports of nodes and estimator | that row; and the release takes another value instead
(`penstock.model.wire.nearest`) |
| orders, amendments, the ledger record itself | nothing helps: raise VERSION, or add a field |
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.model.wire.additions import ADDITIONS, ANY, Addition, is_earlier
from penstock.model.wire.nearest import TOLERATED

RELEASED = "released.json"
TOLERANT = (Topic.NODES, Topic.ESTIMATES)
BELIEVED = (Topic.ORDERS, Topic.AMENDMENTS, Topic.LEDGER)
"""Readers of these topics take an event as it is, or not at all."""

Facets = dict[str, dict[str, Any]]
"""Path of a field → `values` (a list), `most` (a number) and `otherwise` (read in place of unknown
values)."""
Additions = Mapping[type[Event], Sequence[Addition]]


def facets(schema: Mapping[str, Any], kind: str) -> Facets:
    """Of one event's JSON Schema."""
    found: Facets = {}
    tolerated = TOLERATED.get(kind, {})
    for path, name, value in _walk(schema, schema, ""):
        here = found.setdefault(path, {})
        if name == "field":
            continue
        if name == "values":
            here[name] = sorted({*here.get(name, ()), *value}, key=str)
        else:
            here[name] = max(here.get(name, value), value)
        field = path.rpartition(".")[2]
        if name == "values" and tolerated.get(field) is not None:
            here["otherwise"] = tolerated[field]
    return found


def _walk(schema: Mapping[str, Any], root: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    if "$ref" in schema:
        schema = root["$defs"][str(schema["$ref"]).rpartition("/")[2]]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        yield path, "values", values
    for name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
        if name in schema:
            yield path, "most", schema[name]
    for inner in schema.get("anyOf", ()):
        yield from _walk(inner, root, path)
    for name, inner in schema.get("properties", {}).items():
        if inner.get("deprecated"):
            continue  # never written
        below = f"{path}.{name}" if path else name
        yield below, "field", None
        yield from _walk(inner, root, below)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _walk(schema[key], root, path)


def release(schemas: Mapping[type[Event], Mapping[str, Any]]) -> bytes:
    """The file's bytes, for this version."""
    events = {wire_type(model): facets(schema, model.TYPE) for model, schema in schemas.items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(events[name])}" for name in sorted(events)]
    return (f'{{"version": "{__version__}", "events": {{\n' + ",\n".join(lines) + "\n}}\n").encode()


def problems(
    file: Path, schemas: Mapping[type[Event], Mapping[str, Any]], additions: Additions = ADDITIONS
) -> list[str]:
    """What readers of the release cannot read, each with the event, the field and the remedy; nothing where
    nothing was released."""
    if not file.is_file():
        return []
    body = json.loads(file.read_bytes())
    found = [
        problem for model, rows in additions.items() for problem in _bad_rows(model, rows, body["version"])
    ]
    for model, schema in schemas.items():
        before = body["events"].get(wire_type(model))
        rows = additions.get(model, ())
        if before is None:
            found += _of_new_type(model, rows, body["version"])
        else:
            found += _of_fields(model, before, facets(schema, model.TYPE), rows, body["version"])
    return found


def _bad_rows(model: type[Event], rows: Iterable[Addition], version: str) -> Iterator[str]:
    for row in rows:
        where = f"penstock.model.wire.additions: {wire_type(model)} {row.field}".rstrip()
        if row.needs != ANY and not is_earlier(version, row.needs):
            yield (
                f"{where}: needs {row.needs}, which was released without it; raise penstock.__version__ "
                "and name that"
            )
        if is_earlier(__version__, row.needs):
            yield f"{where}: needs {row.needs}, and this is {__version__}: raise penstock.__version__"


def _of_new_type(model: type[Event], rows: Sequence[Addition], version: str) -> Iterator[str]:
    in_records = model.TOPIC is None or model.TOPIC in INPUT_TOPICS
    if in_records and not any(not row.field for row in rows):
        yield (
            f"{wire_type(model)} is new, and readers of {version} stop at it in a ledger record; say in "
            "penstock.model.wire.additions whether they may leave it out"
        )


def _of_fields(
    model: type[Event], before: Facets, now: Facets, rows: Sequence[Addition], version: str
) -> Iterator[str]:
    for path, known in before.items():
        new = _beyond(known, now[path]) if path in now else ""
        if new and (remedy := _remedy(model, path, known, rows)):
            yield f"{wire_type(model)} field {path}: {new}; readers of {version} refuse that: {remedy}"


def _beyond(known: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What readers of the release refuse; empty: nothing."""
    if "values" in known:
        if "values" not in here:
            return "any value is allowed now"
        added = [value for value in here["values"] if value not in known["values"]]
        if added:
            return f"new values: {', '.join(map(str, added))}"
    if "most" in known and here.get("most", float("inf")) > known["most"]:
        return f"its bound was widened from {known['most']} to {here.get('most', 'none')}"
    return ""


def _remedy(model: type[Event], path: str, known: Mapping[str, Any], rows: Sequence[Addition]) -> str:
    """What is still to do; empty: nothing."""
    if model.TOPIC in (Topic.TELEMETRY, Topic.DEAD_LETTERS):
        return ""  # no state depends on them
    if model.TOPIC in BELIEVED:
        return "raise VERSION, or say it in a new optional field"
    if model.TOPIC in TOLERANT and "values" in known and "otherwise" not in known:
        return "they lose the whole report; say it in a new optional field"
    if not any(row.field == path for row in rows):
        return "add a row to penstock.model.wire.additions, or say it in a new optional field"
    return ""


def main() -> int:
    """Writes the file for this version."""
    from infra.codegen.schemas import ROOT, event_schema
    from penstock.model.schema.event import REGISTRY

    schemas = {model: event_schema(model) for model in REGISTRY.values()}
    (ROOT / "schemas" / RELEASED).write_bytes(release(schemas))
    print(f"schemas/{RELEASED}: what Penstock {__version__} reads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
