"""The own folder of the running task, in which no other task can work."""

import os
from pathlib import Path

from penstock.sdk.reporter.lines import FIFO


def is_a_tasks_own(folder: str) -> bool:
    """Whether this program runs in a task, and the folder is in that task's own: its job has no `workdir`, or
    was sent with its code. A job that the program submits cannot have it as its `workdir`."""
    fifo = os.environ.get(FIFO)
    return fifo is not None and Path(folder).is_relative_to(os.path.dirname(fifo))
