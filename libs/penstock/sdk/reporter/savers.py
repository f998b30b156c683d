"""Registration of a process that saves checkpoints: a lock in a file of its task, by which its node finds it
behind any wrapper.

The node reads the holder's pid from the lock (fcntl), which ends with the process. A script, `tee` or
`torchrun` in front of the process does not get the request in its place.
"""

import os
from contextlib import suppress

with suppress(ImportError):  # systems on which no node runs
    import fcntl

SAVERS = "PENSTOCK_SAVERS"
"""Variable: the file with the locks."""


class Registration:
    """Of one process and those that it forks, each for itself."""

    def __init__(self) -> None:
        self._pid = 0
        self._file = -1

    def register(self, *, saves: bool) -> bool:
        """Locks one byte of the task's file, by the process's pid: for writing if it `saves`, else for
        reading. Returns whether it is registered; never fails."""
        if self._pid == os.getpid():
            return True
        path = os.environ.get(SAVERS, "")
        if not path:
            return False
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            kind = fcntl.LOCK_EX if saves else fcntl.LOCK_SH
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, os.getpid())
        except OSError:
            return False
        self._pid = os.getpid()
        return True

    def asked(self) -> bool:
        """Whether the node has requested a save that nobody took, before this process registered. The
        answer is True once."""
        try:
            if not os.pread(self._file, 1, 0):
                return False
            os.ftruncate(self._file, 0)
        except OSError:
            return False
        return True
