"""Leader of one task: the process that becomes the job's program, prepared in advance. Standard library
only (see `confinement`)."""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from penstock_services.node_reporter.shell.isolation.confinement import (
    PR_SET_PDEATHSIG,
    Confinement,
    become,
    default_signals,
    drop_privileges,
    hide,
    leave_keyring,
    prctl,
    reveal,
)
from penstock_services.node_reporter.shell.isolation.whole_files import put
from penstock_services.node_reporter.shell.task_setup.code import unpack
from penstock_services.node_reporter.shell.task_setup.programs import cause_of, enter, execute, find_program

GO = b"\n"  # ends a line from shim to leader: the request, then an empty line, the sign to execute it
OOM_FIRST = 500  # of 1,000: as if it used half of the machine's memory on top


class Pipes(NamedTuple):
    """Descriptors of the leader's ends."""

    output: int
    """Its program's standard output and error."""
    go: int
    """The request, and the sign to execute it."""
    failed: int
    """Its report up to the exec: a failure, or when its code was unpacked."""


def become_program(
    plan: Confinement,
    failure: OSError | None,
    lock_fd: int,
    pipes: Pipes,
    parent: int,
    begun: Callable[[], None],
) -> NoReturn:
    """In the child: waits for the request, prepares, executes. `parent`: the shim's pid; `begun`: closes
    what only the shim needs."""
    stage = "prepare"
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(127)
        begun()
        os.setsid()
        default_signals()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(pipes.output, 1)
        with contextlib.suppress(OSError):  # beyond the user's key quota the launcher's keyring is shared
            leave_keyring()
        tasks = None
        try:
            tasks = hide(plan)
            drop_privileges()
        except OSError as error:
            failure = failure or error
        lines = os.fdopen(pipes.go, "rb")
        message = lines.readline()
        if not message:
            os._exit(127)  # no request came
        os.close(lock_fd)
        request = json.loads(message)
        stage = "confinement"
        if failure is not None:
            raise failure
        reveal(plan, tasks, request)
        stage = "affinity"
        _limit(request)
        stage = "terminal"
        output = _own_terminal(request["terminal"]) if request["interactive"] else pipes.output
        stage = "user"
        become(plan)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # set again: a change of the user clears it
        program = find_program(request)
        if not lines.readline():
            os._exit(127)
        stage = "code"
        if request["code"] is not None:
            os.write(pipes.failed, json.dumps({"unpacked_ns": unpack(*request["code"])}).encode() + GO)
        stage = "workdir"
        os.chdir(request["cwd"])
        stage = "environment"
        env = request["env"]
        if request["programs"] is not None:
            kind, where, folders = request["programs"]
            env = enter(kind, where, env, folders)
        stage = "exec"
        os.dup2(output, 2)
        execute(program, request["argv"], env)
    except OSError as error:
        cause = cause_of(request["argv"][0], env) if stage == "exec" else ""
        report = {"stage": stage, "errno": error.errno, "cause": cause}
        os.write(pipes.failed, json.dumps(report).encode() + GO)
    finally:
        os._exit(127)


def _limit(request: Mapping[str, Any]) -> None:
    """Cores and limits, and who is ended first where the machine runs out of memory."""
    if request["cores"]:
        os.sched_setaffinity(0, request["cores"])
    if request["data_limit"]:
        resource.setrlimit(resource.RLIMIT_DATA, (request["data_limit"], request["data_limit"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request["oom_first"]:
        with contextlib.suppress(OSError):  # the cap holds without it
            put("/proc/self/oom_score_adj", str(OOM_FIRST))


def _own_terminal(path: str) -> int:
    """The terminal as this session's own, since it is the first that the session opens."""
    terminal = os.open(path, os.O_RDWR)
    os.dup2(terminal, 0)
    os.dup2(terminal, 1)
    return terminal
