"""A warm parent for the services of the fault tests: it imports everything once and forks on request.

A restart then costs milliseconds, so that hundreds of kills fit into a test. A forked child runs the module's
real `__main__` with its own environment and arguments, and dies by a real SIGKILL. The zygote never holds a
thread, an event loop or a connection that a child could inherit; children end with it (PR_SET_PDEATHSIG), and
it ends when the test process closes its stdin or dies.

Parent and zygote exchange lines of JSON on the zygote's stdin and stdout:
`spawn` and `signal` down; `pid`, `ready` (the child reported so) and `status` (as `waitpid` gives it) up.
"""

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
FIRST_FREE_FD = 3
MAX_FD = 1_024  # of descriptors that a child closes; the zygote holds a few per living child
READ_BYTES = 65_536


class Process:
    """One forked child. Belongs to the event loop that asked for it."""

    def __init__(self, number: int, module: str) -> None:
        self.number = number
        self.module = module
        self.pid: int | None = None
        self.started = asyncio.Event()
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.status = 0
        """As `os.waitpid` gave it, once `ended` is set."""

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    def describe_end(self) -> str:
        if os.WIFSIGNALED(self.status):
            return f"signal {os.WTERMSIG(self.status)}"
        return f"exit status {os.WEXITSTATUS(self.status)}"


class Zygote:
    """The test process's end. One event loop may use it at a time: `attach`, work, `detach`."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts it. `modules`: what children will run; `env`: what matters at import."""
        parent = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)

        def die_with_parent() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        assert threading.current_thread() is threading.main_thread(), "PDEATHSIG follows the starting thread"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.processes.zygote", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._out.fileno(), False)
        self._numbers = 0
        self._children: dict[int, Process] = {}
        self._buffer = b""

    def attach(self) -> None:
        """News about children reach this event loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._out.fileno(), self._read)

    async def detach(self) -> None:
        """Kills the children that are left and stops listening."""
        for child in list(self._children.values()):
            self.signal(child, signal.SIGKILL)
        for child in list(self._children.values()):
            await child.ended.wait()
        self._loop.remove_reader(self._out.fileno())

    def close(self) -> None:
        """Ends the zygote and with it every child."""
        self._in.close()
        self._process.wait()
        self._out.close()

    def spawn(self, module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
        """Asks for a child that runs `python -m module arguments` with exactly this environment."""
        self._numbers += 1
        child = Process(self._numbers, module)
        self._children[child.number] = child
        self._command(
            op="spawn", id=child.number, module=module, argv=list(arguments), env=dict(env), log=str(log)
        )
        return child

    def signal(self, child: Process, number: int) -> None:
        """Sends a signal, unless the child has ended meanwhile."""
        self._command(op="signal", id=child.number, signum=int(number))

    def _command(self, **command: object) -> None:
        self._in.write(json.dumps(command).encode() + b"\n")
        self._in.flush()

    def _read(self) -> None:
        chunk = self._out.read(READ_BYTES)
        if not chunk:
            self._loop.remove_reader(self._out.fileno())
            for child in self._children.values():
                child.ended.set()
            return
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            news: dict[str, Any] = json.loads(line)
            child = self._children[news["id"]]
            if "pid" in news:
                child.pid = news["pid"]
                child.started.set()
            elif "ready" in news:
                child.ready.set()
            else:
                child.status = news["status"]
                child.ended.set()
                del self._children[child.number]


# ------------------------------------------------------------------------------------------- the zygote


class _Nursery:
    """The zygote's own loop: commands in, forks, news out."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._selector = selectors.DefaultSelector()
        self._ids: dict[int, int] = {}  # pid → id
        self._pids: dict[int, int] = {}  # id → pid, of children not reaped
        self._buffer = b""
        read_end, write_end = os.pipe()
        for end in (read_end, write_end):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, _ignore)  # a handler must be there for the wake-up to be written
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._wakeup = read_end
        self._selector.register(read_end, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    if not self._commands():
                        return
                elif key.fd == self._wakeup:
                    os.read(self._wakeup, READ_BYTES)
                    self._reap()
                else:
                    self._listen(key.fd, key.data)

    def _commands(self) -> bool:
        chunk = os.read(0, READ_BYTES)
        if not chunk:
            return False
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command["op"] == "spawn":
                self._spawn(command)
            elif command["id"] in self._pids:
                os.kill(self._pids[command["id"]], command["signum"])
        return True

    def _spawn(self, command: dict[str, Any]) -> None:
        read_end, write_end = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            _become(command, write_end)
        os.close(write_end)
        self._ids[pid], self._pids[command["id"]] = command["id"], pid
        self._selector.register(read_end, selectors.EVENT_READ, command["id"])
        _say(id=command["id"], pid=pid)

    def _listen(self, descriptor: int, child: int) -> None:
        """What a child prints: `ready`, or the end of its output."""
        chunk = os.read(descriptor, READ_BYTES)
        if b"ready" in chunk:
            _say(id=child, ready=True)
        if not chunk:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _reap(self) -> None:
        while self._ids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._ids.pop(pid)
            del self._pids[child]
            _say(id=child, status=status)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def _show_tasks(_number: int, _frame: FrameType | None) -> None:
    """In a child that does not end: where each of its tasks waits, from the outermost coroutine inwards, on
    stderr."""
    for task in asyncio.all_tasks():
        waiting: Any = task.get_coro()
        while (frame := getattr(waiting, "cr_frame", None)) is not None:
            print(f"{task.get_name()} waits at {frame.f_code.co_filename}:{frame.f_lineno}", file=sys.stderr)
            waiting = waiting.cr_await


def _say(**news: object) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def _become(command: dict[str, Any], out: int) -> None:
    """In the child: turns into the service; never returns."""
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, _show_tasks)
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((null, 0), (out, 1), (log, 2)):
            os.dup2(here, there)
        os.closerange(FIRST_FREE_FD, MAX_FD)
        os.environ.clear()
        os.environ.update(command["env"])
        failpoints = sys.modules["penstock.runtime.failpoints"]
        failpoints._armed.clear()  # it was armed, or not, by the zygote's own environment
        failpoints._arm(os.environ.get("PENSTOCK_FAILPOINT"))
        sys.argv = [command["module"], *command["argv"]]
        runpy.run_module(command["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        if (error := sys.exc_info()[0]) is not None and error is not SystemExit:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Imports what the children will need, then serves."""
    importlib.import_module("penstock.runtime.failpoints")
    for module in sys.argv[1:]:
        found = importlib.util.find_spec(module)
        if found is None or found.submodule_search_locations is None:
            importlib.import_module(module)
        else:
            _import_room(module)
    assert threading.active_count() == 1, "a fork copies one thread only"
    gc.collect()
    gc.freeze()
    _Nursery().run()


def _import_room(module: str) -> None:
    """Every module of a service's shell, which brings in all it uses. (Its `__main__` would run it.)"""
    package = importlib.import_module(f"{module}.shell")
    for folder in package.__path__:
        for file in sorted(Path(folder).rglob("*.py")):
            if file.stem not in ("__init__", "launcher"):
                name = ".".join(file.relative_to(folder).with_suffix("").parts)
                importlib.import_module(f"{module}.shell.{name}")


if __name__ == "__main__":
    main()
