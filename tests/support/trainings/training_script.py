"""What a training script of the SDK has around it in tests: a clock, and the FIFO of its task."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.sdk.progress import Meter
from penstock.sdk.reporter.lines import FIFO


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Pipe:
    """A task's FIFO, held open as its shim does."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def text(self) -> bytes:
        try:
            return os.read(self.descriptor, 1 << 20)
        except BlockingIOError:
            return b""

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """What was written since the last look: the only field of each line. `kinds`: only of lines that have
        one of these fields."""
        found = []
        for line in self.text().splitlines():
            ((kind, value),) = json.loads(line).items()
            if not kinds or kind in kinds:
                found.append(value)
        return found


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """Of this process, which is the first of its job's."""
    pipe = Pipe(tmp_path / "phases")
    monkeypatch.setenv(FIFO, str(pipe.path))
    monkeypatch.delenv("RANK", raising=False)
    yield pipe
    os.close(pipe.descriptor)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(clock)
