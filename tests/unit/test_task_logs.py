"""Logs of tasks: which part is wanted, whole lines of several tasks, and copies to an archive."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from penstock.errors import ConfigurationError
from penstock.runtime.log_archive import LogArchive
from penstock.runtime.task_logs import MAX_TAIL_BYTES, TIMES, Wanted, is_at, log_name, log_path, start_of
from penstock_services.gateway.core.log_text import (
    MAX_LINE_BYTES,
    AsJsonLines,
    AsText,
    Begin,
    Lines,
    Member,
    Text,
)
from penstock_services.node_reporter.shell import output
from penstock_services.node_reporter.shell.archiver import Archiver

SECOND_NS = 1_000_000_000


class Clock:
    """In place of the module `time`."""

    now_s = 1_000_000.0

    def time_ns(self) -> int:
        return round(self.now_s * SECOND_NS)


def test_what_was_printed_since_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training prints for a second, is silent for an hour, prints again; days later its records are far apart."""
    clock = Clock()
    monkeypatch.setattr(output, "time", clock)
    path = tmp_path / "j" / "j.1.w0.log"
    log = output.Output(str(path), 1 << 20)
    for after_s, text in ((0, "a\n"), (0.4, "b\n"), (2, "c\n"), (3_600, "d\n"), (3_601.2, "e\n")):
        clock.now_s = Clock.now_s + after_s
        log.write(text.encode())
    month_s = 30 * 86_400
    for number in range(2_000):
        clock.now_s = Clock.now_s + month_s + number
        log.write(b"f")
    log.close()
    times = path.with_name(path.name + TIMES).read_bytes()
    assert len(times) < 30 * 16, "few records in an old log"

    def since(after_s: float) -> bytes:
        file = io.BytesIO(path.read_bytes())
        start = start_of(file, Wanted(since_ms=round((Clock.now_s + after_s) * 1_000)), times, 0)
        return path.read_bytes()[start : start + 10]

    assert since(-10) == b"a\nb\nc\nd\ne\n"
    assert since(1.5) == b"c\nd\ne\nffff"
    assert since(60) == since(3_600) == b"d\ne\nffffff"
    assert since(3_603) == b"ffffffffff"
    assert since(month_s + 9_999) == b""
    assert start_of(io.BytesIO(b"old"), Wanted(since_ms=5), b"", 4) == 3, "no record of times: the file's own"


@pytest.mark.parametrize(
    ("text", "tail", "wanted"),
    [
        (b"", 2, b""), (b"a\nb\nc", 2, b"b\nc"), (b"a\nb\nc\n", 2, b"b\nc\n"), (b"a\n", 5, b"a\n"), (b"\n\n", 1, b"\n"),
        (b"x" * (MAX_TAIL_BYTES + 9), 1, b"x" * MAX_TAIL_BYTES),
    ],
)  # fmt: skip
def test_the_last_lines(text: bytes, tail: int, wanted: bytes) -> None:
    assert text[start_of(io.BytesIO(text), Wanted(tail=tail), b"", 0) :] == wanted
    assert start_of(io.BytesIO(text), Wanted(tail=tail, offset=1), b"", 0) == min(1, len(text))


def test_lines_of_several_tasks_are_whole_and_bounded() -> None:
    """A progress bar, a line cut by a chunk, a byte that is no text, and a task that prints a gigabyte without a line's end."""
    lines = Lines()
    assert [lines.feed(part) for part in (b"a", b"b\r", b"\nc\rd", b"e\n")] == [b"", b"", b"ab\nc\n", b"de\n"]
    assert lines.end() == b""
    sizes = [len(lines.feed(b"x" * 10_000)) for _ in range(100)]
    assert max(sizes) <= MAX_LINE_BYTES + 10_001
    members = [Member(f"j.1.{name}", "j", 1, "n1", True) for name in ("w1", "ps0")]
    text, rows = AsText(), AsJsonLines()
    pieces = (Begin(1, members), Text(members[0], b"a\nb\n"), Text(members[1], b"\xff\n"))
    assert b"".join(map(text.render, pieces)) == b"worker-1 | a\nworker-1 | b\nps-0 | \xff\n"
    found = [json.loads(rows.render(piece)) for piece in pieces]
    assert [one["name"] for one in found[0]["members"]] == ["worker-1", "ps-0"]
    assert found[1:] == [{"task": "w1", "text": "a\nb\n"}, {"task": "ps0", "text": "\ufffd\n"}]


async def test_no_outage_of_the_archive_loses_a_copy(tmp_path: Path) -> None:
    """The archive's folder cannot be written to, the reporter is started anew, and then it can."""
    logs, marks, place = tmp_path / "logs", tmp_path / "marks", tmp_path / "archive"
    archive = LogArchive(place.as_uri())
    for task_id in ("j/x.1.w0", "j/x.2.w0"):
        path = log_path(logs, "j/x", task_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{task_id}\n")
        Archiver(archive, marks, logs).starting("j/x", task_id, 7)
    place.write_text("no folder")
    first = Archiver(archive, marks, logs)
    work = asyncio.ensure_future(first.run(lambda mark: False))
    first.ended("j/x.1.w0", 7)
    await asyncio.sleep(0.1)
    assert not work.done()
    work.cancel()
    place.unlink()
    again = asyncio.ensure_future(Archiver(archive, marks, logs).run(lambda mark: ".1." in mark))
    async with asyncio.timeout(30):
        while len(list(marks.iterdir())) > 1:
            await asyncio.sleep(0.01)
    again.cancel()
    copy = place / log_name("j/x", "j/x.1.w0")
    assert copy.read_text() == "j/x.1.w0\n"
    assert (copy.stat().st_mode & 0o777, copy.parent.stat().st_mode & 0o777) == (0o640, 0o750)
    assert [one.name for one in marks.iterdir()] == ["j%2Fx.2.w0@7"], "that one still runs"


def test_an_archive_of_a_kind_that_is_not_installed_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_NODE_LOG_ARCHIVE.*install"):
        LogArchive("s3://bucket/logs")
    with pytest.raises(ConfigurationError, match="PENSTOCK_NODE_LOG_ARCHIVE: nope") as refusal:
        LogArchive("nope://user:secret@host/x")
    assert "secret" not in str(refusal.value)
    assert is_at(f"file://{tmp_path}/a%20b", tmp_path / "a b")
    assert not is_at("s3://bucket/logs", Path("/logs"))
