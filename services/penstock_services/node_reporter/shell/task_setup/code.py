"""Unpacking of a job's code archive by the task's leader, as the task's user, into the task's own folder.

Standard library only. The reporter has fetched and verified the archive (`code_cache`); it is verified again
here, since it lies where other tasks of the same user may write on a machine without hidden folders.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tarfile
import time
import zlib

MAX_FILES = 10_000
MAX_BYTES = 256 << 20
# modification time of unpacked files: the same at each start; zip files have none before 1980
UNPACKED_S = 1_000_000_000
TICK_S = 0.02  # at most two of the kernel's: the resolution of file times


def unpack(archive: str, digest: str, into: str) -> int:
    """Refuses absolute paths, paths that lead out of the folder, also through links, devices, and more than
    the bounds.

    Returns the time after unpacking, ns by the clock of the folder's file system: files changed or copied
    later have a later `st_ctime_ns`. Raises `OSError`: EBADMSG for a wrong or invalid archive, EFBIG for too
    much, EPERM for a path that would lead out.
    """
    with open(archive, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise OSError(errno.EBADMSG, "the archive is another one")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r|gz") as packed:
                _extract(packed, into)
        except MemoryError as error:
            raise OSError(errno.ENOMEM, "no memory left") from error
        except (
            tarfile.TarError,
            zlib.error,
            EOFError,
            ValueError,
            LookupError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise OSError(errno.EBADMSG, str(error)) from error
    os.utime(into)
    unpacked_ns = os.stat(into).st_ctime_ns
    time.sleep(TICK_S)
    return unpacked_ns


def _extract(packed: tarfile.TarFile, into: str) -> None:
    """Member by member: Python before 3.11.4 has no extraction filters, and the archives have three kinds of
    members only."""
    size, root = 0, os.path.realpath(into)
    for count, member in enumerate(packed):
        if member.size < 0 or member.issparse() or not (member.isreg() or member.isdir() or member.issym()):
            raise OSError(errno.EPERM, f"{member.name} is neither a file nor a folder nor a link")
        size += member.size
        if count >= MAX_FILES or size > MAX_BYTES:
            raise OSError(errno.EFBIG, "more files or bytes than are allowed")
        if ".." in member.name.split("/"):  # after a link it leads elsewhere than its text
            raise OSError(errno.EPERM, f"{member.name} leads out of the task's folder")
        path = _inside(root, root, member.name)
        os.makedirs(path if member.isdir() else os.path.dirname(path), exist_ok=True)
        if member.issym():
            _inside(root, os.path.dirname(path), member.linkname)
            os.symlink(member.linkname, path)
        elif member.isreg():
            _write(packed, member, path)
        if not member.isdir():
            os.utime(path, (UNPACKED_S, UNPACKED_S), follow_symlinks=False)


def _inside(root: str, folder: str, name: str) -> str:
    """The path of the name from the folder, with existing links followed. Raises `OSError` where that is
    outside of the root."""
    path = os.path.join(folder, name)
    found = os.path.realpath(path)
    if os.path.isabs(name) or os.path.commonpath((root, found)) != root:
        raise OSError(errno.EPERM, f"{name} leads out of the task's folder")
    return os.path.normpath(path)


def _write(packed: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """A new file, with the rights of its owner alone: no set-user-id, not writable for others."""
    rights = 0o755 if member.mode & 0o100 else 0o644
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, rights & (member.mode | 0o600)
    )
    content = packed.extractfile(member)
    assert content is not None, "members that are no files are sorted out before"
    with os.fdopen(descriptor, "wb") as file, content:
        shutil.copyfileobj(content, file)


def remove_unchanged(folder: str, unpacked_ns: int | None) -> None:
    """After the end of all of its processes: removes unpacked files that are unchanged, and Python's caches
    of them; files written by the task stay.

    A copy has its original's modification time, but was made later. None: the program never began, so all
    files are removed.
    """
    for path, folders, files, at in os.fwalk(folder, topdown=False, follow_symlinks=False):
        for name in [*files, *folders]:
            with contextlib.suppress(OSError):  # a folder, or removed already
                found = os.stat(name, dir_fd=at, follow_symlinks=False)
                if unpacked_ns is None or _is_cache(path, name) or _is_unchanged(found, unpacked_ns):
                    os.unlink(name, dir_fd=at)
        for name in folders:
            with contextlib.suppress(OSError):  # not empty, or a link
                os.rmdir(name, dir_fd=at)


def _is_unchanged(found: os.stat_result, unpacked_ns: int) -> bool:
    return found.st_mtime == UNPACKED_S and found.st_ctime_ns <= unpacked_ns


def _is_cache(folder: str, name: str) -> bool:
    return name.endswith(".pyc") and os.path.basename(folder) == "__pycache__"
