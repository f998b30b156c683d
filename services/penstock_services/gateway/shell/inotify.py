"""Waking up when a file grows, without looking at it again and again (Linux inotify through libc)."""

import asyncio
import ctypes
import os
from pathlib import Path

from penstock.errors import PenstockError

IN_MODIFY, IN_CREATE, IN_MOVED_TO = 0x2, 0x100, 0x80
IN_NONBLOCK, IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
EVENTS_BYTES = 65_536

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Events in one folder: its files are created or grow. A context manager; use it on the running loop."""

    def __init__(self, folder: Path) -> None:
        self._fd = _libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        if self._fd < 0:
            raise PenstockError(
                f"inotify: {os.strerror(ctypes.get_errno())}; raise fs.inotify.max_user_instances"
            )
        mask = IN_MODIFY | IN_CREATE | IN_MOVED_TO
        if _libc.inotify_add_watch(self._fd, os.fsencode(folder), mask) < 0:
            detail = os.strerror(ctypes.get_errno())
            os.close(self._fd)
            raise PenstockError(f"inotify: {folder}: {detail}")
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        try:
            while os.read(self._fd, EVENTS_BYTES):
                pass
        except BlockingIOError:
            pass
        self._changed.set()

    async def changed(self) -> None:
        """Returns at once if something changed since the last call."""
        await self._changed.wait()
        self._changed.clear()
