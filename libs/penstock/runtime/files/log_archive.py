"""Archive of tasks' logs: a folder or an object store by its URL (`file:///srv/logs`, `s3://bucket/logs`),
through fsspec.

The layout is that of a node's log folder, `JOB/TASK.log`, so a folder that all nodes write to is an archive
as well.
"""

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import ConfigurationError, PenstockError
from penstock.runtime.files.task_logs import (
    ARCHIVE,
    LINE,
    SEGMENT,
    TIMES,
    Folder,
    Output,
    TaskLog,
    Wanted,
    log_name,
    part_name,
)
from penstock.text.redaction import without_password, without_passwords

FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""Modes in a folder: for owner and group, since node-reporter and gateway may run as different users."""
BLOCK_BYTES = 1 << 20  # buffer of a reader; the default of s3fs is 50 MiB


class ArchiveError(PenstockError):
    """An operation of the archive failed.
    The message names the archive, and the remedy where that is known."""


class LogArchive:
    """One archive. All calls block."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigurationError` for a URL of a kind that is not installed here."""
        self.name = without_password(url)
        """The URL without a password, for messages."""
        try:
            # An instance of its own: a shared one has the credentials with which another part of the process
            # made it.
            self._store, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"{ARCHIVE}: {self.name} cannot be used: {error}; give file:///FOLDER, or install the "
                "package of that store (penstock[s3] for s3://)"
            ) from error

    def put(self, name: str, path: Path) -> None:
        """Stores a log: the head at last, with which the rest becomes visible. Raises `ArchiveError`."""
        if not path.exists():  # of a task that could not be started
            return
        try:
            segments = [part_name("", first) for first in sorted(Folder(path).sizes())]
            for suffix in (TIMES, LINE, *segments, ""):
                source = path.with_name(path.name + suffix)
                if source.exists():
                    self._put(f"{self._root}/{name}{suffix}", source)
        except Exception as error:  # each store raises its own types
            raise self._explained(error) from error

    def _put(self, target: str, source: Path) -> None:
        if not isinstance(self._store, LocalFileSystem):
            self._store.put_file(str(source), target)  # an object appears when it is whole
            return
        part = Path(f"{target}.part")
        part.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        self._store.put_file(str(source), str(part))
        part.chmod(FILE_MODE)
        os.replace(part, target)

    def open(self, job_id: str, task_id: str, wanted: Wanted) -> TaskLog:
        """The log, at the beginning of the wanted part.
        Raises `FileNotFoundError` where there is none, and `ArchiveError`."""
        path = f"{self._root}/{log_name(job_id, task_id)}"
        local = isinstance(self._store, LocalFileSystem)
        try:
            return TaskLog(Folder(Path(path)) if local else Objects(self._store, path), wanted)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._explained(error) from error

    def read(self, log: TaskLog) -> Output | None:
        """The next piece of a log from `open`; None: its end. Raises `ArchiveError`."""
        try:
            return log.read()
        except Exception as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> ArchiveError:
        why = without_passwords(str(error)) or type(error).__name__
        match error:
            case PermissionError():
                remedy = "it does not admit this service; check its credentials and their rights"
            case FileNotFoundError():
                remedy = f"make that bucket or folder, or correct {ARCHIVE}"
            case _ if "redentials" in why:
                remedy = (
                    "give this service credentials of the store (s3://: AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY)"
                )
            case _:
                remedy = f"check that this machine reaches it, and {ARCHIVE}"
        return ArchiveError(f"archive {self.name}: {why}; {remedy}")


class Objects:
    """The files of a log in an object store."""

    def __init__(self, store: AbstractFileSystem, path: str) -> None:
        self._store, self._path = store, path
        self._sizes: dict[int, int] | None = None

    def sizes(self) -> dict[int, int]:
        if self._sizes is None:  # complete logs are archived
            folder, self._sizes = self._path.rpartition("/")[0], {}
            self._store.invalidate_cache(folder)  # another task's log may have been added
            for one in self._store.ls(folder, detail=True):
                name = one["name"]
                if name.startswith(self._path) and (part := SEGMENT.fullmatch(name, len(self._path))):
                    self._sizes[int(part[1])] = one["size"]
        return self._sizes

    def open(self, first: int) -> BinaryIO:
        name = part_name(self._path, first)
        return cast(BinaryIO, self._store.open(name, "rb", block_size=BLOCK_BYTES))

    def beside(self, suffix: str, limit_bytes: int) -> bytes:
        with suppress(FileNotFoundError):
            return cast(bytes, self._store.cat_file(self._path + suffix, end=limit_bytes))
        return b""

    def modified_ms(self) -> int:
        modified = self._store.info(self._path).get("LastModified")
        return int(modified.timestamp() * 1_000) if isinstance(modified, datetime) else 0
