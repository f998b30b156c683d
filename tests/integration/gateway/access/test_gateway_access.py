"""Access to the gateway (tokens, hosts), restarts and outages, and admin requests."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import psutil
import pytest
import pytest_asyncio

from penstock.cli.app import run as cli
from penstock.errors import ConfigurationError
from penstock.ledger.replica.replica import Replica
from penstock.model.inputs.external_events import NodeJoined
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock.runtime.database.postgres_server import PostgresServer
from penstock.runtime.following.snapshots import save_snapshot
from penstock.runtime.http.http_limits import Limits
from penstock.runtime.keys.job_tokens import Claim, made
from penstock.runtime.keys.node_keys import OPERATOR_KEY, TRUST_LOG, NodeKeys
from penstock_services.gateway.shell import service as gateway_service
from penstock_services.gateway.shell.options import Options
from penstock_services.gateway.tokens import _append
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import SPEC, Cell, problem, running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


# ---------------------------------------------------------------------------------------- who may come in


async def test_every_request_needs_a_token_where_tokens_are_set(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokens"
    made = ["token", "--tokens", str(path), "--roles", "submit,read", "--tenant"]
    assert [cli([*made, tenant]) for tenant in ("ana", "ben")] == [0, 0]
    first, second = capsys.readouterr().out.split()
    assert first not in path.read_text()
    options = Options.from_env(
        {"PENSTOCK_TOKENS": str(path), "PENSTOCK_GATEWAY_BIND": "0.0.0.0:1", OPERATOR_KEY: TRUST_LOG}
    )
    assert options.host == "0.0.0.0"
    async with running(dsn, tokens=options.tokens) as cell:
        for authorization in (None, "Bearer wrong-token-0123456789", f"Basic {first}", "Bearer"):
            headers = {"authorization": authorization} if authorization else {}
            for path_ in ("/v1/jobs", "/v1/stream", "/openapi.json"):
                refused = await cell.http.get(path_, headers=headers)
                problem(refused, 401)
                assert refused.headers["www-authenticate"].startswith("Bearer")
        good = {"authorization": f"Bearer {second}"}
        assert (await cell.http.post("/v1/jobs", json=SPEC, headers=good)).status_code == 202
        assert (await cell.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("with_tokens", [True, False])
async def test_a_request_has_one_authorization(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], with_tokens: bool
) -> None:
    """A proxy checks the first of two tokens, and the gateway would act for the second: neither counts."""
    path = tmp_path / "tokens"
    assert cli(["token", "--tokens", str(path), "--roles", "read"]) == 0
    good = f"Bearer {capsys.readouterr().out.strip()}"
    async with running(dsn, tokens=path if with_tokens else None) as cell:
        for values in ((good, good), ("Bearer another", good), (good, "Bearer another"), ("",)):
            headers = [("authorization", value) for value in values]
            refused = problem(await cell.http.get("/v1/jobs", headers=headers), 400)
            assert [error["field"] for error in refused["errors"]] == ["Authorization"]
            assert "send one `Authorization` header" in refused["errors"][0]["remedy"]
        assert (await cell.http.get("/v1/jobs", headers={"authorization": good})).status_code == 200
        port = int(cell.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /v1/jobs HTTP/1.1\r\nHost: evil.example\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        )
        refusal = await reader.read()
        assert refusal.startswith(b"HTTP/1.1 400")
        assert b'"field":"Host"' in refusal
        writer.close()


async def test_half_requests_do_not_stay_open(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of connections with half a request or half a job: all are closed, and no fault is logged."""
    half = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    body = half + b'Content-Length: 1000\r\n\r\n{"command": ['
    async with running(dsn, http_limits=Limits(headers_within_s=0.3, body_within_s=0.3)) as cell:
        port = int(cell.url.rpartition(":")[2])
        peers = []
        for number in range(400):
            peers.append(await asyncio.open_connection("127.0.0.1", port))
            peers[-1][1].write((half, body)[number % 2])
        ends = [await reader.read() for reader, _ in peers]
        assert {end[:13] for end in ends} <= {b"HTTP/1.1 408 ", b""}, "none where the first bytes came late"
        for _, writer in peers:
            writer.close()
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_web_page_of_another_site_cannot_submit(cell: Cell) -> None:
    """A page in the user's browser posts to 127.0.0.1, or has its name point there: what it submits would
    run."""
    evil = {"origin": "https://evil.example"}
    assert problem(await cell.http.post("/v1/jobs", json=SPEC, headers=evil), 403)["type"].endswith(
        "foreign_origin"
    )
    rebound = {"host": "evil.example:8742"}
    assert problem(await cell.http.get("/v1/jobs", headers=rebound), 403)["type"].endswith("foreign_host")
    own = {"origin": cell.url}
    assert (await cell.http.post("/v1/jobs", json=SPEC, headers=own)).status_code == 202


async def test_a_jobs_token_bounds_it_also_where_there_are_no_tokens(cell: Cell) -> None:
    """`penstock up`: every process of the user may do everything. A driver that has its token is one job: it
    does not fence a node, and its trial is linked to it."""
    keys = NodeKeys(b"n" * 32)
    cell.placer.feed(NodeJoined(node=node_spec("n1"), public_key=keys.public_key))
    cell.placer.submit("driver", spec=JobSpec(command=("true",), owner="ana", may_submit=True))
    cell.placer.start("driver")
    job = cell.placer.state.jobs["driver"]
    await cell.tell()
    as_job = {"authorization": f"Bearer {made(keys, Claim('n1', 'driver', *job.tasks, job.token))}"}
    submitted = await cell.http.post("/v1/jobs", json=SPEC, headers=as_job)
    assert submitted.status_code == 202
    shown = (await cell.http.get(f"/v1/jobs/{submitted.json()['job_id']}")).json()
    assert shown["spec"]["parents"] == ["driver"]
    problem(await cell.http.post("/v1/nodes/n1/fence", json={"reason": "x"}, headers=as_job), 403)


@pytest.mark.parametrize(
    ("mode", "text", "complaint"),
    [
        (0o644, f"sha256:{'0' * 64} roles=read\n", "chmod 600"),
        (0o600, "a-token-in-plain-text\n", "line 1: begins with no hash"),
        (0o600, "\n", "holds 0 tokens"),
    ],
)
def test_a_careless_token_file_is_refused(tmp_path: Path, mode: int, text: str, complaint: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=complaint):
        Options.from_env({"PENSTOCK_TOKENS": str(path)})


def _append_all_at_once(path: Path, lines: list[str]) -> None:
    """Each in a process of its own, let go together."""
    together = multiprocessing.get_context("fork")
    gate = together.Barrier(len(lines))

    def append(line: str) -> None:
        gate.wait()
        _append(path, line)

    processes = [together.Process(target=append, args=(line,)) for line in lines]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(lines)


def test_tokens_that_are_made_at_once_are_all_in_the_file(tmp_path: Path) -> None:
    """A deployment makes the nodes' tokens side by side: two read the same file, and one line was lost."""
    path = tmp_path / "tokens"
    lines = [f"sha256:{number:064x} roles=read" for number in range(8)]
    for _ in range(3):
        path.unlink(missing_ok=True)
        _append_all_at_once(path, lines)
        assert sorted(path.read_text().splitlines()) == lines
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokens"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to add a line to another user's file")
def test_a_token_that_root_adds_does_not_lock_the_gateway_out(tmp_path: Path) -> None:
    """`sudo penstock token`, while the gateway runs as a user of its own: it must still be able to read its
    file."""
    path = tmp_path / "tokens"
    made = ["token", "--tokens", str(path), "--roles", "read"]
    assert cli(made) == 0
    os.chown(path, 4_711, 4_712)
    assert cli(made) == 0
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (4_711, 4_712, 0o600)
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("bind", ["0.0.0.0:8742", "[::]:8742", "10.0.0.1:80", "example.com:80"])
def test_it_binds_to_loopback_only_without_tokens(bind: str) -> None:
    """Whoever reaches the gateway runs commands: the whole network must not, by default."""
    with pytest.raises(ConfigurationError, match="PENSTOCK_TOKENS"):
        Options.from_env({"PENSTOCK_GATEWAY_BIND": bind})


@pytest.mark.parametrize("bind", ["8742", "127.0.0.1:x", "127.0.0.1:99999", ":1"])
def test_a_wrong_bind_is_named(bind: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_GATEWAY_BIND"):
        Options.from_env({"PENSTOCK_GATEWAY_BIND": bind})


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="stop what listens there"):
            gateway_service.listening_socket(Options("127.0.0.1", taken.getsockname()[1]))


# ------------------------------------------------------------------------------------------ the rest


async def test_projections_are_verified_and_rebuilt_over_http(cell: Cell) -> None:
    cell.placer.join(node_spec("n0", 1))
    cell.placer.run(["a", "b"])
    await cell.tell()
    await cell.caught_up()
    connection = await asyncpg.connect(cell.dsn)
    await connection.execute("UPDATE penstock.jobs SET owner = 'mallory' WHERE job_id = 'a'")
    await connection.close()
    found = (await cell.http.post("/v1/projections/verify")).json()
    assert (found["ok"], found["different"], found["differences"][0]["key"]) == (False, 1, "a")
    assert (await cell.http.post("/v1/projections/rebuild")).json()["ok"]
    assert (await cell.http.post("/v1/projections/verify")).json()["ok"]


def interpreters() -> dict[int, tuple[int, str]]:
    """Process id → (parent, command line) of the Python processes below this one."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if "python" in line:
                found[child.pid] = (child.ppid(), line)
    return found


async def test_a_replay_over_http_starts_no_interpreter(cell: Cell) -> None:
    """Monitoring may GET it every minute: the worker is a fork of a process that is there already, and stays
    for a while."""
    cell.placer.join(node_spec("n0", 1))
    await cell.tell()
    before = interpreters()
    [server] = [
        pid for pid, (parent, line) in before.items() if "forkserver" in line and parent == os.getpid()
    ]
    found = (await cell.http.get("/v1/replay", params={"until": 1})).json()
    assert (found["ok"], found["records"], found["head_seq"]) == (True, 1, 1)
    new = [parent for pid, (parent, _) in interpreters().items() if pid not in before]
    assert new == [server]
    refused = (await cell.http.get("/v1/replay")).json()
    assert not refused["ok"]
    assert refused["error"].startswith("replay: ")


async def test_the_openapi_document_is_whole(cell: Cell) -> None:
    """Client generators read it: every reference resolves, bodies have examples that the gateway itself
    accepts."""
    document = (await cell.http.get("/openapi.json")).json()
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        found = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
    submit = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    for kind, part in submit.items():
        body = part["example"] if isinstance(part["example"], str) else json.dumps(part["example"])
        answer = await cell.http.post("/v1/jobs", content=body, headers={"content-type": kind})
        assert answer.status_code == 202, answer.text
    hand_in = document["paths"]["/v1/events"]["post"]["requestBody"]["content"]
    example = hand_in["application/cloudevents+json"]["example"]
    headers = {"content-type": "application/cloudevents+json"}
    assert (
        await cell.http.post("/v1/events", content=json.dumps(example), headers=headers)
    ).status_code == 202


async def test_a_gateway_starts_from_a_snapshot_and_goes_on(dsn: str) -> None:
    """A restart in the middle of the day: the replica is the same, and ended jobs are still known."""
    async with running(dsn) as cell:
        cell.placer.join(node_spec("n0", 1))
        cell.placer.run(["done"])
        cell.placer.submit("waits", gpus=2)
        await cell.tell()
        replica, connection = Replica(), await asyncpg.connect(dsn)
        for offset, value in enumerate(cell.placer.values[:4]):
            replica.take(value, offset)
        await cell.caught_up()
        await save_snapshot(connection, "default", replica)
        await connection.close()
        before = [(await cell.http.get(f"/v1/jobs/{job}")).json() for job in ("done", "waits")]
    async with running(dsn) as cell:
        after = [(await cell.http.get(f"/v1/jobs/{job}")).json() for job in ("done", "waits")]
        for found in before + after:
            assert found.pop("now_ms") >= found["submitted_ms"]
        assert after == before
        assert (await cell.http.get("/readyz")).status_code == 200


# so do tests/faults/kills/test_outages.py, for all services, and tests/e2e/local/test_up.py
@pytest.mark.slow
async def test_postgres_is_killed_under_load(postgres_folder: Path) -> None:
    """The out-of-memory killer picks Postgres twice while jobs come in: every 202 is honoured, and the tables
    are right."""
    server = PostgresServer()
    dsn = await server.start(postgres_folder / "pg")
    keyed: set[str] = set()
    try:
        async with running(dsn) as cell:
            stop = asyncio.Event()

            async def submit(client: int) -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    key = {"Idempotency-Key": f"{client}-{number}"}
                    while (
                        answer := await cell.http.post("/v1/jobs", json=SPEC, headers=key)
                    ).status_code == 503:
                        assert answer.headers["retry-after"]
                        await asyncio.sleep(0.05)  # clock: the client's pause before it tries again
                    assert answer.status_code in (200, 202), answer.text
                    keyed.add(answer.json()["job_id"])
                    await asyncio.sleep(0.01)  # clock: the pace of the load, on which nothing depends

            async def more_come_in() -> None:
                enough = len(keyed) + 20
                await await_until(
                    lambda: len(keyed) >= enough or any(client.done() for client in submitting),
                    "20 more jobs",
                )

            submitting = [asyncio.create_task(submit(client)) for client in range(4)]
            for _ in range(2):
                await more_come_in()
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)
                assert await server.start(postgres_folder / "pg") == dsn
            await more_come_in()
            stop.set()
            await asyncio.gather(*submitting)
            events = await cell.written(Topic.JOBS)
            assert {event.data.subject() for event in events} == keyed
            cell.placer.join(node_spec("n0", 1))
            for event in events:
                cell.placer.feed(event.data, event.id)
            await cell.tell()
            await cell.caught_up()
            assert len((await cell.http.get("/v1/jobs", params={"limit": 1_000})).json()["jobs"]) == len(
                keyed
            )
            assert (await cell.http.post("/v1/projections/verify")).json()["ok"]
    finally:
        await server.stop()


# ------------------------------------------------------------------------------------------ without tokens

NOBODY = 65_534
BODY = b'{"command": ["id"]}'
REQUEST = (
    b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
    b"%d\r\n\r\n%s"
)


def submits_as(user: int, port: int, *, waits: bool) -> str:
    """A job from a process of another user; the status line of the answer, if that process `waits` for it."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            with socket.socket() as client:
                client.connect(("127.0.0.1", port))
                client.sendall(REQUEST % (len(BODY), BODY))
                if waits:
                    os.write(writing, client.recv(4_096).splitlines()[0])
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
async def test_loopback_without_tokens_is_for_one_user(dsn: str) -> None:
    """Another user of the machine, or a job that runs as one, submits: refused, also when it does not wait
    for the answer."""
    async with running(dsn) as cell:
        port = int(cell.url.rpartition(":")[2])
        assert "403" in await asyncio.to_thread(submits_as, NOBODY, port, waits=True)
        for _ in range(20):
            await asyncio.to_thread(submits_as, NOBODY, port, waits=False)
        assert await cell.written(Topic.JOBS) == []
        assert "202" in await asyncio.to_thread(submits_as, 0, port, waits=True)
        assert len(await cell.written(Topic.JOBS)) == 1
        assert (await cell.http.get("/healthz")).status_code == 200
