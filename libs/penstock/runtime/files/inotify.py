"""File watcher without polling: wakes up when a file grows (Linux inotify through libc)."""

import asyncio
import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import PenstockError

IN_MODIFY, IN_CLOSE_WRITE, IN_CREATE, IN_MOVED_TO = 0x2, 0x8, 0x100, 0x80
IN_NONBLOCK, IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
EVENTS_BYTES = 65_536
EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, length of the following name."""

_libc = ctypes.CDLL(None, use_errno=True)


class Watcher:
    """Watches folders whose files are created or grow, with one inotify instance: the kernel allows a user
    128. Use it on the running loop."""

    def __init__(self) -> None:
        self._fd = _libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        if self._fd < 0:
            raise PenstockError(
                f"inotify: {os.strerror(ctypes.get_errno())}; raise fs.inotify.max_user_instances"
            )
        self._waiting: dict[int, set[asyncio.Event]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    @contextmanager
    def watching(self, folder: Path) -> Iterator[asyncio.Event]:
        """An event that is set whenever something in the folder changes;
        clear it before looking. Raises `PenstockError`."""
        mask = IN_MODIFY | IN_CLOSE_WRITE | IN_CREATE | IN_MOVED_TO
        number = _libc.inotify_add_watch(self._fd, os.fsencode(folder), mask)  # the same for the same folder
        if number < 0:
            raise PenstockError(f"inotify: {folder}: {os.strerror(ctypes.get_errno())}")
        changed = asyncio.Event()
        self._waiting.setdefault(number, set()).add(changed)
        try:
            yield changed
        finally:
            left = self._waiting[number]
            left.discard(changed)
            if not left:
                del self._waiting[number]
                _libc.inotify_rm_watch(self._fd, number)

    def _read(self) -> None:
        try:
            while data := os.read(self._fd, EVENTS_BYTES):
                at = 0
                while at < len(data):
                    number, _, _, length = EVENT.unpack_from(data, at)
                    at += EVENT.size + length
                    # An overflow of the kernel's queue, number -1, may concern any folder.
                    found = self._waiting if number < 0 else (number,)
                    for one in found:
                        for changed in self._waiting.get(one, ()):
                            changed.set()
        except BlockingIOError:
            pass
