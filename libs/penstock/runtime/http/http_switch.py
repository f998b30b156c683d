"""HTTP connection that goes over to lines in both directions (`Upgrade: penstock-lines`, as for a terminal):
what an application of `http_server.Server` has of it, as `extensions` of its scope.

The server never stops reading one, since only a connection that is read shows that its peer is gone. The peer
therefore has a bound of its own, `session_lines.WINDOW_BYTES`; one that exceeds it is cut.
"""

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.session_lines import PROTOCOL, WINDOW_BYTES, Lines

EXTENSION = "penstock.switch"
MAX_WAITING_BYTES = 4 * WINDOW_BYTES  # base64, and lines without input
HEAD = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {PROTOCOL}\r\n"


class Switch:
    """One such connection. Nothing is sent before `take`: until then the application may answer as usual,
    with a refusal."""

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, cycle: RequestResponseCycle) -> None:
        self._transport, self._flow, self._cycle = transport, flow, cycle
        self._waiting = bytearray()
        self._arrived = asyncio.Event()
        self.gone = asyncio.Event()
        """The peer has closed the connection, or it broke."""
        cycle.keep_alive = False  # the parser reads no further request

    def take(self, headers: MutableMapping[str, str]) -> None:
        """Goes over."""
        self._cycle.response_started = True
        self._flow.resume_reading()
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._transport.write(f"{HEAD}{more}\r\n".encode())

    async def lines(self) -> AsyncIterator[bytes]:
        """Until the peer is gone. Raises `BadLine`."""
        lines = Lines()
        while self._waiting or not self.gone.is_set():
            found = bytes(self._waiting)
            self._waiting.clear()
            for line in lines.feed(found) if found else ():
                yield line
            self._arrived.clear()
            if not self._waiting and not self.gone.is_set():
                await self._arrived.wait()

    async def write(self, data: bytes) -> None:
        """Waits until the connection takes more. Raises ConnectionResetError where the peer is gone."""
        await self._flow.drain()
        if self.gone.is_set():
            raise ConnectionResetError
        self._transport.write(data)

    def close(self) -> None:
        """After everything that was written."""
        self._cycle.response_complete = True
        self._transport.close()

    def feed(self, data: bytes) -> None:
        """Of the server: what has come."""
        self._waiting += data
        self._arrived.set()
        if len(self._waiting) > MAX_WAITING_BYTES:
            self._transport.abort()

    def lost(self) -> None:
        """Of the server: the connection has ended."""
        self.gone.set()
        self._arrived.set()


def switch_of(scope: MutableMapping[str, Any]) -> Switch | None:
    """None: an ordinary request."""
    found: Switch | None = scope.get("extensions", {}).get(EXTENSION, {}).get("switch")
    return found
