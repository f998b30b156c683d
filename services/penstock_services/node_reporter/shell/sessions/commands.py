"""Commands in running tasks (`penstock exec`), and their own terminals (`penstock attach`), for the gateway
alone: paths of the log server, with the same proof.

`POST /v1/exec?task=&token=&nonce=&sha256=[&input=1][&terminal=ROWSxCOLUMNS&term=NAME]`, which goes over to
`session_lines`, runs the body, a JSON array of arguments with this digest, in that task. `GET /v1/exec` gives
the nonce, which counts once, so that nobody can send a request again. `POST
/v1/attach?task=&token=&nonce=&sha256=&terminal=`, with an empty body, joins the task's own terminal
(`terminal`). When the connection ends, so does the command: it gets SIGHUP, and is killed soon after.
"""

import asyncio
import json
import os
import secrets
import socket
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

from penstock.runtime.http.http_switch import Switch
from penstock.runtime.keys.log_keys import ATTACH_PATH, OFFSET, LogKey
from penstock.runtime.race import cancelled
from penstock.session_lines import line, size_of
from penstock_services.node_reporter.shell.isolation.confinement import Confinement
from penstock_services.node_reporter.shell.ports import Key, Started
from penstock_services.node_reporter.shell.process.launcher import IMPORTABLE
from penstock_services.node_reporter.shell.process.spawner import ISOLATED_PYTHON
from penstock_services.node_reporter.shell.process.terminal import MAX_ATTACHED, place
from penstock_services.node_reporter.shell.sessions.enter import ENTER
from penstock_services.node_reporter.shell.sessions.session import (
    Attachment,
    Descriptor,
    resize,
    send_output,
    take_input,
)

MAX_COMMANDS = 16  # at once on a node; each is a process beside its task
MAX_NONCES = 256
MAX_BODY_BYTES = 1 << 16
MAX_OUTPUT_BYTES = 64 << 20  # of a command without input and terminal; as of a task by default
HEADERS = {OFFSET: "0"}

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class NotRun(Exception):
    """Why a command is not run, and the HTTP status that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Ends(NamedTuple):
    """The helper that enters the task, and our ends of the command's descriptors."""

    helper: "subprocess.Popen[bytes]"
    sources: dict[str, int]
    sink: int | None

    def hang_up(self) -> None:
        """The helper then ends the command."""
        _close(self.helper.stdin)


class Commands:
    """Of one node. `started`: the record of a task's start, None: there is none; `folder`: a task's."""

    def __init__(
        self, plan: Confinement, started: Callable[[Key], Started | None], folder: Callable[[Key], Path]
    ) -> None:
        self._plan, self._started, self._folder = plan, started, folder
        self._nonces: dict[str, None] = {}
        self._under_way: Counter[tuple[str, Key]] = Counter()
        """By path and task."""

    def nonce(self) -> str:
        while len(self._nonces) >= MAX_NONCES:
            del self._nonces[next(iter(self._nonces))]
        found = secrets.token_hex(16)
        self._nonces[found] = None
        return found

    async def run(
        self,
        path: str,
        asked: dict[str, str],
        receive: Receive,
        switch: Switch | None,
        key: LogKey,
        stop: asyncio.Event,
    ) -> None:
        """Answers one request, of which the proof is checked. Raises `NotRun`."""
        body = await self._body(asked, receive)
        if switch is None:
            raise NotRun(426, "this gateway asks as an older version did; upgrade it")
        task = asked.get("task", ""), int(asked.get("token", "0"))
        started = self._started(task)
        if started is None:
            raise NotRun(404, "the task does not run here")
        session = path, task
        if self._under_way.total() >= MAX_COMMANDS:
            raise NotRun(
                503, f"{MAX_COMMANDS} sessions with tasks of this node are under way; end one of them"
            )
        if path == ATTACH_PATH and self._under_way[session] >= MAX_ATTACHED:
            raise NotRun(
                503, f"{MAX_ATTACHED} are attached to the task's terminal; one of them detaches first"
            )
        self._under_way[session] += 1
        try:
            if path == ATTACH_PATH:
                await _attach(self._folder(task), asked, switch, key, stop)
            else:
                await self._run(self._request(started, asked, body), asked, switch, key, stop)
        finally:
            self._under_way[session] -= 1
            if not self._under_way[session]:
                del self._under_way[session]

    def _request(self, started: Started, asked: dict[str, str], body: bytes) -> dict[str, Any]:
        """To the helper (`enter`)."""
        return {
            "shim": started.shim,
            "shim_start": started.shim_start,
            "pid": started.pid,
            "plan": self._plan,
            "groups": started.groups,
            "argv": json.loads(body),
            "terminal": "terminal" in asked,
            "input": None,
            "term": asked.get("term", ""),
        }

    async def _body(self, asked: dict[str, str], receive: Receive) -> bytes:
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
        return body

    async def _run(
        self, request: dict[str, Any], asked: dict[str, str], switch: Switch, key: LogKey, stop: asyncio.Event
    ) -> None:
        """Raises `NotRun`."""
        try:
            ends = await asyncio.to_thread(self._start, request, asked)
        except OSError as error:
            raise NotRun(500, f"no process for the command: {error.strerror}") from error
        sink = Descriptor(ends.sink, terminal=request["terminal"])
        left = asyncio.ensure_future(take_input(switch, key, asked["nonce"], sink))
        bounded = ends.sink is None
        try:
            switch.take(HEADERS)
            with suppress(ConnectionResetError):
                await _carry(ends, bounded, switch, left, stop)
        finally:
            await cancelled([left])
            sink.close()
            for pipe in (ends.helper.stdin, ends.helper.stdout, ends.helper.stderr):
                _close(pipe)
            await asyncio.shield(asyncio.to_thread(ends.helper.wait))
            switch.close()

    def _start(self, request: dict[str, Any], asked: dict[str, str]) -> Ends:
        """Raises OSError."""
        output = subprocess.PIPE
        ours: list[int] = []
        theirs: list[int] = []
        try:
            if "terminal" in asked:
                master, output = os.openpty()
                ours, theirs = [master], [output]
                resize(master, *size_of(asked["terminal"]))
                if self._plan.user is not None:
                    os.fchown(output, self._plan.user[0], -1)  # so that the command may open it by its name
            elif "input" in asked:
                request["input"], writing = os.pipe()
                ours, theirs = [writing], [request["input"]]
            helper = _helper(json.dumps(request).encode() + b"\n", output, theirs)
        except OSError:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        assert helper.stderr is not None
        stdout = ours[0] if helper.stdout is None else helper.stdout.fileno()
        sources = {"stdout": stdout, "stderr": helper.stderr.fileno()}
        for descriptor in (*ours, *sources.values()):
            os.set_blocking(descriptor, False)
        return Ends(helper, sources, ours[0] if ours else None)


async def _attach(
    folder: Path, asked: dict[str, str], switch: Switch, key: LogKey, stop: asyncio.Event
) -> None:
    """Raises `NotRun`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            number = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            try:
                connection.connect(place(number))
            finally:
                os.close(number)
        except OSError as error:
            raise NotRun(409, f"the task has no terminal: {error.strerror}") from error
        connection.setblocking(False)
        sink = Attachment(connection.detach())
    sink.resize(*size_of(asked["terminal"]))
    left = asyncio.ensure_future(take_input(switch, key, asked["nonce"], sink))
    try:
        switch.take(HEADERS)
        with suppress(ConnectionResetError):
            assert sink.number is not None
            await send_output({"stdout": sink.number}, switch, None, None, (left, stop))
            if left.done():
                await switch.write(line(problem=left.result()))
            elif not stop.is_set():
                await switch.write(line(ended=True))
    finally:
        await cancelled([left])
        sink.close()
        switch.close()


async def _carry(
    ends: Ends, bounded: bool, switch: Switch, left: "asyncio.Future[str]", stop: asyncio.Event
) -> None:
    """Until the command has ended and the caller knows it, or has left. Raises ConnectionResetError."""
    loop, ended, pidfd = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(ends.helper.pid)

    def on_end() -> None:
        loop.remove_reader(pidfd)
        ended.set()

    loop.add_reader(pidfd, on_end)
    try:
        most = MAX_OUTPUT_BYTES if bounded else None
        within = await send_output(ends.sources, switch, ended, most, (left, stop))
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    if left.done():
        await switch.write(line(problem=left.result()))
        return
    if not within:
        text = (
            f"penstock: ended after {MAX_OUTPUT_BYTES >> 20} MiB of output; write it to a file, or give -i\n"
        )
        await switch.write(line(stderr=text.encode()))
    ends.hang_up()
    await switch.write(line(exit_code=await asyncio.to_thread(ends.helper.wait)))


def _helper(request: bytes, output: int, given: list[int]) -> "subprocess.Popen[bytes]":
    """The process that enters the task, with its request. `given`: descriptors for it. Raises OSError."""
    process = subprocess.Popen(
        [*ISOLATED_PYTHON, IMPORTABLE + ENTER],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.PIPE,
        pass_fds=given,
        env={"PATH": os.defpath},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # its exit code says why
        process.stdin.write(request)
        process.stdin.flush()
    return process


def _close(pipe: IO[bytes] | None) -> None:
    with suppress(BrokenPipeError):
        if pipe is not None:
            pipe.close()


async def gone(receive: Receive) -> None:
    """Returns when the reader has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
