"""Log files of tasks: their layout, and a reader of the wanted part (the last lines, what was printed since a
time, or from a position on).

`TASK.log` is the head of the output. `TASK.log.POSITION` (20 digits) are the segments after it; the oldest of
them are removed as the output goes on, so that positions between the head and the oldest segment are left
out. `TASK.log.line` has the state of the last line while that has not ended, and the position where the line
begins; void once the output is longer. `TASK.log.times` maps times to positions. The shim of the task writes
all of them (`output.py` of the node-reporter), the node-reporter serves them; an archive has the same layout,
so that the gateway reads both with the same code. A log of a version without segments is a head.
"""

import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol
from urllib.parse import quote, unquote, urlsplit

ARCHIVE = "PENSTOCK_NODE_LOG_ARCHIVE"
"""Variable of gateway and node-reporters:
URL of a folder or store of ended tasks' logs (`penstock.runtime.files.log_archive`)."""
MAX_NAME_CHARS = 200  # file systems allow 255 bytes; suffixes need the rest
CHUNK_BYTES = 65_536
MAX_TAIL_BYTES = 1 << 20
MAX_LINES = 10_000
SEGMENT = re.compile(r"\.([0-9]{20})")
"""Suffix of a segment: the position of its first byte."""
TIMES, LINE = ".times", ".line"
TIMES_RECORD = struct.Struct("<QQ")
"""ms since 1970 by the node's clock, and the size of the output then."""
LINE_HEAD, LINE_TAIL = struct.Struct("<QQI"), struct.Struct("<Q")
"""Position where the unfinished line begins, number of its state, bytes of that; then the state, after a
carriage return if the line had another one before; then the number again."""
FRAME = struct.Struct("<?QI")
"""Before each piece on its way to the gateway: whether it is an unfinished line, where the next output
begins, its bytes."""
MAX_TIMES_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 17  # of an unfinished line; the shim keeps half of that
FIRST_INTERVAL_MS = 1_000  # all output within it has one record
INTERVAL_SHARE = 10_000  # the log's age per interval: intervals grow, so that records are few after months


class Wanted(NamedTuple):
    """The part of a log to read; without any field all of it."""

    tail: int | None = None
    """Only this number of last lines, within the last MAX_TAIL_BYTES."""
    since_ms: int | None = None
    """Only output from this time on, ms since 1970 by the node's clock."""
    offset: int | None = None
    """From this position on; the other fields are then ignored."""


class Output(NamedTuple):
    """A piece of a log: output that stays,
    or (`line`) the state of the line that has not ended, as in the file."""

    position: int
    """Where the next output begins."""
    data: bytes
    line: bool = False


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


def framed(piece: Output) -> bytes:
    """A piece as the node-reporter sends it."""
    return FRAME.pack(piece.line, piece.position, len(piece.data)) + piece.data


class Frames:
    """Decoder of pieces from chunks of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Output]:
        """The pieces that are complete with this chunk. Raises ValueError for what no node-reporter sends."""
        data, at = self._rest + chunk, 0
        while at + FRAME.size <= len(data):
            line, position, size = FRAME.unpack_from(data, at)
            if size > MAX_LINE_BYTES:
                raise ValueError("a piece is too long")
            end = at + FRAME.size + size
            if end > len(data):
                break
            yield Output(position, data[at + FRAME.size : end], line)
            at = end
        self._rest = data[at:]


class Parts(Protocol):
    """The files of one log, wherever they lie. All calls block and raise OSError."""

    def sizes(self) -> dict[int, int]:
        """The bytes of each segment, by its first position; without the head."""

    def open(self, first: int) -> BinaryIO:
        """The segment that begins there, or the head, at 0. Raises `FileNotFoundError`."""

    def beside(self, suffix: str, limit_bytes: int) -> bytes:
        """The content of `TIMES` or `LINE`; empty where there is none."""

    def modified_ms(self) -> int:
        """When the head was last written, ms since 1970."""


def part_name(log: str, first: int) -> str:
    """Name of the part of a log that begins at this position."""
    return f"{log}.{first:020d}" if first else log


class Folder:
    """The files of a log in a folder. No link is followed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def sizes(self) -> dict[int, int]:
        found, name = {}, self._path.name
        with os.scandir(self._path.parent) as entries:
            for entry in entries:
                if entry.name.startswith(name) and (part := SEGMENT.fullmatch(entry.name, len(name))):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        found[int(part[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def open(self, first: int) -> BinaryIO:
        return open_plain(self._path.with_name(part_name(self._path.name, first)))

    def beside(self, suffix: str, limit_bytes: int) -> bytes:
        with suppress(OSError), open_plain(self._path.with_name(self._path.name + suffix)) as file:
            return file.read(limit_bytes)
        return b""

    def modified_ms(self) -> int:
        return self._path.stat().st_mtime_ns // 1_000_000


class TaskLog:
    """A reader of one log, from the beginning of the wanted part on. All calls block."""

    def __init__(self, parts: Parts, wanted: Wanted) -> None:
        """Raises OSError; `FileNotFoundError` where there is no such log."""
        self._parts = parts
        self._file, self._first = parts.open(0), 0
        self.position = 0
        """Of the next byte."""
        try:
            head_bytes = self._file.seek(0, os.SEEK_END)
            self.end = max((first + size for first, size in parts.sizes().items()), default=head_bytes)
            """The end of the output when the log was opened."""
            self._go_to(self._beginning(wanted))
        except BaseException:
            self._file.close()
            raise
        self._last, self._shown = b"\n", b""

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "TaskLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> Output | None:
        """The next piece, with at most CHUNK_BYTES of output or one unfinished line;
        None: nothing further at present."""
        found = self._next()
        if isinstance(found, bytes):
            self._last, self._shown = found[-1:], b""
            return Output(self.position, found)
        if found is not None:
            start, self._last = b"" if self._last == b"\n" else b"\n", b"\n"
            return Output(self.position, start + b"[penstock: %d bytes left out]\n" % found)
        return self._line()

    def present(self) -> Iterator[Output]:
        """The pieces up to the end when the log was opened."""
        while self.position < self.end and (found := self.read()) is not None:
            yield found
        if (line := self._line()) is not None:
            yield line

    def _line(self) -> Output | None:
        line = self._unfinished(self.position)
        if line in (b"", self._shown):
            return None
        self._shown = line
        return Output(self.position, line, line=True)

    def _next(self) -> bytes | int | None:
        """Output, or the number of bytes that are left out here; None: the end."""
        while True:
            if found := self._file.read(CHUNK_BYTES):
                self.position += len(found)
                return found
            later = [first for first in self._parts.sizes() if first > self._first and first >= self.position]
            if not later:
                return None
            if min(later) > self.position and (found := self._file.read(CHUNK_BYTES)):
                self.position += len(found)  # written since the last look
                return found
            before = self.position
            self._go_to(min(later))
            if self.position > before:
                return self.position - before

    def _go_to(self, position: int) -> None:
        """To this position; if it is left out, to the end of the part before."""
        while (
            first := max((one for one in self._parts.sizes() if one <= position), default=0)
        ) != self._first:
            with suppress(FileNotFoundError):  # removed since the look
                file = self._parts.open(first)
                self._file.close()
                self._file, self._first = file, first
        self._file.seek(min(position - first, self._file.seek(0, os.SEEK_END)))
        self.position = position

    def _unfinished(self, position: int) -> bytes:
        """The state of the unfinished line that begins there; empty: there is none."""
        found = self._parts.beside(LINE, MAX_LINE_BYTES)
        if len(found) < LINE_HEAD.size:
            return b""
        begins, number, size = LINE_HEAD.unpack_from(found)
        end = LINE_HEAD.size + size
        whole = found[end : end + LINE_TAIL.size] == LINE_TAIL.pack(number)  # else it is being written
        return found[LINE_HEAD.size : end] if whole and begins == position else b""

    def _beginning(self, wanted: Wanted) -> int:
        """Of the wanted part."""
        if wanted.offset is not None:
            return min(wanted.offset, self.end)
        first = 0
        if wanted.since_ms is not None:
            times = self._parts.beside(TIMES, MAX_TIMES_BYTES)
            first = written_since(times, wanted.since_ms, self.end, self._parts.modified_ms())
        return first if wanted.tail is None else max(first, self._last_lines(wanted.tail))

    def _last_lines(self, count: int) -> int:
        """Where the last lines begin. An unfinished line is one of them."""
        self._go_to(max(0, self.end - MAX_TAIL_BYTES))
        blocks: list[tuple[int, bytes]] = []
        while self.position < self.end and (found := self._next()) is not None:
            if isinstance(found, bytes):
                blocks.append((self.position - len(found), found))
        end = self.position
        if not blocks:
            return end
        if blocks[-1][1].endswith(b"\n"):
            count += not self._unfinished(end)  # the last line's own end is none before it
        for start, data in reversed(blocks):
            at = len(data)
            while (at := data.rfind(b"\n", 0, at)) >= 0:
                count -= 1
                if count == 0:
                    return start + at + 1
        return blocks[0][0]


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
