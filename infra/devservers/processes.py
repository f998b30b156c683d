"""Child processes of the launchers: started on loopback, never outliving their parent.

Ideal: a child exists exactly as long as the code block that started it. Departure: a parent that is
killed -9 cannot clean up, so the kernel kills the child for it (PR_SET_PDEATHSIG); files in a temporary
folder then stay. The kernel ties that signal to the *thread* that started the child, hence every child is
started from one thread that lives as long as the process.
"""

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

LOWEST_PORT = 30_000  # above the ports of jobs (`penstock.ledger.derived.ports`)
HIGHEST_PORT = 31_999  # below Linux' ephemeral range (32768 on), so that no outgoing connection takes it
PORT_ATTEMPTS = 100
START_ATTEMPTS = 3  # another process may take a free port between its choice and its use
POLL_S = 0.02  # between readiness probes; a probe is one loopback connection
LOG_TAIL_LINES = 25
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_libc = ctypes.CDLL(None, use_errno=True)
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-spawner")


class LaunchError(Exception):
    """A real part could not be built, started or reached. The message holds the remedy or the log's tail."""


def free_port() -> int:
    """A TCP port on 127.0.0.1, LOWEST_PORT..HIGHEST_PORT, free at this moment.

    Another process may take it before the caller binds it: callers start again with another port.
    Raises `LaunchError` after PORT_ATTEMPTS occupied ones.
    """
    for _ in range(PORT_ATTEMPTS):
        port = LOWEST_PORT + secrets.randbelow(HIGHEST_PORT - LOWEST_PORT + 1)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port on 127.0.0.1 between {LOWEST_PORT} and {HIGHEST_PORT}")


def on_free_ports(start: Callable[[], None]) -> None:
    """Calls `start`, which chooses its ports, again where another process has taken one before its use."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            start()
        except LaunchError as error:
            if attempt == START_ATTEMPTS or "address already in use" not in str(error).lower():
                raise
        else:
            return


class Child:
    """One child process whose output goes to `log_path` (appended)."""

    def __init__(
        self, name: str, argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts it at once. Raises `LaunchError` when the program cannot be executed."""
        self.name = name
        self.log_path = log_path
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the parent died before prctl took effect
                os._exit(1)

        def start() -> subprocess.Popen[bytes]:
            with log_path.open("ab") as log:
                return subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=None if env is None else dict(env),
                    # Ctrl-C reaches the launcher, which then stops the child in order
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )

        try:
            self._process = _spawner.submit(start).result()
        except OSError as error:
            raise LaunchError(f"{name}: cannot execute {argv[0]}: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -9 after SIGKILL."""
        return self._process.poll()

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, at most `grace_s` of waiting, then SIGKILL; returns when it is gone. Idempotent."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.kill9()

    def kill9(self) -> None:
        """SIGKILL to it and to what it started (a build's compilers); returns when it is gone. Idempotent."""
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)  # it leads its own session, and is not reaped yet
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def log_tail(self) -> str:
        """The last LOG_TAIL_LINES lines of its output."""
        if not self.log_path.exists():
            return "(no output)"
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(no output)"

    def wait_ready(
        self, probe: Callable[[], bool], timeout_s: float | None = None, *, needs: "Sequence[Child]" = ()
    ) -> None:
        """Calls `probe` until it returns True. Raises `LaunchError` when the child, or one that it needs,
        exits first.

        `timeout_s`: the same when so much time has passed; None: as long as the child lives, however busy the
        machine is.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not probe():
            for child in (self, *needs):
                if not child.running:
                    raise LaunchError(
                        f"{child.name} exited with {child.exit_code} before {self.name} was "
                        f"ready:\n{child.log_tail()}"
                    )
            if deadline is not None and time.monotonic() > deadline:
                raise LaunchError(f"{self.name} was not ready within {timeout_s:g} s:\n{self.log_tail()}")
            time.sleep(POLL_S)


def run_to_end(
    name: str,
    argv: Sequence[str],
    *,
    log_path: Path,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs a child to its end. Raises `LaunchError` with the log's tail when it fails, or takes longer than
    `timeout_s`."""
    child = Child(name, argv, log_path=log_path, env=env)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while child.running:
            if deadline is not None and time.monotonic() > deadline:
                raise LaunchError(f"{name} took more than {timeout_s:g} s:\n{child.log_tail()}")
            time.sleep(POLL_S)
    finally:
        child.kill9()
    if child.exit_code != 0:
        raise LaunchError(f"{name} exited with {child.exit_code}:\n{child.log_tail()}")


def until_signalled(announce: str) -> None:
    """Prints and waits for Ctrl-C or SIGTERM."""
    asked = threading.Event()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    print(announce, flush=True)
    asked.wait()


def as_command(serve: Callable[[], None]) -> int:
    """Exit status of a `make` target that serves until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve()
    except LaunchError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
