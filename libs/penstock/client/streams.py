"""Server-sent events over broken lines: where a stream goes on, when it gives up, and when its time is over."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx
import httpx_sse
import msgspec

from penstock.client.connection import TIMEOUT_S, Connection
from penstock.client.errors import ClientError, GatewayFault, WaitTimeout
from penstock.client.models import Event
from penstock.client.steps import FIRST_PAUSE_S, LAST_PAUSE_S, PASSING
from penstock.retry import Backoff

# The gateway comments into idle streams more often; silence beyond this is a dead line.
STREAM_TIMEOUT = httpx.Timeout(TIMEOUT_S, read=60.0)
ENDLESS = httpx.Timeout(TIMEOUT_S, read=None)
RECONNECT_TRIES = 8
ENDED = "penstock.job.ended"
BROKEN = (httpx.HTTPError, httpx.StreamError, httpx_sse.SSEError, OSError)


class StreamEvent(NamedTuple):
    """One event of the gateway's stream. `data`: its JSON."""

    id: str
    type: str
    data: dict[str, Any]

    def typed(self) -> Event:
        """Raises `GatewayFault`."""
        try:
            return msgspec.convert(self.data, Event)
        except msgspec.ValidationError as error:
            raise GatewayFault(f"event {self.id} of the stream is of another form: {error}") from error


class Place:
    """How far a stream was read, by the id of its last event (`Last-Event-ID`), and how often it broke since."""

    def __init__(self, connection: Connection, path: str, last_id: str | None) -> None:
        self._connection = connection
        self._path = path
        self._last_id = last_id
        self._backoff, self._failures = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S), 0

    def headers(self) -> dict[str, str]:
        return {"Last-Event-ID": self._last_id} if self._last_id else {}

    def took(self, sse: httpx_sse.ServerSentEvent) -> StreamEvent | None:
        """None: the frame only sets the time to reconnect. Raises `GatewayFault`."""
        self._last_id = sse.id or self._last_id
        self._failures = 0
        self._backoff.reset()
        try:
            return StreamEvent(sse.id, sse.event, sse.json()) if sse.data else None
        except ValueError as error:
            text = f"{self._connection.server}{self._path} sent what is no event: {error}"
            raise GatewayFault(text) from error

    def refused(self, response: httpx.Response) -> Exception:
        """What to raise for an answer that is an error; its body is read."""
        error = self._connection.refused(response)
        return httpx.TransportError(str(error)) if response.status_code in PASSING else error

    def pause_s(self, cause: Exception | None) -> float:
        """Before the next attempt; `cause`: what broke the line, None: the gateway ended it. Raises `ClientError` when it is over."""
        if cause is not None and (misfit := self._connection.misfit(cause)) is not None:
            raise misfit from cause
        self._failures += 1
        if self._failures >= RECONNECT_TRIES:
            raise self._connection.unreachable(cause) from cause
        return self._backoff.next_s()


class Deadline:
    """The end of a time limit; None: never."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._ends_s = None if limit_s is None else time.monotonic() + limit_s

    @property
    def left_s(self) -> float | None:
        return None if self._ends_s is None else max(0.0, self._ends_s - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left_s == 0.0

    def error(self, pending: set[str], total: int) -> ClientError:
        return WaitTimeout(
            f"{len(pending)} of {total} jobs have not ended within {self._limit_s:g} s; they go on"
        )

    @contextmanager
    def cutting(self, response: httpx.Response) -> Iterator[None]:
        """Shuts the response's connection down at the end, which wakes a read that waits longer."""
        if self.left_s is None:
            yield
            return
        end = response.extensions["network_stream"].get_extra_info("socket")
        timer = threading.Timer(self.left_s, _shut_down, (end,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _shut_down(end: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        end.shutdown(socket.SHUT_RDWR)
