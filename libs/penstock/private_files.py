"""Private files: passwords, keys and token hashes, which no other user may read."""

import os
import stat
from pathlib import Path

from penstock.errors import ConfigurationError, unreadable


def read_private(setting: str, path: Path) -> tuple[bytes, os.stat_result]:
    """The file's content and status, of one and the same version. Raises `ConfigurationError` that names
    setting and remedy."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except OSError as error:
        raise unreadable(setting, path, error) from error
    mode = stat.S_IMODE(status.st_mode)
    # Root may give a file to a group, as to libpq's keys: a pod reads a mounted secret through its `fsGroup`.
    if mode & (0o037 if status.st_uid == 0 != os.geteuid() else 0o077):
        raise ConfigurationError(
            f"{setting}: {path} has mode {mode:04o}, others can use it; run chmod 600 {path}"
        )
    return content, status


def read_private_text(setting: str, path: Path) -> tuple[str, os.stat_result]:
    """As `read_private`, for a UTF-8 text."""
    content, status = read_private(setting, path)
    try:
        return content.decode(), status
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{setting}: {path} is not UTF-8 text: {error.reason}") from error
