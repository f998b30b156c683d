"""Reproducible archive of a folder of code: tar and gzip, the same bytes for the same files, bounded, without
ignored files and virtual environments."""

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.sdk.ignore_rules import Rule, ignored_by, rules_of

MAX_FILES = 10_000  # folders and links included
MAX_BYTES = 256 << 20  # before compression
MAX_PACKED_BYTES = 64 << 20
LARGEST_SHOWN = 3
ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # in a virtual environment of Python's, and in one of conda's
REMEDY = (
    "list what the job does not need in .penstockignore or .gitignore; data belongs on a disk that the "
    "nodes share"
)


class NotPackable(PenstockError):
    """A folder cannot be packed; the text names the reason and the remedy."""


class Packed(NamedTuple):
    """An archive. `sha256`: digest of `data`; `left_out`: cause, such as an ignore file, → paths."""

    data: bytes
    sha256: str
    files: int
    left_out: Mapping[str, Sequence[str]] = MappingProxyType({})

    @property
    def summary(self) -> str:
        """What is sent and what is not, by cause:
        `12 files and folders, 34 KiB; left out: data, 3 more (.gitignore)`."""
        parts = []
        for cause, paths in self.left_out.items():
            more = f", {len(paths) - LARGEST_SHOWN} more" if len(paths) > LARGEST_SHOWN else ""
            parts.append(f"{', '.join(paths[:LARGEST_SHOWN])}{more} ({cause})")
        sent = f"{self.files} files and folders, {max(1, len(self.data) >> 10)} KiB packed"
        return f"{sent}; left out: {'; '.join(parts)}" if parts else f"{sent}; nothing left out"


class Entry(NamedTuple):
    """A file, folder or link; `name` is its path in the archive."""

    name: str
    path: Path
    found: os.stat_result


def pack(folder: Path) -> Packed:
    """Archives a folder, without times and owners;
    of modes only the executable bit is included. Raises `NotPackable`."""
    if not folder.is_dir():
        raise NotPackable(f"{folder} is not a folder; name the one with the job's code")
    left_out: dict[str, list[str]] = {}
    entries = _bounded(folder, left_out)
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in entries:
            _add(archive, entry)
    data = raw.getvalue()
    if len(data) > MAX_PACKED_BYTES:
        raise NotPackable(
            f"{folder}: packed it has {len(data) >> 20} MiB; the bound is {MAX_PACKED_BYTES >> 20} MiB; "
            f"{REMEDY}"
        )
    return Packed(data, hashlib.sha256(data).hexdigest(), len(entries), left_out)


def _bounded(folder: Path, left_out: dict[str, list[str]]) -> list[Entry]:
    """The entries to pack, in the order of names; adds the others by cause. Raises `NotPackable`."""
    found: list[Entry] = []
    size = 0
    try:
        for entry in _walk(folder, "", [], left_out):
            found.append(entry)
            size += entry.found.st_size if stat.S_ISREG(entry.found.st_mode) else 0
            if len(found) > MAX_FILES:
                raise NotPackable(f"{folder} has more than {MAX_FILES:,} files; {REMEDY}")
            if size > MAX_BYTES:
                largest = sorted(found, key=lambda entry: -entry.found.st_size)[:LARGEST_SHOWN]
                shown = ", ".join(f"{entry.name} ({entry.found.st_size >> 20} MiB)" for entry in largest)
                raise NotPackable(
                    f"{folder} has more than {MAX_BYTES >> 20} MiB; the largest files: {shown}; {REMEDY}"
                )
    except OSError as error:
        raise NotPackable(f"{error.filename}: cannot be read: {error.strerror}; {REMEDY}") from error
    return found


def _walk(folder: Path, base: str, above: Sequence[Rule], left_out: dict[str, list[str]]) -> Iterator[Entry]:
    rules = [*above, *rules_of(folder, base)]
    with os.scandir(folder) as listed:
        names = sorted(entry.name for entry in listed)
    for name in names:
        path, inside = folder / name, f"{base}{name}"
        found = path.lstat()
        is_folder = stat.S_ISDIR(found.st_mode)
        if cause := ignored_by(inside, rules, is_folder=is_folder):
            left_out.setdefault(cause, []).append(inside)
            continue
        if stat.S_ISLNK(found.st_mode):
            _stays_inside(path, inside)
        elif is_folder and any((path / mark).exists() for mark in ENVIRONMENTS):
            left_out.setdefault("a virtual environment: name it by --venv or --conda", []).append(inside)
            continue  # its links lead to files of this machine alone; a job names its environment
        elif not is_folder and not stat.S_ISREG(found.st_mode):
            left_out.setdefault("no file", []).append(inside)
            continue  # sockets, FIFOs and devices are not code
        yield Entry(inside, path, found)
        if is_folder:
            yield from _walk(path, f"{inside}/", rules, left_out)


def _stays_inside(path: Path, inside: str) -> None:
    """Raises `NotPackable` for a link that leads out of the folder:
    on a node it would have another target."""
    target = os.readlink(path)
    depth = os.path.normpath(os.path.join(os.path.dirname(inside), target))
    if target.startswith("/") or depth.split("/")[0] == "..":
        raise NotPackable(
            f"{inside} is a link to {target}, outside of the folder; list it in .penstockignore, or copy the "
            "file"
        )


def _add(archive: tarfile.TarFile, entry: Entry) -> None:
    """Adds an entry. Raises `NotPackable` for a file that changes meanwhile."""
    info = tarfile.TarInfo(entry.name)
    mode = entry.found.st_mode
    info.mode = 0o755 if mode & 0o100 or stat.S_ISDIR(mode) else 0o644
    if stat.S_ISDIR(mode):
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    elif stat.S_ISLNK(mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(entry.path)
        archive.addfile(info)
    else:
        try:
            content = entry.path.read_bytes()
        except OSError as error:
            raise NotPackable(f"{entry.path}: cannot be read: {error.strerror}; {REMEDY}") from error
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
