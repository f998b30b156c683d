"""Terminals on the command line: the keys that detach, and what is refused before anything is asked of the
gateway."""

import pytest

from penstock.cli.terminals.attach import DetachKeys
from penstock.exits import Stop
from penstock.session_lines import BadLine, Lines, input_of, line, size_of
from tests.support.cli.command_process import run


@pytest.mark.parametrize(
    ("keys", "typed", "sent", "left"),
    [
        ("ctrl-p,ctrl-q", [b"ls\r\x10\x11more"], b"ls\r", True),
        ("ctrl-p,ctrl-q", [b"ls\x10", b"\x11"], b"ls", True),
        ("ctrl-p,ctrl-q", [b"\x10", b"\x10", b"ls\x10"], b"\x10\x10ls", False),
        ("ctrl-[,d,d", [b"\x1b", b"d", b"\x1bdd"], b"\x1bd", True),
        ("none", [b"\x10\x11"], b"\x10\x11", False),
    ],
)
def test_keys_that_detach_are_found_in_whatever_parts_they_come(
    keys: str, typed: list[bytes], sent: bytes, left: bool
) -> None:
    """A user recalls a line of the shell with ctrl-p, and leaves with ctrl-p ctrl-q, over a slow line."""
    found = list(map(DetachKeys(keys), typed))
    assert b"".join(data for data, _ in found) == sent
    assert [over for _, over in found] == [False] * (len(typed) - 1) + [left]


@pytest.mark.parametrize("keys", ["", "ctrl-", "ctrl-pp", "alt-x", "ctrl-p,"])
def test_keys_that_no_terminal_sends_are_refused(keys: str) -> None:
    """A typing error in a configured command, which would leave nobody a way out."""
    with pytest.raises(Stop, match="is not a key"):
        DetachKeys(keys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("exec", "-it", "job", "--", "bash"), ("--tty", "-i alone")),
        (("attach", "job"), ("attach: standard input is not a terminal", "penstock logs -f job")),
        (("submit", "-it", "--", "bash"), ("--interactive: standard input is not a terminal", "--detach")),
        (("submit", "--pty", "--", "bash"), ("--interactive",)),
        (
            ("submit", "-it", "-d", "--container", "i", "--dry-run", "--", "bash"),
            ("interactive", "container", "venv"),
        ),
    ],
)
def test_a_pipe_is_no_terminal(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """A pipeline's step asks for a shell."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"stdin": "?"}',
        b'{"stdin": 1}',
        b'{"size": [1]}',
        b'{"size": [1, "2"]}',
        b'{"size": [1, 70000]}',
        b'{"stdin": "", "end": true}',
        b'{"kill": 1}',
    ],
)
def test_a_line_of_another_form_is_refused(text: bytes) -> None:
    """A program of somebody's own speaks to the gateway, and makes mistakes."""
    with pytest.raises(BadLine):
        input_of(text)


def test_lines_come_whole() -> None:
    """The network cuts them anywhere; a peer that ends none cannot fill the memory."""
    lines, sent = Lines(), line(stdin=b"\0\xff") + line(size=[24, 80]) + line(end=True)
    found = [text for byte in sent for text in lines.feed(bytes([byte]))]
    assert [input_of(text) for text in found] == [b"\0\xff", (24, 80), None]
    with pytest.raises(BadLine):
        [lines.feed(b"x" * 60_000) for _ in range(3)]
    with pytest.raises(BadLine):
        size_of("24x80x1")
