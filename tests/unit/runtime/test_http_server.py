"""HTTP server of gateway and log servers: requests that never become whole are closed, and no others.

Over real sockets, with short limits.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.devservers.certificates import make_certificates
from penstock.runtime.http.http_limits import Limits
from penstock.runtime.http.http_server import Server
from penstock.runtime.http.http_switch import Switch, switch_of
from penstock.runtime.http.tls_server import server_context
from penstock.tls import client_context
from tests.support.waiting import await_until

HALF = b"GET /half HTTP/1.1\r\nHost: a\r\n"
WHOLE = b"GET /whole HTTP/1.1\r\nHost: a\r\n\r\n"
HEADERS_SOON = Limits(headers_within_s=0.2)
BODY_SOON = Limits(body_within_s=0.2)


def post(length: int) -> bytes:
    return b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length


class Application:
    """`/body` answers with the length of the body, `/stream` never ends, `/early` answers before it reads. A
    request that asks to go over to lines gets them back, behind the length of its body, if this is not 0."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        """Paths of requests that ended before their bodies did."""
        self.more = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0
        while scope["path"] == "/body":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.append(scope["path"])
                return
            size += len(message["body"])
            if not message["more_body"]:
                break
        if size and (switch := switch_of(scope)) is not None:
            await self._repeat(switch, size)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.more.wait()
        await send({"type": "http.response.body", "body": b"%d bytes" % size})

    async def _repeat(self, switch: Switch, size: int) -> None:
        switch.take({})
        await switch.write(b"%d\n" % size)
        async for line in switch.lines():
            await switch.write(line + b"\n")
        self.gone.append("lines")
        switch.close()


class Open(NamedTuple):
    """A connection of a client."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, text: bytes) -> None:
        self.writer.write(text)
        await self.writer.drain()

    async def until(self, text: bytes) -> bytes:
        return await self.reader.readuntil(text)

    async def closed(self) -> bytes:
        """Everything up to the end of the connection, which the server closes; who still sends meets a
        reset."""
        found = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while block := await self.reader.read(65_536):
                found += block
        return bytes(found)


class Serving:
    def __init__(self, server: Server, app: Application) -> None:
        self.app = app
        self.port: int = server.servers[0].sockets[0].getsockname()[1]
        self.connections = server.server_state.connections
        self._opened: list[Open] = []

    async def connect(self, text: bytes = b"") -> Open:
        found = Open(*await asyncio.open_connection("127.0.0.1", self.port))
        self._opened.append(found)
        await found.send(text)
        return found

    async def kept(self) -> Open:
        """A connection with one answered request. On a busy machine not the first: its bytes may come
        late."""
        while True:
            found = await self.connect(WHOLE)
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await found.until(b"0 bytes\r\n0\r\n\r\n")
                return found

    def close(self) -> None:
        for each in self._opened:
            each.writer.close()


@asynccontextmanager
async def serving(limits: Limits, tls: ssl.SSLContext | None = None) -> AsyncIterator[Serving]:
    app, stop = Application(), asyncio.Event()
    server = Server(app, stop, limits=limits, tls=tls, host="127.0.0.1", port=0)
    life = asyncio.create_task(server.serve())
    await await_until(lambda: server.started or life.done(), "the server")
    found = Serving(server, app)
    try:
        yield found
    finally:
        app.more.set()
        found.close()
        stop.set()
        await life


@pytest.mark.parametrize(
    ("text", "answers"),
    [(b"", 0), (b"\r\n", 0), (b"GET /half HTT", 1), (HALF, 1), (WHOLE + HALF, 2)],
)
async def test_headers_that_do_not_come_are_not_waited_for(text: bytes, answers: int) -> None:
    """Thousands of connections with half a request stayed open until the gateway had no file left."""
    async with serving(HEADERS_SOON) as server:
        for peer in [await server.connect(text) for _ in range(50)]:
            await peer.closed()
        kept = await server.kept()
        await kept.send(text or HALF)
        await kept.closed()

        async def count() -> int:
            return (await (await server.connect(text)).closed()).count(b"HTTP/1.1 ")

        while await count() != answers:  # on a busy machine the first bytes may come late as well
            pass
        await server.kept()


@pytest.mark.parametrize("path", [b"/body", b"/early"])
async def test_a_body_that_drips_is_not_waited_for(path: bytes) -> None:
    """A byte now and then keeps each time-out between two bytes from ending; also behind an early answer."""
    async with serving(BODY_SOON) as server:
        peer = await server.connect(post(1_000_000).replace(b"/body", path))
        ended = asyncio.ensure_future(peer.closed())
        while not ended.done():
            peer.writer.write(b"x")
            await asyncio.sleep(0.02)  # clock: the pace of the drip; a slower one is closed as well
        assert (b"408" in ended.result()) == (path == b"/body")
        assert server.app.gone == (["/body"] if path == b"/body" else [])


async def test_what_makes_progress_or_is_answered_is_not_cut() -> None:
    """A long upload over a slow line and a live stream: each is open for longer than the limit."""
    async with serving(BODY_SOON._replace(body_bytes_per_s=1)) as server:
        upload = await server.connect(post(2_000) + b"x" * 1_000)
        stream = await server.connect(WHOLE.replace(b"/whole", b"/stream"))
        await stream.until(b"first")
        for _ in range(2):  # whose end shows that the limit has passed
            assert b"408 Request Timeout" in await (await server.connect(post(9))).closed()
        await upload.send(b"x" * 1_000)
        assert await upload.until(b"2000 bytes")
        server.app.more.set()
        assert b"0 bytes" in await stream.until(b"\r\n0\r\n\r\n")


async def test_a_kept_connection_may_rest_between_two_requests() -> None:
    """Clients keep connections for a minute; the time for headers counts from a request's first byte."""
    async with serving(HEADERS_SOON) as server:
        kept = await server.kept()
        for _ in range(2):  # whose end shows that the limit has passed
            await (await server.connect(HALF)).closed()
        await kept.send(WHOLE)
        assert await kept.until(b"0 bytes")


async def test_a_silent_peer_of_an_encrypted_connection_is_cut(tmp_path: Path) -> None:
    """After half a request it never answers again: neither the refusal nor the end of TLS is waited for."""
    make_certificates(tmp_path)
    settings = ("certificate", "key")
    context = server_context(tmp_path / "certificate.pem", tmp_path / "key.pem", settings)
    async with serving(HEADERS_SOON, context) as server:
        silent = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", server.port))
        trusting = client_context(str(tmp_path / "ca.pem"), "ca")
        encrypted = await asyncio.to_thread(trusting.wrap_socket, silent, server_hostname="127.0.0.1")
        await asyncio.to_thread(encrypted.sendall, HALF)
        await await_until(lambda: server.connections, "the connection at the server")
        await await_until(lambda: not server.connections, "its end, with a peer that reads nothing")
        encrypted.close()


async def test_one_peer_holds_so_many_connections_without_a_request() -> None:
    """The next is refused with the reason; streams do not count, and one that has gone makes room."""
    async with serving(Limits(waiting_per_peer=3)) as server:
        for _ in range(5):
            stream = await server.connect(WHOLE.replace(b"/whole", b"/stream"))
            await stream.until(b"first")
        held = [await server.connect(HALF) for _ in range(3)]
        refused = await (await server.connect()).closed()
        assert b"503 Service Unavailable" in refused
        assert b"127.0.0.1 has 3 connections without a whole request" in refused
        await held[0].send(b"\r\n")
        assert await held[0].until(b"0 bytes")
        held[0].writer.close()

        async def is_served() -> bool:
            peer = await server.connect(WHOLE)
            found = await peer.closed() if (first := await peer.reader.read(12)).endswith(b"503") else first
            peer.writer.close()
            return b"200" in found

        await await_until(is_served, "room for one connection")


async def test_headers_without_end_are_refused_by_their_size() -> None:
    """Memory is bounded also where a peer is fast."""
    async with serving(Limits()) as server:
        peer = await server.connect(HALF + b"X-More: ")
        await peer.send(
            b"x" * (Limits().header_bytes + 1 - len(HALF + b"X-More: "))
        )  # no byte is left unread
        assert b"431 Request Header Fields Too Large" in await peer.closed()


def upgrade(length: int) -> bytes:
    return post(length).replace(b"Host: a", b"Host: a\r\nConnection: Upgrade\r\nUpgrade: penstock-lines")


async def test_a_connection_goes_over_to_lines_behind_a_whole_body() -> None:
    """A terminal in a task: its request comes in parts like any other, is refused like any other, and when
    the user's machine is gone, that is noticed at once."""
    async with serving(BODY_SOON) as server:
        body, typed = b"x" * 200_000, b"ls\n" * 20_000
        peer = await server.connect(upgrade(len(body)) + body + b"l")
        assert b"101 Switching Protocols" in await peer.until(b"\r\n\r\n")
        assert await peer.until(b"\n") == b"200000\n"
        await peer.send(typed[1:])
        assert await peer.reader.readexactly(len(typed)) == typed
        peer.writer.close()
        await await_until(lambda: server.app.gone == ["lines"], "its end")
        refused = await (await server.connect(upgrade(0))).closed()
        assert refused.startswith(b"HTTP/1.1 200 OK\r\nconnection: close")
        late = await (await server.connect(upgrade(5) + b"x")).closed()
        assert b"408 Request Timeout" in late
