"""Folders of groups: one per set of GPUs that whole tasks hold on this node, in which the members lock files
to take turns.

Members of a group hold the same GPUs, so a folder named after these needs no message: a task that has its
GPUs alone already has the folder in which later members join it. A file with a hard link in the folder of
each task counts the members. It outlives the reporter, and the folder is removed with the last link but its
own.
"""

import os
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from penstock.model.decisions.orders import StartTask
from penstock.model.nouns.types import WHOLE_GPU
from penstock_services.node_reporter.shell.isolation.users import TaskUser

GROUP = "PENSTOCK_GROUP"
"""The variable with the folder."""
SHOWN = "group"  # in the task's own folder, where the real one is hidden
MEMBERS = ".members"
LINK = "member-of-"


def group_key(order: StartTask) -> str | None:
    """Key of the GPUs that the job holds on this node; None for a task without GPUs, or with a part of one:
    it is never in a group."""
    uuids = order.job_gpu_uuids or order.gpu_uuids
    if not order.gpu_uuids or order.place.gpu_share_milli != WHOLE_GPU:
        return None
    return sha256(",".join(sorted(uuids)).encode()).hexdigest()[:16]


class GroupFolders:
    """In `root`, of one node. `user`: of its tasks; None: the reporter's own. Not for concurrent use."""

    def __init__(self, root: Path, user: TaskUser | None) -> None:
        self.root = root
        self._user = user
        self._hidden = False

    def prepare(self, *, hidden: bool) -> str:
        """Removes folders without members; `hidden`: the folder appears empty to tasks, and each sees its own
        group's folder in its own. Returns the folder of all groups if it is hidden, else "". Raises
        `OSError`."""
        self._hidden = hidden
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._user is not None:
            self.root.chmod(0o711)  # tasks must be able to pass through
        for members in self.root.glob(f"*{MEMBERS}"):
            self._drop(members)
        return str(self.root) if hidden else ""

    def join(self, order: StartTask, own: Path) -> str | None:
        """Makes the task a member; `own` is its folder. Returns the name of its group's folder. Idempotent.
        Raises `OSError`."""
        key = group_key(order)
        if key is None:
            return None
        members, folder = self.root / f"{key}{MEMBERS}", self.root / key
        members.touch(mode=0o600)
        with suppress(FileExistsError):
            (own / f"{LINK}{key}").hardlink_to(members)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if self._user is not None:
                os.chown(folder, self._user.uid, self._user.gid, follow_symlinks=False)
        return key

    def environment(self, key: str | None, own: Path) -> dict[str, str]:
        """The variable of a member with this folder of its own."""
        return {} if key is None else {GROUP: str(own / SHOWN if self._hidden else self.root / key)}

    def bound(self, key: str | None) -> str | None:
        """The name of the folder that is to be mounted into the task's own."""
        return key if self._hidden else None

    def leave(self, own: Path) -> None:
        """The task is proven to have ended. With the last member the folder is removed."""
        with suppress(OSError):
            for link in own.glob(f"{LINK}*"):
                link.unlink()
                self._drop(self.root / f"{link.name.removeprefix(LINK)}{MEMBERS}")

    def _drop(self, members: Path) -> None:
        if members.stat().st_nlink == 1:
            shutil.rmtree(members.with_suffix(""), ignore_errors=True)
            members.unlink()
