"""A user's terminal, in which one `penstock` runs as a process of its own."""

import fcntl
import os
import signal
import struct
import subprocess
import termios
from contextlib import suppress
from typing import Self

from tests.support.cli.command_process import PENSTOCK, ROOT

READ_BYTES = 1 << 16


class Terminal:
    """31 rows, 97 columns. A context manager, which kills what is left."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        self.master, self.slave = os.openpty()
        os.set_blocking(self.master, False)
        self._resize(31, 97)
        self._before = termios.tcgetattr(self.slave)
        self._printed = b""
        self.process = subprocess.Popen(
            [*PENSTOCK, *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
            env={**env, "TERM": "xterm"},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def printed(self) -> bytes:
        """Everything so far."""
        with suppress(BlockingIOError):
            while data := os.read(self.master, READ_BYTES):
                self._printed += data
        return self._printed

    def shows(self, text: bytes) -> bool:
        """Whether it has shown this. Fails where the command has ended before."""
        found = text in self.printed()
        ended = self.process.poll() is not None
        assert found or not ended or text in self.printed(), self._printed
        return found

    def resize(self, rows: int, columns: int) -> None:
        self._resize(rows, columns)
        os.kill(self.process.pid, signal.SIGWINCH)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ended(self) -> bool:
        """Whether the command has; then the terminal is as it was."""
        self.printed()
        if self.process.poll() is None:
            return False
        assert termios.tcgetattr(self.slave) == self._before
        return True

    def _resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
