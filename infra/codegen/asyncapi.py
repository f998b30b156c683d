"""`schemas/asyncapi.yaml`: topics, keys, rights and messages as an AsyncAPI 3 document, and its structural
check.

Rights come from `infra/kafka/acls.yaml`, which the broker enforces; channels from `Topic`; messages from the
registry of events.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from infra.codegen.scenario import JOB, START_MS
from penstock.model.schema.event import Event, wire_type
from penstock.model.schema.topics import CELL_TOPICS, MAX_EVENT_BYTES, MAX_PLAN_BYTES, NODE_PARTITIONS, Topic
from penstock.model.wire.codec import encode
from penstock.model.wire.envelope import Envelope, to_wire

ASYNCAPI_VERSION = "3.0.0"
KAFKA_BINDING_VERSION = "0.5.0"
JSON_SCHEMA_FORMAT = "application/schema+json;version=draft-2020-12"

ABOUT_TOPIC: Mapping[Topic, str] = {
    Topic.JOBS: "Requests of users about jobs.",
    Topic.ESTIMATES: "Estimates of each job's resources and times, and new versions of the models that make "
    "them.",
    Topic.NODES: "Reports of nodes about their inventory, departure and tasks, and operators' commands on "
    "nodes.",
    Topic.PROPOSALS: "Proposals of other services; the placer answers each one.",
    Topic.LEDGER: "One record per input: the only source of the cell's state. Written by one placer at a "
    "time.",
    Topic.AMENDMENTS: "What readers take in place of ledger records that they cannot decode; written for an "
    "operator, kept with the ledger.",
    Topic.ORDERS: "Orders to nodes, derived from valid ledger records; each node reads its partition.",
    Topic.TELEMETRY: "Samples that crossed a threshold on their node.",
    Topic.GUARD_WINDOWS: "Changelog of the contention-guard's windows of telemetry, in a format of its own, "
    "on Kafka only.",
    Topic.DEAD_LETTERS: "Records that could not be read or applied: their place, the reason and an outline.",
}

Document = dict[str, Any]


def topic_key(topic: Topic) -> str:
    """What a topic's records are keyed by: `cell`, `node` or `source topic`."""
    if topic in CELL_TOPICS:
        return "cell"
    return "source topic" if topic is Topic.DEAD_LETTERS else "node"


def rights(root: Path, verb: str) -> dict[Topic, list[str]]:
    """Topic → identities that may `write` or `read` it, sorted. Source: infra/kafka/acls.yaml."""
    acls = yaml.safe_load((root / "infra/kafka/acls.yaml").read_text())
    return {topic: sorted(who for who, may in acls.items() if str(topic) in may[verb]) for topic in Topic}


def short_name(topic: Topic) -> str:
    """`jobs` for `penstock.jobs.v1`."""
    return str(topic).split(".")[1]


def asyncapi(
    models: Iterable[type[Event]], examples: Mapping[str, Event], root: Path, version: str
) -> Document:
    """The whole document. `version`: of the distribution."""
    carried = {topic: sorted((m for m in models if topic == m.TOPIC), key=wire_type) for topic in Topic}
    facts = sorted((model for model in models if model.TOPIC is None), key=wire_type)
    writers, readers = rights(root, "write"), rights(root, "read")
    return {
        "asyncapi": ASYNCAPI_VERSION,
        "info": {
            "title": "Penstock",
            "version": version,
            "description": "Every event of Penstock, as CloudEvents 1.0 in Kafka's binary mode: attributes "
            "in "
            f"headers, the event as JSON value of at most {MAX_EVENT_BYTES} bytes ({MAX_PLAN_BYTES} for a "
            "proposed plan). Readers ignore unknown fields.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": {
            short_name(topic): _channel(topic, carried[topic], writers[topic], readers[topic])
            for topic in Topic
        },
        "operations": dict(_operations(carried, writers, readers)),
        "components": {
            "messages": {
                wire_type(model): _message(model, examples[wire_type(model)])
                for topic in Topic
                for model in carried[topic]
            },
            "messageTraits": {"cloudEvent": _cloud_event()},
        },
        "x-ledger-facts": {
            "description": "Events without a topic of their own; they exist only inside ledger records, "
            "whose "
            "`facts` may carry events from the topics as well.",
            "facts": {wire_type(model): _payload(model)["schema"] for model in facts},
        },
    }


def _channel(topic: Topic, models: Iterable[type[Event]], writers: list[str], readers: list[str]) -> Document:
    partitions = {"cell": "one per cell", "node": f"{NODE_PARTITIONS}, by a hash of the node's id"}
    key = topic_key(topic)
    binding: Document = {"topic": str(topic), "bindingVersion": KAFKA_BINDING_VERSION}
    if key == "node":
        binding["partitions"] = NODE_PARTITIONS
    return {
        "address": str(topic),
        "description": ABOUT_TOPIC[topic],
        "messages": {
            wire_type(model): {"$ref": f"#/components/messages/{wire_type(model)}"} for model in models
        },
        "bindings": {"kafka": binding},
        "x-key": key,
        "x-partitions": partitions.get(key, "one"),
        "x-written-by": writers,
        "x-read-by": readers,
    }


def _operations(
    carried: Mapping[Topic, list[type[Event]]],
    writers: Mapping[Topic, list[str]],
    readers: Mapping[Topic, list[str]],
) -> Iterator[tuple[str, Document]]:
    """Which identities send to and receive from which channel; every identity of the broker appears."""
    for action, verb, who in (("send", "writes", writers), ("receive", "reads", readers)):
        for topic in Topic:
            name = short_name(topic)
            for identity in who[topic]:
                yield (
                    f"{identity}.{verb}.{name}",
                    {
                        "action": action,
                        "channel": {"$ref": f"#/channels/{name}"},
                        "messages": [
                            {"$ref": f"#/channels/{name}/messages/{wire_type(model)}"}
                            for model in carried[topic]
                        ],
                    },
                )


def _payload(model: type[Event]) -> Document:
    return {
        "schemaFormat": JSON_SCHEMA_FORMAT,
        "schema": {"$ref": f"events/{model.TYPE}/v{model.VERSION}.json"},
    }


def _message(model: type[Event], example: Event) -> Document:
    envelope = Envelope(
        id=f"example-{wire_type(model)}",
        source="/penstock/example",
        time_ms=START_MS,
        data=example,
        correlation_id=JOB,
    )
    about = " ".join((model.__doc__ or "").strip().partition("\n\n")[0].split())
    return {
        "name": wire_type(model),
        "title": model.__name__,
        **({"summary": about} if about else {}),
        "contentType": "application/json",
        "payload": _payload(model),
        "traits": [{"$ref": "#/components/messageTraits/cloudEvent"}],
        "examples": [
            {
                "headers": {name: raw.decode() for name, raw in to_wire(envelope)[0]},
                "payload": json.loads(encode(example)),
            }
        ],
    }


def _cloud_event() -> Document:
    """The headers of binary mode; see penstock.model.wire.envelope."""
    text: Document = {"type": "string", "minLength": 1}
    return {
        "headers": {
            "type": "object",
            "required": ["ce_specversion", "ce_id", "ce_source", "ce_type"],
            "properties": {
                "ce_specversion": {"const": "1.0"},
                "ce_id": {**text, "description": "Unique per source; resending keeps it."},
                "ce_source": text,
                "ce_type": {**text, "description": "Type and version, such as penstock.job.submitted.v1."},
                "ce_subject": {**text, "description": "What the event is about."},
                "ce_time": {**text, "format": "date-time"},
                "content-type": {"const": "application/json"},
                "traceparent": {**text, "description": "W3C Trace Context."},
                "causationid": {**text, "description": "Id of the event that led to this one."},
                "correlationid": {**text, "description": "The job, so that all about it can be found."},
            },
        },
        "correlationId": {"location": "$message.header#/correlationid"},
        "contentType": "application/json",
    }


_FIELDS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    # object → (required fields, further allowed fields) of AsyncAPI 3.0.0
    "document": (
        frozenset({"asyncapi", "info"}),
        frozenset({"id", "servers", "defaultContentType", "channels", "operations", "components"}),
    ),
    "info": (
        frozenset({"title", "version"}),
        frozenset({"description", "termsOfService", "contact", "license", "tags", "externalDocs"}),
    ),
    "channel": (
        frozenset({"address", "messages"}),
        frozenset(
            {"title", "summary", "description", "servers", "parameters", "tags", "externalDocs", "bindings"}
        ),
    ),
    "operation": (
        frozenset({"action", "channel"}),
        frozenset({"title", "summary", "description", "security", "tags", "externalDocs"})
        | {"bindings", "traits", "messages", "reply"},
    ),
    "message": (
        frozenset({"payload"}),
        frozenset({"headers", "correlationId", "contentType", "name", "title", "summary", "description"})
        | {"tags", "externalDocs", "bindings", "examples", "traits"},
    ),
    "trait": (
        frozenset(),
        frozenset({"headers", "correlationId", "contentType", "name", "title", "summary", "description"})
        | {"tags", "externalDocs", "bindings", "examples"},
    ),
}


def structure_problems(document: Document, folder: Path) -> list[str]:
    """What keeps the document from being AsyncAPI 3 about all topics; empty for a valid document.

    `folder`: where it lies; relative `$ref`s start there.
    """
    if not str(document.get("asyncapi", "")).startswith("3."):
        return ["asyncapi: the document must say version 3"]
    channels, operations = document.get("channels", {}), document.get("operations", {})
    components = document.get("components", {})
    parts = [("document", "the document", document), ("info", "info", document.get("info", {}))]
    parts += [("channel", f"channels.{name}", part) for name, part in channels.items()]
    parts += [("operation", f"operations.{name}", part) for name, part in operations.items()]
    for kind, section in (("message", "messages"), ("trait", "messageTraits")):
        parts += [
            (kind, f"components.{section}.{name}", part) for name, part in components.get(section, {}).items()
        ]
    problems = [text for kind, where, part in parts for text in _field_problems(kind, where, part)]
    problems += [f"$ref {ref} leads nowhere" for ref in _refs(document) if not _leads(ref, document, folder)]
    addresses = {part.get("address") for part in channels.values()}
    problems += [f"topic {topic} has no channel" for topic in Topic if str(topic) not in addresses]
    for name, part in operations.items():
        if part.get("action") not in ("send", "receive"):
            problems.append(f"operations.{name}: action must be send or receive")
        channel = part.get("channel", {}).get("$ref", "")
        if any(not ref["$ref"].startswith(f"{channel}/messages/") for ref in part.get("messages", ())):
            problems.append(f"operations.{name}: a message is not of its channel")
    return problems


def _field_problems(kind: str, where: str, part: Document) -> Iterator[str]:
    required, allowed = _FIELDS[kind]
    for name in sorted(required - part.keys()):
        yield f"{where}: {name} is missing"
    for name in sorted(part.keys() - required - allowed):
        if not name.startswith("x-"):
            yield f"{where}: {name} is no field of AsyncAPI 3"


def _refs(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "$ref":
                yield value
            else:
                yield from _refs(value)
    elif isinstance(part, list):
        for value in part:
            yield from _refs(value)


def _leads(ref: str, document: Document, folder: Path) -> bool:
    path, _, pointer = ref.partition("#")
    if path:
        return (folder / path).is_file()
    found: Any = document
    for step in pointer.strip("/").split("/"):
        if not isinstance(found, dict) or step not in found:
            return False
        found = found[step]
    return True
