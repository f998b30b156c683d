"""Checkpoints between two nodes as bytes: what is packed comes out the same, and what a hostile task or a
broken network makes of it is refused."""

import io
import os
import tarfile
from pathlib import Path

import msgspec
import pytest

from penstock_services.node_reporter.shell.checkpoints import checkpoint_bundle
from penstock_services.node_reporter.shell.checkpoints.checkpoint_bundle import (
    BadBundle,
    Digests,
    Manifest,
    Received,
    ending,
    pack,
    unpack,
)

LIMIT = 10_000_000


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint as scripts write them."""
    found = tmp_path / "attempt-1-iteration-7"
    (found / "shards" / "empty").mkdir(parents=True)
    (found / "model.pt").write_bytes(os.urandom(2_500_000))
    (found / "shards" / ("long-name-" * 20)).write_bytes(b"x" * 513)
    (found / "none").touch()
    (found / "latest").symlink_to("model.pt")
    return found


def bundle(folder: Path) -> bytes:
    digests: Digests = {}
    files = b"".join(pack(folder, digests))
    return files + ending(msgspec.json.encode(Manifest(folder.name, digests)), b"signed")


def received(data: bytes, into: Path, limit: int = LIMIT) -> Received:
    into.mkdir()
    return unpack(io.BytesIO(data), into, None, limit)


def contents(folder: Path) -> dict[str, object]:
    """Path → bytes, target, or None for a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def test_what_comes_out_is_what_was_packed(saved: Path, tmp_path: Path) -> None:
    found = received(bundle(saved), tmp_path / "new")
    assert contents(tmp_path / "new") == contents(saved)
    assert found.size_bytes == checkpoint_bundle.size_of(saved) - len("model.pt")
    assert (msgspec.json.decode(found.manifest, type=Manifest).name, found.signature) == (
        saved.name,
        b"signed",
    )


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_one_that_is_cut_short_is_refused(saved: Path, tmp_path: Path, part: float) -> None:
    """The old node's reporter is killed while it sends."""
    whole = bundle(saved)
    with pytest.raises(BadBundle, match="cut short"):
        received(whole[: int(part * (len(whole) - 3 * tarfile.RECORDSIZE))], tmp_path / "new")


def test_a_changed_byte_is_noticed(saved: Path, tmp_path: Path) -> None:
    whole = bytearray(bundle(saved))
    whole[whole.index((saved / "model.pt").read_bytes()[:100]) + 50] ^= 1
    with pytest.raises(
        BadBundle, match=r"1 of its files differ from the files that were sent, first model\.pt"
    ):
        received(bytes(whole), tmp_path / "new")


def test_bounds_hold_whatever_was_announced(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadBundle, match="more than the 1 MiB that this node takes"):
        received(bundle(saved), tmp_path / "small", 1 << 20)
    monkeypatch.setattr(checkpoint_bundle, "MAX_FILES", 3)
    with pytest.raises(BadBundle, match="more than 3 files"):
        received(bundle(saved), tmp_path / "few")


def hostile(*members: tuple[str, bytes, str]) -> bytes:
    """(name, type, link or content) each."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as packed:
        for name, kind, text in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, text if kind != tarfile.REGTYPE else ""
            member.size = len(text) if kind == tarfile.REGTYPE else 0
            packed.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("files/../../evil", tarfile.REGTYPE, "x")],
        [("/etc/evil", tarfile.REGTYPE, "x")],
        [("files//etc/evil", tarfile.REGTYPE, "x")],
        [("other/evil", tarfile.REGTYPE, "x")],
        [("files/out", tarfile.SYMTYPE, ".."), ("files/out/evil", tarfile.REGTYPE, "x")],
        [("files/device", tarfile.CHRTYPE, "")],
        [("files/pipe", tarfile.FIFOTYPE, "")],
        [("files/hard", tarfile.LNKTYPE, "/etc/passwd")],
    ],
)
def test_nothing_is_written_outside_of_the_folder(
    tmp_path: Path, members: list[tuple[str, bytes, str]]
) -> None:
    """A node of the cell was taken over, and sends what it likes."""
    with pytest.raises(BadBundle, match=r"leads out|is not a folder of it|neither a file"):
        received(hostile(*members), tmp_path / "new")
    assert not (tmp_path / "evil").exists()


def test_what_is_no_file_of_the_job_does_not_leave_its_node(saved: Path) -> None:
    """A task puts a pipe into its checkpoint, or, on a node where tasks are another user's, a link to a file
    that it cannot read."""
    os.mkfifo(saved / "pipe")
    with pytest.raises(PermissionError, match="pipe is neither a file"):
        bundle(saved)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of two users")
def test_files_of_another_user_do_not_leave_their_node(saved: Path) -> None:
    os.chown(saved, 65_534, 65_534)
    with pytest.raises(PermissionError, match="belongs to another user"):
        bundle(saved)
