"""Frames of a job's output on a terminal and in a pipe."""

import sys
from typing import Any

import pytest

from penstock.cli.following.logs import CLEAR, Shown

ONE: dict[str, Any] = {"attempt": 1, "members": [{"task": "w0", "name": "worker-0"}]}
TWO: dict[str, Any] = {
    "attempt": 1,
    "members": [{"task": f"w{rank}", "name": f"worker-{rank}"} for rank in (0, 1)],
}
BAR = tuple({"task": "w0", "line": text, "redrawn": True} for text in ("50 %", "99 %\r"))
HALF: dict[str, Any] = {"task": "w0", "line": "half ", "redrawn": False}
END: dict[str, Any] = {"task": "w0", "text": "100 %\n"}


def printed(shown: Shown, capsys: pytest.CaptureFixture[str], *frames: dict[str, Any]) -> str:
    for frame in frames:
        shown.take(frame)
    return capsys.readouterr().out


def test_a_progress_bar_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """`penstock logs -f | tee out`: each state replaces the one before; a line that is printed in two parts
    is there once."""
    shown = Shown()
    assert printed(shown, capsys, ONE, *BAR, END) == "50 %\r99 %\r100 %\n"
    assert printed(shown, capsys, HALF, {"task": "w0", "text": "half whole\n"}) == "half whole\n"
    problem = {"task": "w0", "problem": "gone", "final": True}
    assert printed(shown, capsys, BAR[0], problem, END) == "50 %\n100 %\n"


@pytest.mark.parametrize(
    ("shown", "begin", "lead"), [(Shown(), TWO, "worker-0 | "), (Shown(whole_lines=True), ONE, "")]
)
def test_where_other_lines_come_between_states_are_lines(
    shown: Shown, begin: dict[str, Any], lead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gang, and `submit`, which prints phases as well, in the log of a pipeline: not blind while a bar runs
    for hours."""
    assert printed(shown, capsys, begin, *BAR, HALF, END) == f"{lead}50 %\n{lead}99 %\n{lead}100 %\n"


def test_a_progress_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest state of any worker stands in the last row, no longer than that, and gives way to lines."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    shown = Shown(whole_lines=True)
    assert printed(shown, capsys, TWO, *BAR) == f"{CLEAR}worker-0 | 50 %{CLEAR}worker-0 | 99 %"
    other = {"task": "w1", "line": "a line of more than twenty characters", "redrawn": False}
    assert printed(shown, capsys, other) == f"{CLEAR}worker-1 | a line o"
    assert printed(shown, capsys, END) == f"{CLEAR}worker-0 | 100 %\n"
    printed(shown, capsys, BAR[0])
    shown.fresh_line()
    assert capsys.readouterr().out == CLEAR
    assert shown.at_line_start
