"""Gate before a script's first use of its GPUs: a lock that is free once these are its own.

Penstock may start a job with `prelaunch: true` while another one still holds its GPUs: it loads, unpacks and connects meanwhile. `phase("train")`
waits here. The lock is a file's (`flock`), held by the task's supervisor until the node has proof that those before it have ended: nobody polls, and
it is free for whoever asks later. Source of the overlap: Liquid §6.1.
"""

import fcntl
import os

from penstock.sdk.checkpoint import SAVER
from penstock.sdk.lines import write_line

GATE = "PENSTOCK_GATE"
"""Variable: the file to lock. Unset: the GPUs are the script's own from the beginning."""


def pass_gate() -> None:
    """Returns when the GPUs are this job's own. Each process of the script may call it, and as often as it likes.

    Raises OSError where the file is not there, since it is not known then whose they are, and SystemExit where the job is stopped meanwhile.
    """
    path = os.environ.get(GATE)
    if not path:
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    write_line("ready")
    try:
        with SAVER.nothing_to_save():
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
