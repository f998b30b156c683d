"""Execution of a command in a running task (`setns`): a helper process per command, in the task's namespaces
and cgroups, as its user.

Standard library only (see `confinement`). Its stdin has one line of JSON, `{shim, shim_start, pid, plan,
groups, argv, terminal, term, input}`, and stays open: when it closes, every process of the command's session
gets SIGHUP, and after HANG_UP_S SIGKILL; when the task's program ends, the command is killed. The command has
the helper's stdout and stderr, the environment, working folder, cores and limits of the task's program, and
ends with the task: it is in its PID namespace or cgroup. `terminal`: the helper's stdout is a terminal, which
becomes the command's, with `term` as its kind; `input`: the descriptor of its input, null: it has none.

Exit code: that of the command; 128 + N if signal N killed it; NOT_FOUND; NOT_ENTERED, with the reason on
stderr.
"""

import fcntl
import json
import os
import resource
import select
import signal
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from penstock_services.node_reporter.shell.isolation.confinement import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Confinement,
    become,
    default_signals,
    drop_privileges,
    join_mounts,
    join_namespaces,
    leave_keyring,
    prctl,
)
from penstock_services.node_reporter.shell.isolation.whole_files import put
from penstock_services.node_reporter.shell.process.pids import descendants, members, start_ticks

ENTER = "from penstock_services.node_reporter.shell.sessions.enter import main; main()"
NOT_ENTERED, NOT_FOUND = 126, 127  # as shells and container runtimes have them
BY_SIGNAL = 128
HANG_UP_S = 2.0  # to SIGKILL: about what a CI runner leaves after SIGTERM (GitHub's: 2.5 s)
PR_SET_DUMPABLE = 4  # <linux/prctl.h>
TASK_ID = b"PENSTOCK_TASK_ID"  # which the launcher's processes lack before their exec


class Program(NamedTuple):
    """What the command takes over from the task's program."""

    env: Mapping[bytes, bytes]
    folder: int
    cores: set[int]
    limits: Mapping[int, tuple[int, int]]


def main() -> NoReturn:
    try:
        request = json.loads(sys.stdin.buffer.readline())
        plan, pid = Confinement(*request["plan"]), request["pid"]
        leader = os.pidfd_open(pid)
        program = _program(pid, request["shim"], request["shim_start"])
        mounts = join_namespaces(plan, pid)
        if plan.exits == "none":
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        command = os.fork()
        if command == 0:
            _execute(plan, program, mounts, request)
        if request["input"] is not None:
            os.close(request["input"])
        os._exit(_until_end(leader, command))
    except ProcessLookupError:
        _fail(NOT_ENTERED, "the task cannot be entered: it has ended")
    except OSError as error:
        _fail(NOT_ENTERED, f"the task cannot be entered: {error}")


def _program(pid: int, shim: int, shim_start: int) -> Program:
    """Of the task's program, if it is still this one. Raises `OSError`."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        parent = int(file.read().rpartition(b")")[2].split()[1])
    with open(f"/proc/{pid}/environ", "rb") as file:
        env = dict(text.split(b"=", 1) for text in file.read().split(b"\0") if b"=" in text)
    if parent != shim or start_ticks(shim) != shim_start:
        raise ProcessLookupError
    if TASK_ID not in env:
        raise OSError("its program has not started yet; ask again")
    return Program(
        env,
        os.open(f"/proc/{pid}/cwd", os.O_PATH | os.O_DIRECTORY),
        os.sched_getaffinity(pid),
        {kind: resource.prlimit(pid, kind) for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CORE)},
    )


def _execute(plan: Confinement, program: Program, mounts: int | None, request: Mapping[str, Any]) -> NoReturn:
    """In the child: enters the task, drops all rights and becomes the command."""
    argv, env = request["argv"], dict(program.env)
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the task cannot read this process's memory and descriptors
        os.setsid()
        if request["terminal"]:
            fcntl.ioctl(1, termios.TIOCSCTTY, 0)
            env[b"TERM"] = request["term"].encode()
            os.dup2(1, 2)
        os.dup2(_input(request), 0)
        for group in request["groups"]:
            put(f"{group}/cgroup.procs", "0")
        join_mounts(mounts)
        os.sched_setaffinity(0, program.cores)
        with suppress(OSError):  # beyond the user's key quota the helper's keyring is shared
            leave_keyring()
        drop_privileges()
        for kind, limits in program.limits.items():
            resource.setrlimit(kind, limits)
        become(plan)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # set again: a change of the user clears it
        os.fchdir(program.folder)
        default_signals()
        try:
            os.execvpe(argv[0], argv, env)
        except (FileNotFoundError, NotADirectoryError) as error:
            _fail(NOT_FOUND, f"{argv[0]}: {error.strerror}; name a program that the task sees")
    except OSError as error:
        _fail(NOT_ENTERED, f"the command cannot be executed: {error}")
    finally:
        os._exit(NOT_ENTERED)


def _input(request: Mapping[str, Any]) -> int:
    if request["terminal"]:
        return 1
    found: int | None = request["input"]
    return os.open(os.devnull, os.O_RDONLY) if found is None else found


def _until_end(leader: int, command: int) -> int:
    """The command's exit code. The end of the task, and of the line from the reporter, end the command."""
    ended = os.pidfd_open(command)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(leader, select.POLLIN)
    poll.register(0, 0)  # for its hang-up alone
    ready = {descriptor for descriptor, _ in poll.poll()}
    if leader in ready and ended not in ready:
        with suppress(ProcessLookupError):
            os.killpg(command, signal.SIGKILL)
    elif ended not in ready:
        hang_up(command)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    while left := descendants(os.getpid()):  # where neither namespace nor cgroup ends them with the task
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return code if code >= 0 else BY_SIGNAL - code


def hang_up(session: int) -> None:
    """Ends the processes of a session, and those that they have started: by SIGHUP,
    after HANG_UP_S by SIGKILL."""
    left = _until_ended(_signalled(session, signal.SIGHUP), HANG_UP_S)
    for pidfd in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    _until_ended(left, None)
    while more := _signalled(session, signal.SIGKILL):
        _until_ended(more, None)


def _signalled(session: int, number: signal.Signals) -> list[int]:
    """Signals them; returns their pidfds. A stopped one goes on, as where a terminal hangs up."""
    found = []
    for pid in {*members(session), *descendants(session)}:
        with suppress(ProcessLookupError):
            found.append(pidfd := os.pidfd_open(pid))
            signal.pidfd_send_signal(pidfd, number)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    return found


def _until_ended(pidfds: list[int], within_s: float | None) -> list[int]:
    """Waits until they have ended; returns those that have not."""
    poll, left = select.poll(), set(pidfds)
    for pidfd in left:
        poll.register(pidfd, select.POLLIN)
    ends_s = None if within_s is None else time.monotonic() + within_s
    while left and (ends_s is None or time.monotonic() < ends_s):
        for pidfd, _ in poll.poll(None if ends_s is None else max(0.0, 1_000 * (ends_s - time.monotonic()))):
            poll.unregister(pidfd)
            os.close(pidfd)
            left.discard(pidfd)
    return list(left)


def _fail(code: int, text: str) -> NoReturn:
    print(f"penstock: {text}", file=sys.stderr, flush=True)
    os._exit(code)
