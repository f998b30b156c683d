"""User of the tasks: the reporter's own user, or the one named by `--task-user`."""

import os
import pwd
import stat
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigurationError


class TaskUser(NamedTuple):
    """A user of this machine, with the attributes of a login."""

    uid: int
    gid: int
    groups: list[int]
    name: str
    home: str
    shell: str

    def environment(self) -> dict[str, str]:
        return {"USER": self.name, "LOGNAME": self.name, "HOME": self.home, "SHELL": self.shell}


def find_task_user(name: str | None, *, allow_root: bool) -> TaskUser | None:
    """None: the reporter's own. Raises `ConfigurationError` when tasks would be root without permission, or
    cannot be that user."""
    own = os.geteuid()
    found = None if name is None else _user(name)
    uid = own if found is None else found.uid
    if uid == 0 and not allow_root:
        raise ConfigurationError(
            "--task-user: jobs would run as root, since this node-reporter does; give --task-user NAME, or "
            "--allow-root on a machine where every job may do what root can"
        )
    if uid == own:
        return None
    if own != 0:
        raise ConfigurationError(
            f"--task-user {name}: only root can run jobs as another user; start this as root or as {name}"
        )
    return found


def own_name() -> str:
    """Name of the reporter's user; its number where it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def check_reach(user: TaskUser, folder: Path) -> None:
    """Raises `ConfigurationError` when this user cannot reach a folder; only its parents are checked."""
    for parent in folder.resolve().parents:
        try:
            found = parent.stat()
        except FileNotFoundError:
            continue
        mine, group = found.st_uid == user.uid, found.st_gid in (user.gid, *user.groups)
        needed = stat.S_IXUSR if mine else stat.S_IXGRP if group else stat.S_IXOTH
        if not found.st_mode & needed:
            raise ConfigurationError(
                f"--state-dir: {user.name} cannot enter {parent}, so its tasks would have no working folder; "
                "give a folder such as /var/lib/penstock"
            )


def _user(name: str) -> TaskUser:
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        raise ConfigurationError(
            f"--task-user {name}: there is no such user on this machine; create it"
        ) from None
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return TaskUser(entry.pw_uid, entry.pw_gid, groups, entry.pw_name, entry.pw_dir, entry.pw_shell)
