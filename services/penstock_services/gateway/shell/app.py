"""The HTTP application: routes, errors as problems, and who may come in."""

import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from penstock.model.json_schema import json_schema
from penstock.model.types import JobSpec
from penstock_services.gateway.core.problems import CONTENT_TYPE, BadField, Problem, invalid
from penstock_services.gateway.shell import admin, cluster, events, jobs, logs, operators, stream, why
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, problem_answer
from penstock_services.gateway.shell.options import is_loopback

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Guard:
    """Before everything else: bearer tokens where they are set, and no web page of another site.

    On loopback without tokens a page in the user's browser could reach us too, and what it submits runs: so
    the Host must be this machine by name (against DNS rebinding) and an Origin, if sent, must be ours.
    """

    def __init__(self, app: Any, tokens: tuple[bytes, ...]) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._refusal(scope)) is not None:
            await problem_answer(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Problem | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin")
        if origin is not None and _split(origin.decode("latin-1")).netloc != host:
            return Problem(403, "foreign_origin", "requests from pages of other sites are refused")
        if not self._tokens:
            name = _split(f"//{host}").hostname or ""
            if not is_loopback(name):
                return Problem(
                    403, "foreign_host", f"Host {host!r} is not this machine; use 127.0.0.1 or localhost"
                )
            return None
        if scope["path"] in OPEN_PATHS:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        known = [hmac.compare_digest(token.strip(), good) for good in self._tokens]
        if scheme.lower() != b"bearer" or not any(known):
            return Problem(
                401, "no_token", "send `Authorization: Bearer TOKEN` with a token of PENSTOCK_TOKEN_FILE"
            )
        return None


def _split(url: str) -> SplitResult:
    """As `urlsplit`; what is no URL (`http://[`) is nowhere."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")


def build_app(gateway: Gateway) -> Any:
    """The ASGI application around one gateway."""
    app = FastAPI(
        title="Penstock",
        version="1",
        summary="Leads deep-learning jobs to GPUs.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"default": _PROBLEM_RESPONSE},
    )
    app.state.gateway = gateway
    for part in (jobs, why, logs, events, stream, cluster, operators, admin):
        app.include_router(part.router)
    app.get("/healthz", include_in_schema=False)(healthz)
    app.get("/readyz", include_in_schema=False)(readyz)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_bad_parameters)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(500, _on_fault)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return Guard(app, gateway.options.tokens)


def healthz() -> Response:
    """The process answers."""
    return answer({"status": "ok"})


async def readyz(request: Request) -> Response:
    """It has the read models and is notified of the projector's commits."""
    gateway = gateway_of(request)
    await gateway.store.rows("SELECT '1'::text FROM positions LIMIT 1")
    return answer({"status": "ready", "seq": gateway.follower.state.seq})


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return problem_answer(error)


async def _on_bad_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [
        BadField(
            ".".join(str(part) for part in problem["loc"][1:]) or "request",
            str(problem["msg"]),
            "correct it; /openapi.json gives its type and range",
        )
        for problem in error.errors()
    ]
    return problem_answer(invalid("parameters are wrong", found))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "no_path", 405: "method"}.get(error.status_code, "http")
    detail = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
    return problem_answer(Problem(error.status_code, kind, detail))


async def _on_fault(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_answer(
        Problem(500, "fault", f"{type(error).__name__}; the gateway's log holds the traceback")
    )


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The generated document, with the models of bodies that the handlers read themselves."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=[]
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schema = json_schema(JobSpec, "#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas["JobSpec"] = schema
        schemas["Problem"] = _PROBLEM
        app.openapi_schema = orjson.loads(orjson.dumps(document))
    return app.openapi_schema


_PROBLEM_RESPONSE: dict[str, Any] = {
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
        400, "invalid", "this is no job: workers: Input should be greater than or equal to 1", []
    ).body(),
}
