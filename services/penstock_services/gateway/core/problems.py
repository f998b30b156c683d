"""HTTP errors as RFC 9457 problems: a status, a sentence, and every bad field with its remedy."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import ValidationError

from penstock.model.schema.errors import EventError, Reason

MAX_FIELDS = 50  # users would not read more
CONTENT_TYPE = "application/problem+json"

TITLES = {
    400: "The request is wrong",
    401: "Not allowed",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    410: "No longer stored",
    413: "Too large",
    415: "Unknown content type",
    429: "Overloaded",
    503: "Not available now",
}


class BadField(NamedTuple):
    """One error in a request. `field`: a path such as `resources.gpus`."""

    field: str
    message: str
    remedy: str


class Problem(Exception):
    """Ends a request with this answer. `retry_after_s` becomes the header of that name."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        errors: Sequence[BadField] = (),
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.errors = tuple(errors[:MAX_FIELDS])
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The problem document. `type` is stable: programs may compare it."""
        return {
            "type": f"urn:penstock:problem:{self.kind}",
            "title": TITLES.get(self.status, "Failed"),
            "status": self.status,
            "detail": self.detail,
            "errors": [error._asdict() for error in self.errors],
        }


SPANNING = re.compile(r"([a-z_]+): ([^;]+); (.+)")
"""Message of a rule that spans fields: field, error, remedy."""


def bad_fields(error: ValidationError, prefix: str = "") -> list[BadField]:
    """All findings of a validation."""
    found = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        path = ".".join(str(part) for part in problem["loc"])
        field = f"{prefix}{path}" if path else prefix.rstrip(".") or "body"
        message = str(problem["msg"]).removeprefix("Value error, ")
        named = SPANNING.fullmatch(message)
        if named is not None and problem["type"] == "value_error":
            inner, message, remedy = named.groups()
            found.append(BadField(inner if field == "body" else f"{field}.{inner}", message, remedy))
            continue
        found.append(BadField(field, message, _remedy(problem["type"], field)))
    return found


def _remedy(kind: str, field: str) -> str:
    if kind == "missing":
        return f"add `{field}`"
    if kind == "extra_forbidden":
        return f"remove `{field}`; the schema at /openapi.json lists the known fields"
    if kind == "json_invalid":
        return "send well-formed JSON"
    return f"correct `{field}`; /openapi.json gives its type and range"


def invalid(what: str, errors: Sequence[BadField]) -> Problem:
    """400 with every bad field, also listed in the detail for clients that show only that."""
    detail = "; ".join(f"{error.field}: {error.message}" for error in errors[:MAX_FIELDS])
    return Problem(400, "invalid", f"{what}: {detail}"[:4_096], errors)


KINDS: dict[Reason, int] = {
    "undecodable": 400,
    "unknown_type": 400,
    "unknown_version": 400,
    "invalid": 400,
    "too_large": 413,
}


def from_event_error(error: EventError) -> Problem:
    """An event that cannot be decoded."""
    return Problem(KINDS[error.reason], error.reason, str(error))
