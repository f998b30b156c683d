"""A small process that starts tasks for the reporter: stdlib only, one thread, so that it may fork safely.

Ideal: the reporter forks each task itself. Departure: it has threads and a large heap, and a fork of those
is neither safe nor quick.

Run as `python -I -S launcher.py SOCKET_FD LOCK_FD`. It always keeps one *shim* ready, forked beforehand with
the process that will become the program (forks and their page faults would be most of a start's time). A shim
takes one request, a JSON message on the SEQPACKET socket: `{folder, log, log_limit, argv, env, cwd, cores,
data_limit, cgroup, task_id, token}`; runs the program, waits for all of it and writes down how it ended. It
outlives launcher and reporter.

The folder of a task holds, each written whole (temporary name, then rename):
`started.json {task_id, token, shim, shim_start, pid, pid_start, started_ms}`, written before the program runs;
`exit.json {exit_code, signal, cpu_ms, max_rss_kib, started_ms, exited_ms, stage, errno, oom}`, written (fsync)
after the *last* process of the task has been reaped; `phases`, a FIFO made by the reporter for the program's lines.

Proof of exit: the shim is the subreaper of everything that the program starts, in whatever session. Once
the leader is gone it kills what is left and waits until the kernel knows of no child any more: ECHILD.

The lock's descriptor is held by the reporter, by this process and by each shim until its `started.json` is
written. Who gets the lock therefore knows: nothing will be started any more that has no `started.json`.

Signals to a shim: SIGTERM → SIGTERM to the process group; SIGUSR1 → SIGKILL to every process of the task;
SIGUSR2 → SIGUSR1 to the leader if it handles it (a request to save a checkpoint).
"""

import contextlib
import ctypes
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from types import FrameType
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 1 << 18  # argv, environment and peers together; the events behind them are ≤ 64 KiB
CHUNK_BYTES = 65_536  # a pipe's capacity
TAIL_BYTES = 65_536  # of output beyond the limit: so much of its end is kept
FIRST_PAUSE_S = 0.1  # between attempts to write down an exit on a full disk
LONGEST_PAUSE_S = 5.0
REAP_PAUSE_MS = 5  # between kills while the last processes die
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
RESET_SIGNALS = (
    signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ,
)  # fmt: skip
"""What Python, the launcher or the shim changed; the program shall find the defaults."""

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def start_ticks(pid: int) -> int | None:
    """When this process started, in clock ticks since boot; with the pid it names one process. None: no such."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def write_whole(folder: str, name: str, content: dict[str, Any], *, durable: bool) -> None:
    """Writes a file that is there whole or not at all."""
    temporary = f"{folder}/.{name}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    data = json.dumps(content).encode()
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, "written in part")
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, f"{folder}/{name}")


def descendants(root: int) -> list[int]:
    """Living descendants of a process, by the parents in /proc; zombies are left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = deque([root])
    while queue:
        own = children.get(queue.popleft(), [])
        found += own
        queue.extend(own)
    return found


class Output:
    """A task's log file: everything up to the limit, a marker, and the end of what came after."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:  # a task without a log is better than none
            print(f"no log: {error}", file=sys.stderr, flush=True)
            self._file = os.open(os.devnull, os.O_WRONLY)
        self._left = limit_bytes
        self._dropped = 0
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def write(self, chunk: bytes) -> None:
        head, rest = chunk[: self._left], chunk[self._left :]
        if head:
            self._left -= len(head)
            self._put(head)
        if rest:
            if not self._dropped:
                self._put(
                    b"\n[penstock: the log's limit is reached; what follows is left out up to its end]\n"
                )
            self._dropped += len(rest)
            self._tail.append(rest)
            self._tail_bytes += len(rest)
            while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())

    def close(self) -> None:
        if self._tail:
            end = b"".join(self._tail)[-TAIL_BYTES:]
            self._put(b"\n[penstock: %d bytes left out]\n" % (self._dropped - len(end)) + end)
        os.close(self._file)

    def _put(self, data: bytes) -> None:
        try:
            os.write(self._file, data)
        except OSError:  # a full disk must not stop the task; what is missing is missing
            self._dropped += len(data)


class Shim:
    """One task's supervisor; runs in a process of its own from fork to exit."""

    def __init__(self, control: socket.socket, lock_fd: int, taken_fd: int) -> None:
        self._control = control
        self._lock_fd = lock_fd
        self._taken_fd = taken_fd
        self._request: dict[str, Any] = {}
        self._folder = ""
        self._leader = 0
        self._reaped: tuple[int, Any] | None = None
        self._started_ms = 0

    def prepare(self) -> None:
        """Everything that needs no request: signals, pipes, and the leader, which waits for its program."""
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _prctl(PR_SET_NAME, b"penstock-shim", 0, 0, 0)
        os.setsid()
        for number, handler in (
            (signal.SIGTERM, self._on_terminate),
            (signal.SIGUSR1, self._on_kill),
            (signal.SIGUSR2, self._on_checkpoint),
            (signal.SIGCHLD, self._on_child),
        ):
            signal.signal(number, handler)
        self._shim = os.getpid()
        self._shim_start = start_ticks(self._shim)
        self._out_read, out_write = os.pipe()
        go_read, self._go_write = os.pipe()
        self._failed_read, failed_write = os.pipe()
        leader = os.fork()
        if leader == 0:
            os.close(self._go_write)
            os.close(self._failed_read)
            self._become_program(out_write, go_read, failed_write)
        self._leader = leader
        for descriptor in (out_write, go_read, failed_write):
            os.close(descriptor)
        self._leader_start = start_ticks(leader)

    def run(self) -> None:
        """Takes one request and stays until nothing of its program is left."""
        message = self._control.recv(MAX_MESSAGE_BYTES)
        if not message:
            os._exit(0)  # the reporter is gone; the leader goes with us
        self._request = json.loads(message)
        self._folder = self._request["folder"]
        self._report({"event": "taken"})
        errors = os.open(f"{self._folder}/shim.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(errors, 2)
        failure = self._start(message)
        if failure is None:
            self._report({"event": "started", "pid": self._leader, "started_ms": self._started_ms})
        self._control.close()
        os.close(self._taken_fd)  # the launcher makes the next shim ready
        phases = os.open(f"{self._folder}/phases", os.O_RDWR | os.O_NONBLOCK)  # held, so that no line is lost
        self._watch(self._out_read, self._output)
        self._reap_all(self._out_read, self._output)
        self._output.close()
        os.close(phases)
        self._write_exit(failure)

    def _start(self, message: bytes) -> dict[str, Any] | None:
        """Writes down who will run, lets the leader go; the failure when it could not be executed."""
        self._started_ms = now_ms()
        started = {
            "task_id": self._request["task_id"],
            "token": self._request["token"],
            "shim": self._shim,
            "shim_start": self._shim_start,
            "pid": self._leader,
            "pid_start": self._leader_start,
            "started_ms": self._started_ms,
        }
        write_whole(self._folder, "started.json", started, durable=False)
        os.close(self._lock_fd)
        while message:
            message = message[os.write(self._go_write, message) :]
        os.close(self._go_write)
        self._output = Output(self._request["log"], self._request["log_limit"])  # while the leader execs
        report = os.read(self._failed_read, CHUNK_BYTES)  # empty: exec closed it
        os.close(self._failed_read)
        if not report:
            return None
        failure: dict[str, Any] = json.loads(report)
        return failure

    def _become_program(self, output: int, go: int, failed: int) -> NoReturn:
        """In the child: wait for the request, prepare, exec. Whatever fails is reported through `failed`."""
        stage = "prepare"
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._shim:
                os._exit(127)
            os.setsid()
            for number in RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            message = b""
            while chunk := os.read(go, CHUNK_BYTES):
                message += chunk
            if not message:
                os._exit(127)  # nobody came
            os.close(self._lock_fd)
            request = json.loads(message)
            stage = "cgroup"
            if request["cgroup"]:
                with open(f"{request['cgroup']}/cgroup.procs", "w") as file:
                    file.write("0")
            stage = "affinity"
            if request["cores"]:
                os.sched_setaffinity(0, request["cores"])
            if request["data_limit"]:
                resource.setrlimit(resource.RLIMIT_DATA, (request["data_limit"], request["data_limit"]))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            stage = "workdir"
            os.chdir(request["cwd"])
            stage = "exec"
            os.dup2(output, 2)
            os.execvpe(request["argv"][0], request["argv"], request["env"])
        except OSError as error:
            os.write(failed, json.dumps({"stage": stage, "errno": error.errno}).encode())
        finally:
            os._exit(127)

    def _watch(self, pipe: int, output: Output) -> None:
        """Carries output until the leader has ended."""
        leader = os.pidfd_open(self._leader)
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        poll.register(leader, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == leader:
                    os.close(leader)
                    return
                chunk = os.read(pipe, CHUNK_BYTES)
                if chunk:
                    output.write(chunk)
                else:
                    poll.unregister(pipe)

    def _reap_all(self, pipe: int, output: Output) -> None:
        """Kills what the leader left behind and waits until no child is left; then empties the pipe."""
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
        """Reaps every child that has ended. False: the kernel knows of no child any more."""
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
        content = {
            "task_id": self._request["task_id"],
            "token": self._request["token"],
            "exit_code": None if killed or failure else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if killed else None,
            "cpu_ms": round((everything.ru_utime + everything.ru_stime) * 1_000),
            "max_rss_kib": max(usage.ru_maxrss, everything.ru_maxrss),
            "started_ms": self._started_ms,
            "exited_ms": now_ms(),
            "failure": failure,
            "oom": self._out_of_memory(),
        }
        pause_s = FIRST_PAUSE_S
        while os.path.isdir(self._folder):  # without it nobody will ever ask
            try:
                write_whole(self._folder, "exit.json", content, durable=True)
                return
            except OSError:  # a full disk: the exit stays unproven for the reporter until it can be written
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _out_of_memory(self) -> bool:
        """Whether the kernel counted an OOM kill in the task's cgroup, which is removed."""
        group = self._request["cgroup"]
        if not group:
            return False
        counts: dict[str, str] = {}
        with contextlib.suppress(OSError), open(f"{group}/memory.events") as file:
            counts = dict(line.split() for line in file)
        with contextlib.suppress(OSError):
            os.rmdir(group)
        return counts.get("oom_kill", "0") != "0"

    def _report(self, content: dict[str, Any]) -> None:
        """Reports to the reporter, if it is still there; if not, the next one reads `started.json`."""
        content |= {"task_id": self._request["task_id"], "token": self._request["token"], "shim": self._shim}
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(content).encode())

    def _kill_all(self) -> None:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        if self._leader and self._reaped is None:  # unreaped, so the number cannot be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._leader, signal.SIGTERM)

    def _on_kill(self, _number: int, _frame: FrameType | None) -> None:
        self._kill_all()

    def _on_checkpoint(self, _number: int, _frame: FrameType | None) -> None:
        """Unhandled, SIGUSR1 would kill; so it goes only to a leader that catches it."""
        try:
            with open(f"/proc/{self._leader}/status") as file:
                caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
            if caught >> (signal.SIGUSR1 - 1) & 1 and self._reaped is None:
                os.kill(self._leader, signal.SIGUSR1)
        except OSError:
            pass

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


def guard(control: socket.socket, lock_fd: int, taken_fd: int) -> NoReturn:
    """A shim's whole life. Should it fail, the traceback goes to `shim.err` and the kernel kills its leader."""
    try:
        shim = Shim(control, lock_fd, taken_fd)
        shim.prepare()
        shim.run()
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        os._exit(0 if error is None else 1)


def main() -> None:
    """Keeps one shim ready until the reporter closes its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lock_fd = int(sys.argv[2])
    for descriptor in (control.fileno(), lock_fd):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # shims are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _prctl(PR_SET_NAME, b"penstock-launch", 0, 0, 0)
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        taken_read, taken_write = os.pipe()
        if os.fork() == 0:
            os.close(taken_read)
            guard(control, lock_fd, taken_write)
        os.close(taken_write)
        poll = select.poll()
        poll.register(taken_read, select.POLLIN)
        poll.register(control, 0)  # its hang-up alone
        poll.poll()  # the shim has let go of its end: it works, or was killed
        if any(descriptor == control.fileno() for descriptor, _ in poll.poll(0)):
            return
        os.close(taken_read)


if __name__ == "__main__":
    main()
