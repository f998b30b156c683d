"""A task's progress FIFO, which its shim keeps open. Adapter of `ports.ProgressStream`."""

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 65_536  # a pipe's capacity

logger = logging.getLogger(__name__)


class Fifo:
    """An open descriptor, for reading without waiting."""

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
    """None: it is gone, so nobody can write either, or the task has put something else in its place."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        logger.warning("%s is not a FIFO any more; the task's progress is not read", path)
        return None
    return Fifo(descriptor)
