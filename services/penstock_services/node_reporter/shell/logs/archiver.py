"""Archiver of ended tasks' logs.
Pending copies are recorded on disk, so that no crash and no outage loses one."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backoff import Backoff
from penstock.errors import PenstockError
from penstock.runtime.files.task_logs import file_name, log_name

if TYPE_CHECKING:
    from penstock.runtime.files.log_archive import LogArchive

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0

logger = logging.getLogger(__name__)


class Archiver:
    """Of one node. `folder` has a file for each task whose log is not in the archive yet;
    it names the log."""

    def __init__(self, archive: "LogArchive", folder: Path, log_dir: Path) -> None:
        self._archive, self._folder, self._log_dir = archive, folder, log_dir
        self._loop = asyncio.get_running_loop()
        self._something = asyncio.Event()
        self._ended: dict[str, None] = {}
        """Marks, in the order in which they are tried."""

    def starting(self, job_id: str, task_id: str, token: int) -> None:
        """Before a task starts. Raises OSError."""
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        (self._folder / _mark(task_id, token)).write_text(log_name(job_id, task_id))

    def ended(self, task_id: str, token: int) -> None:
        """Its log is complete. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._add, _mark(task_id, token))

    def _add(self, mark: str) -> None:
        self._ended[mark] = None
        self._something.set()

    async def run(self, ended: Callable[[str], bool]) -> None:
        """Copies until cancelled. `ended`: whether the task of a mark from before the restart has ended."""
        backoff, warned = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), ""
        with suppress(FileNotFoundError):
            self._ended |= dict.fromkeys(name for name in sorted(os.listdir(self._folder)) if ended(name))
        while True:
            self._something.clear()
            while self._ended:
                mark = next(iter(self._ended))
                del self._ended[mark]
                try:
                    await asyncio.to_thread(self._copy, mark)
                except (PenstockError, OSError) as error:
                    if str(error) != warned:
                        logger.warning("logs are not copied yet, and on this node only: %s", error)
                    warned = str(error)
                    self._ended[mark] = None  # behind the others, which may succeed
                    await asyncio.sleep(backoff.next_s())
                else:
                    backoff.reset()
                    warned = ""
            await self._something.wait()

    def _copy(self, mark: str) -> None:
        """Raises `ArchiveError` and OSError."""
        place = self._folder / mark
        try:
            name = place.read_text()
        except FileNotFoundError:  # of a task that began before there was an archive
            return
        self._archive.put(name, self._log_dir / name)
        place.unlink(missing_ok=True)


def _mark(task_id: str, token: int) -> str:
    return f"{file_name(task_id)}@{token}"
