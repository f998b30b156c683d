"""One Penstock per folder: a lock file that the kernel releases when its holder ends, however that happens."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.errors import ConfigurationError
from penstock.runtime.postgres import without_password


class FolderLock:
    """The held lock; its file also holds the URL of the gateway."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def announce(self, url: str) -> None:
        """Writes who holds the folder, for the message that the next one gets."""
        self._file.seek(0)
        self._file.truncate()
        json.dump({"pid": os.getpid(), "url": url}, self._file)
        self._file.flush()


@contextmanager
def folder_lock(folder: Path) -> Iterator[FolderLock]:
    """Holds the folder for the block. Raises `ConfigurationError` naming the holder when it is taken."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "up.lock", "a+", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigurationError(
            f"--folder {folder}: cannot be used: {error.strerror}; choose another"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigurationError(
                f"another Penstock{_holder(file.read())} uses {folder}; stop it with Ctrl-C there, or choose another --folder"
            ) from None
        lock = FolderLock(file)
        lock.announce("")
        yield lock


def same_log(folder: Path, log_url: str | None) -> None:
    """Ties the folder to one log: its read models and nodes' tokens mean nothing on another.

    Raises `ConfigurationError` when it was used with another one.
    """
    name = "the embedded log" if log_url is None else without_password(log_url)
    path = folder / "log"
    if not path.exists():
        path.write_text(name + "\n", encoding="utf-8")
    elif (known := path.read_text(encoding="utf-8").strip()) != name:
        raise ConfigurationError(f"{folder} belongs to {known}, not to {name}; choose another --folder")


def _holder(text: str) -> str:
    try:
        holder = json.loads(text)
    except ValueError:
        return ""
    where = f" at {holder['url']}" if holder.get("url") else ""
    return f" (process {holder.get('pid')}{where})"
