"""Dependencies of every request handler (log, store, replica, worker pools),
and the helpers that handlers share."""

import asyncio
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import orjson
from fastapi import Request
from fastapi.responses import Response

from penstock.log.port import Log
from penstock.model.schema.topics import MAX_EVENT_BYTES
from penstock.runtime.pool import WorkerPool
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.gateway.core.followers import Followers
from penstock_services.gateway.core.problems import CONTENT_TYPE, Problem
from penstock_services.gateway.shell.appender import Appender
from penstock_services.gateway.shell.nodes.log_reader import LogReader
from penstock_services.gateway.shell.options import Options
from penstock_services.gateway.shell.replica.alarms import FRESH_RECORDS, Alarms
from penstock_services.gateway.shell.replica.differences import Differences
from penstock_services.gateway.shell.replica.follower import Follower
from penstock_services.gateway.shell.store import Store
from penstock_services.placer.shell.replay import replay_fresh

MAX_BODY_BYTES = 1 << 20  # maximum that is read; events have their own, smaller bound
FRESH_WITHIN_S = 0.5  # a listing waits so long for the tables to reach this gateway's replica


@dataclass(slots=True)
class Exclusive:
    """A lock and worker processes for requests that run one at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    workers: WorkerPool = field(default_factory=WorkerPool)


@dataclass(slots=True)
class Gateway:
    """The parts of one running gateway."""

    settings: Settings
    options: Options
    log: Log
    store: Store
    follower: Follower
    appender: Appender
    traces: Tracing
    logs: LogReader
    stopping: asyncio.Event
    workers: WorkerPool = field(default_factory=WorkerPool)
    ledger: Exclusive = field(default_factory=Exclusive)
    """Verify, rebuild, replay."""
    alarms: Alarms = field(init=False)
    models: Exclusive = field(default_factory=Exclusive)
    """Requests about models."""
    submitting: "WeakValueDictionary[str, asyncio.Lock]" = field(default_factory=WeakValueDictionary)
    """Idempotency key → lock, held while a submission with it is under way."""
    marking: "set[asyncio.Future[None]]" = field(default_factory=set)
    """Keys that are being marked as done, and ends of commands that are being recorded; referenced here so
    that they are not garbage-collected."""
    followers: Followers = field(init=False)
    """Streams by which pipelines follow the jobs that are tied to them."""
    streams: int = 0
    log_streams: int = 0
    sessions: "Counter[str]" = field(default_factory=Counter)
    """Job → the commands under way in it."""
    connections: dict[str, object] = field(default_factory=dict)
    """Node → its standing connection."""
    broken: "dict[str, asyncio.Future[None]]" = field(default_factory=dict)
    """Node whose connection has just broken → the task that reports it,
    unless the node reconnects in time."""

    def __post_init__(self) -> None:
        self.followers = Followers(f"gateway-{secrets.token_hex(8)}", time.monotonic())
        differences = Differences(self.log, self.settings.cell_index, self.follower)
        self.alarms = Alarms(self.follower, self._decides_again, differences)

    async def _decides_again(self) -> dict[str, Any]:
        """Some decisions after the newest snapshot, repeated by a worker that knows nothing of before."""
        return await self.workers.run(replay_fresh, self.settings, FRESH_RECORDS)

    async def fresh(self) -> None:
        """Later reads see at least the records that this gateway has folded so far,
        if the projector keeps up."""
        await self.store.projected(self.follower.state.seq, FRESH_WITHIN_S)

    async def fresh_rows(self, query: str, *arguments: Any) -> list[orjson.Fragment]:
        """The JSON rows of a query (`Store.rows`), after `fresh`."""
        await self.fresh()
        return [row_json(row) for row in await self.store.rows(query, *arguments)]


def gateway_of(request: Request) -> Gateway:
    found: Gateway = request.app.state.gateway
    return found


async def require_live(request: Request) -> None:
    """Dependency of answers from the replica.
    Raises `Problem` while it stands before a record that it cannot decode."""
    found = gateway_of(request).follower.undecodable
    if found is not None:
        detail = (
            f"{found}. The cell stands still before that record; jobs, nodes and events are listed as "
            f"of then. For operators: {found.remedy}"
        )
        raise Problem(409, "ledger_undecodable", detail)


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON; fragments inside are passed through as they are."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def problem_answer(problem: Problem) -> Response:
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if problem.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="penstock"'
    return Response(orjson.dumps(problem.body()), problem.status, headers, CONTENT_TYPE)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises `Problem` 413 as soon as it is known to exceed `limit`."""
    length = request.headers.get("content-length", "0")
    too_large = Problem(413, "too_large", f"the body exceeds {limit} bytes")
    if length.isdigit() and int(length) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def json_body(request: Request, like: str = "", *, optional: bool = False) -> bytes:
    """The body, of an event's size at most. Raises `Problem` 413, and 415 unless it is JSON. `like`: an
    example; `optional`: it may be empty."""
    body = await read_body(request, MAX_EVENT_BYTES)
    if (body or not optional) and content_type(request) != "application/json":
        more = ", or no body" if optional else like and f": {like}"
        raise Problem(415, "content_type", f"send application/json{more}")
    return body


def content_type(request: Request) -> str:
    """Without parameters, lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def row_json(text: str) -> orjson.Fragment:
    """A row that Postgres has already encoded as JSON."""
    return orjson.Fragment(text)
