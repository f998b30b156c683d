"""Progress FIFO of a task, which its shim holds open. Adapter of `ports.ProgressStream`."""

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from penstock_services.node_reporter.shell.ports import Key

CHUNK_BYTES = 65_536  # a pipe's capacity

MAX_HELD = 128  # of tasks that are being started; of failed starts the oldest are closed

logger = logging.getLogger(__name__)


class Fifo:
    """An open descriptor for non-blocking reads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()

    def read(self) -> bytes:
        try:
            return os.read(self._descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return b""

    def watch(self, readable: Callable[[], None]) -> None:
        self._loop.add_reader(self._descriptor, readable)

    def unwatch(self) -> None:
        self._loop.remove_reader(self._descriptor)

    def close(self) -> None:
        self.unwatch()
        os.close(self._descriptor)


def open_fifo(path: Path) -> Fifo | None:
    """None: it is removed, so no process can write either, or the task has replaced it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        logger.warning("%s is not a FIFO any more; the task's progress is not read", path)
        return None
    return Fifo(descriptor)


class HeldFifos:
    """Opened before a task starts: the task may write and end, and its shim with it, before its start is
    known here."""

    def __init__(self) -> None:
        self._held: dict[Key, Fifo] = {}

    def hold(self, key: Key, path: Path) -> None:
        self.release(key)
        if (fifo := open_fifo(path)) is not None:
            self._held[key] = fifo
        if len(self._held) > MAX_HELD:
            self.release(next(iter(self._held)))

    def take(self, key: Key, path: Path) -> Fifo | None:
        """The caller owns it from now on."""
        return self._held.pop(key, None) or open_fifo(path)

    def release(self, key: Key) -> None:
        if (fifo := self._held.pop(key, None)) is not None:
            fifo.close()
