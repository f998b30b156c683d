"""Code that a job was sent with: unpacked by the task's leader, as the task's user, into the task's own folder.

Standard library only. The archive was fetched and compared by the reporter (`code_cache`); it is compared again here, since it
lies where other tasks of the same user may write on a machine that hides nothing.
"""

import contextlib
import errno
import hashlib
import os
import tarfile
import zlib

MAX_FILES = 10_000
MAX_BYTES = 256 << 20
UNPACKED_S = 0  # the time of change of what was unpacked: whatever the task changes has another


def unpack(archive: str, digest: str, into: str) -> None:
    """No path that is absolute or leads out of the folder, also over links, no device, no more than the bounds.

    Raises `OSError`: EBADMSG for another archive or what is none, EFBIG for too much, EPERM for what would lead out.
    """
    with open(archive, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise OSError(errno.EBADMSG, "the archive is another one")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r|gz") as packed:
                _extract(packed, into)
        except tarfile.FilterError as error:
            raise OSError(errno.EPERM, str(error)) from error
        except MemoryError as error:
            raise OSError(errno.ENOMEM, "no memory left") from error
        except (tarfile.TarError, zlib.error, EOFError, ValueError, LookupError) as error:
            raise OSError(errno.EBADMSG, str(error)) from error


def _extract(packed: tarfile.TarFile, into: str) -> None:
    size = 0
    for count, member in enumerate(packed):
        size += member.size
        if count >= MAX_FILES or size > MAX_BYTES:
            raise OSError(errno.EFBIG, "more files or bytes than are allowed")
        if member.name.startswith("/") or not (member.isreg() or member.isdir() or member.issym()):
            raise OSError(
                errno.EPERM, f"{member.name} is neither a file nor a folder nor a link of its own folder"
            )
        member.mtime = UNPACKED_S
        packed.extract(member, into, filter="data")
        if member.issym():
            os.utime(f"{into}/{member.name}", (UNPACKED_S, UNPACKED_S), follow_symlinks=False)


def remove_unchanged(folder: str) -> None:
    """After the end of all of its processes: what was unpacked and is as it was, and Python's caches; what the task wrote stays."""
    for _, folders, files, at in os.fwalk(folder, topdown=False, follow_symlinks=False):
        for name in [*files, *folders]:
            with contextlib.suppress(OSError):  # a folder, or gone
                found = os.stat(name, dir_fd=at, follow_symlinks=False)
                if name.endswith(".pyc") or found.st_mtime == UNPACKED_S:
                    os.unlink(name, dir_fd=at)
        for name in folders:
            with contextlib.suppress(OSError):  # not empty, or a link
                os.rmdir(name, dir_fd=at)
