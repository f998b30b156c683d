"""Embedded Postgres: one server as a child process, which ends with this process; committed data survive any
kill.

Layout of the folder: `data/` (the cluster), `password` (mode 0600, random), `server.log` (`.old`: that of the
previous start), `lock` (held while a server runs). Access is by SCRAM on the socket and on loopback TCP; the
socket lies in a folder of mode 0700. Postgres refuses to run as root, so root hands the folder to another
user and the server runs as that user.
"""

import asyncio
import fcntl
import logging
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple, TypedDict
from urllib.parse import quote

import asyncpg

from penstock.errors import ConfigurationError
from penstock.runtime.database.postgres_binaries import find_binaries, traversable_by
from penstock.runtime.parents import ends_with_parent

logger = logging.getLogger(__name__)

USER = "penstock"
DATABASE = "penstock"
START_TIMEOUT_S = 120.0  # a normal start takes 0.1–0.5 s; crash recovery, and a busy machine, take more
DYING_TIMEOUT_S = 2.0  # a killed server is gone within a moment; then its port is free again
STOP_TIMEOUT_S = 10.0  # a fast shutdown writes one checkpoint
READY_POLL_S = 0.02
SOCKET_PATH_MAX_BYTES = 100  # sun_path holds 108 on Linux; some systems hold 104
FIRST_PORT, LAST_PORT = 30_000, 31_999
"""Between the ports of jobs (`penstock.ledger.derived.ports`) and the ephemeral ones, from 32768 on Linux."""

_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "128MB",  # touched as the working set grows; idle it stays small
    "max_connections": "80",
    "wal_level": "minimal",  # no replica: less to write per commit
    "max_wal_senders": "0",
    "max_wal_size": "512MB",
    "checkpoint_timeout": "15min",
    "jit": "off",  # the statements are short: compiling costs more than it gains
    "max_parallel_workers_per_gather": "0",
    "huge_pages": "off",
    "log_checkpoints": "off",
}


class _AsUser(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


class PostgresServer:
    """Starts, restarts and stops one server; survives a kill -9 of itself, of the server, or of both.

    The server ends when the thread that called `start` ends (PDEATHSIG counts threads): start it from a
    thread that lives as long as the program.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._plan: _Plan | None = None
        self._lock: IO[bytes] | None = None
        self._port: int | None = None
        self._temporary: list[Path] = []  # folders made outside the given one, removed by stop()

    @property
    def pid(self) -> int | None:
        """Process id of the postmaster, None when there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self, folder: Path) -> str:
        """Creates the cluster if need be, starts the server, waits until it answers; returns the DSN.

        Again after the server died: same folder, same port, so that clients may keep their DSN.
        Raises `ConfigurationError` with the tail of the server's log.
        """
        await self._reap_dead()
        try:
            if self._plan is None:
                absolute = os.path.abspath(folder)  # noqa: ASYNC240 - a name only
                self._plan = await self._prepare(Path(absolute))
            self._port = await self._launch(self._plan)
        except BaseException:
            await self.stop()
            raise
        return self._plan.dsn(self._port, DATABASE)

    async def stop(self) -> None:
        """Ends the server (fast shutdown, then harder) and removes
        its files outside the folder; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            for sign in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
                if process.poll() is not None:
                    break
                process.send_signal(sign)
                try:
                    await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    continue
        for place in self._temporary:
            shutil.rmtree(place, ignore_errors=True)
        self._temporary.clear()
        if self._lock is not None:
            self._lock.close()
        self._lock = self._plan = None

    async def _reap_dead(self) -> None:
        """Waits for the end of a killed server of this object;
        a server that still runs is an error of the caller."""
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, DYING_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise ConfigurationError("this PostgreSQL server runs already; stop it first") from None
            self._process = None

    async def _choose_port(self) -> int:
        """The port of the previous start, for clients that hold the DSN, unless it is taken."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + DYING_TIMEOUT_S
        while self._port is not None:
            if _is_free(self._port):
                return self._port
            if loop.time() > deadline_s:
                break
            await asyncio.sleep(READY_POLL_S)
        return free_port()

    async def _prepare(self, folder: Path) -> "_Plan":
        """Locks the folder and creates the cluster if need be."""
        owner = _server_user()
        binaries = find_binaries(uid=owner.pw_uid if owner is not None else None)
        home = self._home(folder, owner)
        self._lock = _locked(home)
        password = await _ensure_cluster(binaries.folder, home, owner)
        return _Plan(binaries.folder, home, self._socket_dir(home, owner), owner, password)

    def _home(self, folder: Path, owner: pwd.struct_passwd | None) -> Path:
        """The folder to use: the given one, or,
        if the server's user (as root) cannot reach it, one under /tmp."""
        folder.mkdir(parents=True, exist_ok=True)
        if owner is None:
            return folder
        home = folder
        if not traversable_by(folder.parent, owner.pw_uid):
            home = self._make_temporary("penstock-pg-")
            logger.warning(
                "user %s cannot reach %s: this server's data lie in %s and are removed when it stops",
                owner.pw_name,
                folder,
                home,
            )
        os.chown(home, owner.pw_uid, owner.pw_gid)
        return home

    def _socket_dir(self, home: Path, owner: pwd.struct_passwd | None) -> Path:
        place = home / "run"
        if len(os.fsencode(place / f".s.PGSQL.{LAST_PORT}.lock")) > SOCKET_PATH_MAX_BYTES:
            place = self._make_temporary("pst-")
        place.mkdir(exist_ok=True)
        place.chmod(0o700)
        if owner is not None:
            os.chown(place, owner.pw_uid, owner.pw_gid)
        return place

    def _make_temporary(self, prefix: str) -> Path:
        self._temporary.append(Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp")))
        return self._temporary[-1]

    async def _launch(self, plan: "_Plan") -> int:
        """Starts the process and waits for it to answer; returns its port.

        Waits for a dying predecessor on the same folder; takes another port if that one was taken meanwhile.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + START_TIMEOUT_S
        while True:
            port = await self._choose_port()
            _remove_stale_pid_file(plan.home / "data" / "postmaster.pid")
            log = plan.home / "server.log"
            if log.exists():
                log.replace(log.with_suffix(".log.old"))
            self._process = _spawn(plan, port, log)
            while self._process.poll() is None:
                if await _is_ready(plan.dsn(port, "postgres")):
                    return port
                if loop.time() > deadline_s:
                    raise ConfigurationError(
                        f"PostgreSQL did not answer within {START_TIMEOUT_S:.0f} s: {_end_of(log)}"
                    )
                await asyncio.sleep(READY_POLL_S)
            reason = _end_of(log)
            if "Address already in use" in reason:
                self._port = None
            elif "is another postmaster" not in reason.lower() and "still in use" not in reason:
                raise ConfigurationError(f"PostgreSQL ({plan.bin_dir}) did not start: {reason}")
            if loop.time() > deadline_s:
                raise ConfigurationError(f"PostgreSQL ({plan.bin_dir}) could not start: {reason}")
            await asyncio.sleep(10 * READY_POLL_S)


class _Plan(NamedTuple):
    """Binaries, folder and user of a server to start."""

    bin_dir: Path
    home: Path
    socket_dir: Path
    owner: pwd.struct_passwd | None
    password: str

    def dsn(self, port: int, database: str) -> str:
        address = f"host={quote(str(self.socket_dir))}&port={port}"
        return f"postgresql://{USER}:{self.password}@/{database}?{address}"


def _end_of(log: Path, size: int = 1500) -> str:
    return log.read_bytes()[-size:].decode(errors="replace").strip()


def _locked(home: Path) -> IO[bytes]:
    """The open lock file. Raises `ConfigurationError` when another program has it."""
    lock = open(home / "lock", "ab")  # noqa: SIM115 - held until stop()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigurationError(
            f"the data folder {home} is in use by another Penstock on this machine; "
            "stop that one or choose another folder"
        ) from error
    return lock


def free_port() -> int:
    """A loopback TCP port below the ephemeral range without a listener right now."""
    for _ in range(200):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT + 1)
        if _is_free(port):
            return port
    raise ConfigurationError(f"no free TCP port between {FIRST_PORT} and {LAST_PORT} on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: a port in TIME_WAIT may be used.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _server_user() -> pwd.struct_passwd | None:
    """The user that the server runs as when this process is root; None: the same user."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ConfigurationError(
        "PostgreSQL refuses to run as root and there is no user postgres or nobody; run as another user"
    )


async def _ensure_cluster(bin_dir: Path, home: Path, owner: pwd.struct_passwd | None) -> str:
    """The password of the cluster in `home`,
    which is created first if it does not exist (whole or not at all)."""
    password_file, data = home / "password", home / "data"
    if (data / "PG_VERSION").exists() and password_file.exists():
        return password_file.read_text(encoding="ascii").strip()
    if data.exists() and not password_file.exists():
        raise ConfigurationError(
            f"{data} exists but {password_file} does not: not a folder of ours; choose another"
        )
    password = secrets.token_urlsafe(24)
    making = home / "data.new"
    shutil.rmtree(making, ignore_errors=True)  # remains of a killed start
    password_file.unlink(missing_ok=True)
    descriptor = os.open(password_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(password + "\n")
    if owner is not None:
        os.chown(password_file, owner.pw_uid, owner.pw_gid)
    command = [
        str(bin_dir / "initdb"),
        "-D",
        str(making),
        "-U",
        USER,
        "-A",
        "scram-sha-256",
        f"--pwfile={password_file}",
        "--no-locale",
        "--encoding=UTF8",
        "--no-instructions",
    ]
    code, printed = await _ended(_begun(command, owner))
    if code != 0:
        raise ConfigurationError(f"initdb failed in {home}: {printed.strip()[-2000:]}")
    making.rename(data)
    return password


def _begun(command: list[str], owner: pwd.struct_passwd | None) -> "subprocess.Popen[str]":
    """Starts the command in a session of its own; it ends with this process."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
        start_new_session=True,
        preexec_fn=ends_with_parent(signal.SIGKILL),
        **_as_user(owner),
    )


async def _ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and output of the process. When cancelled, it is killed first: on a slow disk it may take a
    minute to write its files."""
    ending = asyncio.ensure_future(asyncio.to_thread(process.communicate))
    try:
        printed, _ = await asyncio.shield(ending)
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await ending
        raise
    return process.returncode, printed


def _as_user(owner: pwd.struct_passwd | None) -> _AsUser:
    if owner is None:
        return {}
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}


def _spawn(plan: _Plan, port: int, log_path: Path) -> "subprocess.Popen[bytes]":
    """Forks on the calling thread, into a session of its own,
    so that Ctrl-C reaches this process and not the server."""
    settings = {
        **_SETTINGS,
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "unix_socket_directories": str(plan.socket_dir),
        "unix_socket_permissions": "0700",
    }
    arguments = [str(plan.bin_dir / "postgres"), "-D", str(plan.home / "data")]
    for name, value in settings.items():
        arguments += ["-c", f"{name}={value}"]
    with open(log_path, "ab") as log:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
            preexec_fn=ends_with_parent(signal.SIGINT),
            **_as_user(plan.owner),
        )


def _remove_stale_pid_file(path: Path) -> None:
    """Removes a pid file whose process is not a postgres: Postgres itself would take a reused pid for a
    running server."""
    try:
        pid = int(path.read_text(encoding="ascii").split("\n", 1)[0])
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0]
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return  # no file, or no such process: Postgres handles both
    if os.path.basename(program) not in (b"postgres", b"postmaster"):
        path.unlink(missing_ok=True)


async def _is_ready(dsn: str) -> bool:
    """Whether a session can be opened, and so the database exists.
    Wrong credentials are an error, not 'not yet'."""
    try:
        connection = await asyncpg.connect(dsn, timeout=START_TIMEOUT_S)
    except (OSError, asyncpg.CannotConnectNowError, asyncpg.ConnectionDoesNotExistError, TimeoutError):
        return False
    except asyncpg.InvalidPasswordError as error:
        raise ConfigurationError(f"the embedded PostgreSQL refuses its own password file: {error}") from error
    try:
        if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
            await connection.execute(f"CREATE DATABASE {DATABASE}")
    finally:
        await connection.close()
    return True
