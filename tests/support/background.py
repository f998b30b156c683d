"""Work that only computes, in virtual time: it comes after everything that waits for a clock."""

import contextlib
import os
from pathlib import Path


def give_way() -> None:
    """This process runs when no other one wants its core.

    In a session of its own, since Linux shares busy cores among sessions first (autogroup), and only then by
    niceness.
    """
    os.nice(19)
    with contextlib.suppress(OSError):  # it leads a group already, or the kernel has no such sharing
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")
