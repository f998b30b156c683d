"""Reader of the progress streams of running tasks, with a rate limit per task."""

import asyncio
import logging
from collections.abc import Callable

from penstock.clock import wall_ms
from penstock_services.node_reporter.core.reports.progress import ProgressParser, Report
from penstock_services.node_reporter.shell.ports import Key, ProgressStream

PERIOD_S = 1.0
READS_PER_PERIOD = 64
BYTES_PER_PERIOD = 65_536

logger = logging.getLogger(__name__)


class _Followed:
    """One task's stream. At most so much per period is read of a script that writes without pause; then its
    FIFO is full."""

    def __init__(self, stream: ProgressStream, parser: ProgressParser) -> None:
        self.stream = stream
        self.parser = parser
        self.resume: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._reads = 0
        self._bytes = 0

    def has_enough(self, count: int, now_s: float) -> bool:
        """After a read of so many bytes: whether the next one must wait for the next period."""
        if now_s - self._since_s >= PERIOD_S:
            self._since_s, self._reads, self._bytes = now_s, 0, 0
        self._reads += 1
        self._bytes += count
        return self._reads >= READS_PER_PERIOD or self._bytes >= BYTES_PER_PERIOD

    def close(self) -> None:
        self.stream.close()
        if self.resume is not None:
            self.resume.cancel()


class ProgressReader:
    """Calls `report(key, found)` for each line that becomes an event."""

    def __init__(self, report: Callable[[Key, Report], None]) -> None:
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[Key, _Followed] = {}

    def follow(self, key: Key, stream: ProgressStream | None, parser: ProgressParser) -> None:
        if stream is not None:
            self._tasks[key] = _Followed(stream, parser)
            stream.watch(lambda: self._read(key))

    def forget(self, key: Key) -> tuple[str, str]:
        """Reads the rest and closes the stream; returns `ProgressParser.exhausted`."""
        task = self._tasks.pop(key, None)
        if task is None:
            return "", ""
        now_ms = wall_ms()
        for found in (*task.parser.parse(task.stream.read(), now_ms), *task.parser.end(now_ms)):
            self._report(key, found)
        task.close()
        if task.parser.garbage or task.parser.dropped:
            logger.info(
                "task %s: of the lines in its FIFO %d meant nothing, %d were not passed on",
                key[0],
                task.parser.garbage,
                task.parser.dropped,
            )
        return task.parser.exhausted

    def close(self) -> None:
        for task in self._tasks.values():
            task.close()
        self._tasks.clear()

    def _read(self, key: Key) -> None:
        task = self._tasks[key]
        chunk = task.stream.read()
        for found in task.parser.parse(chunk, wall_ms()):
            self._report(key, found)
        if task.has_enough(len(chunk), self._loop.time()):
            task.stream.unwatch()
            task.resume = self._loop.call_later(PERIOD_S, task.stream.watch, lambda: self._read(key))
