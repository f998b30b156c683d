"""Session of a caller with a program on this node: lines (`session_lines`) on one side, descriptors on the
other.

Nothing is read before the other side has taken what came before, in both directions.
"""

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Awaitable, Collection
from contextlib import suppress
from typing import Protocol

from penstock.runtime.http.http_switch import Switch
from penstock.runtime.keys.log_keys import LogKey
from penstock.runtime.race import first_of
from penstock.session_lines import CHUNK_BYTES, TAKEN_BYTES, BadLine, input_of, line
from penstock_services.node_reporter.shell.process import terminal

SIZE = struct.Struct("HHHH")  # <asm-generic/termios.h>: rows, columns, pixels


class Sink(Protocol):
    """What takes a caller's input."""

    async def put(self, data: bytes) -> None:
        """Returns when it is taken, or nobody will read it any more."""

    def resize(self, rows: int, columns: int) -> None: ...

    def end(self) -> None:
        """No more input comes."""


class Descriptor:
    """A pipe's end, or the master of a terminal, which is not blocking; None: no input is taken."""

    def __init__(self, number: int | None, *, terminal: bool) -> None:
        self.number, self._terminal = number, terminal
        self._loop = asyncio.get_running_loop()

    async def put(self, data: bytes) -> None:
        while data and self.number is not None:
            try:
                data = data[os.write(self.number, data) :]
            except BlockingIOError:
                await self._room(self.number)
            except OSError:  # the program has closed its end
                return

    def resize(self, rows: int, columns: int) -> None:
        if self._terminal and self.number is not None:
            resize(self.number, rows, columns)

    def end(self) -> None:
        """A terminal has no end; its user types it."""
        if not self._terminal:
            self.close()

    def close(self) -> None:
        """Once or more."""
        if self.number is not None:
            os.close(self.number)
            self.number = None

    async def _room(self, number: int) -> None:
        room = asyncio.Event()
        self._loop.add_writer(number, room.set)
        try:
            await room.wait()
        finally:
            self._loop.remove_writer(number)


class Attachment(Descriptor):
    """A connection to a task's terminal (`terminal`), which has input and sizes as messages."""

    def __init__(self, number: int) -> None:
        super().__init__(number, terminal=True)

    async def put(self, data: bytes) -> None:
        for start in range(0, len(data), terminal.CHUNK_BYTES):
            await super().put(terminal.INPUT + data[start : start + terminal.CHUNK_BYTES])

    def resize(self, rows: int, columns: int) -> None:
        with suppress(OSError):  # the next change tells its size as well
            if self.number is not None:
                os.write(self.number, terminal.RESIZE + terminal.SIZE.pack(rows, columns))


def resize(master: int, rows: int, columns: int) -> None:
    """The kernel tells the terminal's foreground processes (SIGWINCH)."""
    with suppress(OSError):
        fcntl.ioctl(master, termios.TIOCSWINSZ, SIZE.pack(rows, columns, 0, 0))


async def take_input(switch: Switch, key: LogKey, nonce: str, sink: Sink) -> str:
    """Until the caller has left, or has sent what no caller sends: then this is returned."""
    number = untold = 0
    try:
        async for signed in switch.lines():
            found = input_of(key.line_of(nonce, number, signed))
            number += 1
            if found is None:
                sink.end()
            elif isinstance(found, tuple):
                sink.resize(*found)
            else:
                await sink.put(found)
                untold += len(found)
                if untold >= TAKEN_BYTES:
                    await switch.write(line(taken=untold))
                    untold = 0
    except BadLine as error:
        return str(error)
    except ConnectionResetError:
        pass
    return ""


async def send_output(
    sources: dict[str, int],
    switch: Switch,
    ended: asyncio.Event | None,
    most_bytes: int | None,
    ends: tuple["asyncio.Future[str]", asyncio.Event],
) -> bool:
    """Sends what these descriptors have until they are empty after `ended`, where that is None until they are
    closed, or one of `ends` has come.

    False: they had more than `most_bytes`. Raises ConnectionResetError where the caller has left.
    """
    loop, sent, (left, stop) = asyncio.get_running_loop(), 0, ends
    while not left.done() and not stop.is_set():
        if most_bytes is not None and sent > most_bytes:
            return False
        last, silent = not sources if ended is None else ended.is_set(), True
        for name, source in tuple(sources.items()):
            try:
                data = os.read(source, CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # EIO: no process has this terminal any more
                data = b""
            silent = False
            if not data:
                del sources[name]
                continue
            sent += len(data)
            await switch.write(line(**{name: data}))
        if silent and last:  # a process that is left behind may hold the pipes
            break
        if silent:
            over = (
                *([] if ended is None else [ended.wait()]),
                asyncio.shield(left),
                stop.wait(),
                switch.gone.wait(),
            )
            await _something(loop, sources.values(), *over)
            if switch.gone.is_set():
                raise ConnectionResetError
    return True


async def _something(
    loop: asyncio.AbstractEventLoop, sources: Collection[int], *ends: Awaitable[object]
) -> None:
    """Until a descriptor has data, or one of these is over."""
    data = asyncio.Event()
    for source in sources:
        loop.add_reader(source, data.set)
    try:
        await first_of(data.wait(), *ends)
    finally:
        for source in sources:
            loop.remove_reader(source)
