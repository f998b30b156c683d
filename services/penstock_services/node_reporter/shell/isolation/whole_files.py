"""Atomic file writes, and writes to cgroup files, for the shim. Standard library only (see `confinement`)."""

import errno
import json
import os
from typing import Any


def write_whole(folder: str, name: str, content: dict[str, Any]) -> None:
    """Writes a file atomically, while the machine is up: without waiting for the disk."""
    temporary = f"{folder}/.{name}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    data = json.dumps(content).encode()
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "written in part")
    finally:
        os.close(descriptor)
    os.rename(temporary, f"{folder}/{name}")


def put(path: str, text: str) -> None:
    """Writes to a file of a cgroup, at once."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
