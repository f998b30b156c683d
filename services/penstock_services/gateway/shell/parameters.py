"""Validation of query parameters: unknown ones are refused, and the error names the valid ones."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.dependencies.models import Dependant

from penstock.text.redaction import brief
from penstock.text.suggestion import choices
from penstock_services.gateway.core.problems import BadField, invalid


async def refuse_unknown(request: Request) -> None:
    """Raises `Problem` 400 for a parameter that the OpenAPI document does not name:
    it would have no effect."""
    if not request.query_params:
        return
    known = _known(request)
    if known is None:
        return
    wrong = [name for name in request.query_params if name not in known]
    if wrong:
        found = [
            BadField(name, "is not known here", choices(name, known) if known else "remove it")
            for name in wrong
        ]
        raise invalid("parameters are wrong", found)


def _known(request: Request) -> list[str] | None:
    """The parameters of this route; None for one that is not in the document, such as /healthz."""
    route = request.scope["route"]
    return list(query_parameters(route.dependant)) if route.include_in_schema else None


def query_parameters(dependant: Dependant) -> Iterator[str]:
    """Names as in the OpenAPI document; generating that takes a third of a second, in which no other request
    is answered."""
    yield from (field.alias for field in dependant.query_params)
    for needed in dependant.dependencies:
        yield from query_parameters(needed)


def bad_parameter(problem: Mapping[str, Any]) -> BadField:
    """One of pydantic's findings about a parameter, as text: for a choice with the valid names."""
    field = ".".join(str(part) for part in problem["loc"][1:]) or "request"
    if problem["type"] == "enum":
        known = re.findall(r"'([^']+)'", problem["ctx"]["expected"])
        remedy = choices(str(problem["input"]), known)
        return BadField(field, f"{brief(problem['input'])} is not known: {remedy}", remedy)
    if problem["type"] == "string_pattern_mismatch" and field.startswith("label."):
        return BadField("label", f"{brief(problem['input'])} is not NAME=VALUE", "give label=team%3Dvision")
    return BadField(field, str(problem["msg"]), "correct it; /openapi.json gives its type and range")
