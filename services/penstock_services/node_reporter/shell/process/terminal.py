"""Terminal of a task, which its shim holds: it lives with the task, whoever attaches and whatever becomes of
the reporter.

Standard library only (see `confinement`). Callers connect to the socket SOCKET in the task's folder
(SEQPACKET). A message to it is INPUT and keys, or RESIZE and rows and columns (SIZE); those from it are what
the terminal shows, at first the last LAST_BYTES. All attached callers see the same, and type into the same.

The terminal is always read, so that nobody who looks can hold up the task: a caller that is too slow misses
what is beyond LAST_BYTES, and is told how much that was.
"""

import fcntl
import os
import select
import socket
import struct
import termios
from contextlib import suppress

SOCKET = "terminal"
INPUT, RESIZE = b"i", b"s"
SIZE = struct.Struct("HH")
FIRST_SIZE = (24, 80)  # until somebody attaches: a VT100's
CHUNK_BYTES = 1 << 15  # as of `session_lines`
LAST_BYTES = 2 * CHUNK_BYTES  # for whoever attaches: some thirty screens of the first size
MAX_ATTACHED = 8  # the shim, one process, sends each a copy of all output


def place(number: int) -> str:
    """Path of the socket that is short enough for the kernel. `number`: a descriptor of the folder."""
    return f"/proc/self/fd/{number}/{SOCKET}"


class Terminal:
    """Of one task. `path`: the terminal's name for the task's program."""

    def __init__(self, folder: str, user: int | None) -> None:
        """`user`: uid of the task's user; None: this process's. Raises OSError."""
        self._master, self._slave = os.openpty()  # the slave is held: no program's end hangs the terminal up
        os.set_blocking(self._master, False)
        if user is not None:
            os.fchown(self._slave, user, -1)
        self.path = os.ttyname(self._slave)
        self._resize(*FIRST_SIZE)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            with suppress(FileNotFoundError):  # of an earlier shim of this very task
                os.unlink(place(number))
            self._listener.bind(place(number))
        finally:
            os.close(number)
        self._listener.listen(MAX_ATTACHED)
        self._attached: dict[int, socket.socket] = {}
        self._missed: dict[int, int] = {}
        """Descriptor of a caller that is too slow → bytes that it has not got."""
        self._last = b""
        """What it has shown, at most LAST_BYTES."""
        self._keys = b""
        """Input that the terminal does not take yet; meanwhile no further is read."""
        self._poll = select.poll()

    def serve(self, poll: select.poll) -> None:
        """Registers with the shim's poll."""
        self._poll = poll
        for descriptor in (self._master, self._listener.fileno()):
            poll.register(descriptor, select.POLLIN)

    def has(self, descriptor: int) -> bool:
        return descriptor in (self._master, self._listener.fileno()) or descriptor in self._attached

    def turn(self, descriptor: int, events: int) -> bytes:
        """Does what is to be done; returns what the terminal has shown since."""
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor != self._master:
            self._serve(descriptor, events)
        elif events & select.POLLOUT:
            self._type()
        return self._shown() if descriptor == self._master else b""

    def rest(self) -> bytes:
        """What it has shown at last."""
        found = b""
        while chunk := self._shown():
            found += chunk
        return found

    def _shown(self) -> bytes:
        try:
            chunk = os.read(self._master, CHUNK_BYTES)
        except OSError:  # nothing is there
            return b""
        self._last = (self._last + chunk)[-LAST_BYTES:]
        for descriptor in tuple(self._attached):
            self._show(descriptor, chunk)
        return chunk

    def _accept(self) -> None:
        try:
            caller = self._listener.accept()[0]
        except OSError:  # it has left
            return
        if len(self._attached) >= MAX_ATTACHED:
            caller.close()
            return
        caller.setblocking(False)
        descriptor = caller.fileno()
        self._attached[descriptor] = caller
        self._listen(descriptor)
        self._show_last(descriptor, len(self._last))

    def _serve(self, descriptor: int, events: int) -> None:
        if descriptor in self._missed and events & select.POLLOUT:
            missed = self._missed.pop(descriptor)
            self._listen(descriptor)
            if missed > len(self._last):
                left_out = missed - len(self._last)
                self._show(descriptor, b"\r\n[penstock: %d bytes left out]\r\n" % left_out)
            self._show_last(descriptor, missed)
        if descriptor not in self._attached:
            return
        if events & (select.POLLHUP | select.POLLERR):
            self._leave(descriptor)
        elif events & select.POLLIN and not self._keys:
            self._take(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            message = self._attached[descriptor].recv(CHUNK_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._leave(descriptor)
        elif message[:1] == INPUT:
            self._keys = message[1:]
            self._type()
        elif message[:1] == RESIZE and len(message) == 1 + SIZE.size:
            self._resize(*SIZE.unpack(message[1:]))

    def _type(self) -> None:
        """Gives the terminal the keys that it takes."""
        waited = bool(self._keys)
        try:
            while self._keys:
                self._keys = self._keys[os.write(self._master, self._keys) :]
        except BlockingIOError:
            pass
        if waited:
            self._poll.modify(self._master, select.POLLIN | (select.POLLOUT if self._keys else 0))
            for descriptor in self._attached:
                self._listen(descriptor)

    def _show_last(self, descriptor: int, count: int) -> None:
        shown = self._last[-count:] if count else b""
        for start in range(0, len(shown), CHUNK_BYTES):
            if descriptor in self._attached:
                self._show(descriptor, shown[start : start + CHUNK_BYTES])

    def _show(self, descriptor: int, data: bytes) -> None:
        if descriptor in self._missed:
            self._missed[descriptor] += len(data)
            return
        try:
            self._attached[descriptor].send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._missed[descriptor] = len(data)
            self._listen(descriptor)
        except OSError:
            self._leave(descriptor)

    def _listen(self, descriptor: int) -> None:
        wanted = 0 if self._keys else select.POLLIN
        self._poll.register(descriptor, wanted | (select.POLLOUT if descriptor in self._missed else 0))

    def _leave(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._missed.pop(descriptor, None)
        self._attached.pop(descriptor).close()

    def _resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
