"""Linux namespaces, private mounts and capabilities of tasks, as a shim and its leader set them up for
themselves before the exec.

Standard library only: it runs in the launcher's processes, which have no site-packages. A `Confinement` is
chosen once, by `probe`, with real processes; so a node reports what it enforces, and a later failure is a
task's failure to start.

The first process of a PID namespace is the task's shim: when that ends, the kernel kills all others and waits
for them before it reports the end. Inside it a process sees its own /proc, and neither the reporter's folders
nor writable kernel settings. A task that is uid 0 has the capabilities in `RETAINED_CAPABILITIES` and no
others.
"""

import ctypes
import errno
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from penstock_services.node_reporter.shell.isolation.private_mounts import hide_places

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x0002_0000, 0x1000_0000, 0x2000_0000  # <linux/sched.h>
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32  # <linux/mount.h>
MS_BIND, MS_REC, MS_SLAVE = 4_096, 16_384, 1 << 19
AT_FDCWD, AT_RECURSIVE = -100, 0x8000  # <linux/fcntl.h>
SYS_MOUNT_SETATTR = 442  # on every architecture
MOUNT_ATTR_RDONLY = 1
SYS_KEYCTL = {"x86_64": 250, "ppc64le": 271, "s390x": 280}.get(os.uname().machine, 219)  # <asm/unistd.h>
KEYCTL_JOIN_SESSION_KEYRING = 1  # <linux/keyctl.h>
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # <linux/prctl.h>
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 23, 24, 38
RETAINED_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 8, 10, 14, 18})
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, IPC_LOCK, SYS_CHROOT:
those that container runtimes leave to root, without raw network, device nodes and file capabilities; with
locked memory, for RDMA."""
MAX_CAPABILITIES = 64
READ_ONLY_PROC = ("sys", "sysrq-trigger", "irq", "bus")
"""Of /proc: kernel settings that uid 0 could write without any capability."""
HIDDEN_OPTIONS = "size=64k,nr_inodes=64,mode=755"  # of the empty folder that hides another
PROBE_TIMEOUT_S = 20.0
PROBE = "from penstock_services.node_reporter.shell.isolation.confinement import answer_probe; answer_probe()"

_libc = ctypes.CDLL(None, use_errno=True)
prctl = _libc.prctl


class Confinement(NamedTuple):
    """The confinement of each task of one node."""

    exits: Literal["pid_namespace", "cgroup", "none"] = "none"
    """The proof of a task's end: `pid_namespace`, `cgroup`, or `none`:
    the shim's own search for descendants."""
    user_namespace: bool = False
    """The namespaces belong to a user namespace, since the reporter is not root."""
    mounts: bool = False
    """/proc, the hidden folders and /sys are the task's own mounts."""
    hidden: Sequence[str] = ()
    """Folders that appear empty to a task, none inside another."""
    tasks: str = ""
    """The folder of the tasks' folders."""
    user: Sequence[Any] | None = None
    """(uid, gid, groups) of the tasks; None: as the reporter."""
    name: str = ""
    """Name of the node, in the names of its tasks' cgroups."""
    groups: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    """Cgroups in which each task gets one of its own,
    and the settings written there before any process may enter."""
    watched: str = ""
    """The root in `groups` whose groups the reporter removes, since it may have triggers there: removing them
    costs the kernel 16 ms."""
    checkpoints: str = ""
    """The folder of the jobs' folders of checkpoints, if it is in a hidden one."""
    members: str = ""
    """The folder of the groups' folders, if it is in a hidden one."""


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def _call(name: str, *arguments: Any) -> int:
    """Calls a function of the C library. Raises `OSError` where it reports an error."""
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])


def _read_only(path: str) -> None:
    """Makes a mount and all below it read-only, for this mount namespace."""
    attributes = _MountAttributes(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call(
        "syscall",
        SYS_MOUNT_SETATTR,
        AT_FDCWD,
        os.fsencode(path),
        AT_RECURSIVE,
        ctypes.byref(attributes),
        size,
    )


def enter_namespaces(plan: Confinement) -> None:
    """Continues as the first process of a PID namespace: the caller goes on in a child, the parent ends."""
    if plan.exits != "pid_namespace":
        return
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", CLONE_NEWPID | (CLONE_NEWUSER if plan.user_namespace else 0))
    if plan.user_namespace:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if os.fork():
        os._exit(0)


def join_namespaces(plan: Confinement, pid: int) -> int | None:
    """Moves the caller's next children to the namespaces of this task's process.
    Returns its mounts, for `join_mounts`."""
    used = (("user", plan.user_namespace), ("pid", plan.exits == "pid_namespace"), ("mnt", plan.mounts))
    found = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name, is_used in used if is_used}
    for name in ("user", "pid"):
        if name in found:
            _call("setns", found[name], 0)
            os.close(found[name])
    return found.get("mnt")


def join_mounts(mounts: int | None) -> None:
    if mounts is not None:
        _call("setns", mounts, CLONE_NEWNS)


class Hidden(NamedTuple):
    """Descriptors of folders that `hide` has hidden, for `reveal`."""

    tasks: int
    checkpoints: int | None
    members: int | None


def hide(plan: Confinement) -> Hidden | None:
    """Gives the calling leader mounts of its own."""
    if not plan.mounts:
        return None
    _call("unshare", CLONE_NEWNS)
    _mount("none", "/", None, MS_REC | MS_SLAVE)  # later mounts of the machine appear here, too
    tasks = os.open(plan.tasks, os.O_PATH | os.O_DIRECTORY)
    checkpoints, members = (
        os.open(path, os.O_PATH | os.O_DIRECTORY) if path else None
        for path in (plan.checkpoints, plan.members)
    )
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in READ_ONLY_PROC:
        if os.path.exists(f"/proc/{name}"):
            _mount(f"/proc/{name}", f"/proc/{name}", None, MS_BIND | MS_REC)
            _read_only(f"/proc/{name}")
    _read_only("/sys")
    for folder in plan.hidden:
        last = MS_RDONLY if folder != _hides(plan, plan.tasks) else 0  # where `reveal` creates something
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV | last, HIDDEN_OPTIONS)
    return Hidden(tasks, checkpoints, members)


def _hides(plan: Confinement, path: str) -> str | None:
    """The hidden folder in which a path lies."""
    return next((folder for folder in plan.hidden if f"{path}/".startswith(f"{folder}/")), None)


def reveal(plan: Confinement, found: Hidden | None, request: Mapping[str, Any]) -> None:
    """Mounts hidden files and folders of the task's own folder, its job's checkpoints and its group's
    folder for the task, and its private /tmp."""
    if found is None:
        return
    folder = request["folder"]
    os.makedirs(folder, exist_ok=True)
    for name in request["visible"]:
        own, shown = f"/proc/self/fd/{found.tasks}/{os.path.basename(folder)}/{name}", f"{folder}/{name}"
        if os.path.isdir(own):
            os.mkdir(shown)
        else:
            os.close(os.open(shown, os.O_CREAT | os.O_WRONLY))
        _mount(own, shown, None, MS_BIND | MS_REC)
    for place, within, shared in (
        (f"{folder}/checkpoints", found.checkpoints, request["checkpoints"]),
        (f"{folder}/group", found.members, request["group"]),
    ):
        if shared is not None:
            os.mkdir(place)
            _mount(f"/proc/self/fd/{within}/{shared}", place, None, MS_BIND | MS_REC)
    hidden = _hides(plan, folder)
    if hidden is not None:
        _mount("none", hidden, None, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    for descriptor in found:
        if descriptor is not None:
            os.close(descriptor)
    hide_places(request, _mount, MS_NOSUID | MS_NODEV, MS_BIND | MS_REC)


def become(plan: Confinement) -> None:
    """Switches the calling leader to the tasks' user."""
    if plan.user is not None:
        uid, gid, groups = plan.user
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def default_signals() -> None:
    """No signal is ignored or blocked, whatever this process's parents did (`nohup`, a shell's `&`)."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def drop_privileges() -> None:
    """Of the leader's program, at exec: root retains `RETAINED_CAPABILITIES` alone, and no program gets more
    than the task has."""
    if os.geteuid() == 0:
        for capability in range(MAX_CAPABILITIES):
            known = prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0
            if known and capability not in RETAINED_CAPABILITIES:
                _call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def leave_keyring() -> None:
    """Gives the caller an empty session keyring in place of the inherited one, whose keys a process may read
    as any user.

    Raises `OSError`, but not where the kernel has no keys or forbids them to all processes here.
    """
    try:
        _call("syscall", SYS_KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise


# ---------------------------------------------------------------------------------------------------- probe


def plans(user: Sequence[Any] | None) -> Iterator[Confinement]:
    """Plans that may work here, the best first.
    A user namespace has one user, so root's tasks there are root."""
    kinds = (True,) if os.geteuid() else (False, True) if user is None else (False,)
    for user_namespace in kinds:
        for mounts in (True, False):
            yield Confinement("pid_namespace", user_namespace, mounts, ("/sys",), "/sys", user)


def answer_probe() -> NoReturn:
    """Tries the plans in processes of its own; prints the first that works and the others' errors, as JSON.

    Its argument is the tasks' user, as in `Confinement`.
    """
    errors = []
    user = json.loads(sys.argv[1])
    for plan in plans(user):
        error = _attempt(plan)
        if not error:
            break
        errors.append(error)
    else:
        plan = Confinement(user=user)
    json.dump({"plan": plan, "errors": errors}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def _attempt(plan: Confinement) -> str:
    """Why this plan does not work; "": it does."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            enter_namespaces(plan)
            if os.fork() == 0:
                hide(plan)
                drop_privileges()
                become(plan)
                os.write(write, b"-")
                os._exit(0)
            os.wait()
        except OSError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as answers:
        answer = answers.read()
    os.wait()
    return "" if answer == "-" else answer or "no answer"
