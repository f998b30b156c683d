"""Session with a program in a task, such as a terminal: lines in both directions
(`penstock.session_lines`)."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from typing import Any

import httpcore
import httpx

from penstock.client.connection import Connection
from penstock.client.errors import GatewayFault, Unreachable
from penstock.keepalive import keep_alive
from penstock.session_lines import CHUNK_BYTES, READ_BYTES, WINDOW_BYTES, BadLine, Lines, line

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
                f"{self._connection.server} sent what is no line of a session: {error}"
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
