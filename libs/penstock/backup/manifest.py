"""Manifest of a copy: what the copy of one cell holds, with the SHA-256 of every file.

COPY/manifest.json                                 written last: a copy without it is unfinished
COPY/log/<topic>/<partition>/                      segments and their index, as in an archive of the log
COPY/tables/<schema>.<table>.gz                    rows in Postgres's text format of COPY
COPY/files/<variable>[/<path>]                     keys, tokens and code that lie beside log and database
"""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.errors import ConfigurationError
from penstock.log.archive import INDEX, Archive, write_durably
from penstock.log.port import Partition

FORMAT = 1
MANIFEST = "manifest.json"
LOG, TABLES, FILES = "log", "tables", "files"
GZIP_LEVEL = 1  # rows of tables: disk is cheaper than the time of a copy


class CopiedPartition(msgspec.Struct, frozen=True):
    """The records at offsets `first` ≤ offset < `end`; before `first` the log had none."""

    topic: str
    index: int
    first: int
    end: int
    records: int
    sha256: str
    """Of the segments' index, which has the digest of each segment; empty without records."""

    @property
    def place(self) -> Partition:
        return Partition(self.topic, self.index)


class CopiedTable(msgspec.Struct, frozen=True):
    name: str
    columns: tuple[str, ...]
    rows: int
    file: str
    """Path inside the copy."""
    sha256: str


class CopiedSchema(msgspec.Struct, frozen=True):
    """One service's tables. `migrations`: names of those that were applied, in order."""

    service: str
    name: str
    migrations: tuple[str, ...]
    tables: tuple[CopiedTable, ...]


class CopiedFile(msgspec.Struct, frozen=True):
    """A file that the environment variable names,
    or one in the folder that it names (`path` inside that folder)."""

    variable: str
    path: str
    mode: int
    sha256: str

    @property
    def file(self) -> str:
        """Path inside the copy."""
        return f"{FILES}/{self.variable}/{self.path}" if self.path else f"{FILES}/{self.variable}"


class CopiedHead(msgspec.Struct, frozen=True):
    """The ledger's last valid record, and the epoch of the log then. `offset` -1: the ledger was empty."""

    seq: int
    id: str
    term: int
    offset: int
    epoch: int


class Manifest(msgspec.Struct, frozen=True):
    """`taken_ms`: wall clock at the beginning of the copy; everything acknowledged before is in the copy."""

    format: int
    version: str
    cell: str
    cell_index: int
    taken_ms: int
    head: CopiedHead
    partitions: tuple[CopiedPartition, ...]
    schemas: tuple[CopiedSchema, ...]
    files: tuple[CopiedFile, ...]

    @property
    def records(self) -> int:
        return sum(part.records for part in self.partitions)

    @property
    def rows(self) -> int:
        return sum(table.rows for schema in self.schemas for table in schema.tables)


def write_manifest(copy: Path, manifest: Manifest) -> None:
    """Writes the file whole or not at all: with it the copy is finished."""
    write_durably(copy / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))


def read_manifest(copy: Path) -> Manifest:
    """Raises `ConfigurationError` for a folder without a finished copy, and for a copy of a newer version."""
    path = copy / MANIFEST
    try:
        content = path.read_bytes()
        if (found := msgspec.json.decode(content)["format"]) != FORMAT:
            raise ConfigurationError(f"{path}: format {found!r} is not known here; use that copy's version")
        return msgspec.json.decode(content, type=Manifest)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{copy} holds no finished copy ({MANIFEST} is missing): name the folder of a `penstock backup` "
            "that ended with exit code 0"
        ) from error
    except (OSError, msgspec.MsgspecError, TypeError, KeyError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): use another copy") from error


def archive_in(copy: Path) -> Archive:
    """The copied records."""
    return Archive(copy / LOG)


def digests(copy: Path, manifest: Manifest) -> Iterator[tuple[Path, str]]:
    """Every file of the copy and its SHA-256, segments included.
    Raises `ConfigurationError` for a damaged index."""
    archive = archive_in(copy)
    for part in manifest.partitions:
        if part.sha256:
            folder = archive.folder_of(part.place)
            yield folder / INDEX, part.sha256
            for segment in archive.index(part.place).segments:
                yield folder / segment.name, segment.sha256
    for schema in manifest.schemas:
        for table in schema.tables:
            yield copy / table.file, table.sha256
    for file in manifest.files:
        yield copy / file.file, file.sha256


def check_digest(path: Path, digest: str) -> None:
    """Raises `ConfigurationError` where the file is missing or was altered."""
    try:
        found = digest_of(path)
    except OSError as error:
        raise ConfigurationError(
            f"{path} of the copy cannot be read ({error.strerror}): use another copy"
        ) from error
    if found != digest:
        raise ConfigurationError(
            f"{path} of the copy was altered: its sha256 is {found}, and {digest} in the manifest. Use "
            "another copy"
        )


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


class _Hashing:
    """A file that digests what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


class Packing:
    """A gzip file that is being written. `sha256`: of its bytes, known once it is closed."""

    def __init__(self, packed: gzip.GzipFile) -> None:
        self.write = packed.write
        self.sha256 = ""


@contextmanager
def packing(path: Path) -> Iterator[Packing]:
    """Writes a gzip file, and digests its bytes on the way."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        with gzip.GzipFile("", "wb", GZIP_LEVEL, hashing, mtime=0) as packed:
            found = Packing(packed)
            yield found
        found.sha256 = hashing.digest.hexdigest()
