"""Outcome of a task's end, derived from its exit record."""

import asyncio
import errno
import logging
import os
import signal

import msgspec

from penstock.model.decisions.orders import StartTask
from penstock.model.nouns.types import Usage
from penstock.sdk.job_file.command_words import BUILTINS, SHELL_FORM
from penstock_services.node_reporter.core.inputs import Exhausted, Outcome
from penstock_services.node_reporter.shell.ports import Exit, Failure, Host, Immortal, Key

logger = logging.getLogger(__name__)

KIB_PER_MIB = 1_024
KERNEL = "the kernel killed a process of it"
TOO_MANY = (
    "it reached its node's limit of processes and threads (pids.max); start fewer loaders or threads, such "
    "as with OMP_NUM_THREADS"
)
LAPSED = "its lease ended: the node did not reach the log, or its reporter did not run"
CODE = {
    errno.EBADMSG: "the archive is damaged, or none; submit the job again with its folder",
    errno.EFBIG: "it unpacks to more than is allowed; leave files out by .penstockignore",
    errno.EPERM: "a path or link leads out of the folder; pack the folder with `penstock submit --sync`",
}
NO_PYTHON = (
    "this node has none on its PATH; write python3, or name where it comes from: --venv DIR, --conda NAME "
    "or --container IMAGE (`environment` in a job file)"
)
NO_FOLDER = (
    "make it on every node, or send a folder of this machine with the job: --sync DIR (`sync` in a job file)"
)
SHELL_WORDS = BUILTINS | {"module"}  # a function of the shell where nodes have environment modules
SWEEP_PAUSE_S = 5.0  # between attempts to end processes that SIGKILL did not end
NEAR_CAP = 0.95  # a task killed with at least this share of its memory cap in use counts as out of memory


def outcome_of(
    found: Exit | None,
    order: StartTask | None,
    reported: tuple[str, str] = ("", ""),
    over: str = "",
    limit_mib: int = 0,
) -> Outcome | None:
    """None: there is no exit record, so the outcome is not known (the shim was killed). `reported`: the
    memory that the program itself reported as exhausted; `over`: the evidence for which its node killed it,
    that it held more of a shared GPU than it was promised; `limit_mib`: its limit of GPU memory by the node's
    watch, 0: that of its order."""
    if found is None:
        return None
    usage = Usage(cpu_ms=found.cpu_ms, host_memory_mib=found.max_rss_kib // KIB_PER_MIB)
    cap_mib = order.place.cap_mib if order is not None else 0
    at_cap = cap_mib > 0 and found.max_rss_kib >= NEAR_CAP * cap_mib * KIB_PER_MIB
    killed = found.oom and found.exit_code != 0
    exhausted, evidence = _reported(found, order, reported)
    if killed:
        exhausted, evidence = "host_memory", KERNEL
    elif over and found.signal == signal.SIGKILL:
        exhausted, evidence = "gpu_memory", over
    return Outcome(
        exited_ms=found.exited_ms,
        started_ms=found.started_ms,
        exit_code=found.exit_code,
        signal=None if found.failure else found.signal,
        failure=_why(found.failure, order) if found.failure else "",
        lost=LAPSED if found.lapsed else "",
        out_of_memory=killed or (found.signal == signal.SIGKILL and at_cap),
        exhausted=exhausted,
        evidence=evidence or (TOO_MANY if found.pids and found.exit_code != 0 else ""),
        gpu_memory_limit_mib=_gpu_limit_mib(order, limit_mib) if exhausted == "gpu_memory" else 0,
        usage=usage,
        left=found.left,
    )


def _gpu_limit_mib(order: StartTask | None, limit_mib: int) -> int:
    """A limit that its frameworks have had since its start holds after its companions' ends, too."""
    return limit_mib or (0 if order is None else order.gpu_memory_limit_mib)


def _reported(found: Exit, order: StartTask | None, reported: tuple[str, str]) -> tuple[Exhausted, str]:
    """(memory, evidence) by the program's own report, else by its last lines, if it failed; a GPU's memory
    only if it had a GPU."""
    if found.exit_code == 0 or found.failure:
        return "", ""
    memory, name = reported if reported[0] else found.exhausted
    evidence = f"the program reported {name}" if reported[0] else f"{name} in its last lines"
    has_gpu = order is None or bool(order.place.gpus)
    if memory == "host_memory":
        return "host_memory", evidence
    if memory == "gpu_memory" and has_gpu:
        return "gpu_memory", evidence
    return "", ""


def merged(kernel: Usage, sampled: Usage) -> Usage:
    """The kernel's figures with the sampler's; of host memory the larger (peak of one process, or all
    together)."""
    memory = [mib for mib in (kernel.host_memory_mib, sampled.host_memory_mib) if mib is not None]
    fields = {"cpu_ms": kernel.cpu_ms, "host_memory_mib": max(memory, default=None)}
    return msgspec.structs.replace(sampled, **fields)


async def end_remaining(host: Host, key: Key) -> int:
    """Ends the processes of a task whose shim was killed, however long that takes; returns their number."""
    while True:
        try:
            return await asyncio.to_thread(host.end_task, key)
        except Immortal as error:
            logger.error("task %s: %s; its GPUs stay taken", key[0], error)
            await asyncio.sleep(SWEEP_PAUSE_S)


def lost_outcome(ended: int, now_ms: int) -> Outcome:
    """Its exit code could not be read; its remaining processes were killed."""
    detail = f"its guardian was killed, so the exit code is unknown; {ended} processes were ended"
    return Outcome(now_ms, signal=signal.SIGKILL, lost=detail)


def _why(failure: Failure, order: StartTask | None) -> str:
    """The failed step, the system's message, and the remedy."""
    program = order.command[0] if order is not None else "the program"
    if failure.stage == "environment" and order is not None:
        return _no_environment(order, failure.errno)
    if failure.stage == "code":
        return f"cannot unpack its code: {CODE.get(failure.errno) or os.strerror(failure.errno)}"
    if (failure.stage, failure.errno) == ("workdir", errno.ENOENT):
        return f"{_no_workdir(order)}: {os.strerror(failure.errno)}; {NO_FOLDER}"
    if (failure.stage, failure.errno, program) == ("exec", errno.ENOENT, "python"):
        return f"cannot execute 'python': {NO_PYTHON}"
    if failure.stage == "exec" and (remedy := _program_remedy(program, failure.cause)):
        return f"cannot execute {program!r}: {remedy}"
    what = {
        "exec": f"cannot execute {program!r}",
        "workdir": _no_workdir(order),
        "user": "cannot become --task-user",
        "affinity": "cannot pin it to its cores",
        "terminal": "there is no terminal for it",
        "confinement": "cannot give it namespaces and mounts of its own",
        "cgroup": "cannot put it into its memory cgroup",
    }.get(failure.stage, "cannot prepare it")
    remedy = {
        errno.ENOENT: "check the spelling, give an absolute path, or install it on every node",
        errno.EACCES: "make it executable and readable for the user that jobs run as (--task-user)",
        errno.ENOEXEC: "it is not a program for this machine; a script needs a first line such as "
        "#!/usr/bin/env python3",
        errno.ENOTDIR: "a part of the path is a file; correct the path",
        errno.E2BIG: "arguments and environment are too long; put them into a file",
        errno.ENOSPC: "raise user.max_pid_namespaces (user.max_user_namespaces, user.max_mnt_namespaces) on "
        "the node",
        errno.ENOMEM: "the memory cap is too small to start it; ask for more host memory",
    }.get(failure.errno, "see the message and the node's log")
    return f"{what}: {os.strerror(failure.errno)}; {remedy}"


def _program_remedy(program: str, cause: str) -> str:
    """What is wrong with the program, by its file or its name; empty: not known."""
    interpreter = "python3" if program.endswith(".py") else "bash"
    found = {
        "crlf": "its first line ends with CRLF, as files from Windows do; convert it: sed -i 's/\\r$//' "
        f"{program}",
        "interpreter": "its first line (#!) names a program that is not on this node; correct it, or install "
        "that program",
        "first_line": "it is a text without a first line such as #!/bin/bash; add one, or run "
        f"`{interpreter} {program}`",
        "mode": f"it is not executable; run `{interpreter} {program}`, or chmod +x {program}",
        "folder": f"it is in the working folder, not on PATH; run `{interpreter} {program}`, or ./{program}",
    }
    if cause:
        return found.get(cause, "")
    if program in SHELL_WORDS:
        return f"{program} is a word of the shell, not a program; run {SHELL_FORM}"
    if " " in program.strip():
        return f"it is one word with blanks; give each word by itself, or run {SHELL_FORM}"
    return ""


def _no_workdir(order: StartTask | None) -> str:
    return f"cannot enter workdir {(order.workdir if order is not None else None) or 'of the task'!r}"


def _no_environment(order: StartTask, number: int) -> str:
    """The environment that is not available here, and the remedy."""
    asked = order.environment
    venv, conda = (asked.venv, asked.conda) if asked is not None else (None, None)
    if venv is not None:
        what = f"no virtual environment in {venv!r}: its bin/python: {os.strerror(number)}"
        return (
            f"{what}; make it on every node in this place (python3 -m venv {venv}), or name one that is "
            "there with --venv"
        )
    what = f"no conda environment {conda!r}: {os.strerror(number)}"
    return (
        f"{what}; make it on every node, name its prefix, or list its folder in the node-reporter's "
        "CONDA_ENVS_PATH"
    )
