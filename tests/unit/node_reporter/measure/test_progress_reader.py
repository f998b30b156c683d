"""Stories of the reader of tasks' progress, on real FIFOs."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock_services.node_reporter.core.reports.progress import (
    ProgressParser,
    Report,
)
from penstock_services.node_reporter.shell.measure.fifo import open_fifo
from penstock_services.node_reporter.shell.measure.progress_reader import (
    BYTES_PER_PERIOD,
    PERIOD_S,
    READS_PER_PERIOD,
    ProgressReader,
)
from penstock_services.node_reporter.shell.ports import Key
from tests.unit.node_reporter.measure.progress_lines import KEY, done_of, parser, steps


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    """Held open as by the shim."""
    path = tmp_path / "phases"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield path
    os.close(descriptor)


def write(path: Path, data: bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    finally:
        os.close(descriptor)


async def test_what_is_left_in_the_fifo_is_read_at_the_end(
    fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The task wrote its last lines and exited before the reporter looked."""
    caplog.set_level(logging.INFO)
    reports: list[Report] = []
    reader = ProgressReader(lambda key, one: reports.append(one) if key == KEY else None)
    reader.follow(KEY, open_fifo(fifo), parser())
    write(fifo, b"oops\n" + b"".join(steps(done) for done in (1, 20, 21)) + b"save")
    reader.forget(KEY)
    assert [one.name.partition("/")[0] for one in reports] == ["steps", "steps", "save", "steps"]
    assert done_of(reports) == [1, 20, 21]
    assert "1 meant nothing, 1 were not passed on" in caplog.text
    reader.forget(KEY)
    assert len(reports) == 4


class Periods:
    """In place of the reader's loop: periods end when the test says so."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._later: list[Callable[[], object]] = []

    def time(self) -> float:
        return self._now_s

    def call_later(
        self, _: float, function: Callable[..., object], *arguments: object
    ) -> asyncio.TimerHandle:
        self._later.append(lambda: function(*arguments))
        return asyncio.get_running_loop().call_later(1e9, lambda: None)

    def end_one(self) -> None:
        self._now_s += PERIOD_S
        due, self._later = self._later, []
        for function in due:
            function()


def reader_of(report: Callable[[Key, Report], None]) -> tuple[ProgressReader, Periods]:
    found, periods = ProgressReader(report), Periods()
    found._loop = periods  # type: ignore[assignment]
    return found, periods


async def test_a_script_that_writes_without_pause_leaves_time_for_others(fifo: Path) -> None:
    """64 KiB a second are read; the rest finds the FIFO full. The reporter does its work meanwhile."""
    reports: list[Report] = []
    reader, periods = reader_of(lambda _, one: reports.append(one))
    reader.follow(KEY, open_fifo(fifo), parser())
    written, held = 0, fcntl.fcntl(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), fcntl.F_GETPIPE_SZ)
    for _ in range(1_000):
        written += write(fifo, b"x\n" * 2_048)
        await asyncio.sleep(0)
    assert BYTES_PER_PERIOD <= written <= 2 * BYTES_PER_PERIOD + held
    while not reports:
        periods.end_one()
        await asyncio.sleep(0)
        write(fifo, steps(5))
    assert done_of(reports)[:1] == [5]
    reader.close()


async def test_many_small_writes_are_bounded_too(fifo: Path) -> None:
    """A line at a time, each a wake-up of the reporter."""
    one_task = parser()
    reads = 0

    class Counting(ProgressParser):
        def parse(self, chunk: bytes, now_ms: int) -> list[Report]:
            nonlocal reads
            reads += 1
            return one_task.parse(chunk, now_ms)

    reader, _ = reader_of(lambda *_: None)
    reader.follow(KEY, open_fifo(fifo), Counting("n1", *KEY, leads=True))
    for number in range(1_000):
        write(fifo, steps(number + 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 1 < reads <= READS_PER_PERIOD
    reader.close()


@pytest.mark.parametrize("what", ["a file", "a link", "nothing"])
async def test_a_fifo_that_was_replaced_is_left_alone(tmp_path: Path, what: str) -> None:
    """The task may do that, its folder is its user's; the next reporter must start all the same, and write
    nowhere."""
    path, aim = tmp_path / "phases", tmp_path / "aim"
    os.mkfifo(aim)
    if what == "a file":
        path.write_text("train\n")
    elif what == "a link":
        path.symlink_to(aim)
    reports: list[Report] = []
    reader = ProgressReader(lambda _, one: reports.append(one))
    reader.follow(KEY, open_fifo(path), parser())
    await asyncio.sleep(0)
    reader.forget(KEY)
    reader.close()
    assert reports == []
