"""HTTP server of a service: uvicorn with bounds on unfinished requests, without its signal handlers.

A request's headers must arrive within a time, and its body must make progress. Else a peer could hold
connections, with their files and memory, by never finishing a request. An answer has no time limit: streams
and standing connections are not cut. Uvicorn's ten wake-ups a second are left out as well.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httptools
import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.runtime.http.http_limits import LIMITS, Limits
from penstock.runtime.http.http_switch import EXTENSION, Switch
from penstock.session_lines import PROTOCOL

GRACE_S = 1  # requests under way may finish at a stop
CLOSED_WITHIN_S = 2.0  # for a refusal to leave, and for the peer's end of TLS; then the connection is cut


class Server(uvicorn.Server):
    """Serves an ASGI application until `stop`. The process has its own signal handlers."""

    def __init__(
        self,
        app: Any,
        stop: asyncio.Event,
        *,
        tls: ssl.SSLContext | None = None,
        limits: Limits = LIMITS,
        **more: Any,
    ) -> None:
        """`tls`: None: not encrypted. `more`: further settings of `uvicorn.Config`."""
        bounded = type("Bounded", (_Bounded,), {"limits": limits, "waiting": Counter()})
        config = uvicorn.Config(
            app,
            http=bounded,
            ws="none",
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            date_header=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            log_config=None,
            ssl_context_factory=None if tls is None else lambda *_: tls,
            **more,
        )
        super().__init__(config)
        self._stop = stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._stop.wait()
        self.should_exit = True


class _Bounded(HttpToolsProtocol):
    """One connection. At most one timer runs, for headers or body; none while only an answer is under way."""

    limits: Limits
    waiting: "Counter[str]"
    """Address → its connections on which a request is awaited or incomplete; of one server."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._counted = False
        self._in_headers = True
        self._begun = False
        self._head_bytes = 0
        self._body_bytes = 0
        self._body_began_s = 0.0
        self._refused = False
        self._switch: Switch | None = None
        self._body_left = 0
        """Bytes of the body that are to come, of a request that asks to go over to lines."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._arm(self.limits.headers_within_s, self._headers_late)
        self._count()
        if self.waiting[self._peer] > self.limits.waiting_per_peer:
            most = self.limits.waiting_per_peer
            detail = f"{self._peer} has {most} connections without a whole request; close some"
            self._refuse(503, "too_many_connections", detail)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._counted:
            self._add(-1)
        super().connection_lost(exc)
        if self._switch is not None:
            self._switch.lost()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._switch is not None:
            self._switched(self._switch, data)
            return
        self._head_bytes += len(data) if self._in_headers else 0
        self._parse(data)
        if self._in_headers and self._head_bytes > self.limits.header_bytes:
            self._refuse(431, "too_large", f"the headers exceed {self.limits.header_bytes} bytes")
        elif (
            self._in_headers and self._timer is None and self._idle
        ):  # no further request has begun: empty lines
            self._arm(self.limits.headers_within_s, self._headers_late)
        self._count()

    def _parse(self, data: bytes) -> None:
        """As the class above; the parser leaves what follows the headers of an upgrade to the caller."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            if self._switch is not None:
                self._switched(self._switch, data[upgrade.args[0] :])

    def _switched(self, switch: Switch, data: bytes) -> None:
        """The request's body, then what the application reads as it comes."""
        body, rest = data[: self._body_left], data[self._body_left :]
        if not self._in_headers:
            self._body_left -= len(body)
            if body:
                self.on_body(body)
            if not self._body_left:
                self.on_message_complete()
                self._count()
        if rest:
            switch.feed(rest)

    def on_message_begin(self) -> None:
        self._begun = True
        if self._timer is None:
            self._arm(self.limits.headers_within_s, self._headers_late)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers, self._head_bytes, self._body_bytes = False, 0, 0
        self._body_began_s = self.loop.time()
        self._arm(self.limits.body_within_s, self._body_late)
        idle = self._idle
        super().on_headers_complete()
        if idle and self.parser.should_upgrade() and self._get_upgrade() == PROTOCOL.encode():
            self._switch = Switch(self.transport, self.flow, self.cycle)
            self.scope["extensions"] = {EXTENSION: {"switch": self._switch}}
            self._body_left = next(
                (int(value) for name, value in self.headers if name == b"content-length"), 0
            )

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body_left:  # said by the parser, which takes the body of an upgrade for something else
            return
        self._disarm()
        self._in_headers, self._begun = True, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._count()

    @property
    def _idle(self) -> bool:
        """No answer is under way or to come."""
        return self.cycle is None or self.cycle.response_complete

    def _headers_late(self) -> None:
        self._refuse(408, "late", f"the headers did not arrive within {self.limits.headers_within_s:g} s")

    def _body_late(self) -> None:
        """Ideal: time in which this server does not read is not the peer's. Departure: all begins again."""
        if self.flow.read_paused:
            self._body_began_s, self._body_bytes = self.loop.time(), 0
        allowed_s = self.limits.body_within_s + self._body_bytes / self.limits.body_bytes_per_s
        left_s = self._body_began_s + allowed_s - self.loop.time()
        if left_s > 0:
            self._arm(left_s, self._body_late)
            return
        rate = self.limits.body_bytes_per_s
        detail = f"the body did not arrive within {allowed_s:g} s; send {rate} bytes a second or more"
        self._refuse(408, "late", detail)

    def _refuse(self, status: int, kind: str, detail: str) -> None:
        """Closes the connection, with an answer if there was a part of a request and no answer to it yet."""
        self._disarm()
        self._refused = True
        begun = self._begun or kind == "too_many_connections"
        answering = (
            self.cycle is not None and self.cycle.response_started and not (self._in_headers and self._idle)
        )
        if begun and not answering and not self.transport.is_closing():
            self.transport.write(_problem(status, kind, detail))
        self.transport.close()
        self._arm(CLOSED_WITHIN_S, self.transport.abort)

    def _arm(self, after_s: float, then: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self.loop.call_later(after_s, then)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else ""

    def _count(self) -> None:
        waiting = self._timer is not None or self._idle
        if waiting is not self._counted:
            self._add(1 if waiting else -1)

    def _add(self, change: int) -> None:
        self._counted = change > 0
        self.waiting[self._peer] += change
        if not self.waiting[self._peer]:
            del self.waiting[self._peer]


def _problem(status: int, kind: str, detail: str) -> bytes:
    found = {
        "type": f"urn:penstock:problem:{kind}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "errors": [],
    }
    body = orjson.dumps(found)
    head = b"content-type: application/problem+json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return STATUS_LINE[status] + head % len(body) + body
