"""CloudEvents over HTTP: binary mode (attributes in `ce-*` headers) and structured mode (one JSON object).

Both become an `Envelope`, validated strictly: a misspelt field name is an error here, where it is written,
while readers of the log ignore unknown fields (style 5).
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from penstock.model.schema.errors import EventError
from penstock.model.schema.event import REGISTRY
from penstock.model.schema.topics import INPUT_TOPICS, MAX_EVENT_BYTES
from penstock.model.schema.validation import checked_json
from penstock.model.wire.envelope import MAX_ID_BYTES, Envelope, from_wire
from penstock_services.gateway.core.problems import BadField, Problem, bad_fields, from_event_error, invalid
from penstock_services.gateway.core.requests.submission import read_json

CONTROLS = r"\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff"
"""Characters that no attribute may contain, as a character class: those that CloudEvents forbids in a String,
and those that break or reverse a line. Not a class of Unicode, such as `str.isprintable`: two libraries know
two versions of those."""
CONTROL = re.compile(f"[{CONTROLS}\\ud800-\\udfff]")
STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
MAX_BATCH_EVENTS = 256
ATTRIBUTES = ("specversion", "id", "source", "type", "subject", "time")
EXTENSIONS = ("traceparent", "causationid", "correlationid")
MAX_ATTRIBUTE_CHARS = 512


def binary(headers: Mapping[str, str], body: bytes) -> Envelope:
    """One event in binary mode. Raises `Problem`."""
    attributes = {name: headers.get(f"ce-{name}") for name in (*ATTRIBUTES, *EXTENSIONS)}
    attributes["traceparent"] = attributes["traceparent"] or headers.get("traceparent")
    return _envelope(attributes, body, "ce-")


def structured(body: bytes) -> Envelope:
    """One event in structured mode. Raises `Problem`."""
    return _from_object(read_json(body))


def batch(body: bytes) -> list[Envelope]:
    """Several events in structured mode. Raises `Problem` that names the first bad one."""
    found = read_json(body)
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_BATCH_EVENTS:
        raise invalid(
            "this is not a batch",
            [BadField("body", "is not a list of events", f"give 1 to {MAX_BATCH_EVENTS}")],
        )
    return [_from_object(entry, f"{number}.") for number, entry in enumerate(found)]


def _from_object(found: Any, prefix: str = "") -> Envelope:
    if not isinstance(found, dict):
        raise invalid(
            "this is not an event",
            [BadField(prefix.rstrip(".") or "body", "is not an object", "send a CloudEvent")],
        )
    if "data_base64" in found or "data" not in found:
        field = BadField(
            f"{prefix}data", "is missing", "give the event's fields as a JSON object under `data`"
        )
        raise invalid("this is not an event", [field])
    wrong = [
        BadField(f"{prefix}{name}", "is not a text", "quote it")
        for name in (*ATTRIBUTES, *EXTENSIONS)
        if found.get(name) is not None and not isinstance(found[name], str)
    ]
    if wrong:
        raise invalid("this is not an event", wrong)
    attributes = {name: found.get(name) for name in (*ATTRIBUTES, *EXTENSIONS)}
    return _envelope(attributes, msgspec.json.encode(found["data"]), prefix)


def _envelope(attributes: Mapping[str, str | None], value: bytes, prefix: str) -> Envelope:
    """Checks everything, and reports all errors at once where possible."""
    wrong = [
        BadField(f"{prefix}{name}", "is missing", f"give `{prefix}{name}`")
        for name in ("specversion", "id", "source", "type")
        if not attributes.get(name)
    ]
    if attributes.get("specversion") not in (None, "", "1.0"):
        wrong.append(BadField(f"{prefix}specversion", "is not 1.0", "send CloudEvents 1.0"))
    wrong += [
        BadField(f"{prefix}{name}", f"is longer than {MAX_ATTRIBUTE_CHARS} characters", "shorten it")
        for name, text in attributes.items()
        if text is not None and len(text) > MAX_ATTRIBUTE_CHARS
    ]
    if len((attributes.get("id") or "").encode(errors="replace")) > MAX_ID_BYTES:
        wrong.append(BadField(f"{prefix}id", f"exceeds {MAX_ID_BYTES} bytes", "shorten it"))
    wrong += [
        BadField(f"{prefix}{name}", "holds control characters", "remove them")
        for name, text in attributes.items()
        if text is not None and CONTROL.search(text)
    ]
    type_name = attributes.get("type") or ""
    model = REGISTRY.get(type_name)
    if model is not None and model.TOPIC not in INPUT_TOPICS:
        wrong.append(
            BadField(
                f"{prefix}type",
                f"{type_name} is not accepted here",
                "send events of jobs, estimates or proposals",
            )
        )
    max_bytes = MAX_EVENT_BYTES if model is None else model.MAX_BYTES
    if len(value) > max_bytes:
        raise Problem(413, "too_large", f"the event has {len(value)} bytes; the bound is {max_bytes}")
    if model is not None:
        try:
            checked_json(model, value, strict=True)
        except ValidationError as error:
            wrong += bad_fields(error, f"{prefix}data." if prefix != "ce-" else "")
    if wrong:
        raise invalid("this event cannot be accepted", wrong)
    return _read(attributes, value)


def _read(attributes: Mapping[str, str | None], value: bytes) -> Envelope:
    """By the same decoder as records of the log, upcasters included."""
    headers = tuple(
        (name if name in EXTENSIONS else f"ce_{name}", text.encode())
        for name, text in attributes.items()
        if text
    )
    try:
        return from_wire(headers, value)
    except EventError as error:
        raise from_event_error(error) from error
