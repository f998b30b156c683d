"""Packing a folder of code: which files, the same bytes each time, bounded; and unpacking nothing that leads
out."""

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.sdk import code_archive
from penstock.sdk.code_archive import NotPackable, pack
from penstock_services.node_reporter.shell.task_setup.code import remove_unchanged, unpack

IGNORE = """
# what a training leaves behind
*.ckpt
!best.ckpt
/data
logs/
build/*.o
**/cache
docs/**/*.png
run[0-9].txt
a?c
\\#odd
wandb/**
trailing{blanks}
"""
PATHS = (
    "train.py",
    "last.ckpt",
    "best.ckpt",
    "sub/last.ckpt",
    "data/x.bin",
    "sub/data/x.bin",
    "logs/a.txt",
    "sub/logs/a.txt",
    "logs.txt",
    "build/a.o",
    "build/deep/a.o",
    "cache/x",
    "sub/deep/cache/x",
    "docs/a.png",
    "docs/x/y/a.png",
    "docs/a.txt",
    "run1.txt",
    "runx.txt",
    "abc",
    "abbc",
    "#odd",
    "wandb/latest/x",
    "trailing",
    "nested/keep.txt",
    "nested/drop.txt",
    "nested/deep/drop.txt",
    ".hidden",
)


def tree(folder: Path) -> Path:
    for path in PATHS:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    (folder / ".gitignore").write_text(IGNORE.format(blanks="   "))
    (folder / "nested" / ".gitignore").write_text("drop.txt\n!/deep/drop.txt\n")
    return folder


def names(data: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name for member in archive if not member.isdir()}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_what_git_ignores_is_not_packed(tmp_path: Path) -> None:
    """A folder with a virtual environment, data and logs beside four scripts: git already knows which files
    are code."""
    folder = tree(tmp_path / "code")
    git = ["git", "-C", str(folder), "-c", "core.excludesFile=/dev/null"]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard", "-z"], capture_output=True, text=True, check=True
    ).stdout
    assert names(pack(folder).data) == set(listed.split("\0")) - {""}


def test_a_virtual_environment_is_not_packed(tmp_path: Path) -> None:
    """`--sync .` beside the `.venv` of the first hour: its interpreter is a link to another folder of this
    machine."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "env" / "conda-meta").mkdir(parents=True)
    (tmp_path / "train.py").touch()
    assert names(pack(tmp_path).data) == {"train.py"}


def test_the_same_files_give_the_same_archive_and_ours_wins_over_gits(tmp_path: Path) -> None:
    """The archive is stored once: neither the time of a checkout nor the order of a folder may make it
    another."""
    first, second = tree(tmp_path / "first"), tree(tmp_path / "second")
    os.utime(second / "train.py", (1, 1))
    assert pack(first) == pack(second)
    (first / ".penstockignore").write_text("train.py\n!last.ckpt\n")
    found = names(pack(first).data)
    assert "train.py" not in found
    assert {"last.ckpt", "sub/last.ckpt"} <= found
    (second / "train.py").chmod(0o755)
    assert pack(second).sha256 != pack(tree(tmp_path / "third")).sha256


def test_what_cannot_be_packed_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--sync .` in a home folder: it must not send ten gigabytes before it complains."""
    with pytest.raises(NotPackable, match="is not a folder"):
        pack(tmp_path / "gone")
    (tmp_path / "out").symlink_to("../elsewhere")
    with pytest.raises(NotPackable, match=r"out is a link to .*elsewhere, outside of the folder"):
        pack(tmp_path)
    (tmp_path / "out").unlink()
    (tmp_path / "big.bin").write_bytes(b"x" * 3_000)
    (tmp_path / "small").write_bytes(os.urandom(2_000))
    for bound, value, complaint in (
        ("MAX_FILES", 1, "more than 1 files"),
        ("MAX_BYTES", 4_000, r"the largest files: big.bin .*penstockignore"),
        ("MAX_PACKED_BYTES", 1_000, "the bound is"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(code_archive, bound, value)
            with pytest.raises(NotPackable, match=complaint):
                pack(tmp_path)


def test_what_was_packed_is_unpacked_and_what_a_task_wrote_stays(tmp_path: Path) -> None:
    """A thousand runs of one training must not leave a thousand copies of its code, and none of its results
    may go."""
    folder, work, archive = tree(tmp_path / "code"), tmp_path / "work", tmp_path / "archive"
    (folder / "link").symlink_to("docs/a.txt")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o750)
    packed = pack(folder)
    archive.write_bytes(packed.data)
    work.mkdir()
    unpacked_ns = unpack(str(archive), packed.sha256, str(work))
    assert (work / "link").read_text() == "docs/a.txt"
    assert os.access(work / "run.sh", os.X_OK)
    assert pack(work).sha256 == packed.sha256
    (work / "train.py").write_text("edited")
    (work / "sub" / "model.pt").write_text("weights")
    (work / "sub" / "__pycache__").mkdir()
    (work / "sub" / "__pycache__" / "train.pyc").write_text("")
    (work / "model.pyc").write_text("compiled, and shipped as a result")
    shutil.copytree(work / "docs", work / "snapshot", copy_function=shutil.copy2)  # times included
    shutil.make_archive(str(tmp_path / "snapshot"), "zip", work)  # which has no time before 1980
    remove_unchanged(str(work), unpacked_ns)
    left = {str(path.relative_to(work)) for path in work.rglob("*") if not path.is_dir()}
    copied = {
        f"snapshot/{name.removeprefix('docs/')}" for name in names(packed.data) if name.startswith("docs/")
    }
    assert copied
    assert left == {"train.py", "sub/model.pt", "model.pyc"} | copied
    remove_unchanged(str(work), None)
    assert list(work.iterdir()) == []


def member(
    name: str,
    kind: bytes = tarfile.REGTYPE,
    target: str = "",
    data: bytes = b"",
    more: dict[str, str] | None = None,
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.pax_headers = more or {}
    info.type, info.linkname, info.size = kind, target, len(data)
    return info, data


@pytest.mark.parametrize(
    "members",
    [
        [member("/abs")],
        [member("../up")],
        [member("a/../../up")],
        [member("link", tarfile.SYMTYPE, "/etc")],
        [member("link", tarfile.SYMTYPE, "../..")],
        [member("link", tarfile.SYMTYPE, ".."), member("link/up")],
        [member("deep/folder/x"), member("turn", tarfile.SYMTYPE, "deep/folder"), member("turn/../../up")],
        [member("less", more={"GNU.sparse.realsize": "-1073741824"})],
        [member("hard", tarfile.LNKTYPE, "../secret")],
        [member("fifo", tarfile.FIFOTYPE)],
        [member("device", tarfile.BLKTYPE)],
    ],
    ids=lambda members: members[-1][0].name + members[-1][0].linkname,
)
def test_nothing_is_unpacked_outside_of_the_tasks_folder(
    members: list[tuple[tarfile.TarInfo, bytes]], tmp_path: Path
) -> None:
    """A user who may submit may put any bytes: an archive made by hand must not write where the task's user
    may."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    work, file = tmp_path / "top" / "work", tmp_path / "archive"
    work.mkdir(parents=True)
    (tmp_path / "secret").write_text("untouched")
    file.write_bytes(raw.getvalue())
    with pytest.raises(OSError, match="Errno"):
        unpack(str(file), sha256(raw.getvalue()).hexdigest(), str(work))
    assert [path.name for path in (tmp_path / "top").iterdir()] == ["work"]
    assert (tmp_path / "secret").stat().st_nlink == 1


def nested_headers() -> bytes:
    """Headers that each announce another one: deeper than Python's stack."""
    one = tarfile.TarInfo.create_pax_global_header({"comment": "x"})
    return gzip.compress(one * 3_000)


@pytest.mark.parametrize("data", [b"", b"no archive", b"\x1f\x8b" + b"x" * 40, nested_headers()])
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    """A broken upload."""
    file = tmp_path / "archive"
    file.write_bytes(data)
    for digest in (sha256(data).hexdigest(), "0" * 64):
        with pytest.raises(OSError, match="Errno"):
            unpack(str(file), digest, str(tmp_path))


def test_what_was_sent_and_left_out_is_said_with_the_file_that_says_so(tmp_path: Path) -> None:
    """`ModuleNotFoundError` on the node: a line `lib/` in a .gitignore, made for Python's builds, left out
    the user's own `lib`."""
    for path in (
        "train.py",
        "lib/mine.py",
        "sub/a.bin",
        "sub/b.bin",
        "venv/pyvenv.cfg",
        ".git/config",
        *(f"w{n}.ckpt" for n in range(5)),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / ".gitignore").write_text("lib/\n*.ckpt\n")
    (tmp_path / "sub/.penstockignore").write_text("*.bin\n!b.bin\n")
    os.mkfifo(tmp_path / "pipe")
    packed = pack(tmp_path)
    assert packed.left_out[".gitignore"] == ["lib", *(f"w{n}.ckpt" for n in range(5))]
    assert packed.left_out["sub/.penstockignore"] == ["sub/a.bin"]
    assert "lib, w0.ckpt, w1.ckpt, 3 more (.gitignore)" in packed.summary
    assert "venv (a virtual environment: name it by --venv or --conda)" in packed.summary
    assert packed.summary.startswith(
        f"{packed.files} files and folders, 1 KiB packed; left out: .git (always); "
    )
    assert "pipe (no file)" in packed.summary
