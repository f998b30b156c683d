"""Sessions with programs in tasks: passed on between a caller and a node,
recorded as they begin and as they end."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from fastapi.responses import Response
from msgspec.structs import replace

from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.nouns.types import MAX_TEXT
from penstock.runtime.http.http_switch import Switch, switch_of
from penstock.runtime.race import first_of
from penstock.session_lines import BadLine, line
from penstock_services.gateway.core.log_text import Unreadable
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.gateway import Gateway
from penstock_services.gateway.shell.routes.jobs import append_event

if TYPE_CHECKING:  # its HTTP client is loaded when a node is asked
    from penstock_services.gateway.shell.nodes.node_session import NodeSession

MAX_SESSIONS = 256  # of a gateway, as many as it has streams
MAX_SESSIONS_OF_JOB = 16  # as many as one node runs
MEDIA_TYPE = "application/x-ndjson"
SEVERAL = (b'{"stdout"', b'{"stderr"', b'{"taken"')
"""Lines that others follow."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Asked(NamedTuple):
    """A request to a node."""

    path: str
    query: Mapping[str, str]
    body: bytes
    left: str
    """What is recorded as the end when the caller leaves."""


async def begun(gateway: Gateway, run: JobCommandRun, node_id: str, asked: Asked) -> Response:
    """The answer that passes on what the node runs for this request. Raises `Problem`."""
    most = f"{gateway.sessions[run.job_id]} in job {run.job_id}, {gateway.sessions.total()} in all"
    if gateway.sessions.total() >= MAX_SESSIONS or gateway.sessions[run.job_id] >= MAX_SESSIONS_OF_JOB:
        raise Problem(
            503, "too_many_sessions", f"this gateway has {most} of its commands under way; end one of them"
        )
    gateway.sessions[run.job_id] += 1
    try:
        gateway.logs.server_of(node_id)
        await _record(gateway, run)  # nothing runs that is not recorded
        try:
            session = await gateway.logs.session(node_id, *asked[:3])
        except Unreadable as error:
            await _record(gateway, replace(run, problem=str(error)[:MAX_TEXT]))
            raise
    except BaseException as error:
        _count_off(gateway, run.job_id)
        if isinstance(error, Unreadable):
            raise Problem(502, "node_unreachable", str(error)) from error
        raise
    return Passing(gateway, run, session, asked.left)


class Passing(Response):
    """The lines of one session. Its end is recorded also if the caller leaves, with whom the program ends."""

    media_type = MEDIA_TYPE

    def __init__(self, gateway: Gateway, run: JobCommandRun, session: "NodeSession", left: str) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._gateway, self._session = gateway, session
        self._run, self._end = run, replace(run, problem=left)
        self._over = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        switch = switch_of(scope)
        try:
            with suppress(ConnectionResetError):
                if switch is None:
                    await self._answer(receive, send)
                else:
                    switch.take({})
                    await first_of(self._up(switch), self._down(switch.write), switch.gone.wait())
        finally:
            _count_off(self._gateway, self._run.job_id)
            recording = asyncio.ensure_future(_record(self._gateway, self._end))
            self._gateway.marking.add(recording)
            recording.add_done_callback(self._gateway.marking.discard)
            if switch is not None:
                switch.close()
            await self._session.close()

    async def _answer(self, receive: Receive, send: Send) -> None:
        """To a caller without input."""

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await first_of(self._down(write), gone())
        await send({"type": "http.response.body", "body": b""})

    async def _up(self, switch: Switch) -> None:
        """The caller's lines, until it leaves. Raises ConnectionResetError."""
        try:
            async for text in switch.lines():
                await self._session.send(text)
        except (BadLine, Unreadable) as error:
            await self._failed(str(error), switch.write)

    async def _down(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """The node's lines. Raises ConnectionResetError."""
        try:
            async for text in self._session.lines():
                if not text.startswith(SEVERAL):
                    self._ends(orjson.loads(text))
                await write(text + b"\n")
            if not self._over:
                raise Unreadable("the node ended the answer before the command")
        except Unreadable as error:
            await self._failed(str(error), write)

    def _ends(self, last: dict[str, Any]) -> None:
        self._over = True
        self._end = replace(
            self._run, exit_code=last.get("exit_code"), problem=str(last.get("problem", ""))[:MAX_TEXT]
        )

    async def _failed(self, problem: str, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._ends({"problem": problem})
        await write(line(problem=problem))


def _count_off(gateway: Gateway, job_id: str) -> None:
    gateway.sessions[job_id] -= 1
    if not gateway.sessions[job_id]:
        del gateway.sessions[job_id]


async def _record(gateway: Gateway, run: JobCommandRun) -> None:
    """Raises `Problem`."""
    event_id = f"exec-{run.job_id}-{secrets.token_hex(8)}"
    await append_event(gateway, "exec", event_id, event_id, run, {"penstock.command": run.command})
