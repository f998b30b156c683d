"""Handing a cell's events on: what breaks on the way must not leave a trace that looks whole."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.client import Gateway
from penstock.cli.exits import Exit, Stop
from penstock.cli.export import pour

COPY = "import pathlib, shutil, sys; shutil.copyfileobj(sys.stdin.buffer, open(sys.argv[1], 'wb'))"
MANY = 20_000  # events: far more than a pipe holds


class Canned(Gateway):
    """A gateway whose stream is these chunks."""

    def __init__(self, *chunks: str) -> None:
        super().__init__("http://127.0.0.1:9")
        self.chunks = chunks
        self.asked: dict[str, Any] = {}

    @contextmanager
    def lines(self, path: str, **params: Any) -> Iterator[Iterator[str]]:
        self.asked = {"path": path, **params}
        yield iter(self.chunks)


def frame(seq: int, n: int = 0) -> str:
    return f'id: {seq}.{n}\ndata: {{"seq":{seq},"n":{n}}}\n\n'


def test_events_arrive_whole_however_the_network_cuts_them(tmp_path: Path) -> None:
    """The gateway's frames come in pieces; its comments and its time to reconnect are no events."""
    text = "retry: 500\n\n" + frame(1) + ": quiet\n\n" + frame(2) + frame(2, 1)
    gateway = Canned(*(text[at : at + 7] for at in range(0, len(text), 7)))
    assert pour(gateway, 2, [sys.executable, "-c", COPY, str(tmp_path / "got")]) == 0
    assert (tmp_path / "got").read_text().splitlines() == [
        '{"seq":1,"n":0}', '{"seq":2,"n":0}', '{"seq":2,"n":1}',
    ]  # fmt: skip
    assert gateway.asked == {"path": "/v1/stream", "after": "0", "until": 2}


def test_a_stream_that_ends_early_is_no_export() -> None:
    """The gateway restarts in the middle: better no trace than half a month that looks like a whole one."""
    waits = [sys.executable, "-c", "import sys; sys.stdin.read(); print('written')"]
    with pytest.raises(Stop, match="ended the stream at record 1 of 3") as caught:
        pour(Canned(frame(1)), 3, waits)
    assert caught.value.code == Exit.UNREACHABLE


def test_a_command_that_refuses_its_options_is_heard() -> None:
    """`--from last-month` is refused before anything is read: its exit code comes through, not a broken pipe."""
    script = (
        "import sys; from tests.unit.test_cli_export import Canned, frame, MANY; from penstock.cli.export import pour;"
        "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL);"
        "sys.exit(pour(Canned(*(frame(seq) for seq in range(1, MANY))), MANY, [sys.executable, '-c', 'raise SystemExit(2)']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
