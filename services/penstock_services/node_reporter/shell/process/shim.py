"""Supervisor (shim) of one task, from its fork to the last of its task's processes. Standard library only
(see `confinement`).

A shim takes one request, a JSON message on the SEQPACKET socket: `{folder, log, log_limit, argv, env, cwd,
code, programs, cores, data_limit, settings, oom, pids, oom_first, ended_by, visible, checkpoints, group,
private, gate, interactive, lease, task_id, token}`; runs the program, waits for all of its processes and
records how it ended.

The folder of a task holds, each written atomically (temporary name, then rename): `started.json {task_id,
token, shim, shim_start, pid, pid_start, started_ms, exits, groups}`, written before the program runs;
`exit.json {task_id, token, exit_code, signal, cpu_ms, max_rss_kib, started_ms, exited_ms, failure,
unpacked_ns, oom, pids, exhausted, lapsed, left}`, written after the *last* process of the task has been
reaped; and the folders visible to the task, `visible`: `work`; `phases`, a FIFO made by the reporter for the
program's lines; and `savers`, the file that processes lock which save (`savers`).

Proof of exit: the shim is the first process of the task's PID namespace, so that nothing of the task outlives
it. Where there is no namespace it is the subreaper of everything that the program starts, in any session. A
task ends with its leader: the shim kills the remaining processes, unless they end by themselves at once, and
waits until the kernel reports no child any more: ECHILD. A task that is stopped ends with the last of its
processes, see `stopping`.

The lock's descriptor is held by the reporter, by the launcher and by each shim until its `started.json` is
written. The holder of the lock can therefore rely on it: no task without a `started.json` will be started any
more.

`lease` is None or the arguments of `lease_watch.LeaseWatch`: when it ends, so does the task, with or without
a reporter.

Signals to a shim: SIGTERM → the task is stopped, once; SIGUSR1 → SIGKILL to every process of the task; SIGHUP
→ the gate opens.

An `interactive` task has a terminal in place of an empty input and a pipe: `terminal.Terminal`.

`gate` is None or the file that the shim locks before the program runs: the program waits for the lock before
it uses a GPU (`penstock.sdk.gate`).
"""

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import time
from types import FrameType
from typing import Any

from penstock_services.node_reporter.shell.isolation.confinement import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    Confinement,
    prctl,
)
from penstock_services.node_reporter.shell.isolation.task_groups import KILL_PAUSE_S, TaskGroups
from penstock_services.node_reporter.shell.isolation.whole_files import write_whole
from penstock_services.node_reporter.shell.logs.last_lines import exhausted
from penstock_services.node_reporter.shell.logs.output import Output
from penstock_services.node_reporter.shell.process.leader import GO, Pipes, become_program
from penstock_services.node_reporter.shell.process.pids import (
    descendants,
    pid_of,
    processes_below,
    start_ticks,
)
from penstock_services.node_reporter.shell.process.savers import SAVERS, savers
from penstock_services.node_reporter.shell.process.stopping import SETTLE_S, Stop
from penstock_services.node_reporter.shell.process.terminal import Terminal
from penstock_services.node_reporter.shell.watchdogs.lease_watch import LeaseWatch, boot_s

# argv, environment, peers, secrets: the kernel's largest message with its default net.core.wmem_max
MAX_MESSAGE_BYTES = 425_952
CHUNK_BYTES = 65_536  # a pipe's capacity
FIRST_PAUSE_S = 0.1  # between attempts to record an exit on a full disk
LONGEST_PAUSE_S = 5.0
NEXT_SHIM_MS = 50  # after that the next shim is prepared during a start; most starts take less


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
        self._terminal: Terminal | None = None
        self._groups = TaskGroups(plan)
        self._executed = self._stopped = self._killed = False
        """The leader has become the program; a stop, or the end of all processes, was requested."""
        self._left = 0
        """Number of processes that the leader has left running, or that were not stopped in time."""
        self._settled_s: float | None = None
        """When what the leader has left running is killed, s of the monotonic clock."""

    def prepare(self) -> None:
        """Everything that needs no request: signals, pipes, and the leader, which waits for its program."""
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(PR_SET_NAME, b"penstock-shim", 0, 0, 0)
        os.setsid()
        for number, handler in (
            (signal.SIGTERM, self._on_terminate),
            (signal.SIGUSR1, self._on_kill),
            (signal.SIGHUP, self._on_open),
            (signal.SIGCHLD, self._on_child),
        ):
            signal.signal(number, handler)
        self._woken, wakes = os.pipe()
        for descriptor in (self._woken, wakes):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
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
            signal.set_wakeup_fd(-1)
            pipes = Pipes(out_write, go_read, failed_write)
            become_program(self._plan, self._failure, self._lock_fd, pipes, own, self._let_next)
        self._leader = leader
        for descriptor in (out_write, go_read, failed_write):
            os.close(descriptor)
        pidfd = os.pidfd_open(leader)
        self._pid = pid_of(pidfd)
        os.close(pidfd)
        self._leader_start = start_ticks(self._pid)
        self._groups.enter(self._leader, self._shim)

    def run(self) -> None:
        """Takes one request and stays until no process of its program is left."""
        message = self._control.recv(MAX_MESSAGE_BYTES)
        if not message:
            os.kill(self._leader, signal.SIGKILL)  # the reporter is gone
            os.waitpid(self._leader, 0)
            self._groups.remove()
            os._exit(0)
        self._request = json.loads(message)
        self._folder = self._request["folder"]
        if self._request["interactive"]:
            message = json.dumps(self._request | {"terminal": self._open_terminal()}).encode()
        rest = message + GO
        while rest:  # the leader prepares while the start is recorded
            rest = rest[os.write(self._go_write, rest) :]
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
        self._watch()
        self._groups.empty(self._request["ended_by"])
        self._output.close()
        os.close(phases)
        self._write_exit(failure)
        self._groups.remove(but=self._plan.watched)

    def _start(self) -> dict[str, Any] | None:
        """Records the start, lets the leader go on;
        returns the failure when the program could not be executed."""
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
            "groups": list(self._groups.paths.values()),
        }
        write_whole(self._folder, "started.json", started)
        os.close(self._lock_fd)
        lease = self._request["lease"]
        if lease is not None:
            self._lease = LeaseWatch(**lease)
            self._lapsed = self._lease.over()
        failure = self._groups.limit(self._request["settings"])
        if failure is None and not self._lapsed:  # else the leader ends where it waits
            os.write(self._go_write, GO)
        os.close(self._go_write)
        self._output = Output(self._request["log"], self._request["log_limit"])  # while the leader execs
        for line in self._until_executed().splitlines():
            report = json.loads(line)
            self._unpacked_ns = report.pop("unpacked_ns", self._unpacked_ns)
            failure = report or failure
        self._executed = True
        return failure

    def _open_terminal(self) -> str:
        """Its name; empty: there is none, and the leader will say so."""
        user = self._plan.user
        with contextlib.suppress(OSError):
            self._terminal = Terminal(self._folder, None if user is None else user[0])
            return self._terminal.path
        return ""

    def _until_executed(self) -> bytes:
        """The leader's report up to its exec, which closes the pipe.

        It may unpack code, or access a network file system that hangs: other tasks start meanwhile, and its
        lease may end.
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
        """Its end is derived from the time since boot:
        a clock that steps meanwhile does not change the run's length."""
        self._started_ms, self._began_s = now_ms(), boot_s()

    def _watch(self) -> None:
        """Copies output until no process of the task is left; ends what is to end."""
        os.set_blocking(self._out_read, False)
        poll, stop = select.poll(), None
        for descriptor in (self._out_read, self._woken):
            poll.register(descriptor, select.POLLIN)
        if self._lease is not None:
            poll.register(self._lease.fd, select.POLLIN)
        if self._terminal is not None:
            self._terminal.serve(poll)
        while self._reap():
            if self._stopped and stop is None:
                stop = Stop(
                    poll, lambda: processes_below(self._shim), lambda: savers(f"{self._folder}/{SAVERS}")
                )
            self._end_what_is_left(stop)
            for descriptor, events in poll.poll(self._wait_ms(stop)):
                self._ready(poll, descriptor, events, stop)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._out_read, CHUNK_BYTES):
                self._output.write(chunk)
        if self._terminal is not None:
            self._output.write(self._terminal.rest())

    def _ready(self, poll: select.poll, descriptor: int, events: int, stop: Stop | None) -> None:
        """Reads what is there, or learns what has ended."""
        if self._terminal is not None and self._terminal.has(descriptor):
            if shown := self._terminal.turn(descriptor, events):
                self._output.write(shown)
        elif descriptor == self._out_read:
            if chunk := os.read(descriptor, CHUNK_BYTES):
                self._output.write(chunk)
            else:
                poll.unregister(descriptor)
        elif descriptor == self._woken:
            self._drain_wakes()
        elif self._lease is not None and descriptor == self._lease.fd:
            self._end_lapsed(self._lease)
        elif stop is not None:
            stop.ended(descriptor)

    def _wait_ms(self, stop: Stop | None) -> float | None:
        """How long nothing is to be done unless something happens."""
        if self._killed:
            return 1_000 * KILL_PAUSE_S
        waits: list[float | None] = [self._output.pause_ms()]
        if stop is not None:
            waits.append(None if (left_s := stop.left_s()) is None else 1_000 * left_s)
        elif self._settled_s is not None:
            waits.append(max(0.0, 1_000 * (self._settled_s - time.monotonic())))
        return min((wait for wait in waits if wait is not None), default=None)

    def _end_what_is_left(self, stop: Stop | None) -> None:
        """Of a task that is stopped the next processes get SIGTERM; of one that has ended by itself the
        rest is killed."""
        if self._killed:
            self._kill_all()
        elif stop is not None:
            stop.turn()
        elif self._reaped is not None and self._settled_s is None:
            self._settled_s = time.monotonic() + SETTLE_S
        elif self._settled_s is not None and time.monotonic() >= self._settled_s:
            self._left = len(descendants(self._shim))
            self._kill_all()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, CHUNK_BYTES):
                pass

    def _end_lapsed(self, lease: LeaseWatch | None) -> None:
        """Ends the task if its lease is over; until its processes have ended this is tried again at once."""
        if lease is not None and lease.over():
            self._lapsed = True
            self._kill_all()
            time.sleep(KILL_PAUSE_S)

    def _reap(self) -> bool:
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
            "oom": self._groups.count(self._request["oom"]) > 0,
            "pids": self._groups.count(self._request["pids"]) > 0,
            "exhausted": reported,
            "lapsed": self._lapsed,
            "left": self._left,
        }
        pause_s = FIRST_PAUSE_S
        while os.path.isdir(self._folder):  # without it no reporter will read the exit
            try:
                write_whole(self._folder, "exit.json", content)
                return
            except OSError:  # a full disk: the exit stays unproven for the reporter until it can be written
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _report(self, content: dict[str, Any]) -> None:
        """Sends to the reporter, if it is still there; if not, the next one reads `started.json`."""
        content |= {"task_id": self._request["task_id"], "token": self._request["token"], "shim": self._shim}
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(content).encode())

    def _kill_all(self) -> None:
        self._killed = True
        if self._alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all at once, so that nothing forks in between
            return
        for pid in descendants(self._shim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        """A leader that has not become its program yet, which may take long, ends where it is."""
        self._stopped = True
        if not self._executed and self._leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader, signal.SIGTERM)

    def _on_kill(self, _number: int, _frame: FrameType | None) -> None:
        if self._stopped and not self._killed:
            self._left = len(descendants(self._shim))
        self._kill_all()

    def _on_open(self, _number: int, _frame: FrameType | None) -> None:
        if self._gate is not None:
            os.close(self._gate)  # which unlocks it: no other process has this descriptor
            self._gate = None

    def _on_child(self, _number: int, _frame: FrameType | None) -> None:
        """Its wake-up is all that is needed: `_reap` reads which children have ended."""
