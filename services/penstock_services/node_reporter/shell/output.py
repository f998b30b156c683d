"""Bounded log file of a task, as its shim writes it. Standard library only (see `confinement`)."""

import os
import struct
import sys
import time
from collections import deque

from penstock_services.node_reporter.shell.last_lines import LAST_BYTES

TAIL_BYTES = 65_536  # so much of the end of output beyond the limit is logged
TIMES, TIMES_RECORD = ".times", struct.Struct("<QQ")  # read by `penstock.runtime.task_logs`
FIRST_INTERVAL_MS, INTERVAL_SHARE = 1_000, 10_000  # as there


class Output:
    """A task's log file: everything up to the limit, a marker, and the end of the later output. A file beside it has the times of writing."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._file = os.open(path, flags, 0o600)
            self._times = os.open(path + TIMES, flags, 0o600)
        except OSError as error:  # a task without a log is better than none
            print(f"no log: {error}", file=sys.stderr, flush=True)
            self._file = self._times = os.open(os.devnull, os.O_WRONLY)
        self._size = os.fstat(self._file).st_size
        self._began_ms = self._next_ms = 0
        self._left = limit_bytes
        self._dropped = 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.last = b""
        """The last LAST_BYTES of the output, also beyond the log's limit."""

    def write(self, chunk: bytes) -> None:
        self.last = chunk[-LAST_BYTES:] if len(chunk) >= LAST_BYTES else (self.last + chunk)[-LAST_BYTES:]
        head, rest = chunk[: self._left], chunk[self._left :]
        if head:
            self._left -= len(head)
            self._put(head)
        if rest:
            if not self._dropped:
                self._put(
                    b"\n[penstock: the log's limit is reached; what follows is left out up to its end]\n"
                )
            self._dropped += len(rest)
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())

    def close(self) -> None:
        if self._tail:
            end = b"".join(self._tail)[-TAIL_BYTES:]
            self._put(b"\n[penstock: %d bytes left out]\n" % (self._dropped - len(end)) + end)
        for descriptor in {self._file, self._times}:
            os.close(descriptor)

    def _put(self, data: bytes) -> None:
        try:
            self._note_time()
            self._size += os.write(self._file, data)
        except OSError:  # a full disk must not stop the task; the output is lost
            self._dropped += len(data)

    def _note_time(self) -> None:
        """Once per second with output, less often as the log grows old: about 65,000 times in a month."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms >= self._next_ms:
            self._began_ms = self._began_ms or now_ms
            self._next_ms = now_ms + max(FIRST_INTERVAL_MS, (now_ms - self._began_ms) // INTERVAL_SHARE)
            os.write(self._times, TIMES_RECORD.pack(now_ms, self._size))
