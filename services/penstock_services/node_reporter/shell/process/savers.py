"""Processes that have registered with the SDK to save checkpoints: holders of locks in a file of their task.

Standard library only (see `confinement`). A lock of fcntl names its holder's pid, in the reader's own
namespace, and ends with its holder. A write lock: the process saves (rank 0, or a script without ranks); a
read lock: it trains on until that one has ended.
"""

import fcntl
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of <fcntl.h> on 64-bit Linux: type, whence, start, length, pid."""
END = (1 << 63) - 1  # of any file
MAX_LOOKS = 513  # 256 ranks of one task; a file with more locks is a task's own fault
ASKED = b"\n"
SAVERS = "savers"  # the file's name in the task's folder


class Savers(NamedTuple):
    """Pids in the caller's namespace."""

    saving: frozenset[int] = frozenset()
    following: frozenset[int] = frozenset()


def savers(path: str) -> Savers:
    """The registered processes of the task with this file; none where the file cannot be read or locked."""
    return _looked(path, _holders)


def ask(path: str) -> Savers:
    """As `savers`; where none is registered, the first one that registers later finds that a save was
    requested.

    The request is written before the look: who registers in between finds it, and is found.
    """

    def look(descriptor: int) -> Savers:
        os.pwrite(descriptor, ASKED, 0)
        found = _holders(descriptor)
        if found.saving:
            os.ftruncate(descriptor, 0)
        return found

    return _looked(path, look)


def _looked(path: str, look: Callable[[int], Savers]) -> Savers:
    """The file is the task's: it may be anything by now."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return Savers()
    try:
        return look(descriptor)
    except OSError:
        return Savers()
    finally:
        os.close(descriptor)


def _holders(descriptor: int) -> Savers:
    """The kernel names any lock within a range, not the first one:
    what is before and after it is searched, too."""
    found: dict[int, set[int]] = {fcntl.F_WRLCK: set(), fcntl.F_RDLCK: set()}
    ranges = [(0, END)]
    for _ in range(MAX_LOOKS):
        if not ranges:
            break
        start, end = ranges.pop()
        asked = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
        kind, _, begin, length, pid = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            continue
        if pid > 0:  # 0: a process outside of the caller's namespace
            found[kind].add(pid)
        after = begin + length if length else END  # 0: up to any end
        ranges += [each for each in ((start, begin), (after, end)) if each[0] < each[1]]
    return Savers(frozenset(found[fcntl.F_WRLCK]), frozenset(found[fcntl.F_RDLCK]))
