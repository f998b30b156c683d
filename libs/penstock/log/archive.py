"""Archive of log records in a directory: segments, and an index with their digests that is the commit point.

    ARCHIVE/<topic>/<partition>/index.json
    ARCHIVE/<topic>/<partition>/<first offset>-<end offset>.records.gz
    ARCHIVE/<ledger's topic>/<partition>/<end offset>.snapshot.gz

A segment is the gzipped MessagePack of its records, byte for byte as they were read. The directory may be a
network file system; one archiver at a time writes. Every read compares the file's sha256 with the index, and
`ArchivedLog` compares the archive's last record with the log's (`Index.last_id`), so that neither can be
exchanged alone.
"""

import fcntl
import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigurationError
from penstock.ledger.record.record import NO_PARENT, record_id
from penstock.log.port import Partition, Record

SEGMENT_RECORDS = 20_000  # one read of the archive loads a whole segment into memory
SEGMENT_BYTES = 32 << 20  # bytes of values, for the same reason
INDEX = "index.json"
LOCK = ".lock"

Row = tuple[int, int, bytes | None, tuple[tuple[str, bytes], ...], bytes]
"""Offset, timestamp in ms, key, headers, value."""


class Segment(msgspec.Struct, frozen=True):
    """One file: the records at offsets `first` ≤ offset < `end`."""

    name: str
    first: int
    end: int
    records: int
    sha256: str


class Fold(msgspec.Struct, frozen=True):
    """Snapshot of the ledger's fold after the last record, so that the next archiving goes on from there."""

    format: str
    """`format_id` of the snapshot: a version with another one folds from the beginning."""
    name: str
    sha256: str


class Index(msgspec.Struct, frozen=True):
    """The archived segments of one partition, in order of the offsets and without gaps."""

    segments: tuple[Segment, ...] = ()
    last_id: str = NO_PARENT
    """Id of the last record (`record_id`)."""
    fold: Fold | None = None

    @property
    def first(self) -> int:
        """Offset of the oldest record; 0 for an empty index."""
        return self.segments[0].first if self.segments else 0

    @property
    def end(self) -> int:
        """Offset after the newest record; 0 for an empty index."""
        return self.segments[-1].end if self.segments else 0

    def holding(self, offset: int) -> Segment | None:
        """The segment with this offset."""
        return next((found for found in self.segments if found.first <= offset < found.end), None)


class Archive:
    """One archive's directory. Blocking; call it in a thread."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def index(self, partition: Partition) -> Index:
        """The partition's index, empty where nothing is archived.
        Raises `ConfigurationError` for a damaged one."""
        path = self.folder_of(partition) / INDEX
        try:
            index = msgspec.json.decode(path.read_bytes(), type=Index)
        except FileNotFoundError:
            return Index()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigurationError(
                f"{path} of the archive cannot be read ({error}): restore it from a copy"
            ) from error
        for before, segment in zip(index.segments, index.segments[1:], strict=False):
            if segment.first != before.end:
                raise ConfigurationError(
                    f"{path} of the archive lacks offsets {before.end} to {segment.first}: restore it from a "
                    "copy"
                )
        return index

    def read(self, partition: Partition, segment: Segment) -> list[Record]:
        """The segment's records. Raises `ConfigurationError` with its name where it is missing or altered."""
        packed = self._file(partition, segment.name, segment.sha256)
        rows: list[Any] = msgspec.msgpack.decode(gzip.decompress(packed), type=list[Row])
        return [
            Record(partition, offset, value, headers, key, timestamp_ms)
            for offset, timestamp_ms, key, headers, value in rows
        ]

    def fold(self, partition: Partition, fold: Fold) -> bytes:
        """The snapshot after the last record. Raises as `read`."""
        return gzip.decompress(self._file(partition, fold.name, fold.sha256))

    def lacking(self, partition: Partition) -> list[str]:
        """The segments whose files are missing or not readable; digests are not checked."""
        folder = self.folder_of(partition)
        return [
            segment.name
            for segment in self.index(partition).segments
            if not os.access(folder / segment.name, os.R_OK)
        ]

    def _file(self, partition: Partition, name: str, digest: str) -> bytes:
        path = self.folder_of(partition) / name
        try:
            packed = path.read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"segment {path} of the archive cannot be read ({error.strerror}): restore it from a copy"
            ) from error
        found = sha256(packed).hexdigest()
        if found != digest:
            raise ConfigurationError(
                f"segment {path} of the archive was altered: its sha256 is {found}, and {digest} in the "
                "index. Restore it from a copy"
            )
        return packed

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock of the one archiver. Raises `ConfigurationError` while another archiver runs, or the directory
        cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"PENSTOCK_ARCHIVE: {self.folder} cannot be written: {error.strerror}"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise ConfigurationError(f"another program writes to the archive {self.folder}") from error
        finally:
            os.close(handle)

    def folder_of(self, partition: Partition) -> Path:
        return self.folder / partition.topic / str(partition.index)


class Writer:
    """Appends records of one partition to an archive. They count only after `commit`."""

    def __init__(self, archive: Archive, partition: Partition) -> None:
        self._archive = archive
        self._partition = partition
        self._folder = archive.folder_of(partition)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._before = archive.index(partition)
        self._segments: list[Segment] = []
        self._rows: list[Row] = []
        self._bytes = 0
        self._last_id = self._before.last_id
        self._last_end = self.end

    @property
    def end(self) -> int:
        """Offset after the newest record that is already in the archive; 0: there is none."""
        return self._before.end

    def add(self, record: Record) -> None:
        """Appends the next record, as it was written also where an amendment applies. The first one of a
        partition begins its archive."""
        if not self._before.segments and not self._segments and not self._rows:
            self._last_end = record.offset
        value = bytes(record.value)
        self._rows.append((record.offset, record.timestamp_ms, record.key, record.headers, value))
        self._bytes += len(record.value)
        self._last_id = record_id(record.value)
        if len(self._rows) >= SEGMENT_RECORDS or self._bytes >= SEGMENT_BYTES:
            self._flush()

    def commit(self, snapshot: tuple[str, bytes] | None = None) -> Index:
        """Reads every new segment back, and then enters all of them into the index.

        `snapshot`: of the fold after the last record, with its format.
        """
        self._flush()
        if not self._segments:
            return self._before
        for segment in self._segments:
            found = self._archive.read(self._partition, segment)
            assert len(found) == segment.records
        fold = None
        if snapshot is not None:
            packed = gzip.compress(snapshot[1], compresslevel=6, mtime=0)
            fold = Fold(snapshot[0], f"{self._last_end:020d}.snapshot.gz", sha256(packed).hexdigest())
            write_durably(self._folder / fold.name, packed)
        index = Index((*self._before.segments, *self._segments), self._last_id, fold)
        write_durably(self._folder / INDEX, msgspec.json.format(msgspec.json.encode(index)))
        if self._before.fold is not None:
            (self._folder / self._before.fold.name).unlink(missing_ok=True)
        return index

    def _flush(self) -> None:
        if not self._rows:
            return
        first, end = self._last_end, self._rows[-1][0] + 1
        packed = gzip.compress(msgspec.msgpack.encode(self._rows), compresslevel=6, mtime=0)
        name = f"{first:020d}-{end:020d}.records.gz"
        write_durably(self._folder / name, packed)
        self._segments.append(Segment(name, first, end, len(self._rows), sha256(packed).hexdigest()))
        self._rows, self._bytes, self._last_end = [], 0, end


def write_durably(path: Path, content: bytes) -> None:
    """Writes the whole file or none, also over a power loss."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
