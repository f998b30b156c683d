"""HTTP server of the tasks' output, for the gateway alone: whole, its end, from an offset or a time on, and
as it grows.

`GET /v1/logs?job=&task=&tail=&since_ms=&age_ms=&offset=&follow=1`, with the proof of
`penstock.runtime.keys.log_keys`. An answer has pieces (`task_logs.framed`), from the position in its header
`penstock-offset` on. One that follows ends with its connection: the ledger records when a task has exited.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs

from penstock.bearer import bearer_token
from penstock.clock import wall_ms
from penstock.errors import ConfigurationError, PenstockError
from penstock.keepalive import keep_alive
from penstock.model.nouns.nodes import LogServer
from penstock.runtime.files.inotify import Watcher
from penstock.runtime.files.task_logs import MAX_LINES, Folder, Output, TaskLog, Wanted, framed, log_path
from penstock.runtime.http.http_limits import LIMITS
from penstock.runtime.http.http_server import Server
from penstock.runtime.http.http_switch import switch_of
from penstock.runtime.http.tls_server import server_context
from penstock.runtime.keys.log_keys import (
    ATTACH_PATH,
    EXEC_PATH,
    OFFSET,
    PATH,
    LogKey,
    key_in_file,
    key_of_token,
)
from penstock.runtime.race import first_of
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.sessions.commands import Commands, NotRun, gone

MAX_READERS = 256
BACKLOG = 256
PORT_FILE = "log.port"  # in the state folder
MAX_PORT = 65_535
MAX_NUMBER = 1 << 53

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = Callable[[Scope, Send], Awaitable[None]]
"""Raises `Refused`."""
NOTHING_MORE: Mapping[str, Answer] = MappingProxyType({})

logger = logging.getLogger(__name__)


class Refused(Exception):
    """An answer other than a log."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class NotBound(ConfigurationError):
    """The address is not this machine's, or the port is in use."""


class TaskLogServer:
    """Of one node, from the start of its reporter to its end.
    `announced`: the address in the node's joining."""

    def __init__(
        self, options: Options, more: Mapping[str, Answer] = NOTHING_MORE, commands: Commands | None = None
    ) -> None:
        """Listens. `more`: path → the handler of that path. Raises `NotBound`, and `ConfigurationError` for
        files that cannot be used."""
        self._options = options
        self._more, self._commands = more, commands
        self._key = _secret(options)
        self._tls = _certificate(options)
        self._listener = _listener(options)
        port = self._listener.getsockname()[1]
        self.announced = LogServer(port=port, key=self._key.id, tls=self._tls is not None)
        self._stop = asyncio.Event()
        self._readers = 0
        self._watcher: Watcher | None = None

    async def serve(self) -> None:
        """Until cancelled."""
        limits = LIMITS._replace(waiting_per_peer=MAX_READERS)
        server = Server(self, self._stop, tls=self._tls, limits=limits, limit_concurrency=2 * MAX_READERS)
        serving = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        try:
            await asyncio.shield(serving)
        finally:
            self._stop.set()
            await asyncio.gather(serving, return_exceptions=True)
            self._listener.close()
            if self._watcher is not None:
                self._watcher.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            return
        self._readers += 1
        try:
            if scope["method"] == "GET" and (answer := self._more.get(scope["path"])) is not None:
                await answer(scope, send)
                return
            query = self._proven(scope)
            if scope["path"] in (EXEC_PATH, ATTACH_PATH) and self._commands is not None:
                await self._command(self._commands, scope, query, receive, send)
                return
            job_id, task_id, wanted, follow = self._asked(scope, query)
            path = log_path(self._options.log_dir, job_id, task_id)
            if follow:
                await self._follow(path, wanted, receive, send)
            else:
                await self._send_whole(path, wanted, send)
        except Refused as refusal:
            await _answer(send, refusal.status, str(refusal))
        finally:
            self._readers -= 1

    def _proven(self, scope: Scope) -> str:
        """The query of a request by the gateway. Raises `Refused`."""
        query: str = scope["query_string"].decode("latin-1")
        proofs = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        if len(proofs) != 1 or not self._key.admits(proofs[0], self._options.node_id, query):
            raise Refused(403, "the proof of the gateway's secret is missing or wrong")
        return query

    async def _command(
        self, commands: Commands, scope: Scope, query: str, receive: Receive, send: Send
    ) -> None:
        """Raises `Refused`."""
        if scope["method"] == "GET":
            await _answer(send, 200, commands.nonce())
            return
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        try:
            await commands.run(scope["path"], asked, receive, switch_of(scope), self._key, self._stop)
        except NotRun as error:
            raise Refused(error.status, str(error)) from error

    def _asked(self, scope: Scope, query: str) -> tuple[str, str, Wanted, bool]:
        """Job, task, part, whether to follow. Raises `Refused`."""
        if (scope["method"], scope["path"]) != ("GET", PATH):
            raise Refused(404, f"only GET {PATH}")
        if self._readers > MAX_READERS:
            raise Refused(503, f"{MAX_READERS} readers are served already")
        found = {name: values[0] for name, values in parse_qs(query).items()}
        numbers = {name: _number(found, name) for name in ("tail", "since_ms", "age_ms", "offset")}
        since_ms = numbers["since_ms"]
        if (age_ms := numbers["age_ms"]) is not None:  # by this machine's clock, as are the times
            since_ms = max(since_ms or 0, wall_ms() - age_ms)
        tail = None if numbers["tail"] is None else min(numbers["tail"], MAX_LINES)
        if not found.get("job") or not found.get("task"):
            raise Refused(400, "job and task are missing")
        return found["job"], found["task"], Wanted(tail, since_ms, numbers["offset"]), "follow" in found

    async def _send_whole(self, path: Path, wanted: Wanted, send: Send) -> None:
        """The present content."""
        with await asyncio.to_thread(_open, path, wanted) as log:
            await _begin(send, log.position)
            pieces = log.present()
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                await _send(send, piece)
        await send({"type": "http.response.body", "body": b""})

    async def _follow(self, path: Path, wanted: Wanted, receive: Receive, send: Send) -> None:
        """The file as it grows, even if it does not exist yet,
        until the reader disconnects or the reporter ends."""
        self._watcher = self._watcher or Watcher()
        left = asyncio.ensure_future(gone(receive))
        log: TaskLog | None = None
        try:
            await asyncio.to_thread(path.parent.mkdir, 0o700, True, True)
            with self._watcher.watching(path.parent) as changed:
                while not left.done() and not self._stop.is_set():
                    changed.clear()
                    if log is None:
                        with suppress(Refused):
                            log = await asyncio.to_thread(_open, path, wanted)
                            await _begin(send, log.position)
                    if log is not None and (piece := await asyncio.to_thread(log.read)) is not None:
                        await _send(send, piece)
                        continue
                    await first_of(changed.wait(), asyncio.shield(left), self._stop.wait())
        except (OSError, PenstockError) as error:
            if log is None:
                raise Refused(500, f"{path.parent} cannot be watched: {error}") from error
            logger.warning("%s is followed no further: %s", path, error)
        finally:
            left.cancel()
            if log is not None:
                log.close()


def _open(path: Path, wanted: Wanted) -> TaskLog:
    """The log at the beginning of the wanted part. Raises `Refused`."""
    try:
        return TaskLog(Folder(path), wanted)
    except FileNotFoundError as error:
        raise Refused(404, "there is no such output here") from error
    except OSError as error:
        raise Refused(500, f"its file cannot be read: {error.strerror}") from error


def _number(found: dict[str, str], name: str) -> int | None:
    """Raises `Refused`."""
    text = found.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) > MAX_NUMBER:
        raise Refused(400, f"{name} is not a number of that kind")
    return int(text)


async def _send(send: Send, piece: Output) -> None:
    await send({"type": "http.response.body", "body": framed(piece), "more_body": True})


async def _begin(send: Send, first: int) -> None:
    headers = [(b"content-type", b"application/octet-stream"), (OFFSET.encode(), str(first).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _answer(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (OFFSET.encode(), b"0")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def _secret(options: Options) -> LogKey:
    """From the key file, else from the node's token for the gateway. Raises `ConfigurationError`."""
    if options.log_key is not None:
        return key_in_file(options.log_key)
    assert options.gateway_token_file is not None
    token = bearer_token(options.gateway_token_file, "--gateway-token-file")
    return key_of_token(sha256(token.encode()).digest())


def _certificate(options: Options) -> ssl.SSLContext | None:
    """Raises `ConfigurationError`."""
    if options.log_cert is None and options.log_cert_key is None:
        return None
    if options.log_cert is None or options.log_cert_key is None:
        raise ConfigurationError("--log-cert and --log-cert-key belong together; give both, or none for http")
    return server_context(options.log_cert, options.log_cert_key, ("--log-cert", "--log-cert-key"))


def listens_at(options: Options) -> tuple[str, int]:
    """Host and port; port 0 is any free one. Raises `NotBound`."""
    if options.log_bind is None:
        return options.address or "127.0.0.1", _port_before(options)
    host, colon, text = options.log_bind.rpartition(":")
    if not colon or not host or not text.isdecimal() or int(text) > MAX_PORT:
        raise NotBound(f"--log-bind {options.log_bind}: not HOST:PORT; give one such as 0.0.0.0:8743")
    return host, int(text)


def _port_before(options: Options) -> int:
    """Port of the reporter before,
    so that a restart does not change the address for pending readers; 0: none."""
    try:
        text = (options.state_dir / PORT_FILE).read_text()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() and int(text) <= MAX_PORT else 0


def _listener(options: Options) -> socket.socket:
    """Bound and listening. Raises `NotBound`."""
    host, port = listens_at(options)
    if options.log_bind is not None:
        return _bound(host, port)
    try:
        listener = _bound(host, port)
    except NotBound:
        if not port:
            raise
        listener = _bound(host, 0)
    with suppress(OSError):  # errors of the state folder are reported elsewhere
        options.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (options.state_dir / PORT_FILE).write_text(str(listener.getsockname()[1]))
    return listener


def _bound(host: str, port: int) -> socket.socket:
    """Raises `NotBound`."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], socket.SOCK_STREAM)
    except OSError as error:
        raise NotBound(f"--log-bind: {host} is not an address of this machine ({error.strerror})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise NotBound(
            f"--log-bind: {host}:{port} cannot be bound ({error.strerror}); the gateway fetches tasks' "
            "output there, so name an address of this machine and a free port, such as 0.0.0.0:8743"
        ) from error
    listener.setblocking(False)
    keep_alive(listener)
    return listener
