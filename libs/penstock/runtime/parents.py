"""Parent and child processes on Linux (prctl): a child that ends with its parent,
a parent that adopts orphans."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def ends_with_parent(number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child this signal when the thread that started it ends, even by
    kill -9."""
    parent = os.getpid()

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl took effect
            os._exit(1)

    return prepare


def adopt_orphans() -> None:
    """From now on orphans of this process's children become its children: a container's process 1 may not
    reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
