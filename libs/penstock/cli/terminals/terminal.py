"""This machine's terminal, or pipes, joined with a session: input, size and keys go there,
output comes from there."""

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any

from penstock.cli.signals import held, terminable
from penstock.client.sessions import Session
from penstock.exits import Exit, Stop
from penstock.session_lines import CHUNK_BYTES

STDIN = 0
Write = Callable[[str, bytes], None]
Keys = Callable[[bytes], tuple[bytes, bool]]
"""What of this input is sent, and whether the session is left then."""


def require_terminal(option: str, remedy: str) -> None:
    """Raises `Stop`, with the remedy, where standard input is not a terminal."""
    if not os.isatty(STDIN):
        raise Stop(Exit.BAD_SPEC, f"{option}: standard input is not a terminal; {remedy}")


def size() -> str:
    """Rows and columns of this terminal."""
    columns, rows = os.get_terminal_size(STDIN)
    return f"{rows}x{columns}"


def kind() -> str:
    """Of this terminal, as programs know it."""
    found = os.environ.get("TERM", "")
    return found if re.fullmatch("[A-Za-z0-9._+-]{1,64}", found) else "dumb"


def show(name: str, data: bytes) -> None:
    """Writes to stdout or stderr as `name` says."""
    stream = getattr(sys, name).buffer
    stream.write(data)
    stream.flush()


def join(
    opened: Callable[[], AbstractAsyncContextManager[Session]],
    write: Write = show,
    *,
    stdin: bool,
    terminal: bool,
    keys: Keys = lambda data: (data, False),
) -> dict[str, Any]:
    """Until the session ends: its last frame, empty if `keys` left it. The terminal is restored on each way
    out.

    Raises `ClientError`, and KeyboardInterrupt for a signal as of `signals`.
    """
    with terminable(), _raw(really=stdin and terminal):
        return asyncio.run(_join(opened, write, stdin=stdin, terminal=terminal, keys=keys))


@contextmanager
def _raw(*, really: bool) -> Iterator[None]:
    """Every key reaches the program, Ctrl-C as well."""
    if not really:
        yield
        return
    before = termios.tcgetattr(STDIN)
    try:
        tty.setraw(STDIN, termios.TCSADRAIN)
        yield
    finally:
        with held(), suppress(termios.error):  # a terminal that is gone
            termios.tcsetattr(STDIN, termios.TCSADRAIN, before)


async def _join(
    opened: Callable[[], AbstractAsyncContextManager[Session]],
    write: Write,
    *,
    stdin: bool,
    terminal: bool,
    keys: Keys,
) -> dict[str, Any]:
    async with opened() as session:
        output = asyncio.ensure_future(_output(session, write))
        beside = [asyncio.ensure_future(_input(session, keys))] if stdin else []
        if terminal:
            beside.append(asyncio.ensure_future(_sizes(session)))
        try:
            while not output.done():
                done, _ = await asyncio.wait([output, *beside], return_when=asyncio.FIRST_COMPLETED)
                ended = [part for part in beside if part in done]
                beside = [part for part in beside if part not in ended]
                if any(part.result() for part in ended) and not output.done():  # left by its keys
                    return {}
            return output.result()
        finally:
            output.cancel()
            for part in beside:
                part.cancel()


async def _output(session: Session, write: Write) -> dict[str, Any]:
    """The last frame. Raises `Stop`."""
    async for frame in session.frames():
        if "problem" in frame:
            raise Stop(Exit.PROBLEM, str(frame["problem"]))
        if "stdout" not in frame and "stderr" not in frame:
            return frame
        for name, data in frame.items():
            write(name, data)
    raise Stop(Exit.UNREACHABLE, "the gateway ended the session; `penstock events` may tell more")


async def _input(session: Session, keys: Keys) -> bool:
    """Whether the session was left by keys; False: the input has ended."""
    while True:
        await _readable(STDIN)
        try:
            data = os.read(STDIN, CHUNK_BYTES)
        except BlockingIOError:  # another process made it so, and has read what was there
            continue
        except OSError:  # the terminal is gone
            data = b""
        if not data:
            await session.end()
            return False
        data, left = keys(data)
        await session.send(data)
        if left:
            return True


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:  # a file, which always is
        return
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def _sizes(session: Session) -> bool:
    """Sends this terminal's size, and each change of it; never returns."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        while True:
            with suppress(OSError):  # the terminal is gone
                columns, rows = os.get_terminal_size(STDIN)
                await session.resize(rows, columns)
            await changed.wait()
            changed.clear()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
