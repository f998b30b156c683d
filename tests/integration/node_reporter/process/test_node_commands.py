"""`penstock exec` on a real node-reporter: commands in the namespaces of running tasks, over the log server's
own HTTP."""

import asyncio
import json
import secrets
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import httpx
import psutil
import pytest

from penstock.model.inputs import external_events
from penstock.runtime.keys.log_keys import ATTACH_PATH, EXEC_PATH, LogKey, key_in_file
from penstock.session_lines import CHUNK_BYTES, UPGRADE, WINDOW_BYTES, line
from penstock_services.gateway.core.log_text import NoAnswer
from penstock_services.gateway.shell.nodes.node_session import NodeSession
from penstock_services.node_reporter.options import IsolationChoice, Options
from penstock_services.node_reporter.shell.process.terminal import MAX_ATTACHED
from penstock_services.node_reporter.shell.sessions import commands
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import NODE, Cell, printed, start_order, stop_order, working
from tests.support.waiting import await_until

options, broker, cell = node_fixtures.options, node_fixtures.broker, node_fixtures.cell
in_background = node_fixtures.in_background
nothing_left = node_fixtures.nothing_left


class Gateway:
    """Asks a node as the gateway does."""

    def __init__(self, http: httpx.AsyncClient, url: str, key: LogKey) -> None:
        self.http, self.url, self.key = http, url, key

    def ask(
        self, method: str, query: str = "", body: bytes = b"", path: str = EXEC_PATH
    ) -> AbstractAsyncContextManager[httpx.Response]:
        headers = {
            "Authorization": self.key.authorization(NODE, query),
            **(UPGRADE if method == "POST" else {}),
        }
        return self.http.stream(method, f"{self.url}{path}?{query}", content=body, headers=headers)

    async def refused(self, query: str, body: bytes) -> tuple[int, str]:
        async with self.ask("POST", query, body) as answer:
            await answer.aread()
            return answer.status_code, answer.text

    async def query(self, body: bytes, task: int = 1, **more: str) -> str:
        async with self.ask("GET") as answer:
            nonce = (await answer.aread()).decode()
        asked = {"task": f"job-{task}.1.0", "token": task, "nonce": nonce, "sha256": sha256(body).hexdigest()}
        return urlencode({**asked, **more})

    @asynccontextmanager
    async def session(self, *argv: str, task: int = 1, **more: str) -> AsyncIterator[NodeSession]:
        """With a command; without one, with the terminal of the task."""
        body = json.dumps(argv).encode() if argv else b""
        query = await self.query(body, task, **more)
        async with self.ask("POST", query, body, EXEC_PATH if argv else ATTACH_PATH) as answer:
            assert answer.status_code == 101, await answer.aread()
            yield NodeSession(NODE, answer, self.key, parse_qs(query)["nonce"][0])

    async def run(self, *argv: str, task: int = 1) -> dict[str, Any]:
        """The command's whole output and exit code."""
        found: dict[str, Any] = {"stdout": "", "stderr": ""}
        async with self.session(*argv, task=task) as session:
            async for line in session.lines():
                for name, value in json.loads(line).items():
                    found[name] = value if name == "exit_code" else found[name] + b64decode(value).decode()
        return found


@pytest.fixture
def key(tmp_path: Path) -> Path:
    found = tmp_path / "key"
    found.touch(0o600)
    found.write_bytes(secrets.token_bytes(32))
    return found


@asynccontextmanager
async def node(
    options: Options, broker: MemoryBroker, cell: Cell, key: Path, after: int = 0
) -> AsyncIterator[Gateway]:
    """`after`: the incarnation of the reporter before it."""
    async with working(replace(options, log_key=key, address="127.0.0.1"), MemoryLog(broker)):
        joined = await cell.next_join(after)
        async with httpx.AsyncClient(timeout=None) as http:
            yield Gateway(http, f"http://127.0.0.1:{joined.node.logs.port}", key_in_file(key))


LOOK = (
    "{ ls -A {state}/tasks; sed -n '/CapBnd/p;/NoNewPrivs/p;/Groups/p;/SigBlk/p;/SigIgn/p' "
    "/proc/self/status; id; pwd; nproc; ulimit -d -c; "
    "cat /proc/self/cgroup; readlink /proc/self/ns/pid /proc/self/ns/mnt; env | sort | grep -E "
    "'PENSTOCK|CUDA'; }"
)


def sleepers(seconds: str) -> list[int]:
    """Processes of these tests, known by the odd length of their sleep."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline() == ["sleep", seconds] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.usefixtures("in_background")
@pytest.mark.parametrize("isolation", [IsolationChoice.AUTO, IsolationChoice.NONE])
async def test_a_command_is_in_its_task(
    options: Options, broker: MemoryBroker, cell: Cell, key: Path, isolation: IsolationChoice
) -> None:
    """A training hangs: its owner looks around with its eyes. What was run ends with the task, at the
    latest."""
    look = LOOK.replace("{state}", str(options.state_dir))
    async with node(replace(options, isolation=isolation), broker, cell, key) as gateway:
        await cell.order(start_order(1, "sh", "-c", f"{look} > own; echo on; exec sleep 600"))
        await await_until(lambda: printed(options, "job-1", "job-1.1.0") == "on\n", "its program")
        own = (await gateway.run("cat", "own"))["stdout"]
        assert (await gateway.run("sh", "-c", look))["stdout"] == own
        assert "PENSTOCK_TASK_ID=job-1.1.0" in own
        assert "SigIgn:\t0000000000000000" in own
        ends = await gateway.run("sh", "-c", "echo no >&2; exit 7")
        assert ends == {"stdout": "", "stderr": "no\n", "exit_code": 7}
        assert (await gateway.run("sh", "-c", "kill -9 $$"))["exit_code"] == 137
        assert (await gateway.run("sh", "-c", "sleep 602 & echo left"))["stdout"] == "left\n"
        missing = await gateway.run("/no-such-program")
        assert missing["exit_code"] == 127
        assert "name a program that the task sees" in missing["stderr"]
        asked = asyncio.ensure_future(gateway.run("sh", "-c", "echo > began; sleep 600"))
        work = options.state_dir / "tasks" / "job-1.1.0@1" / "work"
        await await_until((work / "began").exists, "the command")
        await cell.order(stop_order(2, "job-1.1.0", grace_ms=0))
        await cell.until(external_events.TaskExited, task_id="job-1.1.0")
        assert (await asked)["exit_code"] == 137
        body = b'["true"]'
        async with gateway.ask("POST", await gateway.query(body), body) as late:
            if late.status_code != 404:
                lines = [line async for line in NodeSession(NODE, late, gateway.key, "").lines()]
                assert b"it has ended" in b64decode(json.loads(lines[0])["stderr"])
        assert sleepers("602") == []


async def test_a_command_ends_with_its_caller_and_within_bounds(
    options: Options, broker: MemoryBroker, cell: Cell, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at a laptop, a command that prints without end, too many at once, and a request that somebody
    sends again."""
    monkeypatch.setattr(commands, "MAX_COMMANDS", 1)
    monkeypatch.setattr(commands, "MAX_OUTPUT_BYTES", 1 << 20)
    async with node(options, broker, cell, key) as gateway:
        await cell.order(start_order(1, "sh", "-c", "echo on; exec sleep 600"))
        await await_until(lambda: printed(options, "job-1", "job-1.1.0") == "on\n", "its program")
        flood = await gateway.run("yes")
        assert flood["exit_code"] == 129
        assert "write it to a file" in flood["stderr"]
        body = json.dumps(["sh", "-c", "echo > began; exec sleep 601"]).encode()
        query = await gateway.query(body)
        work = options.state_dir / "tasks" / "job-1.1.0@1" / "work"
        async with gateway.ask("POST", query, body):
            await await_until((work / "began").exists, "the command")
            status, text = await gateway.refused(query, body)
            assert (status, "nonce" in text) == (403, True)
            status, text = await gateway.refused(await gateway.query(body), body)
            assert (status, "1 sessions" in text) == (503, True)
            assert (await gateway.refused(await gateway.query(body), b'["true"]'))[0] == 400
        await await_until(lambda: not sleepers("601"), "the end of the command")
        assert (
            await gateway.http.get(gateway.url + EXEC_PATH, headers={"Authorization": "Penstock no"})
        ).status_code == 403


class Talk:
    """What a command in a session has printed so far, and its last frame."""

    def __init__(self, session: NodeSession) -> None:
        self.session, self.printed, self.taken, self.end = session, b"", 0, {}
        self.reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for text in self.session.lines():
            frame = json.loads(text)
            self.printed += b64decode(frame.get("stdout", "")) + b64decode(frame.get("stderr", ""))
            self.taken += frame.get("taken", 0)
            if frame.keys() & {"exit_code", "problem", "ended"}:
                self.end = frame

    async def say(self, **fields: Any) -> None:
        await self.session.send(line(**fields)[:-1])

    async def until(self, text: bytes) -> None:
        await await_until(lambda: text in self.printed, lambda: f"{text!r} in {self.printed[-400:]!r}")

    async def ends(self) -> dict[str, Any]:
        await self.reading
        return self.end


async def test_a_command_with_input_and_one_with_a_terminal(
    options: Options, broker: MemoryBroker, cell: Cell, key: Path
) -> None:
    """A user repairs a file in a hanging task by `tar`, looks around in a shell, and closes the laptop; on
    the way to the node somebody adds a line of his own."""
    async with node(options, broker, cell, key) as gateway:
        await cell.order(start_order(1, "sh", "-c", "echo on; exec sleep 600"))
        await await_until(lambda: printed(options, "job-1", "job-1.1.0") == "on\n", "its program")

        data = secrets.token_bytes(CHUNK_BYTES)
        async with gateway.session("sh", "-c", "cat; exit 3", input="1") as session:
            talk = Talk(session)
            for sent in range(0, 64 * len(data), len(data)):
                await await_until(lambda sent=sent: sent - talk.taken < WINDOW_BYTES, "room for input")
                await talk.say(stdin=data)
            await talk.say(end=True)
            assert await talk.ends() == {"exit_code": 3}
            assert talk.printed == data * 64
        async with gateway.session("true", input="1") as session:
            talk = Talk(session)
            await talk.say(stdin=data)
            assert await talk.ends() == {"exit_code": 0}
        async with gateway.session("sleep", "606", input="1") as session:
            with pytest.raises(NoAnswer):  # noqa: PT012 - the line at which it is cut is the system's choice
                while True:
                    await session.send(line(stdin=data)[:-1])
        async with gateway.session("sleep", "606", input="1") as session:
            talk = Talk(session)
            session._key = key_in_file(await foreign(key))
            await talk.say(stdin=b"kill 1\n")
            assert "not the gateway's" in (await talk.ends())["problem"]

        shell = 'stty size; tty; echo "$TERM"; echo ready; while :; do read -r x; eval "$x"; done'
        async with gateway.session("bash", "-c", shell, terminal="24x80", term="vt100") as session:
            talk = Talk(session)
            await talk.until(b"ready\r\n")
            assert talk.printed.startswith(b"24 80\r\n/dev/pts/")
            assert b"\r\nvt100\r\n" in talk.printed
            await talk.say(size=[50, 132])
            await talk.say(stdin=b"stty size\r")
            await talk.until(b"50 132\r\n")
            await talk.say(stdin=b"sleep 604; echo woken\r")
            await await_until(lambda: sleepers("604"), "what the shell runs")
            await talk.say(stdin=b"\x03")
            assert await talk.ends() == {"exit_code": 130}

        left = "trap '' HUP; sleep 605 & (sleep 605 & exit); setsid -w sleep 605"
        async with gateway.session("bash", "-ic", left, terminal="24x80", term="vt100") as session:
            talk = Talk(session)
            await await_until(lambda: len(sleepers("605")) == 3, "what ignores the hang-up")
        await await_until(lambda: not sleepers("605"), "the end of all that the shell has started")
        talk.reading.cancel()


async def foreign(key: Path) -> Path:
    """Another secret than the gateway's."""
    found = key.with_name("foreign")
    found.touch(0o600)
    found.write_bytes(secrets.token_bytes(32))
    return found


TERMINAL = 'tty; stty size; echo "$TERM"; while :; do echo "rea""dy"; read -r x; eval "$x"; done'


async def test_a_task_with_a_terminal_of_its_own(
    options: Options, broker: MemoryBroker, cell: Cell, key: Path
) -> None:
    """Two colleagues look at a debugger in a job; a third has a bad line, and holds up neither. Then the
    node's agent is upgraded, one of them goes on, and leaves the shell."""
    async with node(options, broker, cell, key) as gateway:
        await cell.order(
            start_order(1, "bash", "-c", TERMINAL, interactive=True),
            start_order(2, "sleep", "600", gpus=(1,)),
        )
        await cell.until(external_events.TaskStarted, task_id="job-1.1.0")
        await cell.until(external_events.TaskStarted, task_id="job-2.1.0")
        async with (
            gateway.session(terminal="24x80") as one,
            gateway.session(terminal="30x90") as other,
            gateway.session(terminal="30x90") as stuck,
        ):
            first, second = Talk(one), Talk(other)
            await first.until(b"xterm\r\nready\r\n")
            await second.until(b"24 80\r\nxterm\r\nready\r\n")
            assert first.printed.startswith(b"/dev/pts/")
            await first.say(size=[31, 91])
            await first.say(stdin=b"stty size; echo he''llo\r")
            await second.until(b"31 91\r\nhello\r\n")
            await second.say(stdin=b"seq 400000; echo do''ne\r")
            await first.until(b"\r\n400000\r\ndone\r\n")
            third = Talk(stuck)
            await third.until(b"ready\r\n")
            async with AsyncExitStack() as others:
                for _ in range(MAX_ATTACHED - 3):
                    await others.enter_async_context(gateway.session(terminal="24x80"))
                query = await gateway.query(b"", terminal="24x80")
                async with gateway.ask("POST", query, path=ATTACH_PATH) as ninth:
                    assert (ninth.status_code, b"detaches first" in await ninth.aread()) == (503, True)
        async with gateway.ask(
            "POST", await gateway.query(b"", 2, terminal="24x80"), path=ATTACH_PATH
        ) as none:
            assert (none.status_code, b"no terminal" in await none.aread()) == (409, True)
    for talk in (first, second, third):
        talk.reading.cancel()
    before = cell.events(external_events.NodeJoined)[-1].incarnation
    async with (
        node(options, broker, cell, key, before) as gateway,
        gateway.session(terminal="50x132") as again,
    ):
        talk = Talk(again)
        await talk.until(b"400000\r\ndone\r\nready\r\n")
        await talk.say(stdin=b"stty size; exit 9\r")
        assert await talk.ends() == {"ended": True}
        assert b"50 132\r\n" in talk.printed
        exited = await cell.until(external_events.TaskExited, task_id="job-1.1.0")
        assert exited.exit_code == 9
        assert "\nhello\n" in printed(options, "job-1", "job-1.1.0")
        await cell.order(stop_order(3, "job-2.1.0", grace_ms=0))
        await cell.until(external_events.TaskExited, task_id="job-2.1.0")
