"""Folders of tasks: each with the FIFO for the program's lines, the file that saving processes lock, and,
unless the program has another, a working folder.

Ideal: a folder is created when its order comes. Departure: the next one is created in advance, and becomes
the task's by one rename, since each change of a file system waits while its journal is committed, which the
order's own fsync has just begun.
"""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

from penstock_services.node_reporter.shell.process.savers import SAVERS

PHASES = "phases"
WORK = "work"
SPARE = "spare"
REFILL_S = 0.05  # after a start, which is over by then; for an earlier task a folder is created on demand


class TaskFolders:
    """In `state_dir`, whose lock the caller holds. Not for concurrent use."""

    def __init__(self, state_dir: Path) -> None:
        self._spare = state_dir / SPARE
        self._ready = False
        self._refill: asyncio.TimerHandle | None = None

    def prepare(self) -> None:
        """Creates the next folder. One left by an earlier reporter is not used: it may be incomplete."""
        self._ready = False
        shutil.rmtree(self._spare, ignore_errors=True)
        with suppress(OSError):  # then it is created for its task, whose failure reports the reason
            _make(self._spare, work=True, again=False)
            self._ready = True

    def create(self, folder: Path, *, work: bool) -> None:
        """A task's folder; files of an earlier attempt at the same start stay. Raises `OSError`."""
        if not self._taken(folder):
            _make(folder, work=work, again=True)
        elif not work:
            (folder / WORK).rmdir()
        if self._refill is not None:
            self._refill.cancel()
        self._refill = asyncio.get_running_loop().call_later(REFILL_S, self.prepare)

    def _taken(self, folder: Path) -> bool:
        if not self._ready:
            return False
        self._ready = False
        try:
            self._spare.rename(folder)
        except OSError:  # the folder is there and not empty, or has no parent
            return False
        return True


def _make(folder: Path, *, work: bool, again: bool) -> None:
    """Readable for the reporter's user alone. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=again)
    with suppress(FileExistsError):
        os.mkfifo(folder / PHASES, 0o600)
    (folder / SAVERS).touch(mode=0o600)
    if work:
        (folder / WORK).mkdir(mode=0o700, exist_ok=again)
