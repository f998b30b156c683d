"""Client of the launcher: starts tasks and watches their shims by pidfd. Makes no decisions."""

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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from penstock.backoff import retry
from penstock.errors import ConfigurationError
from penstock.model.decisions.orders import StartTask
from penstock_services.node_reporter.shell.isolation.confinement import PROBE, PROBE_TIMEOUT_S, Confinement
from penstock_services.node_reporter.shell.isolation.users import TaskUser
from penstock_services.node_reporter.shell.ports import Callbacks, Key, NotStartable
from penstock_services.node_reporter.shell.process import processes
from penstock_services.node_reporter.shell.process.launcher import IMPORTABLE, LAUNCHER
from penstock_services.node_reporter.shell.process.shim import MAX_MESSAGE_BYTES
from penstock_services.node_reporter.shell.watchdogs.reporter_watch import ANSWER, QUESTION

# a killed reporter's launcher releases it in milliseconds, a reporter that leaves while the log is down in 10
# s
LOCK_WAIT_S = 15.0
LOCK_PAUSE_S = 0.01
OVERHEAD = 32  # bytes of a socket's buffer that no message gets
ISOLATED_PYTHON = (sys.executable, "-I", "-S", "-c")  # followed by the code
SHIM_SIGNALS: Mapping[signal.Signals, signal.Signals] = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGKILL: signal.SIGUSR1,
}
"""Signal for the task → the signal to its shim (see shim.py)."""

logger = logging.getLogger(__name__)


def find_confinement(user: TaskUser | None) -> tuple[Confinement, list[str]]:
    """The best that this machine allows, tried with real processes; and why no better one is possible."""
    command = [*ISOLATED_PYTHON, IMPORTABLE + PROBE, json.dumps(user and user[:3])]
    try:
        answer = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, timeout=PROBE_TIMEOUT_S, cwd="/"
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Confinement(user=user and user[:3]), [str(error)]
    found = json.loads(answer)
    return Confinement(*found["plan"]), found["errors"]


async def lock_state(state_dir: Path) -> int:
    """Takes the state folder's lock; returns its descriptor. Raises `ConfigurationError` when another process
    has it.

    The lock proves that no former launcher or half-started shim is left.
    """
    descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)

    async def lock() -> int:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    try:
        return await retry(
            lock, (BlockingIOError,), first_s=LOCK_PAUSE_S, longest_s=LOCK_PAUSE_S, limit_s=LOCK_WAIT_S
        )
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigurationError(
            f"--state-dir: {state_dir} is in use by another node-reporter; stop that one or give another "
            "folder"
        ) from error


class RequestOf(Protocol):
    """The request for an order, see shim.py for its fields."""

    def __call__(self, order: StartTask, until_s: float | None, *, gated: bool) -> Mapping[str, Any]: ...


class Spawner:
    """The launcher's other end; adapter of `ports.Launcher`. `marks`: the launcher's environment.

    `contact`: file with the recorded contact, if the launcher is to
    kill this process when it hangs.
    """

    def __init__(
        self,
        lock: int,
        marks: Mapping[str, str],
        plan: Confinement,
        callbacks: Callbacks,
        request_of: RequestOf,
        contact: Path | None = None,
    ) -> None:
        self._started, self._gone, self._lost = callbacks
        self._request_of = request_of
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
        self._question, asking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._question.setblocking(False)
        own = os.pidfd_open(os.getpid())
        watched = None if contact is None else (str(contact), own, asking.fileno())
        with theirs, asking, os.fdopen(own):
            self._process = subprocess.Popen(
                [
                    *ISOLATED_PYTHON,
                    LAUNCHER,
                    str(theirs.fileno()),
                    str(lock),
                    json.dumps(plan),
                    json.dumps(watched),
                ],
                pass_fds=(theirs.fileno(), lock, *(watched or ())[1:]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.defpath, **marks},
                cwd="/",
                start_new_session=True,
            )
        self._launcher = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._control.fileno(), self._on_message)
        self._loop.add_reader(self._question.fileno(), self._answer)
        self._loop.add_reader(self._launcher, self._on_lost)  # not the socket, which shims hold as well

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(self, order: StartTask, until_s: float | None, *, gated: bool) -> None:
        request = json.dumps(self._request_of(order, until_s, gated=gated)).encode()
        most = min(
            MAX_MESSAGE_BYTES, self._control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - OVERHEAD
        )
        if len(request) > most:
            raise NotStartable(
                f"command, environment and secrets take {len(request)} bytes of {most}; have the program "
                "read files"
            )
        self._queue.append(request)
        self._flush()

    def attach(self, key: Key, shim: int, shim_start: int | None) -> bool:
        descriptor = processes.open_pidfd(shim, shim_start)
        if descriptor is None:
            return False
        self._pidfds[key] = descriptor
        self._loop.add_reader(descriptor, self._on_exit, key)
        return True

    def _tell(self, key: Key, number: signal.Signals) -> None:
        """Signals the shim; one that has ended needs no signal."""
        descriptor = self._pidfds.get(key)
        if descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)

    def signal(self, key: Key, number: signal.Signals) -> None:
        self._tell(key, SHIM_SIGNALS[number])

    def open_gate(self, key: Key) -> None:
        self._tell(key, signal.SIGHUP)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        self._control.close()
        self._loop.remove_reader(self._question.fileno())
        self._question.close()
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
        """Handles all messages that the launcher and the shims have sent up to now."""
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
            found = json.loads(message)
            key = (found.get("task_id", ""), found.get("token", 0))
            if found["event"] == "taken":
                if not self.attach(key, found["shim"], None):
                    self._loop.call_soon(self._on_exit, key)
            elif found["event"] == "started":
                self._started(key, found["pid"], found["started_ms"])

    def _answer(self) -> None:
        """Answers the launcher's probe."""
        try:
            if self._question.recv(len(QUESTION)):
                self._question.send(ANSWER)
                return
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("the launcher asked and takes no answer: %s", error)
        self._loop.remove_reader(self._question.fileno())  # it has ended; its pidfd reports so

    def _on_exit(self, key: Key) -> None:
        """The shim has ended. Its messages are handled first."""
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
