"""Logs of tasks: which part is wanted, whole lines of several tasks, and copies to an archive."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from penstock.errors import ConfigurationError
from penstock.runtime.files.log_archive import BLOCK_BYTES, ArchiveError, LogArchive
from penstock.runtime.files.task_logs import (
    MAX_TAIL_BYTES,
    TIMES,
    TIMES_RECORD,
    Folder,
    TaskLog,
    Wanted,
    is_at,
    log_name,
    log_path,
    part_name,
)
from penstock_services.gateway.core.log_text import (
    MAX_LINE_BYTES,
    AsJsonLines,
    Ask,
    AsText,
    Begin,
    Line,
    Lines,
    Member,
    Text,
    Trouble,
)
from penstock_services.node_reporter.shell.logs import archiver, output
from penstock_services.node_reporter.shell.logs.archiver import Archiver
from tests.support.log.s3_server import S3Server
from tests.support.waiting import await_until

SECOND_NS = 1_000_000_000


class Clock:
    """In place of the module `time`."""

    now_s = 1_000_000.0

    def time_ns(self) -> int:
        return round(self.now_s * SECOND_NS)

    def monotonic(self) -> float:
        return self.now_s


def read(path: Path, wanted: Wanted) -> bytes:
    """The wanted part of a log."""
    with TaskLog(Folder(path), wanted) as log:
        return b"".join(piece.data for piece in log.present())


def test_what_was_printed_since_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training prints for a second, is silent for an hour, prints again; days later its records are far
    apart."""
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
        log.write(b"f\n")
    log.close()
    times = path.with_name(path.name + TIMES).read_bytes()
    assert len(times) < 30 * 16, "few records in an old log"

    def since(after_s: float) -> bytes:
        return read(path, Wanted(since_ms=round((Clock.now_s + after_s) * 1_000)))[:10]

    assert since(-10) == b"a\nb\nc\nd\ne\n"
    assert since(1.5) == b"c\nd\ne\nf\nf\n"
    assert since(60) == since(3_600) == b"d\ne\nf\nf\nf\n"
    assert since(3_603) == b"f\nf\nf\nf\nf\n"
    assert since(month_s + 9_999) == b""
    path.with_name(path.name + TIMES).unlink()
    os.utime(path, (4, 4))
    assert read(path, Wanted(since_ms=5_000)) == b"", "no record of times: the file's own"
    assert read(path, Wanted(since_ms=3_000)) != b""


@pytest.mark.parametrize(
    ("text", "tail", "wanted"),
    [
        (b"", 2, b""),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\n", 5, b"a\n"),
        (b"\n\n", 1, b"\n"),
        (b"x" * (MAX_TAIL_BYTES + 9), 1, b"x" * MAX_TAIL_BYTES),
    ],
)
def test_the_last_lines(tmp_path: Path, text: bytes, tail: int, wanted: bytes) -> None:
    """Of a log as earlier versions wrote it, in one file."""
    path = tmp_path / "j.1.w0.log"
    path.write_bytes(text)
    assert read(path, Wanted(tail=tail)) == wanted
    assert read(path, Wanted(tail=tail, offset=1)) == text[1:]


def test_lines_of_several_tasks_are_whole_and_bounded() -> None:
    """A progress bar, a line cut by a chunk, a byte that is no text, and a task that prints a gigabyte
    without a line's end."""
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


def test_text_says_what_happened_on_a_line_of_its_own() -> None:
    """A progress bar's line has not ended when its node goes away, and when the next attempt begins."""
    member, text = Member("j.1.w0", "j", 1, "n1", True), AsText()
    pieces = (
        Begin(1, [member]),
        Text(member, b"50 %"),
        Trouble("gone", member),
        Text(member, b"99 %\n"),
        Begin(2, [member]),
    )
    written = b"".join(map(text.render, pieces))
    assert written == b"50 %\n[penstock: worker-0: gone]\n99 %\n[penstock: attempt 2]\n"


def test_an_unfinished_line_is_redrawn_in_its_place() -> None:
    """A progress bar is followed by `curl`, and a line that a program prints in two parts. Of a gang states
    are lines."""
    members = [Member(f"j.1.w{rank}", "j", 1, "n1", True) for rank in (0, 1)]
    pieces = (
        Line(members[0], b"50 %", redrawn=True),
        Line(members[0], b"99 %\r", redrawn=True),
        Text(members[0], b"100 %\n"),
        Line(members[0], b"half "),
        Text(members[0], b"half whole\n"),
        Line(members[0], b"7 %"),
        Trouble("gone", members[0]),
        Line(members[0], b"7 %"),
    )
    alone, gang, rows = AsText(), AsText(), AsJsonLines()
    written = b"".join(map(alone.render, (Begin(1, members[:1]), *pieces)))
    assert written == b"50 %\r99 %\r\r100 %\nhalf whole\n7 %\n[penstock: worker-0: gone]\n7 %"
    shown = b"".join(map(gang.render, (Begin(1, members), *pieces)))
    assert shown == (
        b"worker-0 | 50 %\nworker-0 | 99 %\nworker-0 | 100 %\nworker-0 | half whole\n[penstock: "
        b"worker-0: "
        b"gone]\n"
    )
    assert json.loads(rows.render(pieces[0])) == {"task": "w0", "line": "50 %", "redrawn": True}


def test_since_counts_from_when_it_was_asked() -> None:
    """Its node is away for two minutes: what was printed four minutes ago then was within five when it was
    asked for."""
    ask = Ask(age_ms=300_000, asked_ms=880_000)
    assert ask.parameters(1_000_000) == {"tail": None, "since_ms": None, "age_ms": 420_000}
    assert (ask.since(), ask._replace(since_ms=600_000).since()) == (580_000, 600_000)


def test_a_link_in_an_archives_folder_is_not_followed(tmp_path: Path) -> None:
    """Tasks can write to a folder that they share with the archive, and the gateway can read what they
    cannot."""
    (tmp_path / "secret").write_text("of the gateway")
    name = tmp_path / "archive" / log_name("j", "j.1.w0")
    name.parent.mkdir(parents=True)
    name.symlink_to(tmp_path / "secret")
    with pytest.raises(ArchiveError, match="archive"):
        LogArchive((tmp_path / "archive").as_uri()).open("j", "j.1.w0", Wanted())


async def test_logs_in_an_s3_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node's secret is wrong, then the bucket is missing, then both are mended: the service's log names
    each, and the copy is made."""
    monkeypatch.setattr(archiver, "FIRST_PAUSE_S", 0.05)
    path = log_path(tmp_path / "logs", "j/x:1", "j/x:1.1.w0")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(500_000)))
    path.with_name(path.name + TIMES).write_bytes(
        TIMES_RECORD.pack(5_000, 0) + TIMES_RECORD.pack(9_000, 700_000)
    )
    end = path.stat().st_size
    for first, line in ((end + 1_000, b"newer\n"), (end + 1_006, b"newest\n")):
        path.with_name(part_name(path.name, first)).write_bytes(line)
    with S3Server("id", "secret").serving() as store:
        for name, value in store.environment("wrong").items():
            monkeypatch.setenv(name, value)
        archive = LogArchive("s3://bucket/cell/logs")
        copies = Archiver(archive, tmp_path / "marks", tmp_path / "logs")
        copies.starting("j/x:1", "j/x:1.1.w0", 7)
        work = asyncio.ensure_future(copies.run(lambda mark: True))
        await await_until(lambda: work.done() or "SignatureDoesNotMatch" in caplog.text, "the refusal")
        assert "s3://bucket/cell/logs" in caplog.text
        assert "check its credentials" in caplog.text
        store.keys["id"] = "wrong"
        await await_until(lambda: work.done() or "NoSuchBucket" in caplog.text, "the next refusal")
        store.objects["bucket"] = {}
        await await_until(lambda: work.done() or not list((tmp_path / "marks").iterdir()), "the copy")
        assert not work.done()
        work.cancel()
        stored = f"cell/logs/{log_name('j/x:1', 'j/x:1.1.w0')}"
        assert store.objects["bucket"][stored] == path.read_bytes()
        before = store.sent_bytes
        with archive.open("j/x:1", "j/x:1.1.w0", Wanted()) as log:
            piece = archive.read(log)
            assert piece is not None
            assert piece.data.startswith(b"line 0\nlin")
        assert store.sent_bytes - before < 2 * BLOCK_BYTES, "not the whole log for its first line"
        rest = b"[penstock: 1000 bytes left out]\nnewer\nnewest\n"
        for wanted, expected in (
            (Wanted(tail=1), b"newest\n"),
            (Wanted(offset=3), path.read_bytes()[3:] + rest),
            (Wanted(offset=end + 999), b"[penstock: 1 bytes left out]\nnewer\nnewest\n"),
            (Wanted(since_ms=9_500), path.read_bytes()[700_000:] + rest),
        ):
            with archive.open("j/x:1", "j/x:1.1.w0", wanted) as log:
                assert b"".join(piece.data for piece in log.present()) == expected
        with pytest.raises(FileNotFoundError):
            archive.open("j", "j.1.w0", Wanted())
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(ArchiveError, match="AWS_ACCESS_KEY_ID"):
            LogArchive("s3://bucket/cell/logs").open("j/x:1", "j/x:1.1.w0", Wanted())


async def test_no_outage_of_the_archive_loses_a_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    await await_until(lambda: work.done() or "logs are not copied yet" in caplog.text, "the attempt")
    assert not work.done()
    work.cancel()
    place.unlink()
    again = asyncio.ensure_future(Archiver(archive, marks, logs).run(lambda mark: ".1." in mark))
    await await_until(lambda: again.done() or len(list(marks.iterdir())) == 1, "the copy")
    assert not again.done()
    again.cancel()
    copy = place / log_name("j/x", "j/x.1.w0")
    assert copy.read_text() == "j/x.1.w0\n"
    assert (copy.stat().st_mode & 0o777, copy.parent.stat().st_mode & 0o777) == (0o640, 0o750)
    assert [one.name for one in marks.iterdir()] == ["j%2Fx.2.w0@7"], "that one still runs"


def test_an_archive_of_a_kind_that_is_not_installed_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_NODE_LOG_ARCHIVE.*install"):
        LogArchive("gs://bucket/logs")
    with pytest.raises(ConfigurationError, match="PENSTOCK_NODE_LOG_ARCHIVE: nope") as refusal:
        LogArchive("nope://user:secret@host/x")
    assert "secret" not in str(refusal.value)
    assert is_at(f"file://{tmp_path}/a%20b", tmp_path / "a b")
    assert not is_at("s3://bucket/logs", Path("/logs"))
