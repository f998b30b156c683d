"""Folders and memory caps of tasks."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError
from penstock.model.types import TaskPlacement
from penstock.runtime.task_logs import file_name
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.journal import JournalFailed

PHASES = "phases"
BYTES_PER_MIB = 1 << 20
DATA_SLACK_MIB = 1_024
"""RLIMIT_DATA counts memory that is reserved but never touched (thread stacks of 8 MiB, BLAS buffers of 32 MiB
per thread), a memory cap means what is used; so much more is therefore allowed."""


def make_folder(path: Path) -> Path:
    """A folder only we can look into. Raises `JournalFailed`: a state folder that cannot be written is no base to act on."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise JournalFailed(f"the state folder cannot be written: {error}") from error
    return path


def make_task_folder(path: Path) -> Path:
    """A task's folder with its FIFO for phases; as `make_folder`."""
    make_folder(path)
    try:
        with suppress(FileExistsError):
            os.mkfifo(path / PHASES, 0o600)
    except OSError as error:
        raise JournalFailed(f"the state folder cannot be written: {error}") from error
    return path


def remove_folder(path: Path) -> None:
    """Forgets a task's folder, except what the task itself wrote into its working folder."""
    work = path / "work"
    with suppress(OSError):
        work.rmdir()
    if not work.exists():
        shutil.rmtree(path, ignore_errors=True)


def memory_cap(options: Options, place: TaskPlacement) -> dict[str, Any]:
    """The request's fields `data_limit` (bytes, 0: none) and `cgroup` (a folder, or None)."""
    if place.host_memory_mib == 0:
        return {"data_limit": 0, "cgroup": None}
    if options.cgroup is None:
        return {"data_limit": (place.host_memory_mib + DATA_SLACK_MIB) * BYTES_PER_MIB, "cgroup": None}
    group = options.cgroup / f"{file_name(options.node_id)}@{file_name(place.task_id)}"
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.max").write_text(str(place.host_memory_mib * BYTES_PER_MIB))
    except OSError as error:
        raise JournalFailed(f"--cgroup: {group} cannot be set up: {error}") from error
    return {"data_limit": 0, "cgroup": str(group)}


def check_cgroup(folder: Path | None) -> None:
    """Raises `ConfigurationError` when the delegated folder cannot carry memory caps."""
    if folder is None:
        return
    try:
        enabled = (folder / "cgroup.subtree_control").read_text().split()
    except OSError as error:
        raise ConfigurationError(f"--cgroup: {folder} is no cgroup v2 folder: {error}") from error
    if "memory" not in enabled:
        raise ConfigurationError(
            f"--cgroup: {folder} does not pass on the memory controller; write +memory into cgroup.subtree_control"
        )
