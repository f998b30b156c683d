"""Rotation of a task's log: what its shim stores of a long output, and what a reader sees of it meanwhile."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.files.task_logs import (
    LINE,
    MAX_LINE_BYTES,
    Folder,
    Frames,
    Output,
    TaskLog,
    Wanted,
    framed,
    log_path,
)
from penstock_services.node_reporter.shell.logs import output
from penstock_services.node_reporter.shell.logs.output import LINE_BYTES, SETTLE_BYTES, Lines

LIMIT = 1 << 20
BAR = "\rtrain:  42%|█████▏     | 1234567/2939445 [10:33:41<14:40:22, 32.47it/s, loss=0.123]".encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return log_path(tmp_path, "j", "j.1.w0")


def written(path: Path) -> output.Output:
    return output.Output(str(path), LIMIT)


def shown(path: Path, wanted: Wanted = Wanted()) -> bytes:  # noqa: B008 - frozen
    with TaskLog(Folder(path), wanted) as log:
        return b"".join(piece.data.removeprefix(b"\r") for piece in log.present())


def stored_bytes(path: Path) -> int:
    return sum(one.stat().st_size for one in path.parent.iterdir())


def test_a_night_of_a_progress_bar_is_one_line(path: Path) -> None:
    """A training redraws its bar for 18 hours, 70 times the limit, then prints a loss per second: each loss
    is stored and seen at once."""
    log = written(path)
    block = BAR * 700
    for _ in range(70 * LIMIT // len(block)):
        log.write(block)
    for epoch in range(40):
        log.write(b"\nepoch %d val_loss=0.1\n" % epoch)
        assert shown(path, Wanted(tail=1)) == b"epoch %d val_loss=0.1\n" % epoch
    log.close()
    text = shown(path)
    assert text.count(b"val_loss") == 40
    assert text.startswith(BAR[1:] + b"\nepoch 0 ")
    assert stored_bytes(path) < 10_000


def test_the_first_and_the_newest_of_a_flood_remain(path: Path) -> None:
    """A loop prints ten times the limit: the disk is safe, the configuration at the beginning and the error
    at the end are there."""
    log, lines = written(path), [b"%d loss=0.123456 lr=0.001\n" % number for number in range(400_000)]
    for first in range(0, len(lines), 1_000):
        log.write(b"".join(lines[first : first + 1_000]))
    log.close()
    head, _, rest = shown(path).partition(b"[penstock: ")
    left_out, _, newest = rest.partition(b" bytes left out]\n")
    whole = b"".join(lines)
    assert whole.startswith(head)
    assert whole.endswith(newest)
    assert head.endswith(b"\n"), "whole lines"
    assert newest.startswith(lines[-newest.count(b"\n")])
    assert len(head) + int(left_out) + len(newest) == len(whole)
    assert (len(head) > LIMIT // 5, len(newest) > LIMIT * 2 // 3) == (True, True)
    assert stored_bytes(path) < LIMIT + 1_000
    assert shown(path, Wanted(tail=3)) == b"".join(lines[-3:])
    assert shown(path, Wanted(tail=10_000)) == b"".join(lines[-10_000:]), "over several segments"


def test_a_follower_sees_each_byte_once_while_segments_go(path: Path) -> None:
    """One reader keeps up, one comes back after ten minutes at its position, which is gone: both see the
    newest line."""
    log = written(path)
    log.write(b"first\n")
    with TaskLog(Folder(path), Wanted()) as reader:
        found = b""
        for number in range(40_000):
            log.write(b"%d loss=0.123456 lr=0.001 tokens/s=12345.6\n" % number)
            while number % 500 == 0 and (piece := reader.read()) is not None:
                found += piece.data
        while (piece := reader.read()) is not None:
            found += piece.data
        position = reader.position
    expected = b"first\n" + b"".join(
        b"%d loss=0.123456 lr=0.001 tokens/s=12345.6\n" % number for number in range(40_000)
    )
    assert found == expected
    assert position == len(expected), "rotation moves no position"
    late = shown(path, Wanted(offset=len(expected) // 2))
    remark, _, rest = late.partition(b"\n")
    assert remark.startswith(b"[penstock: ")
    assert expected.endswith(rest)
    assert int(remark.split()[1]) + len(rest) == len(expected) - len(expected) // 2


def test_an_unfinished_line_is_seen_within_a_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar is redrawn ten times a second, waits, and ends; a line without an end is the last of a shim that
    is killed."""

    class Clock:
        now_s = 1_000_000.0

        def monotonic(self) -> float:
            return self.now_s

        def time_ns(self) -> int:
            return round(self.now_s * 1e9)

    clock = Clock()
    monkeypatch.setattr(output, "time", clock)
    log = written(path)
    assert log.pause_ms() is None
    with TaskLog(Folder(path), Wanted()) as reader:
        log.write(b"begin\n\r 1 %")
        assert log.pause_ms() is None
        assert [reader.read() for _ in range(3)] == [
            Output(6, b"begin\n"),
            Output(6, b"\r 1 %", line=True),
            None,
        ]
        for number in range(2, 10):
            clock.now_s += 0.1
            log.write(b"\r %d %%" % number)
            assert 100 < (log.pause_ms() or 0) < 1_000, "it is stored once per second"
        assert reader.read() is None
        clock.now_s += 0.3
        assert log.pause_ms() is None
        assert reader.read() == Output(6, b"\r 9 %", line=True)
        assert shown(path) == b"begin\n 9 %"
        assert shown(path, Wanted(tail=1)) == b" 9 %"
        assert shown(path, Wanted(tail=2)) == b"begin\n 9 %"
        clock.now_s += 5
        log.write(b"\r100 %\nend")
        log.pause_ms()
        assert [reader.read() for _ in range(2)] == [Output(12, b"100 %\n"), Output(12, b"end", line=True)]
    assert shown(path) == b"begin\n100 %\nend"
    state = path.with_name(path.name + LINE)
    whole = state.read_bytes()
    state.write_bytes(whole[:20] + b"END" + whole[23:27] + b"\xff")
    assert shown(path) == b"begin\n100 %\n", "half of a state is none"
    log.close()
    assert shown(path) == b"begin\n100 %\nend"
    assert sorted(one.name for one in path.parent.iterdir()) == ["j.1.w0.log", "j.1.w0.log.times"]


@pytest.mark.parametrize("name", ["raw bytes", "a long line", "line ends of Windows", "a cut character"])
def test_what_is_no_redraw_passes_unharmed(path: Path, name: str) -> None:
    """An image on stdout, the JSON of a state in one line, and texts of other systems."""
    image = b"\x89PNG\r\n\x1a\n\0" + bytes(range(256)) * 1_000
    chunks = {
        "raw bytes": [b"before\n", *(image[at : at + 700] for at in range(0, len(image), 700)), b"\rabc\n"],
        "a long line": [b"x" * 10_000] * 15 + [b"\nLAST\n"],
        "line ends of Windows": [b"one\r\ntwo\r", b"\nthree\r\r\n"],
        "a cut character": [b"half \xe2\x96", b"\x88 whole\n"],
    }[name]
    log = written(path)
    for chunk in chunks:
        log.write(chunk)
    log.close()
    assert shown(path) == b"".join(chunks)


def test_bars_are_collapsed_again_after_bytes_that_are_no_text() -> None:
    """A line in another encoding costs no more than the redraws right after it."""
    lines = Lines()
    lines.feed(b"caf\xe9\n")
    assert len(b"".join(lines.feed(BAR * 10) for _ in range(500))) < 2 * SETTLE_BYTES
    assert lines.feed(b"\n") == BAR[1:] + b"\n"


@given(st.lists(st.text(alphabet="ab\r\n█", max_size=9).map(str.encode), max_size=20), st.integers(1, 7))
def test_the_last_state_of_each_line_is_stored_whatever_the_chunks(parts: list[bytes], size: int) -> None:
    """A pipe cuts output anywhere, also between the two bytes of a line end."""
    text = b"".join(parts)
    lines = Lines()
    found = b"".join(lines.feed(text[at : at + size]) for at in range(0, len(text), size)) + lines.rest
    expected = [line[line.rstrip(b"\r").rfind(b"\r") + 1 :] for line in text.split(b"\n")]
    assert found == b"\n".join(expected)


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_any_bytes_are_taken_in_bounded_memory(chunks: list[bytes]) -> None:
    lines = Lines()
    for chunk in chunks:
        lines.feed(chunk * 3_000)
        assert len(lines.rest) <= LINE_BYTES


def test_a_full_disk_leaves_a_readable_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job fills the disk for a while: what could not be stored is counted, and what comes later is
    there."""
    full, write = False, os.write

    def failing(descriptor: int, data: bytes) -> int:
        if full and len(data) > 3:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", failing)
    log = written(path)
    log.write(b"before\n")
    full = True
    log.write(b"lost\n")
    log.write(b"lost as well\nun")
    log.pause_ms()
    full = False
    log.write(b"finished\nafter\n")
    log.close()
    assert shown(path) == b"before\n[penstock: 18 bytes left out]\nunfinished\nafter\n"


def test_a_ring_on_a_full_disk_gives_way_to_the_newest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for half of the ring: the older half goes early."""
    write = os.write

    def failing(descriptor: int, data: bytes) -> int:
        if stored_bytes(path) + len(data) > LIMIT // 2:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", failing)
    log = written(path)
    lines = [
        b"%d loss=0.123456 lr=0.001 tokens/s=12345.6 x=%d\n" % (number, number) for number in range(20_000)
    ]
    for first in range(0, len(lines), 50):
        log.write(b"".join(lines[first : first + 50]))
    log.close()
    assert shown(path).startswith(b"0 loss=")
    assert shown(path, Wanted(tail=1)).startswith(b"19999 loss=")


def test_a_log_goes_on_after_a_restart_of_its_task(path: Path) -> None:
    """A task is started again under its id: positions go on where they were."""
    for run in range(3):
        log = written(path)
        for first in range(0, 20_000, 100):
            log.write(b"".join(b"run %d line %d\n" % (run, number) for number in range(first, first + 100)))
        log.close()
    newest = shown(path, Wanted(tail=25_000))
    assert newest.endswith(b"run 2 line 19999\n")
    assert newest.count(b"run 2") == 20_000
    assert b"run 1 line 19999\nrun 2 line 0\n" in newest


@given(
    st.lists(st.builds(Output, st.integers(0, 1 << 60), st.binary(max_size=300), st.booleans()), max_size=9),
    st.integers(1, 99),
)
def test_pieces_survive_any_packets(pieces: list[Output], size: int) -> None:
    sent, frames = b"".join(map(framed, pieces)), Frames()
    found = [one for at in range(0, len(sent), size) for one in frames.feed(sent[at : at + size])]
    assert found == pieces
    with pytest.raises(ValueError, match="too long"):
        list(Frames().feed(framed(Output(0, bytes(MAX_LINE_BYTES + 1)))))
