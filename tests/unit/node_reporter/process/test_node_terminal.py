"""The terminal of a task in its shim: nobody who looks holds up the task, and no key is lost."""

import os
import select
import socket
import tty
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock_services.node_reporter.shell.process.terminal import (
    INPUT,
    LAST_BYTES,
    MAX_ATTACHED,
    Terminal,
    place,
)

READ_BYTES = 1 << 17
KEYS = bytes(range(256)) * 16


class Shim:
    """Turns as the shim does, and the program at the other end, which has set the terminal to raw mode."""

    def __init__(self, folder: Path) -> None:
        self.terminal, self.poll = Terminal(str(folder), None), select.poll()
        self.folder = os.open(folder, os.O_PATH)
        self.program = os.open(self.terminal.path, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(self.program)
        os.set_blocking(self.program, False)
        self.terminal.serve(self.poll)

    def turn(self) -> bytes:
        """Everything that is to be done now; what the terminal has shown."""
        shown = b""
        for descriptor, events in self.poll.poll(0):
            shown += self.terminal.turn(descriptor, events)
        return shown

    def attach(self) -> socket.socket:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found.connect(place(self.folder))
        found.setblocking(False)
        self.turn()
        return found

    def close(self) -> None:
        for descriptor in (self.program, self.folder, self.terminal._master, self.terminal._slave):
            os.close(descriptor)


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    found = Shim(tmp_path)
    yield found
    found.close()


def test_who_does_not_read_misses_a_part_and_sees_the_end(shim: Shim) -> None:
    """A laptop sleeps while a training prints; when it wakes, its user sees how much is missing, and the
    prompt."""
    with shim.attach() as awake, shim.attach() as asleep:
        printed, seen = 0, 0
        while printed < 40 * LAST_BYTES:
            printed += os.write(shim.program, b"x" * 1_000)
            shim.turn()
            with suppress(BlockingIOError):
                seen += len(awake.recv(READ_BYTES))
        os.write(shim.program, b"prompt> ")
        shown = b""
        while not shown.endswith(b"prompt> "):
            shim.turn()
            with suppress(BlockingIOError):
                shown += asleep.recv(READ_BYTES)
        assert seen == printed
        [before, notice, after] = shown.replace(b"[", b"]").split(b"]")
        assert notice.startswith(b"penstock: ")
        assert notice.endswith(b" bytes left out")
        assert len(before) - 2 + int(notice.split()[1]) + len(after) - 2 == printed + len(b"prompt> ")
    with shim.attach() as late:
        last = late.recv(READ_BYTES) + late.recv(READ_BYTES)
        assert (len(last), last[-8:]) == (LAST_BYTES, b"prompt> ")


def test_keys_wait_until_the_program_reads_them(shim: Shim) -> None:
    """Somebody pastes a file into an editor that is busy: it takes all of it, in order, when it comes to
    that."""
    with shim.attach() as caller:
        sent = 0
        with suppress(BlockingIOError):
            while True:
                caller.send(INPUT + KEYS)
                sent += 1
                shim.turn()
        assert sent > 3
        typed = b""
        while len(typed) < sent * len(KEYS):
            shim.turn()
            with suppress(BlockingIOError):
                typed += os.read(shim.program, READ_BYTES)
        assert typed == KEYS * sent


def test_as_many_attach_as_there_is_room_for(shim: Shim) -> None:
    """A lecture: the ninth is turned away, and comes in when another has left."""
    inside = [shim.attach() for _ in range(MAX_ATTACHED)]
    with shim.attach() as ninth:
        assert ninth.recv(READ_BYTES) == b""
    inside.pop().close()
    shim.turn()
    inside.append(shim.attach())
    os.write(shim.program, b"hello")
    shim.turn()
    for caller in inside:
        assert caller.recv(READ_BYTES) == b"hello"
        caller.close()
