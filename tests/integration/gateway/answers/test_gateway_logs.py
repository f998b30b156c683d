"""Tasks' output through the gateway, from node-reporters' servers with folders of their own, over real
HTTP."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from infra.devservers.certificates import make_certificates
from penstock.cli.following import follow
from penstock.client import AsyncClient, BadRequest, Client
from penstock.model.inputs.external_events import NodeJoined, NodeLeft, RunningTask
from penstock.model.jobs.job_parts import RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import LogServer
from penstock.runtime.files.log_archive import LogArchive
from penstock.runtime.files.task_logs import log_name, log_path
from penstock_services.gateway.shell.nodes import log_reader
from penstock_services.gateway.shell.routes import logs
from penstock_services.gateway.shell.store import Store
from penstock_services.node_reporter.shell.link.log_server import TaskLogServer
from penstock_services.node_reporter.shell.logs.output import Output
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import Cell, problem, running
from tests.support.log.s3_server import S3Server
from tests.support.node_reporter.node_cell import node_options

pytestmark = pytest.mark.postgres

GANG = JobSpec(command=("true",), workers=2, retry=RetryPolicy(max_attempts=2, backoff_ms=0))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    found = tmp_path / "logs.key"
    found.touch(0o600)
    found.write_bytes(os.urandom(32))
    return found


@asynccontextmanager
async def serving(folder: Path, node_id: str, **options: Any) -> AsyncIterator[LogServer]:
    """A node-reporter's log server with a folder of its own."""
    server = TaskLogServer(node_options(folder / node_id, node_id=node_id, address="127.0.0.1", **options))
    life = asyncio.create_task(server.serve())
    try:
        yield server.announced
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def printed(folder: Path, node_id: str, task_id: str, text: str | bytes) -> None:
    """As the task's shim does."""
    path = log_path(folder / node_id / "logs", task_id.rsplit(".", 2)[0], task_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


async def gang(cell: Cell, first: LogServer | None, second: LogServer | None) -> None:
    """Job j with one worker on each of n0 and n1."""
    cell.placer.join(node_spec("n0", 1, logs=first), node_spec("n1", 1, logs=second))
    cell.placer.submit("j", spec=GANG)
    cell.placer.start("j")
    await cell.tell()
    await cell.caught_up()


async def comes_back(cell: Cell, served: LogServer) -> None:
    """The reporter of n1 joins again; its task has run on."""
    token = cell.placer.state.jobs["j"].token
    running_on = (RunningTask(task_id="j.1.w1", token=token),)
    cell.placer.feed(NodeJoined(node=node_spec("n1", 1, logs=served), tasks=running_on))
    await cell.tell()


async def text(cell: Cell, **params: Any) -> str:
    answer = await cell.http.get("/v1/jobs/j/logs", params=params)
    assert answer.status_code == 200, answer.text
    return answer.text


async def frames(cell: Cell, **params: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await text(cell, format="ndjson", **params)).splitlines()]


async def until(chunks: AsyncIterator[str], *wanted: str) -> str:
    """What comes up to the chunk with the last of these texts."""
    found = ""
    while not all(text in found for text in wanted):
        found += await anext(chunks)
    return found


async def test_members_on_two_machines_are_shown_with_their_names(
    dsn: str, tmp_path: Path, key: Path
) -> None:
    """Two workers on two machines: all output at once, one task alone, its end, an earlier attempt, and `-f`
    over the retry to the end."""
    async with (
        serving(tmp_path, "n0", log_key=key) as first,
        serving(tmp_path, "n1", log_key=key) as second,
        running(dsn, node_log_key=key) as cell,
    ):
        await gang(cell, first, second)
        printed(tmp_path, "n0", "j.1.w0", "a1\na2\n")
        printed(tmp_path, "n1", "j.1.w1", "b1\nb2")
        assert await text(cell) == "worker-0 | a1\nworker-0 | a2\nworker-1 | b1\nworker-1 | b2\n"
        assert await text(cell, task="w1") == await text(cell, task="worker-1") == "b1\nb2"
        assert await text(cell, tail=1) == "worker-0 | a2\nworker-1 | b2\n"
        shown = await frames(cell)
        assert [one["name"] for one in shown[0]["members"]] == ["worker-0", "worker-1"]
        assert shown[1:] == [
            {"task": "w0", "text": "a1\na2\n"},
            {"task": "w1", "text": "b1\n"},
            {"task": "w1", "text": "b2\n"},
        ]
        for name in ("../../secret", "w9", "/etc/passwd", "."):
            missing = problem(await cell.http.get("/v1/jobs/j/logs", params={"task": name}), 404)
            assert "its tasks are w0, w1" in missing["detail"]
        async with cell.http.stream("GET", "/v1/jobs/j/logs", params={"follow": 1}) as response:
            chunks = response.aiter_text()
            await until(chunks, "worker-0 | a2\n", "worker-1 | b1\n")
            printed(tmp_path, "n1", "j.1.w1", "!\r99 %\r100 %\nlast words")
            assert await until(chunks, "100 %") == "worker-1 | b2!\nworker-1 | 99 %\nworker-1 | 100 %\n"
            cell.placer.finish("j", exit_code=1)
            cell.placer.fire()
            cell.placer.start("j")
            await cell.tell()
            printed(tmp_path, "n0", "j.2.w0", "again\n")
            printed(tmp_path, "n1", "j.2.w1", "")
            assert (await until(chunks, "again")).startswith("worker-1 | last words\n[penstock: attempt 2]\n")
            cell.placer.finish("j")
            await cell.tell()
            assert "".join([chunk async for chunk in chunks]) == ""
        await cell.caught_up()
        assert await text(cell) == "worker-0 | again\n"
        assert "worker-0 | a2\n" in await text(cell, attempt=1)
        problem(await cell.http.get("/v1/jobs/j/logs", params={"attempt": 3}), 404)
        async with AsyncClient(cell.url) as client:
            assert await client.logs("j", attempt=1, task="w0", tail=1, since="1h") == "a2\n"
            job = await client.handle("j")
            assert await job.logs(since_ms=1 << 52) == ""
            followed = client.follow_logs("j", attempt=1, task="w1", tail=1)
            assert "".join([piece async for piece in followed]) == "last words"
            with pytest.raises(BadRequest, match="since"):
                await client.logs("j", since="yesterday")
        with Client(cell.url) as client:
            handle = await asyncio.to_thread(client.handle, "j")
            assert await asyncio.to_thread(handle.logs, attempt=1, task="w0", tail=1) == "a2\n"
            followed = client.follow_logs("j", attempt=1, task="w1", tail=1)
            assert await asyncio.to_thread("".join, followed) == "last words"


async def test_a_nodes_token_is_its_secret_and_output_is_encrypted(dsn: str, tmp_path: Path) -> None:
    """Machines that others share a network with: each node has a token of its own, and a certificate."""
    make_certificates(tmp_path)
    lines, files = [], []
    for name in ("n0", "n1", "reader"):
        token = f"token-of-{name}"
        roles = "roles=read,operate" if name == "reader" else f"roles=node node={name}"
        lines.append(f"sha256:{sha256(token.encode()).hexdigest()} {roles}")
        files.append(tmp_path / f"{name}.token")
        files[-1].write_text(token)
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("\n".join(lines))
    tls = {"log_cert": tmp_path / "certificate.pem", "log_cert_key": tmp_path / "key.pem"}
    async with (
        serving(tmp_path, "n0", gateway_token_file=files[0], **tls) as first,
        serving(tmp_path, "n1", gateway_token_file=files[0], **tls) as second,
        running(dsn, tokens=tokens, node_log_ca=tmp_path / "ca.pem") as cell,
    ):
        assert first.tls
        cell.http.headers["Authorization"] = "Bearer token-of-reader"
        await gang(cell, first, second)
        printed(tmp_path, "n0", "j.1.w0", "encrypted\n")
        shown = await frames(cell)
        assert shown[1] == {"task": "w0", "text": "encrypted\n"}
        assert "secret of node n1" in shown[2]["problem"], "it has another node's token"
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{first.port}/v1/logs")


async def test_a_log_that_cannot_be_read_is_named_in_one_line(
    dsn: str,
    tmp_path: Path,
    key: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One machine has another secret, then its reporter is down and comes back elsewhere, then the machine is
    gone: the others are shown."""
    monkeypatch.setattr(log_reader, "FIRST_PAUSE_S", 0.01)
    other = tmp_path / "other.key"
    other.touch(0o600)
    other.write_bytes(os.urandom(32))
    archive = tmp_path / "archive"
    async with (
        serving(tmp_path, "n0", log_key=key) as first,
        running(dsn, node_log_key=key, node_log_archive=f"file://{archive}") as cell,
    ):
        async with serving(tmp_path, "n1", log_key=other) as foreign:
            await gang(cell, first, foreign)
            printed(tmp_path, "n0", "j.1.w0", "here\n")
            printed(tmp_path, "n1", "j.1.w1", "one\n")
            shown = await frames(cell)
            assert {"task": "w0", "text": "here\n"} in shown
            assert shown[-1]["task"] == "w1"
            assert "PENSTOCK_NODE_LOG_KEY" in shown[-1]["problem"]
            async with httpx.AsyncClient() as stranger:
                url = f"http://127.0.0.1:{foreign.port}/v1/logs?job=j&task=j.1.w1"
                assert (await stranger.get(url)).status_code == 403
        async with cell.http.stream("GET", "/v1/jobs/j/logs", params={"follow": 1, "task": "w1"}) as response:
            chunks = response.aiter_text()
            await until(chunks, "waiting for it]")
            async with serving(tmp_path, "n1", log_key=key) as back:
                await comes_back(cell, back)
                assert await until(chunks, "one\n") == "one\n"
            printed(tmp_path, "n1", "j.1.w1", "two\n")
            async with serving(tmp_path, "n1", log_key=key) as back:
                await comes_back(cell, back)
                assert (await until(chunks, "two\n")).endswith("two\n"), "nothing twice"
                cell.placer.finish("j")
                await cell.tell()
                assert "".join([chunk async for chunk in chunks]) == ""
        await cell.caught_up()
        client = Client(cell.url)
        job = await asyncio.to_thread(follow.to_end, client, "j", follow.Shows.OUTPUT)
        assert follow.exit_code(job, propagate=False) == 0, "what cannot be shown does not fail the job"
        screen = capsys.readouterr()
        assert "\nworker-0 | here\n" in screen.out
        assert "penstock: worker-1: node n1 does not answer" in screen.err
        gone = await frames(cell)
        assert {"task": "w0", "text": "here\n"} in gone
        assert "does not answer" in gone[-1]["problem"]
        assert "archive" in gone[-1]["problem"]
        log = log_name("j", "j.1.w1")
        LogArchive(f"file://{archive}").put(log, tmp_path / "n1" / "logs" / log)
        assert await text(cell, task="w1") == "one\ntwo\n"
        assert await text(cell, task="w1", tail=1) == "two\n"
        (tmp_path / "n0" / "logs" / log_name("j", "j.1.w0")).unlink()
        assert "no such output" in (await frames(cell, task="w0"))[-1]["problem"]
        cell.placer.feed(NodeLeft(node_id="n1", boot_id="boot-1", proof="deleted"))
        await cell.tell()
        await cell.caught_up()
        assert await text(cell, task="w1") == "one\ntwo\n"


async def test_a_followed_log_never_goes_blind(
    dsn: str, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar prints four times the log's limit, then a loss. While the reporter restarts, the ring goes on
    without its reader."""
    monkeypatch.setattr(log_reader, "FIRST_PAUSE_S", 0.01)
    log = Output(str(log_path(tmp_path / "n1" / "logs", "j", "j.1.w1")), 1 << 20)
    async with serving(tmp_path, "n0", log_key=key) as first, running(dsn, node_log_key=key) as cell:
        async with serving(tmp_path, "n1", log_key=key) as served:
            await gang(cell, first, served)
        async with cell.http.stream("GET", "/v1/jobs/j/logs", params={"follow": 1, "task": "w1"}) as response:
            chunks = response.aiter_text()
            async with serving(tmp_path, "n1", log_key=key) as back:
                await comes_back(cell, back)
                log.write(b"\r 1 %")
                log.pause_ms()
                assert (await until(chunks, " 1 %")).endswith(" 1 %")
                for number in range(10_000):
                    log.write(b"\r%2d %%" % (number % 100) * 100)
                log.write(b"\nval_loss=0.5\n")
                assert (await until(chunks, "val_loss=0.5\n")).endswith("\r99 %\nval_loss=0.5\n")
            lines = "".join(f"line {number}\n" for number in range(200_000))
            for at in range(0, len(lines), 1 << 16):
                log.write(lines[at : at + (1 << 16)].encode())
            async with serving(tmp_path, "n1", log_key=key) as back:
                await comes_back(cell, back)
                text = re.sub(r"\[penstock: worker-1.*\n", "", await until(chunks, "line 199999\n"))
                head, left_out, newest = re.split(r"\[penstock: (\d+) bytes left out\]\n", text)
                assert lines.startswith(head)
                assert lines.endswith(newest)
                assert len(head) + int(left_out) + len(newest) == len(lines)
                log.close()
                cell.placer.finish("j")
                await cell.tell()
                assert "".join([chunk async for chunk in chunks]) == ""


@asynccontextmanager
async def foreign(answer: Callable[[str], bytes]) -> AsyncIterator[tuple[int, list[str]]]:
    """Another server than a node-reporter's, and the requests' paths that reach it. `answer`: of a path."""
    paths: list[str] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            paths.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode().partition("?")[0])
            writer.write(answer(paths[-1]))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], paths


SECRET = "credentials-of-this-machine"
FOREIGN = {
    "a page": f"HTTP/1.1 200 OK\r\nContent-Length: {len(SECRET)}\r\n\r\n{SECRET}",
    "an error": f"HTTP/1.1 500 No\r\nContent-Length: {len(SECRET)}\r\n\r\n{SECRET}",
    "a wrong offset": "HTTP/1.1 200 OK\r\npenstock-offset: -1\r\nContent-Length: "
    f"{len(SECRET)}\r\n\r\n{SECRET}",
    "a redirect": "HTTP/1.1 302 Found\r\nLocation: /secret\r\nContent-Length: 0\r\n\r\n",
    "a redirect of a reporter": "HTTP/1.1 307 Found\r\nLocation: /secret\r\npenstock-offset: "
    "0\r\nContent-Length: 0\r\n\r\n",
    "an endless refusal": "HTTP/1.1 403 No\r\npenstock-offset: 0\r\n\r\n" + "refused " * 100_000,
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_nodes_address_leads_to_its_reporter_and_nowhere_else(
    dsn: str, tmp_path: Path, key: Path, kind: str
) -> None:
    """A node announces another server's address, which answers the gateway alone: nobody sees its text."""
    page = f"HTTP/1.1 200 OK\r\npenstock-offset: 0\r\nContent-Length: {len(SECRET)}\r\n\r\n{SECRET}"
    async with (
        foreign(lambda path: (page if path == "/secret" else FOREIGN[kind]).encode()) as (port, paths),
        serving(tmp_path, "n0", log_key=key) as first,
        running(dsn, node_log_key=key) as cell,
    ):
        await gang(cell, first, replace(first, port=port))
        printed(tmp_path, "n0", "j.1.w0", "a1\n")
        shown = await text(cell)
        assert "worker-0 | a1\n" in shown
        assert "[penstock: worker-1: node n1 at http" in shown
        assert SECRET not in shown
        assert len(shown) < 2_000
        assert paths == ["/v1/logs"]


async def test_a_followed_retry_is_shown_whole(
    dsn: str, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logs -f --tail 1`: of the retry, which has printed before it is asked, nothing is cut off. No task is
    called w9."""
    asked: list[str] = []
    rows = Store.rows

    async def counted(self: Store, query: str, *arguments: Any) -> list[str]:
        asked.append(query)
        return await rows(self, query, *arguments)

    monkeypatch.setattr(Store, "rows", counted)
    async with serving(tmp_path, "n0", log_key=key) as first, running(dsn, node_log_key=key) as cell:
        cell.placer.submit("j", spec=JobSpec(command=("true",), retry=GANG.retry))
        await cell.tell()
        await cell.caught_up()
        params = {"follow": 1, "tail": 1}
        async with cell.http.stream("GET", "/v1/jobs/j/logs", params=params) as response:
            chunks, before = response.aiter_text(), len(asked)
            for number in range(8):
                cell.placer.submit(f"other-{number}", spec=JobSpec(command=("true",)))
                await cell.tell()
                await cell.caught_up()
            assert len(asked) - before < 5, "a job in the queue: the tables have nothing new"
            printed(tmp_path, "n0", "j.1.w0", "a1\na2")
            cell.placer.join(node_spec("n0", 16, logs=first))
            cell.placer.start("j")
            await cell.tell()
            assert await until(chunks, "a2") == "a2"
            problem(await cell.http.get("/v1/jobs/j/logs", params={"follow": 1, "task": "w9"}), 404)
            printed(tmp_path, "n0", "j.2.w0", "b1\nb2\nb3\n")
            cell.placer.finish("j", exit_code=1)
            cell.placer.fire()
            cell.placer.start("j")
            await cell.tell()
            assert await until(chunks, "b3\n") == "\n[penstock: attempt 2]\nb1\nb2\nb3\n"


async def test_more_tasks_than_are_followed_at_once_and_a_reporter_that_restarts_at_the_end(
    dsn: str, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two workers one is followed at once: the other's output comes in the end. And one's reporter is
    restarted just when its task ends."""
    monkeypatch.setattr(logs, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(log_reader, "QUIET_FAILURES", 1 << 30)  # however long the restart takes
    async with (
        AsyncExitStack() as stack,
        serving(tmp_path, "n1", log_key=key) as second,
        running(dsn, node_log_key=key) as cell,
    ):
        first = await stack.enter_async_context(serving(tmp_path, "n0", log_key=key))
        await gang(cell, first, second)
        printed(tmp_path, "n0", "j.1.w0", "one\n")
        printed(tmp_path, "n1", "j.1.w1", "two\n")
        params = {"follow": 1, "format": "ndjson"}
        async with cell.http.stream("GET", "/v1/jobs/j/logs", params=params) as response:
            chunks = response.aiter_text()
            begun = await until(chunks, "one\\n")
            assert "task=w1" in begun
            assert '"final":false' in begun
            await stack.aclose()
            printed(tmp_path, "n0", "j.1.w0", "last words\n")
            cell.placer.finish("j")
            await cell.tell()
            await cell.caught_up()
            async with serving(tmp_path, "n0", log_key=key) as back:
                cell.placer.join(node_spec("n0", 1, logs=back))
                await cell.tell()
                rest = "".join([chunk async for chunk in chunks])
        assert [json.loads(line) for line in rest.splitlines()] == [
            {"task": "w0", "text": "last words\n"},
            {"task": "w1", "text": "two\n"},
        ]


async def test_a_log_of_a_node_that_is_gone_comes_from_an_s3_store(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is taken away after its task. While the store refuses the gateway, a line explains why the
    output is missing."""
    with S3Server("id", "secret", "bucket").serving() as store:
        for name, value in store.environment("secret").items():
            monkeypatch.setenv(name, value)
        log, archive = tmp_path / "log", "s3://bucket/cell"
        log.write_text("a\nb\n")
        LogArchive(archive).put(log_name("j", "j.1.w0"), log)
        async with running(dsn, node_log_archive=archive) as cell:
            cell.placer.join(node_spec("n0", 1))
            cell.placer.submit("j", spec=JobSpec(command=("true",)))
            cell.placer.start("j")
            cell.placer.finish("j")
            cell.placer.feed(NodeLeft(node_id="n0", boot_id="boot-1", proof="deleted"))
            await cell.tell()
            await cell.caught_up()
            assert await text(cell) == "a\nb\n"
            assert await text(cell, tail=1, follow=1) == "b\n"
            store.keys["id"] = "another"
            [_, missing] = await frames(cell)
            assert "archive s3://bucket/cell: SignatureDoesNotMatch" in missing["problem"]
            assert "credentials" in missing["problem"]
