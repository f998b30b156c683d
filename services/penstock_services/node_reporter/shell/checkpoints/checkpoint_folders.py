"""Checkpoint folders, one per job: created when its tasks start, with the choice of the newest checkpoint.

Every call may block, since the folder may be on a network file system: it runs in a thread.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from penstock.model.decisions.orders import StartTask
from penstock.runtime.files.task_logs import file_name
from penstock.sdk.checkpoint import FOLDER, RESUME
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.isolation.users import TaskUser
from penstock_services.node_reporter.shell.ports import Key, NotStartable

DEFAULT = "checkpoints"  # in the state folder, and where a task finds its own
COMPLETE = re.compile(r"attempt-(\d{1,9})-iteration-(\d{1,16})")


class CheckpointFolders:
    """Of one node. `user`: of its tasks; None: the reporter's own."""

    def __init__(self, options: Options, user: TaskUser | None) -> None:
        self.root = options.checkpoint_dir or options.state_dir / DEFAULT
        self.owner = None if user is None else (user.uid, user.gid)
        self._own = options.checkpoint_dir is None
        self._coming = f".fetched-{sha256(options.node_id.encode()).hexdigest()[:16]}-"
        self._newest: dict[Key, str] = {}
        self._hidden = False

    def make(self) -> None:
        """Creates the folder of all jobs, unless an operator has named it, and removes partial fetches of a
        killed reporter. Raises `OSError`."""
        if self._own:
            self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
        for entry in self.root.glob(f"{self._coming}*"):
            shutil.rmtree(entry, ignore_errors=True)

    def hidden(self, folders: Iterable[Path]) -> str:
        """The folder of all jobs, if it lies in a hidden one: then each task sees its own job's below its own
        folder. Else ""."""
        self._hidden = any(self.root.resolve().is_relative_to(folder) for folder in folders)
        return str(self.root) if self._hidden else ""

    def of(self, job_id: str) -> Path:
        return self.root / file_name(job_id)

    def newest(self, job_id: str, below: int, known: str) -> Path | None:
        """The job's newest complete checkpoint here, of the attempts before `below`;
        as `newest`. Raises `OSError`."""
        folder = self.of(job_id)
        try:
            found = [name for name in _complete(folder) if age(name) < (below,)]
        except FileNotFoundError:
            return None
        return folder / newest(found, known) if found else None

    def prepare(self, order: StartTask) -> None:
        """Creates the job's folder and selects the checkpoint to resume at. Raises `NotStartable`."""
        folder = self.of(order.job_id)
        try:
            self._make(folder)
            found = _complete(folder)
        except OSError as error:
            raise NotStartable(
                f"its checkpoints cannot lie in {folder}: {error.strerror}; mount or repair the folder of "
                "--checkpoint-dir"
            ) from error
        alone = all(peer.node_id == order.node_id for peer in order.peers)
        if order.checkpoint and not found and not alone:
            raise NotStartable(
                f"the checkpoint {order.checkpoint} is not in {folder}, and its gang goes on there; mount on "
                "all nodes what --checkpoint-shared names"
            )
        if found and (order.checkpoint or alone):
            self._newest[order.task_id, order.token] = newest(found, order.checkpoint or "")

    def _make(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.owner is not None:
            os.chown(folder, *self.owner, follow_symlinks=False)

    @contextmanager
    def receiving(self) -> Iterator[Path]:
        """An empty folder beside those of jobs, for an incoming checkpoint;
        removed at the end unless it was adopted."""
        folder = self.root / f"{self._coming}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def adopt(self, folder: Path, job_id: str, name: str) -> Path:
        """The checkpoint is completely on the disk: from now on it belongs to the job. Raises `OSError`."""
        self._make(self.of(job_id))
        if self.owner is not None:
            os.chown(folder, *self.owner)
        found = self.of(job_id) / name
        folder.rename(found)
        descriptor = os.open(found.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return found

    def free_bytes(self) -> int:
        """Raises `OSError`."""
        return shutil.disk_usage(self.root).free

    def discard(self, job_id: str) -> None:
        """The job has succeeded. A folder that an operator named is left alone."""
        if self._own:
            shutil.rmtree(self.of(job_id), ignore_errors=True)

    def bound(self, order: StartTask) -> str | None:
        """The name of the job's folder, where it is to be mounted into the task's."""
        return file_name(order.job_id) if self._hidden and order.checkpoint is not None else None

    def environment(self, order: StartTask, own: Path) -> dict[str, str]:
        """Variables of a task that was prepared; `own` is its folder. Empty where it saves nothing."""
        if order.checkpoint is None:
            return {}
        shown = own / DEFAULT if self._hidden else self.of(order.job_id)
        newest = self._newest.pop((order.task_id, order.token), None)
        return {FOLDER: str(shown)} | ({} if newest is None else {RESUME: f"{shown}/{newest}"})


def _complete(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if COMPLETE.fullmatch(name)]


def newest(names: Sequence[str], known: str) -> str:
    """Of complete checkpoints, at least one, in one folder: the `known` one of the ledger, or one that has
    all of its work; where neither is here the SDK has removed it in favour of a newer one."""
    return max([name for name in names if covers(name, known)] or names, key=age)


def covers(name: str, known: str) -> bool:
    """Whether a complete checkpoint has all the work of another one. A later attempt alone does not suffice:
    it may have begun before the other one was known, at an older one."""
    return all(mine >= other for mine, other in zip(age(name), age(known), strict=False))


def age(name: str) -> tuple[int, ...]:
    """Sort key: later attempts, then later iterations, are newer; empty for another name. The ledger may not
    know the newest: its report is lost where reporter and task are killed together."""
    match = COMPLETE.fullmatch(name)
    return () if match is None else tuple(map(int, match.groups()))
