"""Records that shims write atomically into a task's folder:
its start (`started.json`) and end (`exit.json`)."""

import logging
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock_services.node_reporter.shell.ports import Exit, Started

MAX_RECORD_BYTES = 65_536

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", Started, Exit)


def read_record(path: Path, kind: type[Kind]) -> Kind | None:
    """A file that a shim wrote atomically. None: missing, not readable (lost as the machine went down), or
    not a shim's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            logger.error("%s was not written by a shim; it is not believed", path)
            return None
        try:
            return msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
