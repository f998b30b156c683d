"""The FIFO of a task: what its program writes, until its node-reporter reads it."""

from collections.abc import Callable

from tests.faults.laboratory.machines.process import Process

STREAM_BYTES = 65_536


class Stream:
    """A task's progress; bytes wait until they are read. Adapter of `ports.ProgressStream`."""

    def __init__(self) -> None:
        self._bytes = b""
        self._readable: Callable[[], None] | None = None
        self._process: Process | None = None

    def write(self, data: bytes) -> None:
        self._bytes += data
        self._call()

    def _call(self) -> None:
        if self._bytes and self._readable is not None and self._process is not None and self._process.alive:
            self._process.world.loop.call_soon(self._check, context=self._process.context)

    def _check(self) -> None:
        if self._bytes and self._readable is not None:
            self._readable()

    def of(self, process: Process) -> "Stream":
        """As this process has it open."""
        self._process = process
        return self

    def read(self) -> bytes:
        found, self._bytes = self._bytes[:STREAM_BYTES], self._bytes[STREAM_BYTES:]
        return found

    def watch(self, readable: Callable[[], None]) -> None:
        self._readable = readable
        self._call()

    def unwatch(self) -> None:
        self._readable = None

    def close(self) -> None:
        self.unwatch()
