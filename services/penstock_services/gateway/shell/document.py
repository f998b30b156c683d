"""OpenAPI document of the gateway: the part generated from the routes, and the models of bodies that the
handlers read themselves."""

from collections.abc import Iterator
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    JobCheckpointRequested,
    JobHoldRequested,
    JobReleaseRequested,
    JobSubmitted,
)
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import MAX_JOB_ID_CHARS, Value
from penstock.model.schema.event import REGISTRY, Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import MAX_ID_BYTES
from penstock.model.wire.json_schema import json_schema
from penstock_services.gateway.core.forecasts.deadline import Outlook
from penstock_services.gateway.core.problems import CONTENT_TYPE, BadField, Problem
from penstock_services.gateway.core.requests.cloudevents import (
    ATTRIBUTES,
    CONTROLS,
    EXTENSIONS,
    MAX_ATTRIBUTE_CHARS,
)

PRINTABLE = f"^[^{CONTROLS}]*$"
REFERENCE = "#/components/schemas/{model}"
TOPICS = (Topic.JOBS, Topic.ESTIMATES, Topic.PROPOSALS)
"""Topics of events that are accepted from clients."""


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document; made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=[]
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        _add(schemas, JobSpec)
        schemas["CloudEvent"] = _cloud_event(schemas)
        schemas["EventData"] = {"anyOf": [data for _, data in _events(schemas)]}
        _say_rules_of_jobs(schemas["JobSpec"]["properties"])
        schemas["Environment"]["oneOf"] = [_just(name, pattern) for name, pattern in ENVIRONMENTS.items()]
        schemas["Accepted"] = _ACCEPTED
        schemas["Expected"] = _EXPECTED
        both = [{"$ref": REFERENCE.format(model=name)} for name in ("Accepted", "Expected")]
        schemas["AcceptedOrExpected"] = {"anyOf": both}
        schemas["Deadline"] = _DEADLINE
        schemas["Problem"] = _PROBLEM
        app.openapi_schema = orjson.loads(orjson.dumps(document))
    return app.openapi_schema


def request_body(kind: type[Value]) -> dict[str, Any]:
    """`openapi_extra` of a request with a JSON object of this type, without nested ones, as its body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": json_schema(kind)}}}}


def _add(schemas: dict[str, Any], kind: type[Value]) -> dict[str, Any]:
    """Adds the schema of this type and of those within; returns a reference to it."""
    if kind.__name__ not in schemas:
        schema = json_schema(kind, REFERENCE)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return {"$ref": REFERENCE.format(model=kind.__name__)}


def _say_rules_of_jobs(properties: dict[str, Any]) -> None:
    """Adds a job's rules, as far as JSON Schema can express them: the published schemas of events stay as
    they are."""
    command = properties["command"]
    command["prefixItems"] = [{**command["items"], "minLength": 1}]
    for name in ("env", "secrets"):
        properties[name]["propertyNames"] = {"pattern": "^[^=]+$"}


ENVIRONMENTS = {"venv": "^/", "conda": "^[^-]", "container": "^[^-]"}
"""Exactly one of these is given, and matches its pattern."""


def _just(name: str, pattern: str) -> dict[str, Any]:
    """Schema of an environment with this one key."""
    others = {other: {"type": "null"} for other in ENVIRONMENTS if other != name}
    properties = {name: {"type": "string", "pattern": pattern}, **others}
    return {"required": [name], "properties": properties}


def _events(schemas: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(wire type, schema of its data) of every event that is accepted;
    adds the schemas that they refer to."""
    for wire_type, model in REGISTRY.items():
        if model.TOPIC in TOPICS and model is not JobCommandRun:
            more = NARROWER.get(model)
            data = _add(schemas, model)
            yield wire_type, {"allOf": [data, {"properties": more}]} if more else data


COMMANDS = (JobCancelRequested, JobHoldRequested, JobReleaseRequested, JobCheckpointRequested)
NARROWER: dict[type[Event], dict[str, Any]] = {
    JobSubmitted: {"job_id": {"maxLength": MAX_JOB_ID_CHARS, "pattern": "^[^/]*$"}},
    **{command: {"by": {"const": ""}, "tenant": {"type": "null"}} for command in COMMANDS},
}
"""Event → constraints of this endpoint beside those of the event itself (`shell/routes/events.py`)."""


def _cloud_event(schemas: dict[str, Any]) -> dict[str, Any]:
    """An event in structured mode. Attributes that are not named here are ignored."""
    text = {"type": "string", "maxLength": MAX_ATTRIBUTE_CHARS, "pattern": PRINTABLE}
    optional = {"anyOf": [text, {"type": "null"}]}
    properties: dict[str, Any] = dict.fromkeys((*ATTRIBUTES, *EXTENSIONS), optional)
    properties |= {
        "specversion": {"const": "1.0"},
        "id": {"type": "string", "minLength": 1, "maxLength": MAX_ID_BYTES, "pattern": PRINTABLE},
        "source": {**text, "minLength": 1},
        "type": {"type": "string"},
        "time": {"anyOf": [{"type": "string", "format": "date-time"}, {"const": ""}, {"type": "null"}]},
        "data_base64": False,
    }
    kinds = [
        {"properties": {"type": {"const": wire_type}, "data": data}} for wire_type, data in _events(schemas)
    ]
    required = ["specversion", "id", "source", "type", "data"]
    return {"type": "object", "required": required, "properties": properties, "oneOf": kinds}


_WARNINGS: dict[str, Any] = {
    "type": "array",
    "description": "Accepted, but probably not meant.",
    "items": {"type": "object", "properties": {name: {"type": "string"} for name in BadField._fields}},
}
_NUMBER = {"type": ["number", "null"]}
_DEADLINE: dict[str, Any] = {
    "type": ["object", "null"],
    "description": "Whether a job meets its deadline; null where it has none.",
    "properties": {
        **dict.fromkeys(Outlook._fields, _NUMBER),
        **{key: {"type": "string"} for key in ("job_id", "qos", "unknown")},
    },
}
_ACCEPTED: dict[str, Any] = {
    "type": "object",
    "required": ["job_id", "links"],
    "properties": {
        "job_id": {"type": "string"},
        "links": {"type": "object", "additionalProperties": {"type": "string"}},
        "deadline": {"$ref": REFERENCE.format(model="Deadline")},
        "warnings": _WARNINGS,
    },
}
_EXPECTED: dict[str, Any] = {
    "type": "object",
    "description": "The answer to a submission with `dry_run`.",
    "required": ["estimate", "deadline", "problem", "warnings"],
    "properties": {
        "estimate": {"type": ["object", "null"]},
        "deadline": {"$ref": REFERENCE.format(model="Deadline")},
        "problem": {"type": "string"},
        "warnings": _WARNINGS,
    },
}
PROBLEM_RESPONSE: dict[str, Any] = {
    "description": "A problem (RFC 9457)",
    "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
_PROBLEM: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "errors"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {name: {"type": "string"} for name in BadField._fields},
            },
        },
    },
    "example": Problem(
        400, "invalid", "this is not a job: workers: Input should be greater than or equal to 1", []
    ).body(),
}
