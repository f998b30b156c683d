"""Log rotation of a task, as its shim writes it: a head, a ring of the newest segments, and the line that has
not ended.

Standard library only (see `confinement`). Read by `penstock.runtime.files.task_logs`, which describes the
files. A position in the log is one in the task's output after redraws are collapsed; rotation moves no
position.
"""

import codecs
import os
import re
import struct
import sys
import time
from collections import deque
from contextlib import suppress

from penstock_services.node_reporter.shell.logs.last_lines import LAST_BYTES

HEAD_SHARE, SEGMENT_SHARE = 4, 16  # the limit divided by these: the head's bytes, and a segment's
SEGMENTS = SEGMENT_SHARE - SEGMENT_SHARE // HEAD_SHARE  # of the ring, with the one being written
LINE_BYTES = 65_536  # of an unfinished line; a longer line is stored in parts
SETTLE_BYTES = 65_536  # of text after bytes that are not text, before redraws are collapsed again
SHOW_S = 1.0  # at least, between two stored states of an unfinished line
TIMES, TIMES_RECORD = ".times", struct.Struct("<QQ")  # these five: as in `penstock.runtime.files.task_logs`
LINE, LINE_HEAD, LINE_TAIL = ".line", struct.Struct("<QQI"), struct.Struct("<Q")
SEGMENT = ".%020d"
FIRST_INTERVAL_MS, INTERVAL_SHARE = 1_000, 10_000
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


class Lines:
    """Buffer of the unfinished line. Of a line that is redrawn by carriage returns only the last state leaves
    it. Pure.

    Bytes that are not UTF-8 text, and SETTLE_BYTES after them, pass unchanged at once.
    """

    def __init__(self) -> None:
        self.rest = b""
        """The last state of the unfinished line, at most LINE_BYTES."""
        self.redrawn = False
        """Whether that line had another state before."""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._unsettled = 0

    def feed(self, chunk: bytes) -> bytes:
        """The output that is complete with this chunk."""
        if self._is_text(chunk):
            self._unsettled = max(0, self._unsettled - len(chunk))
        else:
            self._unsettled = SETTLE_BYTES
        data = self.rest + chunk
        if self._unsettled:
            self.rest, self.redrawn = b"", False
            return data
        cut = data.rfind(b"\n") + 1
        whole, line = data[:cut], data[cut:]
        rest = _last_state(line)
        self.redrawn = len(rest) < len(line) or (self.redrawn and not cut)
        if b"\r" in whole and whole.count(b"\r") > whole.count(b"\r\n"):
            whole = b"\n".join(map(_last_state, whole.split(b"\n")))
        if len(rest) > LINE_BYTES:
            whole, rest, self.redrawn = whole + rest, b"", False
        self.rest = rest
        return whole

    def _is_text(self, chunk: bytes) -> bool:
        try:
            self._decoder.decode(chunk)  # with the beginning of a character from the chunk before
        except UnicodeDecodeError:
            self._decoder.reset()
            return False
        return b"\0" not in chunk


def _last_state(line: bytes) -> bytes:
    """What remains of a line without its `\\n`; carriage returns at its end belong to the end."""
    return line[line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1 :]


class Storage:
    """The files of one log. No error of the disk reaches the task:
    what cannot be written leaves a gap in the positions."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = path
        self._segment_bytes = limit_bytes // SEGMENT_SHARE
        self._segments: deque[int] = deque()
        self._line: int | None = None
        self._states = 0
        """Number of stored states of unfinished lines."""
        self._began_ms = self._next_ms = 0
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self._file = os.open(path, APPEND, 0o600)
            self._times = os.open(path + TIMES, APPEND, 0o600)
            self.end = os.fstat(self._file).st_size
            """Position of the next byte."""
            self._left = limit_bytes // HEAD_SHARE - self.end
            if self.end:  # of an earlier start of this very task
                self._go_on()
        except OSError as error:  # a task without a log is better than none
            print(f"no log: {error}", file=sys.stderr, flush=True)
            self._file = self._times = os.open(os.devnull, os.O_WRONLY)
            self._path, self._left, self.end = "", sys.maxsize, 0

    def append(self, data: bytes) -> None:
        """Adds to the output."""
        if data:
            self._note_time()
        while data:
            try:
                if self._left <= 0:
                    self._roll()
                written = os.write(self._file, self._first_part(data))
            except OSError:
                if self._drop_oldest(but=1):  # the newest output counts most
                    continue
                if self._segments and self._segments[-1] == self.end:
                    self._remove(self._segments.pop())  # it is empty
                self.end += len(data)
                self._left = 0  # what comes next begins a segment at its own position
                return
            self.end += written
            self._left -= written
            data = data[written:]

    def show(self, line: bytes) -> None:
        """Stores the unfinished line at the end, in place of the state before;
        it is no part of the output yet."""
        self._states += 1
        head = LINE_HEAD.pack(self.end, self._states, len(line))
        with suppress(OSError):
            if self._line is None:
                self._line = os.open(
                    self._path + LINE if self._path else os.devnull, os.O_WRONLY | os.O_CREAT, 0o600
                )
            os.pwrite(self._line, head + line + LINE_TAIL.pack(self._states), 0)

    def close(self) -> None:
        if self._path:
            with suppress(OSError):
                os.unlink(self._path + LINE)
        for descriptor in {self._file, self._times, self._line} - {None}:
            os.close(descriptor)  # type: ignore[arg-type]

    def _go_on(self) -> None:
        """After the segments that exist. Raises OSError."""
        folder, name = os.path.split(self._path)
        segment = re.compile(re.escape(name) + r"\.([0-9]{20})")
        self._segments.extend(
            sorted(int(found[1]) for found in map(segment.fullmatch, os.listdir(folder)) if found)
        )
        if self._segments:
            start = self._segments[-1]
            self.end, self._left = start + os.stat(self._path + SEGMENT % start).st_size, 0

    def _first_part(self, data: bytes) -> bytes:
        """Up to the end of the present file; whole lines if that is possible."""
        if len(data) <= self._left:
            return data
        cut = data.rfind(b"\n", 0, self._left) + 1
        if cut:
            self._left = cut
        return data[: self._left]

    def _roll(self) -> None:
        """Begins a segment, and removes the oldest beyond SEGMENTS. Raises OSError."""
        self._drop_oldest(but=SEGMENTS - 1)
        file = os.open(self._path + SEGMENT % self.end, APPEND, 0o600)
        os.close(self._file)
        self._file, self._left = file, max(1, self._segment_bytes)
        if not self._segments or self._segments[-1] != self.end:  # an empty one of a shim that was killed
            self._segments.append(self.end)

    def _drop_oldest(self, but: int) -> bool:
        """Removes segments until this number is left. False: there were no more."""
        found = len(self._segments) > but
        while len(self._segments) > but:
            self._remove(self._segments.popleft())
        return found

    def _remove(self, segment: int) -> None:
        with suppress(OSError):
            os.unlink(self._path + SEGMENT % segment)

    def _note_time(self) -> None:
        """Once per second with output, less often as the log grows old: about 65,000 times in a month."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms >= self._next_ms:
            self._began_ms = self._began_ms or now_ms
            self._next_ms = now_ms + max(FIRST_INTERVAL_MS, (now_ms - self._began_ms) // INTERVAL_SHARE)
            with suppress(OSError):
                os.write(self._times, TIMES_RECORD.pack(now_ms, self.end))


class Output:
    """A task's output on its way from the pipe to the log."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._lines, self._log = Lines(), Storage(path, limit_bytes)
        self._changed = False
        """The unfinished line is another one than the stored one."""
        self._due_s = 0.0
        self.last = b""
        """The last LAST_BYTES of the output as it came."""

    def write(self, chunk: bytes) -> None:
        self.last = chunk[-LAST_BYTES:] if len(chunk) >= LAST_BYTES else (self.last + chunk)[-LAST_BYTES:]
        self._log.append(self._lines.feed(chunk))
        self._changed = bool(self._lines.rest)

    def pause_ms(self) -> int | None:
        """Stores the unfinished line if that is due. Milliseconds until it is;
        None: not before further output."""
        if not self._changed:
            return None
        left_s = self._due_s - time.monotonic()
        if left_s > 0:
            return round(left_s * 1_000) + 1
        self._log.show((b"\r" if self._lines.redrawn else b"") + self._lines.rest)
        self._due_s, self._changed = time.monotonic() + SHOW_S, False
        return None

    def close(self) -> None:
        self._log.append(self._lines.rest)
        self._log.close()
