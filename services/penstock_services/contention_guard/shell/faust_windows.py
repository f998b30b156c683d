"""Telemetry windows on Kafka: the adapter of the port `Windows` whose reader is Faust in a process of its
own.

Why a process: see `faust_table`. After any failure of it `read` raises `LogError`, and the service's next
attempt starts another one.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from penstock.errors import ConfigurationError, LogError, NotAllowed
from penstock.scheduling.acting.telemetry_windows import NodeWindow

PROCESS = "penstock_services.contention_guard.shell.faust_table"
LENGTH_BYTES = 4  # before each frame
STOP_S = 5.0  # then it is killed
KINDS: Mapping[str, type[LogError | ConfigurationError]] = MappingProxyType(
    {each.__name__: each for each in (ConfigurationError, NotAllowed)}
)
"""Errors that a retry cannot fix, by name."""


class Asked(NamedTuple):
    """Input of the process. It comes through a pipe, for the URL has a password."""

    log_url: str
    cell_index: int


class Refused(msgspec.Struct):
    """Why the process cannot go on: its last frame."""

    kind: str
    """A name of `KINDS`, or `LogError`."""
    text: str


class FaustWindows:
    """A `Windows` on Kafka."""

    def __init__(self, log_url: str, cell_index: int) -> None:
        self._asked = Asked(log_url, cell_index)
        self._process: asyncio.subprocess.Process | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._changed: dict[tuple[str, int], NodeWindow] = {}
        self._news = asyncio.Event()
        """Set while windows have changed, and from the end of the process on."""

    async def begin(self) -> Sequence[NodeWindow]:
        """As `Windows`. Raises `ConfigurationError` where the changelog topic is not as it must be."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", PROCESS, stdin=pipe, stdout=pipe
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(self._asked) + b"\n")
        self._receiving = asyncio.create_task(self._receive(self._process.stdout))
        return await self._next()

    async def read(self) -> Sequence[NodeWindow]:
        """As `Windows`."""
        changed: Sequence[NodeWindow] = ()
        while not changed:
            changed = await self._next()
        return changed

    async def close(self) -> None:
        """As `Windows`. Samples that were read and are not
        in the changelog are read again by the next one."""
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _next(self) -> Sequence[NodeWindow]:
        """Windows since the last call; a first frame may be empty.
        Raises the error that ended the process."""
        assert self._receiving is not None, "`begin` comes first"
        await self._news.wait()
        if self._receiving.done():
            self._receiving.result()
        self._news.clear()
        changed, self._changed = self._changed, {}
        return [changed[key] for key in sorted(changed)]

    async def _receive(self, stream: asyncio.StreamReader) -> None:
        """Takes frames as they come, so that the process never waits. Raises why there are no more."""
        try:
            while True:
                length = int.from_bytes(await stream.readexactly(LENGTH_BYTES))
                frame = msgspec.json.decode(await stream.readexactly(length), type=list[NodeWindow] | Refused)
                if isinstance(frame, Refused):
                    raise KINDS.get(frame.kind, LogError)(frame.text)
                for window in frame:
                    self._changed[window.node_id, window.begin_ms] = window
                self._news.set()
        except asyncio.IncompleteReadError as error:
            raise LogError(
                "the process that reads telemetry by Faust has ended; its log has the reason"
            ) from error
        finally:
            self._news.set()
