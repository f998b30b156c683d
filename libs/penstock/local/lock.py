"""Lock file for one Penstock per folder; the kernel releases it when the process that holds it ends, in
whatever way."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.errors import ConfigurationError
from penstock.text.redaction import without_password


def announce(lock: IO[str], url: str) -> None:
    """Writes this process's id and the gateway's URL into the lock file,
    for the message of a second process."""
    lock.seek(0)
    lock.truncate()
    json.dump({"pid": os.getpid(), "url": url}, lock)
    lock.flush()


@contextmanager
def folder_lock(folder: Path) -> Iterator[IO[str]]:
    """Locks the folder for the block; yields its lock file. Raises `ConfigurationError` that names the
    process that holds it."""
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
                f"another Penstock{_holder(file.read())} uses {folder}; stop it with Ctrl-C there, or choose "
                "another --folder"
            ) from None
        announce(file, "")
        yield file


def same_log(folder: Path, log_url: str | None) -> None:
    """Ties the folder to one log: its read models and nodes' tokens are invalid on another.

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
