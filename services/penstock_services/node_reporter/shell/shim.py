"""Supervisor (shim) of one task, from its fork to the last of its task's processes. Standard library only (see `confinement`).

A shim takes one request, a JSON message on the SEQPACKET socket: `{folder, log, log_limit, argv, env, cwd, code, programs, cores,
data_limit, settings, oom, oom_first, ended_by, visible, saves, checkpoints, group, gate, lease, task_id, token}`; runs the program, waits for all of its processes and records how it
ended.

The folder of a task holds, each written atomically (temporary name, then rename):
`started.json {task_id, token, shim, shim_start, pid, pid_start, started_ms, exits, groups}`, written before the program runs;
`exit.json {task_id, token, exit_code, signal, cpu_ms, max_rss_kib, started_ms, exited_ms, failure, unpacked_ns, oom, exhausted, lapsed}`, written
after the *last* process of the task has been reaped; and the folders visible to the task, `visible`: `work`, and `phases`,
a FIFO made by the reporter for the program's lines.

Proof of exit: the shim is the first process of the task's PID namespace, so that nothing of the task outlives it.
Where there is no namespace it is the subreaper of everything that the program starts, in any session. Once
the leader has ended it kills the remaining processes and waits until the kernel reports no child any more: ECHILD.

The lock's descriptor is held by the reporter, by the launcher and by each shim until its `started.json` is
written. The holder of the lock can therefore rely on it: no task without a `started.json` will be started any more.

`lease` is None or the arguments of `lease_watch.LeaseWatch`: when it ends, so does the task, with or without a reporter.

Signals to a shim: SIGTERM → SIGTERM to the process group, or to the leader alone if it then saves, for which it may need the others; SIGUSR1 → SIGKILL to every process of the task;
SIGUSR2 → SIGUSR1 to the leader if it handles it (a request to save a checkpoint); SIGHUP → the gate opens.

`gate` is None or the file that the shim locks before the program runs: the program waits for the lock before it uses a GPU (`penstock.sdk.gate`).
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import time
from types import FrameType
from typing import Any, NoReturn

from penstock_services.node_reporter.shell.code import unpack
from penstock_services.node_reporter.shell.confinement import (
    Confinement,
    become,
    drop_privileges,
    hide,
    leave_keyring,
    reveal,
)
from penstock_services.node_reporter.shell.last_lines import exhausted
from penstock_services.node_reporter.shell.lease_watch import LeaseWatch, boot_s
from penstock_services.node_reporter.shell.output import Output
from penstock_services.node_reporter.shell.pids import catches, descendants, pid_of, start_ticks
from penstock_services.node_reporter.shell.programs import enter, execute, find_program
from penstock_services.node_reporter.shell.whole_files import put, write_whole

MAX_MESSAGE_BYTES = 1 << 18  # argv, environment, peers, secrets; without these the events are ≤ 64 KiB
CHUNK_BYTES = 65_536  # a pipe's capacity
FIRST_PAUSE_S = 0.1  # between attempts to record an exit on a full disk
LONGEST_PAUSE_S = 5.0
OOM_FIRST = 500  # of 1,000: as if it used half of the machine's memory on top
REAP_PAUSE_MS = 5  # between kills while the last processes die
GO = b"\n"  # ends a line from shim to leader: the request, then an empty line, the sign to execute it
NEXT_SHIM_MS = 50  # after that the next shim is prepared during a start; most starts take less
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
RESET_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ,
)  # fmt: skip
"""Signals changed by Python, the launcher or the shim; the program shall have the defaults."""

prctl = ctypes.CDLL(None, use_errno=True).prctl


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Shim:
    """One task's supervisor; runs in a process of its own from fork to exit."""

    def __init__(
        self, control: socket.socket, lock_fd: int, taken_fd: int, plan: Confinement, failure: OSError | None
    ) -> None:
        """`failure`: why the confinement is not available; the task will not start."""
        self._plan = plan
        self._failure = failure
        self._alone = failure is None and plan.exits == "pid_namespace"
        """This process sees no others than the task's own."""
        self._control = control
        self._lock_fd = lock_fd
        self._taken_fd: int | None = taken_fd
        self._request: dict[str, Any] = {}
        self._folder = ""
        self._leader = 0
        self._reaped: tuple[int, Any] | None = None
        self._started_ms, self._began_s = 0, 0.0
        self._lease: LeaseWatch | None = None
        self._lapsed = False
        self._unpacked_ns = 0
        self._gate: int | None = None

    def prepare(self) -> None:
        """Everything that needs no request: signals, pipes, and the leader, which waits for its program."""
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(PR_SET_NAME, b"penstock-shim", 0, 0, 0)
        os.setsid()
        for number, handler in (
            (signal.SIGTERM, self._on_terminate),
            (signal.SIGUSR1, self._on_kill),
            (signal.SIGUSR2, self._on_checkpoint),
            (signal.SIGHUP, self._on_open),
            (signal.SIGCHLD, self._on_child),
        ):
            signal.signal(number, handler)
        self._shim = int(os.readlink("/proc/self"))  # the pid in the reporter's namespace; in its own it is 1
        self._shim_start = start_ticks(self._shim)
        own = os.getpid()
        self._out_read, out_write = os.pipe()
        if self._plan.user is not None:
            os.fchown(out_write, *self._plan.user[:2])  # so that it may open /dev/stdout
        go_read, self._go_write = os.pipe()
        self._failed_read, failed_write = os.pipe()
        leader = os.fork()
        if leader == 0:
            os.close(self._go_write)
            os.close(self._failed_read)
            self._become_program(out_write, go_read, failed_write, own)
        self._leader = leader
        for descriptor in (out_write, go_read, failed_write):
            os.close(descriptor)
        self._leader_fd = os.pidfd_open(leader)
        self._pid = pid_of(self._leader_fd)
        self._leader_start = start_ticks(self._pid)
        self._enter_groups()

    def run(self) -> None:
        """Takes one request and stays until no process of its program is left."""
        message = self._control.recv(MAX_MESSAGE_BYTES)
        if not message:
            os.kill(self._leader, signal.SIGKILL)  # the reporter is gone
            os.waitpid(self._leader, 0)
            self._remove_groups()
            os._exit(0)
        rest = message + GO
        while rest:  # the leader prepares while the start is recorded
            rest = rest[os.write(self._go_write, rest) :]
        self._request = json.loads(message)
        self._folder = self._request["folder"]
        if self._request["gate"] is not None:
            self._gate = os.open(self._request["gate"], os.O_RDONLY)
            fcntl.flock(self._gate, fcntl.LOCK_EX)
        self._report({"event": "taken"})
        errors = os.open(f"{self._folder}/shim.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        phases = os.open(f"{self._folder}/phases", os.O_RDWR | os.O_NONBLOCK)  # held: no line is lost
        failure = self._start()
        if failure is None:
            self._report({"event": "started", "pid": self._pid, "started_ms": self._started_ms})
        self._control.close()
        self._let_next()
        self._watch(self._out_read, self._output)
        self._reap_all(self._out_read, self._output)
        self._empty_group()
        self._output.close()
        os.close(phases)
        self._write_exit(failure)
        self._remove_groups(but=self._plan.watched)

    def _start(self) -> dict[str, Any] | None:
        """Records the start, lets the leader go on; returns the failure when the program could not be executed."""
        self._note_start()
        started = {
            "task_id": self._request["task_id"],
            "token": self._request["token"],
            "shim": self._shim,
            "shim_start": self._shim_start,
            "pid": self._pid,
            "pid_start": self._leader_start,
            "started_ms": self._started_ms,
            "exits": self._plan.exits,
            "groups": list(self._groups.values()),
        }
        write_whole(self._folder, "started.json", started)
        os.close(self._lock_fd)
        lease = self._request["lease"]
        if lease is not None:
            self._lease = LeaseWatch(**lease)
            self._lapsed = self._lease.over()
        failure = self._set_groups()
        if failure is None and not self._lapsed:  # else the leader ends where it waits
            os.write(self._go_write, GO)
        os.close(self._go_write)
        self._output = Output(self._request["log"], self._request["log_limit"])  # while the leader execs
        for line in self._until_executed().splitlines():
            report = json.loads(line)
            self._unpacked_ns = report.pop("unpacked_ns", self._unpacked_ns)
            failure = report or failure
        return failure

    def _until_executed(self) -> bytes:
        """The leader's report up to its exec, which closes the pipe.

        It may unpack code, or access a network file system that hangs: other tasks start meanwhile, and its lease may end.
        """
        poll, found = select.poll(), b""
        pause_ms: int | None = NEXT_SHIM_MS
        poll.register(self._failed_read, select.POLLIN)
        if self._lease is not None:
            poll.register(self._lease.fd, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(pause_ms)}
            if not ready:
                self._let_next()
                pause_ms = None
            elif self._failed_read not in ready:
                self._end_lapsed(self._lease)
            elif chunk := os.read(self._failed_read, CHUNK_BYTES):
                found += chunk
            else:
                os.close(self._failed_read)
                return found

    def _let_next(self) -> None:
        """Lets the launcher prepare the next shim."""
        if self._taken_fd is not None:
            os.close(self._taken_fd)
            self._taken_fd = None

    def _note_start(self) -> None:
        """Its end is derived from the time since boot: a clock that steps meanwhile does not change the run's length."""
        self._started_ms, self._began_s = now_ms(), boot_s()

    def _enter_groups(self) -> None:
        """Puts the leader into cgroups of its own: in advance, since that waits for a grace period of the kernel (11 ms)."""
        self._groups: dict[str, str] = {}
        self._group_failure: OSError | None = None
        try:
            for root, settings in self._plan.groups:
                group = f"{root}/{self._plan.name}@{self._shim}"
                os.makedirs(group, exist_ok=True)
                self._groups[root] = group
                for name, value in (*settings, ("cgroup.procs", str(self._leader))):
                    put(f"{group}/{name}", value)
        except OSError as error:
            self._group_failure = error

    def _set_groups(self) -> dict[str, Any] | None:
        """Gives the groups the limits of this task; returns the failure, if that is refused."""
        try:
            if self._group_failure is not None:
                raise self._group_failure
            for root, name, value in self._request["settings"]:
                put(f"{self._groups[root]}/{name}", value)
        except OSError as error:
            return {"stage": "cgroup", "errno": error.errno}
        return None

    def _remove_groups(self, but: str = "") -> None:
        """All but the one in this root."""
        for root, group in self._groups.items():
            with contextlib.suppress(OSError):
                if root != but:
                    os.rmdir(group)

    def _become_program(self, output: int, go: int, failed: int, shim: int) -> NoReturn:
        """In the child: wait for the request, prepare, exec. Failures are reported through `failed`."""
        stage = "prepare"
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != shim:
                os._exit(127)
            self._let_next()  # only the shim delays that
            os.setsid()
            for number in RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            with contextlib.suppress(OSError):  # beyond the user's key quota the launcher's keyring is shared
                leave_keyring()
            failure, tasks = self._failure, None
            try:
                tasks = hide(self._plan)
                drop_privileges()
            except OSError as error:
                failure = failure or error
            lines = os.fdopen(go, "rb")
            message = lines.readline()
            if not message:
                os._exit(127)  # no request came
            os.close(self._lock_fd)
            request = json.loads(message)
            stage = "confinement"
            if failure is not None:
                raise failure
            shared = request["checkpoints"], request["group"]
            reveal(self._plan, tasks, request["folder"], request["visible"], *shared)
            stage = "affinity"
            if request["cores"]:
                os.sched_setaffinity(0, request["cores"])
            if request["data_limit"]:
                resource.setrlimit(resource.RLIMIT_DATA, (request["data_limit"], request["data_limit"]))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if request["oom_first"]:
                with contextlib.suppress(OSError):  # the cap holds without it
                    put("/proc/self/oom_score_adj", str(OOM_FIRST))
            stage = "user"
            become(self._plan)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # set again: a change of the user clears it
            program = find_program(request)
            if not lines.readline():
                os._exit(127)
            stage = "code"
            if request["code"] is not None:
                os.write(failed, json.dumps({"unpacked_ns": unpack(*request["code"])}).encode() + GO)
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
            os.write(failed, json.dumps({"stage": stage, "errno": error.errno}).encode() + GO)
        finally:
            os._exit(127)

    def _watch(self, pipe: int, output: Output) -> None:
        """Copies output until the leader has ended."""
        leader = self._leader_fd
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(leader, select.POLLIN)
        if self._lease is not None:
            poll.register(self._lease.fd, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll(output.pause_ms()):
                if descriptor == leader:
                    os.close(leader)
                    return
                if self._lease is not None and descriptor == self._lease.fd:
                    self._end_lapsed(self._lease)
                    continue
                chunk = os.read(pipe, CHUNK_BYTES)
                if chunk:
                    output.write(chunk)
                else:
                    poll.unregister(pipe)

    def _end_lapsed(self, lease: LeaseWatch | None) -> None:
        """Ends the task if its lease is over; until the leader has ended this is tried again at once."""
        if lease is not None and lease.over():
            self._lapsed = True
            self._kill_all()
            time.sleep(REAP_PAUSE_MS / 1_000)

    def _reap_all(self, pipe: int, output: Output) -> None:
        """Kills the processes that the leader left behind and waits until no child is left; then empties the pipe."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.set_blocking(pipe, False)
        alive = True
        while alive:
            alive = self._reap_ready()
            self._carry(pipe, output)
            if alive:
                self._kill_all()
                select.select([], [], [], REAP_PAUSE_MS / 1_000)
        self._carry(pipe, output)

    def _reap_ready(self) -> bool:
        """Reaps every child that has ended. False: the kernel reports no child any more."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._leader:
                self._reaped = (status, usage)

    @staticmethod
    def _carry(pipe: int, output: Output) -> None:
        try:
            while chunk := os.read(pipe, CHUNK_BYTES):
                output.write(chunk)
        except BlockingIOError:
            pass

    def _write_exit(self, failure: dict[str, Any] | None) -> None:
        assert self._reaped is not None
        status, usage = self._reaped
        everything = resource.getrusage(resource.RUSAGE_CHILDREN)
        killed = os.WIFSIGNALED(status)
        reported = ("", "") if status == 0 or failure else exhausted(self._output.last)
        content = {
            "task_id": self._request["task_id"],
            "token": self._request["token"],
            "exit_code": None if killed or failure else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if killed else None,
            "cpu_ms": round((everything.ru_utime + everything.ru_stime) * 1_000),
            "max_rss_kib": max(usage.ru_maxrss, everything.ru_maxrss),
            "started_ms": self._started_ms,
            "exited_ms": self._started_ms + round((boot_s() - self._began_s) * 1_000),
            "failure": failure,
            "unpacked_ns": self._unpacked_ns,
            "oom": self._out_of_memory(),
            "exhausted": reported,
            "lapsed": self._lapsed,
        }
        pause_s = FIRST_PAUSE_S
        while os.path.isdir(self._folder):  # without it no reporter will read the exit
            try:
                write_whole(self._folder, "exit.json", content)
                return
            except OSError:  # a full disk: the exit stays unproven for the reporter until it can be written
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _empty_group(self) -> None:
        """Where a cgroup proves the end: kills its processes until the kernel reports none there."""
        group = self._groups.get(self._request["ended_by"])
        while group:
            with open(f"{group}/cgroup.events") as file:
                if "populated 0" in file.read().splitlines():
                    return
            put(f"{group}/cgroup.kill", "1")
            time.sleep(REAP_PAUSE_MS / 1_000)

    def _out_of_memory(self) -> bool:
        """Whether the kernel counted an OOM kill in the task's cgroup."""
        counts: dict[str, str] = {}
        if self._request["oom"]:
            root, name = self._request["oom"]
            with contextlib.suppress(OSError, KeyError), open(f"{self._groups[root]}/{name}") as file:
                counts = dict(line.split() for line in file)
        return counts.get("oom_kill", "0") != "0"

    def _report(self, content: dict[str, Any]) -> None:
        """Sends to the reporter, if it is still there; if not, the next one reads `started.json`."""
        content |= {"task_id": self._request["task_id"], "token": self._request["token"], "shim": self._shim}
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(content).encode())

    def _kill_all(self) -> None:
        if self._alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all at once, so that nothing forks in between
            return
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        if self._leader and self._reaped is None:  # unreaped, so the pid cannot be reused
            alone = self._request.get("saves") and catches(self._pid, signal.SIGTERM)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.kill if alone else os.killpg)(self._leader, signal.SIGTERM)

    def _on_kill(self, _number: int, _frame: FrameType | None) -> None:
        self._kill_all()

    def _on_checkpoint(self, _number: int, _frame: FrameType | None) -> None:
        """Unhandled, SIGUSR1 would kill; so it goes only to a leader that catches it."""
        with contextlib.suppress(OSError):
            if catches(self._pid, signal.SIGUSR1) and self._reaped is None:
                os.kill(self._leader, signal.SIGUSR1)

    def _on_open(self, _number: int, _frame: FrameType | None) -> None:
        if self._gate is not None:
            os.close(self._gate)  # which unlocks it: no other process has this descriptor
            self._gate = None

    def _on_child(self, _number: int, _frame: FrameType | None) -> None:
        """Adopted orphans are reaped as they end; the leader is left for `_reap_all`."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid == self._leader:
                return
            os.waitpid(ended.si_pid, 0)
