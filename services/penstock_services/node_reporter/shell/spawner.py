"""Starts tasks through the launcher and watches their shims by pidfd. Nothing here decides anything."""

import asyncio
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError, KernelError
from penstock.runtime.task_logs import file_name
from penstock_services.node_reporter.shell import processes
from penstock_services.node_reporter.shell.launcher import MAX_MESSAGE_BYTES

LOCK_WAIT_S = 15.0  # a killed reporter's launcher lets go in milliseconds, one that leaves while the log is away in 10 s
LOCK_PAUSE_S = 0.01
LAUNCHER = Path(__file__).with_name("launcher.py")
SHIM_SIGNALS: Mapping[signal.Signals, signal.Signals] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGKILL: signal.SIGUSR1,
    signal.SIGUSR1: signal.SIGUSR2,
}
"""What is to reach the task → what its shim is told (see launcher.py)."""

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""Task id and token."""


class LauncherLost(KernelError):
    """The launcher ended under us: which requests it took is known again after a new start (the lock)."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What tells our processes from others' on the same machine."""

    node_id: str
    state_dir: str

    def environment(self) -> dict[str, str]:
        return {"PENSTOCK_NODE_ID": self.node_id, "PENSTOCK_STATE_DIR": self.state_dir}


def task_folder(state_dir: Path, task_id: str, token: int) -> Path:
    """Where a task's shim writes down its start and end."""
    return state_dir / "tasks" / f"{file_name(task_id)}@{token}"


def read_json(path: Path) -> dict[str, Any] | None:
    """A file that a shim wrote whole; None when it is not there, or not readable: the machine lost it as it went down."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found


async def lock_state(state_dir: Path) -> int:
    """Takes the state folder's lock; returns its descriptor. Raises `ConfigurationError` when another has it.

    Whoever has it knows that no former launcher or half-started shim is left.
    """
    descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(round(LOCK_WAIT_S / LOCK_PAUSE_S)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(LOCK_PAUSE_S)
        else:
            return descriptor
    os.close(descriptor)
    raise ConfigurationError(
        f"--state-dir: {state_dir} is in use by another node-reporter; stop that one or give another folder"
    )


class Spawner:
    """The launcher's other end. Calls back on the event loop: `started(key, pid, ms)`, `gone(key)`, `lost()`."""

    def __init__(
        self,
        lock: int,
        marks: Marks,
        *,
        started: Callable[[Key, int, int], None],
        gone: Callable[[Key], None],
        lost: Callable[[], None],
    ) -> None:
        self._started = started
        self._gone = gone
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[Key, int] = {}
        self._queue: deque[bytes] = deque()
        self._closed = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            ours.setsockopt(socket.SOL_SOCKET, option, 4 * MAX_MESSAGE_BYTES)
            theirs.setsockopt(socket.SOL_SOCKET, option, 4 * MAX_MESSAGE_BYTES)
        self._control = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LAUNCHER), str(theirs.fileno()), str(lock)],
                pass_fds=(theirs.fileno(), lock),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.defpath, **marks.environment()},
                cwd="/",
                start_new_session=True,
            )
        self._launcher = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._control.fileno(), self._on_message)
        self._loop.add_reader(self._launcher, self._on_lost)  # the socket alone is also held by shims

    @property
    def launcher_pid(self) -> int:
        return self._process.pid

    def spawn(self, request: Mapping[str, Any]) -> None:
        """Asks for one task; see launcher.py for the request's fields."""
        self._queue.append(json.dumps(request).encode())
        self._flush()

    def attach(self, key: Key, shim: int, ticks: int | None) -> bool:
        """Watches a shim that runs already. False: it has ended."""
        descriptor = processes.open_pidfd(shim, ticks)
        if descriptor is None:
            return False
        self._pidfds[key] = descriptor
        self._loop.add_reader(descriptor, self._on_exit, key)
        return True

    def signal(self, key: Key, number: signal.Signals) -> None:
        """Has the shim signal its task; a shim that has ended needs none."""
        descriptor = self._pidfds.get(key)
        if descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, SHIM_SIGNALS[number])

    def close(self) -> None:
        """Lets the launcher go; tasks and shims stay."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        self._control.close()
        self._loop.remove_reader(self._launcher)
        os.close(self._launcher)
        for descriptor in self._pidfds.values():
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._pidfds.clear()
        self._process.wait()

    def _flush(self) -> None:
        while self._queue:
            try:
                self._control.send(self._queue[0])
            except BlockingIOError:
                self._loop.add_writer(self._control.fileno(), self._flush)
                return
            except OSError:
                self._on_lost()
                return
            self._queue.popleft()
        self._loop.remove_writer(self._control.fileno())

    def _on_message(self) -> None:
        """Everything that the launcher and the shims have said up to now."""
        while not self._closed:
            try:
                message = self._control.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._on_lost()
                return
            told = json.loads(message)
            key = (told.get("task_id", ""), told.get("token", 0))
            if told["event"] == "taken":
                if not self.attach(key, told["shim"], None):
                    self._loop.call_soon(self._on_exit, key)
            elif told["event"] == "started":
                self._started(key, told["pid"], told["started_ms"])

    def _on_exit(self, key: Key) -> None:
        """The shim has ended. What it said before is heard first."""
        self._on_message()
        descriptor = self._pidfds.pop(key, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        if not self._closed:
            self._gone(key)

    def _on_lost(self) -> None:
        if not self._closed:
            logger.error("the launcher (pid %d) ended; starting over", self._process.pid)
            self.close()
            self._lost()
