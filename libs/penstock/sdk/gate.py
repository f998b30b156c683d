"""Gate before a script's first use of its GPUs: a file lock that is free once the job holds them alone.

Penstock may start a job with `prelaunch: true` while another one still holds its GPUs: it loads, unpacks and
connects meanwhile. `phase("train")` waits here. The lock (`flock`) is held by the task's supervisor until the
node has proof that the jobs before it have ended: no process polls, and later calls find it free. Source of
the overlap: Liquid §6.1.
"""

import fcntl
import os

from penstock.sdk.checkpoint import SAVER
from penstock.sdk.reporter.lines import write_line

GATE = "PENSTOCK_GATE"
"""Variable: the file to lock. Unset: the GPUs are the script's own from the beginning."""


def pass_gate() -> None:
    """Returns when this job holds its GPUs alone. Each process of the script may call it, any number of
    times.

    Raises OSError if the file does not exist, since it is not known then which job holds the GPUs, and
    SystemExit if the job is stopped meanwhile.
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
