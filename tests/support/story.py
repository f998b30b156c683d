# clocks: how long a process has run is part of its story
"""What a failed test tells beside its traceback, so that a failure is understood without another run.

    with told("services.log", folder / "services.log"):      # a file: what was written during the failed test
        ...
    with told("last events", lambda: "\n".join(map(str, cell.events[-40:]))):
        ...

A pytest plugin: each failed phase of a test gets the machine's load and what the sources tell at that moment.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import left_s

MOST_CHARS = 12_000
"""Of each source, the last ones: a service's log of some seconds, and a report that is still read."""
NOT_RUN = "not run: the whole run's deadline had passed"
"""The failure of each test that then does not begin any more; of thousands of them nobody reads a story."""

_sources: list["_Source"] = []
_told: list[tuple[str, str]] = []
"""What blocks have told that the test's failure ended."""
_began = time.monotonic()


class _Source:
    """One source of a story."""

    def __init__(self, title: str, source: Path | Callable[[], object]) -> None:
        self.title = title
        self._source = source
        self._start = 0

    def begin(self) -> None:
        """A test begins: what the file holds by now belongs to others."""
        if isinstance(self._source, Path) and self._source.exists():
            self._start = self._source.stat().st_size

    def text(self) -> str:
        if isinstance(self._source, Path):
            if not self._source.exists():
                return "(no such file)"
            with self._source.open("rb") as file:
                file.seek(max(self._start, file.seek(0, os.SEEK_END) - MOST_CHARS))
                return file.read().decode(errors="replace")
        try:
            return str(self._source())[-MOST_CHARS:]
        except Exception as error:  # noqa: BLE001 - the story of a failure must not hide it
            return f"({type(error).__name__}: {error})"


@contextmanager
def told(title: str, source: Path | Callable[[], object]) -> Iterator[None]:
    """In this block failures tell what a file got since their test began, or what a function returns."""
    entry = _Source(title, source)
    _sources.append(entry)
    try:
        yield
    except BaseException:
        _told.append((f"told by {title}", entry.text()))  # now: a cell is gone when the failure is reported
        raise
    finally:
        _sources.remove(entry)


def load() -> str:
    """How busy the machine is: processors, load, share of time in which work waited for one, memory."""
    pressure = Path("/proc/pressure/cpu")
    waited = (
        pressure.read_text().splitlines()[0].partition("avg10=")[2].split()[0] if pressure.exists() else "?"
    )
    one, five, _ = os.getloadavg()
    free_mib = psutil.virtual_memory().available >> 20
    return (
        f"{len(os.sched_getaffinity(0))} processors, load {one:.1f} in the last minute, {five:.1f} in five; "
        f"for {waited} % of the last 10 s somebody waited for a processor; {free_mib} MiB of memory free; "
        f"{os.environ.get('PYTEST_XDIST_WORKER', 'the process')} ran for {time.monotonic() - _began:.0f} s, "
        f"the whole run ends in {left_s():.0f} s"
    )


def waiting_tasks() -> str:
    """Each task of an event loop that has not ended, and where its coroutines wait, the innermost last."""
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task) and not each.done()]
    return "\n".join(f"{task.get_name()}: " + " → ".join(_waits(task.get_coro())) for task in tasks)


def _waits(coroutine: Any) -> Iterator[str]:
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield f"{coroutine.__qualname__} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        coroutine = coroutine.cr_await


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _told.clear()
    for source in _sources:
        source.begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and NOT_RUN not in str(report.longrepr):
        report.sections.append(("load of the machine", load()))
        if left_s() <= 0:
            report.sections.append(("where tasks wait", waiting_tasks()))
        report.sections += _told + [(f"told by {source.title}", source.text()) for source in _sources]
    return report
