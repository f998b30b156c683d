"""The folder and user of a submission: defaults of a job; a running task's own folder, in which no other task
can work."""

import getpass
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.sdk.reporter.lines import FIFO


def is_a_tasks_own(folder: str) -> bool:
    """Whether this program runs in a task, and the folder is in that task's own: its job has no `workdir`, or
    was sent with its code. A job that the program submits cannot have it as its `workdir`."""
    fifo = os.environ.get(FIFO)
    return fifo is not None and Path(folder).is_relative_to(os.path.dirname(fifo))


def submitted_here(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a job file; owner and workdir default to this user and folder."""
    here = {} if "sync" in fields or is_a_tasks_own(os.getcwd()) else {"workdir": os.getcwd()}
    return {"owner": _user(), **here, **fields}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid-{os.getuid()}"
