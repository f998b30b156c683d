"""Log files of tasks: their path, and the part to read (the last lines, lines since a time, or the rest from an offset).

The node-reporter writes the file and serves it; an archive has the same layout, so that the gateway reads both with the same code.
"""

import hashlib
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import quote, unquote, urlsplit

ARCHIVE = "PENSTOCK_NODE_LOG_ARCHIVE"
"""Variable of gateway and node-reporters: URL of a folder or store of ended tasks' logs (`penstock.runtime.log_archive`)."""
MAX_NAME_CHARS = 200  # file systems allow 255 bytes; suffixes need the rest
CHUNK_BYTES = 65_536
MAX_TAIL_BYTES = 1 << 20
MAX_LINES = 10_000
TIMES = ".times"
"""Suffix of the file beside a log that maps times to offsets."""
TIMES_RECORD = struct.Struct("<QQ")
"""ms since 1970 by the node's clock, and the size of the log then. `shell/output.py` of the node-reporter writes them."""
MAX_TIMES_BYTES = 4 << 20
FIRST_INTERVAL_MS = 1_000  # all output within it has one record
INTERVAL_SHARE = 10_000  # the log's age per interval: intervals grow, so that records are few after months


class Wanted(NamedTuple):
    """The part of a log to read; without any field all of it."""

    tail: int | None = None
    """Only this number of last lines, within the last MAX_TAIL_BYTES."""
    since_ms: int | None = None
    """Only output from this time on, ms since 1970 by the node's clock."""
    offset: int | None = None
    """From this byte on; the other fields are then ignored."""


def file_name(identifier: str) -> str:
    """An identifier as one file name, different for different identifiers: `/` becomes `%2F`.

    Identifiers start with a letter or digit, so the name is never hidden, `.` or `..`.
    """
    name = quote(identifier, safe=":")
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{name[:160]}~{hashlib.sha256(identifier.encode()).hexdigest()[:32]}"


def log_name(job_id: str, task_id: str) -> str:
    """`JOB/TASK.log`, in the folder of logs and in an archive."""
    return f"{file_name(job_id)}/{file_name(task_id)}.log"


def log_path(log_dir: Path, job_id: str, task_id: str) -> Path:
    """`LOG_DIR/JOB/TASK.log`."""
    return log_dir / log_name(job_id, task_id)


def is_at(url: str, folder: Path) -> bool:
    """Whether an archive's URL names this very folder."""
    parts = urlsplit(url)
    return parts.scheme in ("", "file") and Path(unquote(parts.path)).resolve() == folder.resolve()


def open_plain(path: Path) -> BinaryIO:
    """Opens a file without following a link. Raises OSError, also for anything but a plain file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is no plain file")
    return open(descriptor, "rb")


def open_at(path: Path, wanted: Wanted) -> tuple[BinaryIO, int]:
    """A log's file, as `open_plain`, at the offset where the wanted part begins. Raises OSError."""
    file = open_plain(path)
    try:
        times = b""
        if wanted.since_ms is not None:
            with suppress(OSError), open_plain(path.with_name(path.name + TIMES)) as beside:
                times = beside.read(MAX_TIMES_BYTES)
        first = start_of(file, wanted, times, os.fstat(file.fileno()).st_mtime_ns // 1_000_000)
        file.seek(first)
    except BaseException:
        file.close()
        raise
    return file, first


def start_of(file: BinaryIO, wanted: Wanted, times: bytes, modified_ms: int) -> int:
    """The offset where the wanted part begins. `times`: the file beside the log; empty where there is none."""
    size = file.seek(0, os.SEEK_END)
    if wanted.offset is not None:
        return min(wanted.offset, size)
    first = 0 if wanted.since_ms is None else written_since(times, wanted.since_ms, size, modified_ms)
    return first if wanted.tail is None else max(first, _last_lines(file, size, wanted.tail))


def written_since(times: bytes, since_ms: int, size: int, modified_ms: int) -> int:
    """Offset of the output from `since_ms` on, at most one interval earlier; `size`: there is none."""
    whole = len(times) - len(times) % TIMES_RECORD.size
    records = list(TIMES_RECORD.iter_unpack(times[:whole]))
    if not records:
        return 0 if modified_ms >= since_ms else size
    began_ms = records[0][0]
    for at_ms, offset in records:
        if at_ms + interval_ms(at_ms - began_ms) >= since_ms:
            return min(int(offset), size)
    return size


def interval_ms(age_ms: int) -> int:
    """Minimum time between two records in the times file, in ms, when the log has this age."""
    return max(FIRST_INTERVAL_MS, age_ms // INTERVAL_SHARE)


def _last_lines(file: BinaryIO, size: int, count: int) -> int:
    first = max(0, size - MAX_TAIL_BYTES)
    file.seek(first)
    end = file.read(size - first)
    at = len(end.removesuffix(b"\n"))
    for _ in range(count):
        at = end.rfind(b"\n", 0, at)
        if at < 0:
            return first
    return first + at + 1
