"""Transfer format of a checkpoint between two nodes: a tar stream that ends with the size and SHA-256 of each
file, and their signature.

The packed files and the stream may come from a hostile task: only files, folders and links of the folder's
own owner are packed, and nothing is written outside of the new folder.
"""

import hashlib
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.errors import PenstockError

CHUNK_BYTES = 1 << 20
MAX_FILES = 20_000
MAX_DIGESTS_BYTES = 16 << 20
MAX_PATH_CHARS = 1_024
FILES = "files/"
DIGESTS = "digests.json"
SIGNATURE = "signature"
END = bytes(2 * tarfile.BLOCKSIZE)

Digests = dict[str, list[str | int]]
"""Path below the checkpoint → [bytes, SHA-256] of a file, [target] of a link, [] for a folder."""


class BadBundle(PenstockError):
    """Not a valid bundle of a node: cut short, changed, too large, or leading out of its folder."""


class Manifest(msgspec.Struct, frozen=True):
    """`digests.json`."""

    name: str
    """Name of the checkpoint."""
    files: Digests


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Received(NamedTuple):
    """`manifest` as received, with its signature; `size_bytes` of all files."""

    manifest: bytes
    signature: bytes
    size_bytes: int


def size_of(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(folder) for name in names)


def pack(folder: Path, digests: Digests) -> Iterator[bytes]:
    """The stream up to its last file; fills `digests`. Raises `OSError`, also for files that may not leave
    the node."""
    owner = os.lstat(folder).st_uid
    for path, folders, files, at in os.fwalk(folder, onerror=_raise, follow_symlinks=False):
        for name in sorted([*folders, *files]):
            inside = os.path.normpath(os.path.join(os.path.relpath(path, folder), name))
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            if found.st_uid != owner:
                raise PermissionError(f"{inside} belongs to another user than the checkpoint")
            member = tarfile.TarInfo(FILES + inside)
            member.mode = stat.S_IMODE(found.st_mode) & 0o755
            if stat.S_ISREG(found.st_mode):
                yield from _packed_file(member, name, at, digests)
                continue
            if stat.S_ISLNK(found.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=at)
            elif stat.S_ISDIR(found.st_mode):
                member.type = tarfile.DIRTYPE
            else:
                raise PermissionError(f"{inside} is neither a file nor a folder nor a link")
            digests[inside] = [member.linkname] if member.linkname else []
            yield _header(member)


def _packed_file(member: tarfile.TarInfo, name: str, at: int, digests: Digests) -> Iterator[bytes]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=at), "rb") as file:
        member.size = left = os.fstat(file.fileno()).st_size
        yield _header(member)
        digest = hashlib.sha256()
        while left:
            chunk = file.read(min(CHUNK_BYTES, left))
            if not chunk:
                raise OSError(f"{member.name} became shorter")
            digest.update(chunk)
            left -= len(chunk)
            yield chunk
    yield bytes(-member.size % tarfile.BLOCKSIZE)
    digests[member.name.removeprefix(FILES)] = [member.size, digest.hexdigest()]


def ending(manifest: bytes, signature: bytes) -> bytes:
    """The rest of the stream."""
    parts = []
    for name, data in ((DIGESTS, manifest), (SIGNATURE, signature)):
        member = tarfile.TarInfo(name)
        member.size = len(data)
        parts += [_header(member), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    return b"".join([*parts, END])


def unpack(stream: Source, into: Path, owner: tuple[int, int] | None, limit_bytes: int) -> Received:
    """Writes the files into an empty folder that no other user can write to, syncs all of them, and compares
    sizes and digests.

    `owner`: user and group of the new files. Raises `BadBundle`, `OSError`.
    """
    writing = _Writing(into, owner, limit_bytes)
    last = {DIGESTS: b"", SIGNATURE: b""}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as packed:  # type: ignore[call-overload]
            for member in packed:
                if member.name in last:
                    last[member.name] = _content(packed, member).read(MAX_DIGESTS_BYTES)
                else:
                    writing.take(packed, member)
    except (tarfile.TarError, zlib.error, EOFError, ValueError, LookupError, ArithmeticError) as error:
        raise BadBundle(f"the received data is cut short, or not a bundle: {error}") from error
    if not last[SIGNATURE]:
        raise BadBundle("the received data is cut short: its end is missing")
    try:
        expected = msgspec.json.decode(last[DIGESTS], type=Manifest).files
    except msgspec.DecodeError as error:
        raise BadBundle(f"its digests cannot be read: {error}") from error
    if expected != writing.found:
        wrong = sorted(
            name
            for name in expected.keys() | writing.found.keys()
            if expected.get(name) != writing.found.get(name)
        )
        raise BadBundle(f"{len(wrong)} of its files differ from the files that were sent, first {wrong[0]}")
    writing.sync()
    return Received(last[DIGESTS], last[SIGNATURE], writing.size_bytes)


class _Writing:
    def __init__(self, into: Path, owner: tuple[int, int] | None, limit_bytes: int) -> None:
        self.found: Digests = {}
        self.size_bytes = 0
        self._into, self._owner, self._limit = into, owner, limit_bytes

    def take(self, packed: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = member.name.removeprefix(FILES)
        parts = name.split("/")
        if (
            not member.name.startswith(FILES)
            or not all(parts)
            or {".", ".."} & set(parts)
            or len(name) > MAX_PATH_CHARS
        ):
            raise BadBundle(f"{member.name[:MAX_PATH_CHARS]} leads out of its folder")
        self.size_bytes += max(0, member.size)
        if self.size_bytes > self._limit:
            raise BadBundle(f"it has more than the {self._limit >> 20} MiB that this node takes")
        if len(self.found) >= MAX_FILES:
            raise BadBundle(f"it has more than {MAX_FILES} files")
        folder = self._folder(parts[:-1])
        try:
            if member.isdir():
                os.mkdir(parts[-1], 0o700, dir_fd=folder)
                os.chmod(parts[-1], 0o700 | member.mode & 0o755, dir_fd=folder)
                self.found[name] = []
            elif member.issym():
                os.symlink(member.linkname, parts[-1], dir_fd=folder)
                self.found[name] = [member.linkname]
            elif member.isreg() and not member.issparse():
                self.found[name] = self._file(_content(packed, member), parts[-1], folder, member)
            else:
                raise BadBundle(f"{name} is neither a file nor a folder nor a link")
            if self._owner is not None:
                os.chown(parts[-1], *self._owner, dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)

    def _folder(self, parts: list[str]) -> int:
        """Opened without following a link, so that no link of the bundle is followed."""
        at = os.open(self._into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for part in parts:
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            except OSError as error:
                raise BadBundle(f"{'/'.join(parts)} is not a folder of it") from error
            finally:
                os.close(at)
            at = inner
        return at

    @staticmethod
    def _file(content: Source, name: str, folder: int, member: tarfile.TarInfo) -> list[str | int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        digest = hashlib.sha256()
        with open(os.open(name, flags, 0o600 | member.mode & 0o755, dir_fd=folder), "wb") as file:
            while chunk := content.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        return [size, digest.hexdigest()]

    def sync(self) -> None:
        """Syncs the folders, after their content."""
        for _, _, _, at in os.fwalk(self._into, topdown=False, follow_symlinks=False):
            os.fsync(at)


def _content(packed: tarfile.TarFile, member: tarfile.TarInfo) -> Source:
    found: Any = packed.extractfile(member)
    if found is None:
        raise BadBundle(f"{member.name} is no file")
    return found  # type: ignore[no-any-return]


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _raise(error: OSError) -> None:
    raise error
