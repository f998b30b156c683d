"""`penstock exec` through the gateway: who may run a command in whose task, and what the ledger's input has
of that."""

import asyncio
import os
import subprocess
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from penstock.client import AsyncClient, sessions
from penstock.model.inputs.command_runs import JobCommandRun
from penstock.model.jobs.job_parts import Environment
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import LogServer
from penstock.model.schema.topics import Topic
from penstock.session_lines import WINDOW_BYTES
from penstock_services.node_reporter.shell.isolation.confinement import Confinement
from penstock_services.node_reporter.shell.link.log_server import TaskLogServer
from penstock_services.node_reporter.shell.ports import Started
from penstock_services.node_reporter.shell.process.pids import start_ticks
from penstock_services.node_reporter.shell.sessions.commands import Commands
from tests.integration.gateway.access.test_gateway_roles import CALLERS, CLOUD_EVENT, as_, write_tokens
from tests.integration.gateway.answers.test_gateway_logs import key as key
from tests.integration.node_reporter.process.test_node_commands import sleepers
from tests.support.cli.terminal import Terminal
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import Cell, problem, running
from tests.support.node_reporter.node_cell import node_options
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres


@pytest.fixture
def started() -> Iterator[Started]:
    """A task: one sleeping process."""
    with subprocess.Popen(["sleep", "600"], env={**os.environ, "PENSTOCK_TASK_ID": "j.1.w0"}) as task:
        yield Started("j.1.w0", 1, os.getpid(), start_ticks(os.getpid()), task.pid, 0)
        task.kill()


@pytest_asyncio.fixture
async def served(tmp_path: Path, key: Path, started: Started) -> AsyncIterator[LogServer]:
    """A node on which each task is this one."""
    options = node_options(tmp_path / "n0", node_id="n0", address="127.0.0.1", log_key=key)
    server = TaskLogServer(
        options, commands=Commands(Confinement(), lambda _: started, lambda _: tmp_path / "task")
    )
    life = asyncio.create_task(server.serve())
    yield server.announced
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


def job(cell: Cell, job_id: str, **spec: Any) -> None:
    cell.placer.submit(job_id, spec=JobSpec(**{"command": ("true",), "owner": "vision", **spec}))
    cell.placer.start(job_id)


async def runs(cell: Cell) -> list[JobCommandRun]:
    return [one.data for one in await cell.written(Topic.JOBS) if isinstance(one.data, JobCommandRun)]


async def test_a_command_is_its_owners_affair_or_an_operators_and_is_recorded(
    dsn: str, tmp_path: Path, key: Path, served: LogServer
) -> None:
    """Another tenant could read a neighbour's data; what its owner and the operator ran can be read
    afterwards, by name."""
    tokens = write_tokens(tmp_path / "tokens", list(CALLERS))
    async with running(dsn, tokens=tokens, node_log_key=key) as cell:
        cell.placer.join(node_spec("n0", 4, logs=served), node_spec("silent", 1))
        job(cell, "j")
        job(cell, "gang", workers=2)
        job(cell, "box", environment=Environment(container="image"))
        cell.placer.submit("waits", spec=JobSpec(command=("true",), owner="vision"))
        await cell.tell()
        await cell.caught_up(as_("operator"))

        async def ask(caller: str, job_id: str, **body: Any) -> Any:
            return await cell.http.post(f"/v1/jobs/{job_id}/exec", json=body, headers=as_(caller))

        for caller in ("speech", "reader", "node"):
            problem(await ask(caller, "j", command=["true"]), 403)
        assert "is running" in problem(await ask("vision", "waits", command=["true"]), 409)["detail"]
        assert "container" in problem(await ask("vision", "box", command=["true"]), 409)["detail"]
        assert "name one of w0, w1" in problem(await ask("vision", "gang", command=["true"]), 404)["detail"]
        assert (
            "no running task 'w7'"
            in problem(await ask("vision", "j", command=["true"], task="w7"), 404)["detail"]
        )
        for command in ([], [""], ["a\0"], ["x"] * 513):
            assert "command" in problem(await ask("vision", "j", command=command), 400)["detail"]
        assert "command" in problem(await ask("vision", "j", command=["x" * 600] * 2), 413)["detail"]
        problem(await ask("operator", "ghost", command=["true"]), 404)
        assert await runs(cell) == []

        answer = await ask(
            "vision", "j", command=["sh", "-c", "echo out; echo err >&2; exit 3"], task="worker-0"
        )
        frames = [orjson.loads(line) for line in answer.text.splitlines()]
        assert frames[-1] == {"exit_code": 3}
        found = {name: b64decode(text) for frame in frames[:-1] for name, text in frame.items()}
        assert found == {"stdout": b"out\n", "stderr": b"err\n"}
        await await_until(lambda: _has(cell, 2), "its end")
        begun, ended = await runs(cell)
        assert (begun.by, begun.tenant, begun.task_id) == ("vision/ci", "vision", "j.1.w0")
        assert begun.command == "sh -c 'echo out; echo err >&2; exit 3'"
        assert (begun.exit_code, ended.exit_code) == (None, 3)
        forged = {
            "specversion": "1.0",
            "id": "e",
            "source": "/t",
            "type": "penstock.job.command_run.v1",
            "data": {"job_id": "j", "task_id": "j.1.w0", "command": "ls"},
        }
        problem(await cell.http.post("/v1/events", json=forged, headers=as_("operator", **CLOUD_EVENT)), 403)

        body = {"command": ["sh", "-c", "echo on; exec sleep 603"]}
        async with cell.http.stream(
            "POST", "/v1/jobs/j/exec", json=body, headers=as_("operator")
        ) as response:
            assert "stdout" in await anext(response.aiter_lines())
        await await_until(lambda: _has(cell, 4), "the end of a command whose caller left")
        *_, begun, ended = await runs(cell)
        assert (begun.by, begun.tenant, ended.exit_code) == ("ops/on-call", None, None)
        assert "its caller" in ended.problem


async def _has(cell: Cell, count: int) -> bool:
    return len(await runs(cell)) == count


SHELL = "stty size; echo $TERM; while :; do echo 'rea''dy'; read -r x; eval \"$x\"; done"


async def test_a_shell_in_a_task_has_the_terminal_of_its_user(
    dsn: str, tmp_path: Path, key: Path, served: LogServer
) -> None:
    """Somebody looks around in a hanging task: the window is resized, Ctrl-C ends what hangs there and not
    the client; then the gateway is upgraded, and a laptop is shut down. The terminal is usable after each."""
    async with AsyncExitStack() as until_cut:
        cell = await until_cut.enter_async_context(running(dsn, node_log_key=key))
        cell.placer.join(node_spec("n0", 4, logs=served))
        job(cell, "j")
        await cell.tell()
        await cell.caught_up()
        async with AsyncClient(cell.url) as client:
            body = {"command": ["sh", "-c", "cat; exit 5"], "stdin": True}
            async with sessions.opened(client, "/v1/jobs/j/exec", body) as session:
                data = os.urandom(3 * WINDOW_BYTES)
                sending = asyncio.ensure_future(session.send(data))
                found, frames = b"", session.frames()
                while len(found) < len(data):
                    found += (await anext(frames))["stdout"]
                await sending
                await session.end()
                assert (found, await anext(frames)) == (data, {"exit_code": 5})
        problem(await cell.http.post("/v1/jobs/j/exec", json=body), 426)

        env = {**os.environ, "PENSTOCK_SERVER": cell.url}
        shell = ("exec", "-it", "j", "--", "bash", "-c", SHELL)
        with Terminal(env, *shell) as terminal:
            await await_until(lambda: terminal.shows(b"31 97\r\nxterm\r\nready\r\n"), terminal.printed)
            terminal.resize(40, 120)
            terminal.type(b"until [ \"$(stty size)\" = '40 120' ]; do sleep 0.01; done; echo re''sized\r")
            await await_until(lambda: terminal.shows(b"resized\r\nready\r\n"), terminal.printed)
            terminal.type(b"trap 'echo int''errupted' INT; sleep 607\r")
            await await_until(lambda: sleepers("607"), "what the shell runs")
            terminal.type(b"\x03")
            await await_until(lambda: terminal.shows(b"interrupted\r\n"), terminal.printed)
            terminal.type(b"exit 7\r")
            await await_until(terminal.ended, terminal.printed)
            assert terminal.process.returncode == 7

        with Terminal(env, *shell) as shut, Terminal(env, *shell) as cut:
            await await_until(lambda: shut.shows(b"ready\r\n") and cut.shows(b"ready\r\n"), shut.printed)
            shut.type(b"sleep 608\r")
            await await_until(lambda: sleepers("608"), "what the shell runs")
            shut.process.terminate()
            await await_until(shut.ended, shut.printed)
            assert shut.process.returncode == 143
            await await_until(lambda: not sleepers("608"), "the end of what the shell ran")
            await until_cut.aclose()
            await await_until(cut.ended, cut.printed)
            assert cut.process.returncode == 20
            assert b"the gateway ended the session" in cut.printed() or b"broke" in cut.printed()
