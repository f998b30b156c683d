"""HTTP application of the gateway: routes, errors as problems, and authentication."""

import logging
import os
import pwd
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from penstock.errors import ConfigurationError
from penstock.runtime.keys.job_tokens import PREFIX
from penstock_services.gateway.core.access import Caller, local_caller
from penstock_services.gateway.core.problems import BadField, Problem, invalid
from penstock_services.gateway.shell.access.job_callers import caller_of_token
from penstock_services.gateway.shell.access.peer import Peers
from penstock_services.gateway.shell.access.roles import CALLER
from penstock_services.gateway.shell.access.tokens import TokenFile
from penstock_services.gateway.shell.document import PROBLEM_RESPONSE, openapi
from penstock_services.gateway.shell.gateway import Gateway, answer, gateway_of, problem_answer
from penstock_services.gateway.shell.options import is_loopback
from penstock_services.gateway.shell.parameters import bad_parameter, refuse_unknown
from penstock_services.gateway.shell.routes import (
    cluster,
    code,
    connections,
    events,
    groups,
    jobs,
    logs,
    stream,
    submissions,
    why,
)
from penstock_services.gateway.shell.routes.commands import (
    admin,
    checkpoints,
    cores,
    execute,
    holds,
    moves,
    operators,
    repair,
)

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
PARTS = (
    submissions,
    jobs,
    code,
    holds,
    checkpoints,
    cores,
    moves,
    why,
    logs,
    execute,
    events,
    stream,
    connections,
    cluster,
    groups,
    operators,
    repair,
    admin,
)
OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Guard:
    """Authentication before every route: identifies the caller, and refuses web pages of other sites.

    A running task of a job that may submit jobs: by the token that its node has signed. Others, with
    tokens: the caller that the token file names. On loopback without them: the user who runs the gateway,
    by the peer's socket. A page in that user's browser could reach the gateway too, and its submissions
    would run: so the Host must be this machine by name (against DNS rebinding) and an Origin, if sent, must
    be the gateway's.
    """

    def __init__(self, app: Any, tokens: TokenFile | None, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._tokens = tokens
        self._peers = Peers() if tokens is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[CALLER] = await self._caller(scope)
            except Problem as problem:
                await problem_answer(problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Caller | None:
        """None on paths that are open to all. Raises `Problem`."""
        host = (_only(scope, b"host") or b"").decode("latin-1")
        origin = _only(scope, b"origin")
        authorization = _only(scope, b"authorization")
        if origin is not None and _split(origin.decode("latin-1")).netloc != host:
            raise Problem(403, "foreign_origin", "requests from pages of other sites are refused")
        if self._peers is not None and not is_loopback(_split(f"//{host}").hostname or ""):
            raise Problem(
                403, "foreign_host", f"Host {host!r} is not this machine; use 127.0.0.1 or localhost"
            )
        if scope["path"] in OPEN_PATHS:
            return None
        token = _token(authorization or b"")
        if token.startswith(PREFIX.encode()):
            return await caller_of_token(self._gateway.follower, token.decode("latin-1"))
        if self._peers is not None:
            return _local(self._peers, scope)
        assert self._tokens is not None
        return _bearer(self._tokens, token)


def _only(scope: Scope, name: bytes) -> bytes | None:
    """The value of this header; None: it is not there. Raises `Problem` 400 for an empty one, or several.

    Of two, a proxy in front may check the one that the gateway does not read.
    """
    values: list[bytes] = [value.strip() for key, value in scope["headers"] if key == name]
    if not values:
        return None
    if len(values) > 1 or not values[0]:
        header, found = (
            name.decode().capitalize(),
            "is empty" if len(values) == 1 else f"comes {len(values)} times",
        )
        raise invalid(
            "the headers are wrong",
            [BadField(header, found, f"send one `{header}` header with a value, or none")],
        )
    return values[0]


def _local(peers: Peers, scope: Scope) -> Caller:
    """Raises `Problem` 403 for a peer of another user."""
    uid = peers.uid(scope["client"], scope["server"])
    if uid == os.geteuid():
        return local_caller(_user())
    whose = f"user {uid}" if uid is not None else "a closed connection"
    detail = (
        f"this gateway has no tokens and is for the user {os.geteuid()} who runs it, not for {whose}; "
        "have it run with PENSTOCK_TOKENS, and send a token"
    )
    raise Problem(403, "other_user", detail)


@cache
def _user() -> str:
    """User and host of this process: `ada@workstation-7`."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # this uid has no name
        name = f"user-{os.geteuid()}"
    return f"{name}@{socket.gethostname()}"


def _token(authorization: bytes) -> bytes:
    """Empty: the header names none."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _bearer(tokens: TokenFile, token: bytes) -> Caller:
    """Raises `Problem`."""
    try:
        caller = tokens.caller(token) if token else None
    except ConfigurationError as error:
        logger.error("no caller is admitted: %s", error)
        raise Problem(503, "no_tokens", f"no caller is admitted until this is mended: {error}") from error
    if caller is None:
        raise Problem(
            401, "no_token", "send `Authorization: Bearer TOKEN` with a token that PENSTOCK_TOKENS lists"
        )
    return caller


def _split(url: str) -> SplitResult:
    """As `urlsplit`; an invalid URL (`http://[`) gives an empty result."""
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
        responses={"default": PROBLEM_RESPONSE},
        dependencies=[Depends(refuse_unknown)],
    )
    app.state.gateway = gateway
    for part in PARTS:
        app.include_router(part.router)
    app.get("/healthz", include_in_schema=False)(healthz)
    app.get("/readyz", include_in_schema=False)(readyz)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_bad_parameters)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(500, _on_fault)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    tokens = gateway.options.tokens
    return Guard(app, None if tokens is None else TokenFile(tokens), gateway)


async def healthz() -> Response:
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
    found = [bad_parameter(problem) for problem in error.errors()]
    return problem_answer(invalid("parameters are wrong", found))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "no_path", 405: "method"}.get(error.status_code, "http")
    detail = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
    found = problem_answer(Problem(error.status_code, kind, detail))
    if (
        error.status_code == 405
    ):  # the framework names the methods of one route, and several may share the path
        found.headers["Allow"] = ", ".join(_allowed(request))
    return found


def _allowed(request: Request) -> list[str]:
    """Methods of this path. Of several matching templates one without parameters counts, else the longest:
    node ids may contain a slash."""
    routes = [*request.app.routes, *(route for part in PARTS for route in part.router.routes)]
    fitting: dict[str, set[str]] = {}
    for route in routes:
        if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE:
            fitting.setdefault(route.path, set()).update(route.methods or ())
    return sorted(fitting[max(fitting, key=lambda path: ("{" not in path, len(path)))]) if fitting else []


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The connection ended before the body did: nobody reads the answer, and the gateway is not at fault."""
    return problem_answer(Problem(408, "late", "the body did not arrive"))


async def _on_fault(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_answer(
        Problem(500, "fault", f"{type(error).__name__}; the gateway's log holds the traceback")
    )
