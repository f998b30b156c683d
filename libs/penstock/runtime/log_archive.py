"""Archive of tasks' logs: a folder or an object store by its URL (`file:///srv/logs`, `s3://bucket/logs`), through fsspec.

The layout is that of a node's log folder, `JOB/TASK.log`, so a folder that all nodes write to is an archive as well.
"""

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import ConfigurationError
from penstock.redaction import without_password
from penstock.runtime.task_logs import ARCHIVE, MAX_TIMES_BYTES, TIMES, Wanted, log_name, start_of

FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""In a folder: for its owner and group, since node-reporter and gateway may be different users."""


class LogArchive:
    """All calls block; their errors are `OSError`, or those of the store's own library."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigurationError` for a URL of a kind that is not installed here."""
        self.name = without_password(url)
        """For messages."""
        try:
            self._store, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"{ARCHIVE}: {self.name} cannot be used: {error}; give file:///FOLDER, or install the package of that store "
                "(s3fs for s3://)"
            ) from error

    def put(self, name: str, path: Path) -> None:
        """Stores a log and the times beside it. A copy under way is never taken for a whole one."""
        for suffix in (TIMES, ""):
            source = path.with_name(path.name + suffix)
            if source.exists():  # a task that could not be started has none
                self._put(f"{self._root}/{name}{suffix}", source)

    def _put(self, target: str, source: Path) -> None:
        if not isinstance(self._store, LocalFileSystem):
            self._store.put_file(str(source), target)  # an object appears when it is whole
            return
        part = Path(f"{target}.part")
        part.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        self._store.put_file(str(source), str(part))
        part.chmod(FILE_MODE)
        os.replace(part, target)

    def open(self, job_id: str, task_id: str, wanted: Wanted) -> tuple[BinaryIO, int]:
        """The log at the offset where the wanted part begins. Raises `FileNotFoundError` where there is none."""
        path, times = f"{self._root}/{log_name(job_id, task_id)}", b""
        found: dict[str, Any] = self._store.info(path)
        if wanted.since_ms is not None:
            with suppress(FileNotFoundError):
                times = self._store.cat_file(path + TIMES, end=MAX_TIMES_BYTES)
        modified = found.get("mtime") or found.get("LastModified")
        modified_s = modified.timestamp() if isinstance(modified, datetime) else float(modified or 0)
        file = cast(BinaryIO, self._store.open(path, "rb"))
        try:
            first = start_of(file, wanted, times, int(modified_s * 1_000))
            file.seek(first)
        except BaseException:
            file.close()
            raise
        return file, first
