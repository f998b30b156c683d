"""Generator and guard of the published schemas in `schemas/`: `python -m infra.codegen.schemas [--check]`.

| file | what |
|---|---|
| `events/<type>/v<N>.json` | JSON Schema 2020-12 of one version of one event |
| `examples/<type>.v<N>.json` | exactly the bytes of one realistic event of that version |
| `job.schema.json` | the job file that users write |
| `asyncapi.yaml` | topics, rights and messages |
| `released.json` | values and bounds that readers of the latest release know (`infra.codegen.released`) |
| `published.lock` | sha256 of every published file, one line per revision; lines are only ever added |

A published file changes in one way only: the models gain something compatible (a new optional field, a
wider range, a better description), and `make schemas` writes the file again and adds a line. Everything else
is refused, here and by `--check`: an edit by hand, a removed file, an incompatible change of a model. For
that, raise `VERSION` and add an upcaster; the old files stay.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

import penstock
from infra.codegen.asyncapi import asyncapi, structure_problems
from infra.codegen.compatibility import breaks
from infra.codegen.examples import EXAMPLES, example_bytes
from infra.codegen.field_docs import field_docs
from infra.codegen.job_schema import job_schema
from infra.codegen.released import RELEASED, Additions, problems
from penstock.model.schema.event import REGISTRY, Event, wire_type
from penstock.model.schema.validation import STRUCT_OF, form
from penstock.model.wire.additions import ADDITIONS
from penstock.model.wire.json_schema import Generator
from penstock.model.wire.upcasters import UPCASTERS

ROOT = Path(__file__).resolve().parents[2]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
LOCK, ASYNCAPI, JOB_SCHEMA = "published.lock", "asyncapi.yaml", "job.schema.json"
LOCK_HEADER = "# sha256 and path of every published file, one line per revision. Lines are only ever added.\n"
GENERATE = "run `make schemas` and commit what it writes"
RAISE_VERSION = (
    "raise VERSION on the model and add an upcaster to penstock/events/upcasters.py; the published file stays"
)


KEEP_OLD_FORM = "job files of users must stay valid: read the old form beside the new"


@dataclass(frozen=True)
class Catalogue:
    """The models to publish. Tests use altered ones; the product's is `Catalogue.current()`."""

    models: Mapping[str, type[Event]]
    examples: Mapping[str, Event]
    upcasters: Iterable[tuple[str, int]]
    """Type and version that can be raised by one."""
    additions: Additions = field(default_factory=lambda: ADDITIONS)
    """What readers of the release may do about what is new."""

    @classmethod
    def current(cls) -> "Catalogue":
        return cls(dict(REGISTRY), EXAMPLES, list(UPCASTERS))


@dataclass
class Findings:
    """`refused`: what no generation may repair. `stale`: path → bytes that `make schemas` would write."""

    refused: list[str] = field(default_factory=list)
    stale: dict[str, bytes] = field(default_factory=dict)
    lock: dict[str, list[str]] = field(default_factory=dict)
    """Path → digests of its revisions, oldest first, as they stand."""


FORMERLY = "Read, as earlier releases wrote it; never written."


class _Generator(Generator):
    """Readers ignore unknown fields, so the schema allows them; fields carry their docstrings."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        found.pop("additionalProperties", None)
        if "description" in found:  # how wide the code's lines are is no reader's concern
            paragraphs = found["description"].split("\n\n")
            found["description"] = "\n\n".join(" ".join(text.split()) for text in paragraphs)
        for name, text in field_docs(STRUCT_OF[schema["cls"]]).items():
            found["properties"][name]["description"] = text
        for name in STRUCT_OF[schema["cls"]].FORMER:
            found["properties"][name] = {"deprecated": True, "description": FORMERLY}
        return found

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def event_schema(model: type[Event]) -> dict[str, Any]:
    """JSON Schema of what goes over the wire for this event and version."""
    schema = form(model).model_json_schema(schema_generator=_Generator)
    return {"$schema": DIALECT, "$id": wire_type(model), **schema}


@cache
def _event_schema_file(model: type[Event]) -> bytes:
    return _pretty(event_schema(model))


def published_files(catalogue: Catalogue) -> dict[str, bytes]:
    """Path below `schemas/` → content of every file that the lock guards, current versions only."""
    files = {JOB_SCHEMA: _pretty(job_schema())}
    for name, model in sorted(catalogue.models.items()):
        files[f"events/{model.TYPE}/v{model.VERSION}.json"] = _event_schema_file(model)
        files[f"examples/{name}.json"] = example_bytes(catalogue.examples[name])
    return files


def _pretty(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def asyncapi_file(catalogue: Catalogue) -> bytes:
    """`asyncapi.yaml` of this version."""
    version = penstock.__version__
    document = asyncapi(list(catalogue.models.values()), catalogue.examples, ROOT, version)
    text = yaml.dump(document, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=110)
    return f"# Generated by `make schemas`; do not edit.\n{text}".encode()


class _Plain(yaml.SafeDumper):
    """Without anchors: people read this file."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def inspect(folder: Path, catalogue: Catalogue) -> Findings:
    """Compares `folder` with the present models; changes nothing."""
    without = [name for name in catalogue.models if name not in catalogue.examples]
    if without:
        remedy = "add one to infra/codegen/examples.py"
        return Findings([f"{name}: the event has no example; {remedy}" for name in without])
    found = Findings(lock=_read_lock(folder))
    current = published_files(catalogue)
    for path, digests in found.lock.items():
        _inspect_published(folder, path, digests[-1], current.get(path), found)
        if path not in current:
            _inspect_old(path, catalogue, found)
    for path, content in current.items():
        if path not in found.lock:
            found.stale[path] = content
    document, file = asyncapi_file(catalogue), folder / ASYNCAPI
    if not file.is_file() or file.read_bytes() != document:
        found.stale[ASYNCAPI] = document
    schemas = {model: json.loads(_event_schema_file(model)) for model in catalogue.models.values()}
    found.refused += [
        f"schemas/{RELEASED}: {text}" for text in problems(folder / RELEASED, schemas, catalogue.additions)
    ]
    known = {*found.lock, *current, ASYNCAPI, LOCK, RELEASED}
    found.refused += [
        f"schemas/{path}: no model and no published version makes this file; delete it"
        for path in sorted(_files(folder) - known)
    ]
    return found


def _inspect_published(folder: Path, path: str, digest: str, current: bytes | None, found: Findings) -> None:
    """One locked file: it must match the lock, and the present models must be compatible with it."""
    file, restore = folder / path, f"restore it (`git checkout schemas/{path}`)"
    if not file.is_file():
        found.refused.append(f"schemas/{path}: a published file is missing; {restore}")
        return
    content = file.read_bytes()
    if sha256(content).hexdigest() != digest:
        found.refused.append(
            f"schemas/{path}: a published file was edited (its sha256 is not the one in {LOCK}); "
            f"{restore} and change the model instead"
        )
        return
    if current is None or content == current:
        return
    incompatible: list[str] = []
    if not path.startswith("examples/"):
        remedy = RAISE_VERSION if path.startswith("events/") else KEEP_OLD_FORM
        incompatible = [
            f"schemas/{path}: field {place}: {text}; {remedy}"
            for place, text in breaks(json.loads(content), json.loads(current))
        ]
    if incompatible:
        found.refused += incompatible
    else:
        found.stale[path] = current


def _inspect_old(path: str, catalogue: Catalogue, found: Findings) -> None:
    """A locked file of a version that the models no longer write must still be readable."""
    if not path.startswith("events/"):
        return
    type_name, version = path.removeprefix("events/").removesuffix(".json").split("/v")
    if (type_name, int(version)) not in set(catalogue.upcasters):
        found.refused.append(
            f"schemas/{path}: {type_name} version {version} was published, but nothing reads it any more; "
            "bring the model back, or raise it by an upcaster in penstock/events/upcasters.py"
        )


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _read_lock(folder: Path) -> dict[str, list[str]]:
    lock: dict[str, list[str]] = {}
    file = folder / LOCK
    for line in file.read_text().splitlines() if file.is_file() else ():
        if not line.startswith("#"):
            digest, _, path = line.partition("  ")
            lock.setdefault(path, []).append(digest)
    return lock


def check(folder: Path, catalogue: Catalogue) -> list[str]:
    """Everything that is wrong with `folder`, each with file, field and remedy; empty when all is well."""
    found = inspect(folder, catalogue)
    problems = [
        *found.refused,
        *(f"schemas/{path}: differs from the models; {GENERATE}" for path in found.stale),
    ]
    if not problems:
        document = yaml.load((folder / ASYNCAPI).read_text(), Loader=_FAST_LOADER)
        problems = [f"schemas/{ASYNCAPI}: {text}" for text in structure_problems(document, folder)]
    return problems


_FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def generate(folder: Path, catalogue: Catalogue) -> tuple[list[str], list[str]]:
    """Writes what is stale and adds lock lines: (paths written, refusals). With refusals nothing is
    written."""
    found = inspect(folder, catalogue)
    if found.refused:
        return [], found.refused
    added = ""
    for path, content in found.stale.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        if path != ASYNCAPI:
            added += f"{sha256(content).hexdigest()}  {path}\n"
    lock = folder / LOCK
    if added:
        before = lock.read_text() if lock.is_file() else LOCK_HEADER
        lock.write_text(before + added)
    return sorted(found.stale), []


def main(arguments: list[str]) -> int:
    """0: all is well or was written; 1: refused or drifted, each problem on stderr; 2: usage."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m infra.codegen.schemas [--check]", file=sys.stderr)
        return 2
    folder, catalogue = ROOT / "schemas", Catalogue.current()
    if arguments:
        problems = check(folder, catalogue)
        done = f"schemas: {len(catalogue.models)} events, all as published"
    else:
        written, problems = generate(folder, catalogue)
        done = f"schemas: {len(written)} files written"
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(done)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
