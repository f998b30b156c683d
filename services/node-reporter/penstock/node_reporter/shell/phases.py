"""What training scripts tell about themselves: lines in a FIFO that the task's shim keeps open."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

PHASES_KNOWN = frozenset({"launch", "train", "save"})
CHUNK_BYTES = 65_536  # a pipe's capacity
MAX_CHANGES = 1_000  # per task; a script that tells its phase in every step is not listened to for ever

Key = tuple[str, int]


class PhaseReader:
    """Calls `tell(key, phase)` for each change. Lines that are no phase are ignored."""

    def __init__(self, tell: Callable[[Key, str], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._open: dict[Key, int] = {}
        self._last: dict[Key, str] = {}
        self._count: dict[Key, int] = {}

    def follow(self, key: Key, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            return  # its folder is gone: nobody can write either
        self._open[key] = descriptor
        self._loop.add_reader(descriptor, self._read, key)

    def forget(self, key: Key) -> None:
        """Reads what is left and lets go."""
        if key in self._open:
            self._read(key)
            descriptor = self._open.pop(key)
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._last.pop(key, None)
        self._count.pop(key, None)

    def close(self) -> None:
        for descriptor in self._open.values():
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._open.clear()

    def _read(self, key: Key) -> None:
        try:
            lines = os.read(self._open[key], CHUNK_BYTES).decode(errors="replace").split()
        except BlockingIOError:
            return
        for phase in lines:
            if phase not in PHASES_KNOWN or phase == self._last.get(key):
                continue
            self._last[key] = phase
            self._count[key] = self._count.get(key, 0) + 1
            if self._count[key] <= MAX_CHANGES:
                self._tell(key, phase)
