"""Session with a program on a node, such as a command in a task:
lines in both directions (`penstock.session_lines`)."""

from collections.abc import AsyncIterator
from typing import Any

import httpcore
import httpx

from penstock.runtime.keys.log_keys import LogKey
from penstock.session_lines import READ_BYTES, BadLine, Lines
from penstock_services.gateway.core.log_text import NoAnswer, Unreadable

BROKEN = (httpx.HTTPError, httpcore.NetworkError, httpcore.TimeoutException, OSError)


class NodeSession:
    """One connection, which has gone over to lines. `close` ends the program at its other end."""

    def __init__(self, node_id: str, response: httpx.Response, key: LogKey, nonce: str) -> None:
        self._node_id, self._response, self._key, self._nonce = node_id, response, key, nonce
        self._stream: Any = response.extensions["network_stream"]
        self._sent = 0

    async def lines(self) -> AsyncIterator[bytes]:
        """The node's lines, without their ends. Raises `Unreadable`."""
        lines = Lines()
        try:
            while data := await self._stream.read(READ_BYTES):
                for text in lines.feed(data):
                    yield text
        except BadLine as error:
            raise Unreadable(f"node {self._node_id}: {error}") from error
        except BROKEN as error:
            raise self._broken(error) from error

    async def send(self, text: bytes) -> None:
        """One line to the node. Raises `Unreadable`."""
        signed = self._key.signed_line(self._nonce, self._sent, text)
        self._sent += 1
        try:
            await self._stream.write(signed)
        except BROKEN as error:
            raise self._broken(error) from error

    async def close(self) -> None:
        await self._response.aclose()

    def _broken(self, error: Exception) -> NoAnswer:
        return NoAnswer(f"the connection to node {self._node_id} broke ({type(error).__name__})")
