"""Commands in running tasks (`penstock exec`), for the gateway alone: two paths of the log server, with the
same proof.

`POST /v1/exec?task=&token=&nonce=&sha256=`: runs the body, a JSON array of arguments with this digest, in
that task. `GET /v1/exec` gives the nonce, which counts once, so that nobody can send a request again. The
answer is NDJSON, `{"stdout": BASE64}` and `{"stderr": BASE64}` as they come, at last `{"exit_code": N}`. When
the connection ends, so does the command.
"""

import asyncio
import json
import logging
import os
import secrets
import subprocess
from base64 import b64encode
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from hashlib import sha256
from typing import IO, Any

from penstock.runtime.log_keys import OFFSET
from penstock.runtime.race import first_of
from penstock_services.node_reporter.shell.confinement import Confinement
from penstock_services.node_reporter.shell.enter import ENTER
from penstock_services.node_reporter.shell.launcher import IMPORTABLE
from penstock_services.node_reporter.shell.ports import Key, Started
from penstock_services.node_reporter.shell.spawner import ISOLATED_PYTHON

MAX_COMMANDS = 16  # at once on a node; each is a process beside its task
MAX_NONCES = 256
MAX_BODY_BYTES = 1 << 16
MAX_OUTPUT_BYTES = 64 << 20  # of a command; as of a task by default
CHUNK_BYTES = 65_536
HEADERS = [(b"content-type", b"application/x-ndjson"), (OFFSET.encode(), b"0")]

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = logging.getLogger(__name__)


class NotRun(Exception):
    """Why a command is not run, and the HTTP status that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Commands:
    """Of one node. `started`: the record of a task's start, None: there is none."""

    def __init__(self, plan: Confinement, started: Callable[[Key], Started | None]) -> None:
        self._plan, self._started = plan, started
        self._nonces: dict[str, None] = {}
        self._running = 0

    def nonce(self) -> str:
        while len(self._nonces) >= MAX_NONCES:
            del self._nonces[next(iter(self._nonces))]
        found = secrets.token_hex(16)
        self._nonces[found] = None
        return found

    async def run(self, asked: dict[str, str], receive: Receive, send: Send, stop: asyncio.Event) -> None:
        """Answers one request, of which the proof is checked. Raises `NotRun`."""
        argv = await self._argv(asked, receive)
        key = asked.get("task", ""), int(asked.get("token", "0"))
        started = self._started(key)
        if started is None:
            raise NotRun(404, "the task does not run here")
        if self._running >= MAX_COMMANDS:
            raise NotRun(503, f"{MAX_COMMANDS} commands are run on this node already; end one of them")
        self._running += 1
        try:
            await self._run(started, argv, receive, send, stop)
        finally:
            self._running -= 1

    async def _argv(self, asked: dict[str, str], receive: Receive) -> list[str]:
        """Raises `NotRun`."""
        body, more = b"", True
        while more and len(body) <= MAX_BODY_BYTES:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if self._nonces.pop(asked.get("nonce", ""), self) is self:
            raise NotRun(403, "the nonce is not known here, or was used")
        if more or sha256(body).hexdigest() != asked.get("sha256"):
            raise NotRun(400, f"the body has another digest, or more than {MAX_BODY_BYTES} bytes")
        found: list[str] = json.loads(body)
        return found

    async def _run(
        self, started: Started, argv: list[str], receive: Receive, send: Send, stop: asyncio.Event
    ) -> None:
        request = {
            "shim": started.shim, "shim_start": started.shim_start, "pid": started.pid, "plan": self._plan,
            "groups": started.groups, "argv": argv,
        }  # fmt: skip
        try:
            process = await asyncio.to_thread(_helper, json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise NotRun(500, f"no process for the command: {error.strerror}") from error
        left = asyncio.ensure_future(gone(receive))
        try:
            await send({
                "type": "http.response.start", "status": 200, "headers": HEADERS,
            })  # fmt: skip
            await _carry(process, send, left, stop)
            _close(process.stdin)
            end = {"exit_code": await asyncio.to_thread(process.wait)}
            await send({"type": "http.response.body", "body": json.dumps(end).encode() + b"\n"})
        finally:
            left.cancel()
            for pipe in (process.stdin, process.stdout, process.stderr):
                _close(pipe)
            await asyncio.shield(asyncio.to_thread(process.wait))


async def _carry(
    process: "subprocess.Popen[bytes]", send: Send, left: "asyncio.Future[None]", stop: asyncio.Event
) -> None:
    """Sends the output until the command has ended, the reader has left, or the reporter ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    loop, ended, sent = asyncio.get_running_loop(), asyncio.Event(), 0
    pipes = {"stdout": process.stdout.fileno(), "stderr": process.stderr.fileno()}
    pidfd = os.pidfd_open(process.pid)

    def on_end() -> None:
        loop.remove_reader(pidfd)
        ended.set()

    try:
        loop.add_reader(pidfd, on_end)
        while not left.done() and not stop.is_set() and sent <= MAX_OUTPUT_BYTES:
            last, silent = ended.is_set(), True
            for name, pipe in tuple(pipes.items()):
                try:
                    data = os.read(pipe, CHUNK_BYTES)
                except BlockingIOError:
                    continue
                silent = False
                if not data:
                    del pipes[name]
                    continue
                sent += len(data)
                line = json.dumps({name: b64encode(data).decode()}).encode() + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
            if silent and last:  # a process that it left behind may hold the pipes
                return
            if silent:
                await _something(loop, pipes.values(), ended.wait(), asyncio.shield(left), stop.wait())
        if sent > MAX_OUTPUT_BYTES:
            text = f"penstock: ended after {MAX_OUTPUT_BYTES >> 20} MiB of output; write it to a file\n"
            line = json.dumps({"stderr": b64encode(text.encode()).decode()}).encode() + b"\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _helper(request: bytes) -> "subprocess.Popen[bytes]":
    """The process that enters the task, with its request. Raises OSError."""
    process = subprocess.Popen(
        [*ISOLATED_PYTHON, IMPORTABLE + ENTER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PATH": os.defpath}, cwd="/", start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
    with suppress(BrokenPipeError):  # its exit code says why
        process.stdin.write(request)
        process.stdin.flush()
    return process


def _close(pipe: IO[bytes] | None) -> None:
    with suppress(BrokenPipeError):
        if pipe is not None:
            pipe.close()


async def _something(
    loop: asyncio.AbstractEventLoop, pipes: Collection[int], *ends: Awaitable[object]
) -> None:
    """Until a pipe has data, or one of these is over."""
    data = asyncio.Event()
    for pipe in pipes:
        loop.add_reader(pipe, data.set)
    try:
        await first_of(data.wait(), *ends)
    finally:
        for pipe in pipes:
            loop.remove_reader(pipe)


async def gone(receive: Receive) -> None:
    """Returns when the reader has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
