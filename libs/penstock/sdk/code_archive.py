"""Reproducible archive of a folder of code: tar and gzip, the same bytes for the same files, bounded, without ignored files and virtual environments."""

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.errors import PenstockError
from penstock.sdk.ignore_rules import Rule, ignored, rules_of

MAX_FILES = 10_000  # folders and links included
MAX_BYTES = 256 << 20  # before compression
MAX_PACKED_BYTES = 64 << 20
LARGEST_SHOWN = 3
ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # in a virtual environment of Python's, and in one of conda's
REMEDY = "list what the job does not need in .penstockignore or .gitignore; data belongs on a disk that the nodes share"


class NotPackable(PenstockError):
    """A folder cannot be packed; the text names the reason and the remedy."""


class Packed(NamedTuple):
    """An archive. `sha256`: digest of `data`."""

    data: bytes
    sha256: str
    files: int


class Entry(NamedTuple):
    """A file, folder or link; `name` is its path in the archive."""

    name: str
    path: Path
    found: os.stat_result


def pack(folder: Path) -> Packed:
    """Archives a folder, without times and owners; of modes only the executable bit is included. Raises `NotPackable`."""
    if not folder.is_dir():
        raise NotPackable(f"{folder} is not a folder; name the one with the job's code")
    entries = _bounded(folder)
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
            f"{folder}: packed it has {len(data) >> 20} MiB; the bound is {MAX_PACKED_BYTES >> 20} MiB; {REMEDY}"
        )
    return Packed(data, hashlib.sha256(data).hexdigest(), len(entries))


def _bounded(folder: Path) -> list[Entry]:
    """The entries to pack, in the order of names. Raises `NotPackable`."""
    found: list[Entry] = []
    size = 0
    try:
        for entry in _walk(folder, "", []):
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


def _walk(folder: Path, base: str, above: Sequence[Rule]) -> Iterator[Entry]:
    rules = [*above, *rules_of(folder, base)]
    with os.scandir(folder) as listed:
        names = sorted(entry.name for entry in listed)
    for name in names:
        path, inside = folder / name, f"{base}{name}"
        found = path.lstat()
        is_folder = stat.S_ISDIR(found.st_mode)
        if ignored(inside, rules, is_folder=is_folder):
            continue
        if stat.S_ISLNK(found.st_mode):
            _stays_inside(path, inside)
        elif is_folder and any((path / mark).exists() for mark in ENVIRONMENTS):
            continue  # its links lead to files of this machine alone; a job names its environment
        elif not is_folder and not stat.S_ISREG(found.st_mode):
            continue  # sockets, FIFOs and devices are not code
        yield Entry(inside, path, found)
        if is_folder:
            yield from _walk(path, f"{inside}/", rules)


def _stays_inside(path: Path, inside: str) -> None:
    """Raises `NotPackable` for a link that leads out of the folder: on a node it would have another target."""
    target = os.readlink(path)
    depth = os.path.normpath(os.path.join(os.path.dirname(inside), target))
    if target.startswith("/") or depth.split("/")[0] == "..":
        raise NotPackable(
            f"{inside} is a link to {target}, outside of the folder; list it in .penstockignore, or copy the file"
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
