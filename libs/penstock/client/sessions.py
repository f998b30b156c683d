"""Session with a program in a task, such as a terminal: lines in both directions
(`penstock.session_lines`)."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpcore
import httpx

from penstock.client.aio.client import AsyncClient
from penstock.client.connection import Connection
from penstock.client.errors import GatewayFault, Unreachable
from penstock.client.streams import ENDLESS
from penstock.keepalive import keep_alive
from penstock.session_lines import (
    CHUNK_BYTES,
    PROTOCOL,
    READ_BYTES,
    UPGRADE,
    WINDOW_BYTES,
    BadLine,
    Lines,
    line,
)

OUTPUTS = ("stdout", "stderr")
BROKEN = (httpcore.NetworkError, httpcore.TimeoutException, OSError)


class Session:
    """One session. Its end, for whatever reason, ends a command, and leaves a job's terminal."""

    def __init__(self, connection: Connection, response: httpx.Response) -> None:
        self._connection = connection
        self._stream: Any = response.extensions["network_stream"]
        keep_alive(self._stream.get_extra_info("socket"))
        self._writing = asyncio.Lock()
        self._under_way = 0
        self._room = asyncio.Event()

    async def frames(self) -> AsyncIterator[dict[str, Any]]:
        """What comes from the task, output as bytes. Raises `ClientError`."""
        lines = Lines()
        try:
            while data := await self._stream.read(READ_BYTES):
                for text in lines.feed(data):
                    frame = json.loads(text)
                    if "taken" in frame:
                        self._under_way -= frame["taken"]
                        self._room.set()
                    else:
                        yield {
                            name: b64decode(value) if name in OUTPUTS else value
                            for name, value in frame.items()
                        }
        except (ValueError, BadLine) as error:
            raise GatewayFault(
                f"{self._connection.server} sent a line that is not of a session: {error}"
            ) from error
        except BROKEN as error:
            raise self._broken(error) from error

    async def send(self, data: bytes) -> None:
        """Input for the program. Returns once at most WINDOW_BYTES of it are under way. Raises
        `ClientError`."""
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            while self._under_way + len(part) > WINDOW_BYTES:
                self._room.clear()
                await self._room.wait()
            self._under_way += len(part)
            await self._write(line(stdin=part))

    async def resize(self, rows: int, columns: int) -> None:
        """Raises `ClientError`."""
        await self._write(line(size=[rows, columns]))

    async def end(self) -> None:
        """No more input comes. Raises `ClientError`."""
        await self._write(line(end=True))

    async def _write(self, data: bytes) -> None:
        try:
            async with self._writing:
                await self._stream.write(data)
        except BROKEN as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> Unreachable:
        why = str(error) or type(error).__name__
        return Unreachable(f"the connection to {self._connection.server} broke ({why})")


@asynccontextmanager
async def opened(client: AsyncClient, path: str, body: Any) -> AsyncIterator[Session]:
    """A session with what runs for this request. Raises `ClientError`."""
    connection = client._connection
    try:
        async with client._http.stream("POST", path, json=body, headers=UPGRADE, timeout=ENDLESS) as response:
            if response.status_code != httpx.codes.SWITCHING_PROTOCOLS:
                if response.is_error:
                    await response.aread()
                    raise connection.refused(response)
                remedy = "a proxy before it has to pass `Upgrade` on"
                raise GatewayFault(f"{connection.server} does not go over to {PROTOCOL}; {remedy}")
            yield Session(connection, response)
    except httpx.HTTPError as error:
        raise connection.unreachable(error) from error
