"""Reads what training scripts tell about themselves: a FIFO per task, which the task's shim keeps open."""

import asyncio
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from penstock.clock import wall_ms
from penstock_services.node_reporter.core.told import Hearing, Told

CHUNK_BYTES = 65_536  # a pipe's capacity
PERIOD_S = 1.0
READS_A_PERIOD = 64
BYTES_A_PERIOD = 65_536

Key = tuple[str, int]

logger = logging.getLogger(__name__)


class _Ear:
    """One task's FIFO. Of a script that writes without pause so much a period is read; the rest finds the FIFO full."""

    def __init__(self, descriptor: int, hearing: Hearing) -> None:
        self.descriptor = descriptor
        self.hearing = hearing
        self.resume: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._reads = 0
        self._bytes = 0

    def read(self) -> bytes:
        """What there is; nothing, if there is nothing."""
        try:
            return os.read(self.descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return b""

    def has_enough(self, count: int, now_s: float) -> bool:
        """After a read of so many bytes: whether the next one must wait for the next period."""
        if now_s - self._since_s >= PERIOD_S:
            self._since_s, self._reads, self._bytes = now_s, 0, 0
        self._reads += 1
        self._bytes += count
        return self._reads >= READS_A_PERIOD or self._bytes >= BYTES_A_PERIOD


class Listener:
    """Calls `tell(key, told)` for whatever becomes an event."""

    def __init__(self, tell: Callable[[Key, Told], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._ears: dict[Key, _Ear] = {}

    def follow(self, key: Key, path: Path, hearing: Hearing) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return  # its folder is gone: nobody can write either
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            logger.warning("task %s has replaced its FIFO; what it tells is not heard", key[0])
            return
        self._ears[key] = _Ear(descriptor, hearing)
        self._loop.add_reader(descriptor, self._read, key)

    def forget(self, key: Key) -> None:
        """Reads what is left and lets go."""
        ear = self._ears.pop(key, None)
        if ear is None:
            return
        self._let_go(ear)
        self._hear(key, ear, ear.read())
        os.close(ear.descriptor)
        for told in ear.hearing.end(wall_ms()):
            self._tell(key, told)
        if ear.hearing.garbage or ear.hearing.unheard:
            logger.info(
                "task %s: of the lines in its FIFO %d meant nothing, %d were not passed on",
                key[0], ear.hearing.garbage, ear.hearing.unheard,
            )  # fmt: skip

    def close(self) -> None:
        for ear in self._ears.values():
            self._let_go(ear)
            os.close(ear.descriptor)
        self._ears.clear()

    def _let_go(self, ear: _Ear) -> None:
        self._loop.remove_reader(ear.descriptor)
        if ear.resume is not None:
            ear.resume.cancel()

    def _read(self, key: Key) -> None:
        ear = self._ears[key]
        chunk = ear.read()
        self._hear(key, ear, chunk)
        if ear.has_enough(len(chunk), self._loop.time()):
            self._loop.remove_reader(ear.descriptor)
            ear.resume = self._loop.call_later(
                PERIOD_S, self._loop.add_reader, ear.descriptor, self._read, key
            )

    def _hear(self, key: Key, ear: _Ear, chunk: bytes) -> None:
        for told in ear.hearing.hear(chunk, wall_ms()):
            self._tell(key, told)
