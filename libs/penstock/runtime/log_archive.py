"""Archive of tasks' logs: a folder or an object store by its URL (`file:///srv/logs`, `s3://bucket/logs`), through fsspec.

The layout is that of a node's log folder, `JOB/TASK.log`, so a folder that all nodes write to is an archive as well.
"""

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from penstock.errors import ConfigurationError, PenstockError
from penstock.redaction import without_password, without_passwords
from penstock.runtime.task_logs import ARCHIVE, MAX_TIMES_BYTES, TIMES, Wanted, log_name, open_at, start_of

FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""Modes in a folder: for owner and group, since node-reporter and gateway may run as different users."""
BLOCK_BYTES = 1 << 20  # buffer of a reader; the default of s3fs is 50 MiB


class ArchiveError(PenstockError):
    """An operation of the archive failed. The message names the archive, and the remedy where that is known."""


class LogArchive:
    """One archive. All calls block."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigurationError` for a URL of a kind that is not installed here."""
        self.name = without_password(url)
        """The URL without a password, for messages."""
        try:
            # An instance of its own: a shared one has the credentials with which another part of the process made it.
            self._store, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigurationError(
                f"{ARCHIVE}: {self.name} cannot be used: {error}; give file:///FOLDER, or install the package of that store "
                "(penstock[s3] for s3://)"
            ) from error

    def put(self, name: str, path: Path) -> None:
        """Stores a log and its times file. A partial copy is never visible under the final name. Raises `ArchiveError`."""
        for suffix in (TIMES, ""):
            source = path.with_name(path.name + suffix)
            if source.exists():  # a task that could not be started has none
                try:
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

    def open(self, job_id: str, task_id: str, wanted: Wanted) -> BinaryIO:
        """The log, at the offset where the wanted part begins. Raises `FileNotFoundError` where there is none, and `ArchiveError`."""
        try:
            return self._open(f"{self._root}/{log_name(job_id, task_id)}", wanted)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._explained(error) from error

    def _open(self, path: str, wanted: Wanted) -> BinaryIO:
        if isinstance(self._store, LocalFileSystem):  # where tasks may make links
            return open_at(Path(path), wanted)[0]
        times, modified_ms = b"", 0
        if wanted.since_ms is not None:
            with suppress(FileNotFoundError):
                times = self._store.cat_file(path + TIMES, end=MAX_TIMES_BYTES)
            modified = self._store.info(path).get("LastModified")
            modified_ms = int(modified.timestamp() * 1_000) if isinstance(modified, datetime) else 0
        file = cast(BinaryIO, self._store.open(path, "rb", block_size=BLOCK_BYTES))
        try:
            file.seek(start_of(file, wanted, times, modified_ms))
        except BaseException:
            file.close()
            raise
        return file

    def read(self, file: BinaryIO, size: int) -> bytes:
        """The next bytes of a file from `open`; empty: its end. Raises `ArchiveError`."""
        try:
            return file.read(size)
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
                remedy = "give this service credentials of the store (s3://: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
            case _:
                remedy = f"check that this machine reaches it, and {ARCHIVE}"
        return ArchiveError(f"archive {self.name}: {why}; {remedy}")
