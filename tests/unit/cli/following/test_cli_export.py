"""The events of a cell as a stream: what breaks on the way must not give a trace that looks whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import run
from penstock.cli.events import cell_events, events_until
from penstock.cli.session import Session
from penstock.client import Client
from penstock.exits import Exit, Stop


class Canned(Client):
    """A gateway whose stream is these chunks."""

    def __init__(self, *chunks: str) -> None:
        super().__init__("http://127.0.0.1:9")
        self.chunks = chunks
        self.asked: dict[str, Any] = {}

    def get(self, path: str, **params: Any) -> Any:
        answers = {
            "/v1/status": {"cell": "default", "projector_lag": 0, "seq": 3},
            "/v1/queue": {"now_ms": 1_000},
        }
        return answers[path]

    @contextmanager
    def lines(self, path: str, **params: Any) -> Iterator[Iterator[str]]:
        self.asked = {"path": path, **params}
        yield iter(self.chunks)


def frame(seq: int, n: int = 0) -> str:
    return f'id: {seq}.{n}\ndata: {{"seq":{seq},"n":{n}}}\n\n'


def test_events_arrive_whole_however_the_network_cuts_them() -> None:
    """The gateway's frames come in pieces; its comments and its time to reconnect are no events."""
    text = "retry: 500\n\n" + frame(1) + ": quiet\n\n" + frame(2) + frame(2, 1)
    gateway = Canned(*(text[at : at + 7] for at in range(0, len(text), 7)))
    assert list(events_until(gateway, 2)) == [
        b'{"seq":1,"n":0}',
        b'{"seq":2,"n":0}',
        b'{"seq":2,"n":1}',
    ]
    assert gateway.asked == {"path": "/v1/stream", "after": "0", "until": 2}


def test_a_stream_that_ends_early_is_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gateway restarts in the middle: better no trace than half a month that looks like a whole one."""
    short = '{"at_ms":1,"type":"penstock.cell.thawed","data":{"reason":"nodes are back"}}'
    monkeypatch.setattr(Session, "gateway", lambda self: Canned(f"id: 1.0\ndata: {short}\n\n"))
    trace = tmp_path / "month.csv"
    assert run(["export", "-o", str(trace)]) == Exit.UNREACHABLE
    assert "ended the stream at record 1 of 3" in capfd.readouterr().err
    assert not trace.exists()


def test_a_wrong_option_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--from last-month` needs no stream of a whole month to be found wrong."""
    gateway = Canned(frame(1))
    monkeypatch.setattr(Session, "gateway", lambda self: gateway)
    assert run(["export", "--from", "last-month"]) == Exit.BAD_SPEC
    assert "neither a date and time nor a span" in capfd.readouterr().err
    assert gateway.asked == {}


def test_the_gateway_of_another_cell_is_refused() -> None:
    """Two cells, two gateways, and the wrong one in the environment."""
    with pytest.raises(Stop, match="serves cell default, not elsewhere") as caught:
        cell_events(Canned(frame(1)), "elsewhere")
    assert caught.value.code == Exit.PROBLEM
