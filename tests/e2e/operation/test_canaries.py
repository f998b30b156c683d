"""Canary strings, sent in through every door: nowhere in ledger, tables, traces, logs, streams, dead letters,
tasks."""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from penstock.log.port import Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.schema.topics import Topic, node_partition
from tests.e2e.conftest import Installation, Start
from tests.support.gateway.canaries import found_in, new_canary, written
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres
CANARIES = [new_canary(n) for n in range(79)]
DSN, OTLP, OPERATOR, NODE, TOKEN, PUBLIC = CANARIES[50:56]
"""Passwords in URLs; the keys of the cell and of a node; a token in use; a secret that every user could
read."""
REFUSED, RECORDS, LINE = CANARIES[56:68], CANARIES[68:78], CANARIES[78]
"""In requests that are refused; in records that cannot be read; in the file of tokens, where no secret
belongs."""
DEAD_LETTER = b"penstock.input.dead_lettered"
CREDENTIALS = {"keys/operator.key", "nodes/node-0/node.key", "nodes/node-0/log-url"}
"""Files that hold a canary because it is theirs, and that only the user may read."""
TRAIN = """
import hashlib, json, os
found = [os.environ[f"S{n}"] for n in range(25)]
with open(os.environ["PENSTOCK_PHASE_FILE"], "w") as file:
    file.write("\\n".join((json.dumps({"loss": found[24]}), f"PASSWORD={found[24]}", "{" + found[24], "")))
print(hashlib.sha256("".join(found).encode()).hexdigest())
"""
"""Has all secrets, and writes one of them in lines that mean nothing as its progress."""
SPY = """
import os, re, sys
found, seen = set(), 0
pids = [name for name in os.listdir("/proc") if name.isdigit()]
places = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "cmdline")]
places += [os.path.join(folder, name) for folder, _, names in os.walk(sys.argv[1]) for name in names]
places = [place for place in places if os.path.isfile(place)]
for place in places:
    try:
        with open(place, "rb") as file:
            text = file.read(1 << 20)
    except OSError:
        continue
    seen += 1
    found |= {(place, match) for match in re.findall(rb"canary[0-9x]+[0-9a-f]{18}", text)}
print("read", seen, "found", sorted(found))
"""
"""Looks where a hostile task would look, and prints what it finds: into its log, where the search finds
it."""


class Collector(BaseHTTPRequestHandler):
    """An OTLP endpoint that stores what it gets."""

    bodies: list[bytes] = []  # noqa: RUF012 - one per test run

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return None


@pytest.fixture
def collector() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


async def tables(dsn: str) -> bytes:
    """Every row of every table, but for the records that `write_records` has written."""
    connection = await asyncpg.connect(dsn)
    planted = await connection.execute(
        "DELETE FROM penstock_log.records WHERE position('planted'::bytea IN headers) > 0 AND "
        "position('x-password'::bytea IN headers) > 0"
    )
    assert planted == f"DELETE {len(RECORDS)}"
    names = await connection.fetch(
        "SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables "
        "WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    )
    rows = [
        row[0] for name in names for row in await connection.fetch(f"SELECT t::text FROM {name['name']} t")
    ]
    await connection.close()
    assert len(rows) > 50
    return "\n".join(rows).encode()


async def password_in(dsn: str) -> str:
    """The same database for another user, whose password is a canary."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"CREATE ROLE spied_on SUPERUSER LOGIN PASSWORD '{DSN}'")
    await connection.close()
    scheme, _, rest = dsn.partition("://")
    return f"{scheme}://spied_on:{DSN}@{rest.rpartition('@')[2]}"


async def drop_role(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "REASSIGN OWNED BY spied_on TO current_user; DROP OWNED BY spied_on; DROP ROLE spied_on"
    )
    await connection.close()


def prepare(place: Path) -> None:
    """Keys and secrets as an administrator hands them out."""
    secrets = place / "secrets/shared"
    secrets.mkdir(mode=0o755, parents=True)
    given = {secrets / f"file-{n}": CANARIES[n] for n in range(15)}
    (place / "state/nodes/node-0").mkdir(parents=True)
    (place / "state/keys").mkdir()
    given |= {
        place / "state/keys/operator.key": f"{OPERATOR:_<32}",
        place / "state/nodes/node-0/node.key": f"{NODE:_<32}",
    }
    for path, text in given.items():
        path.write_text(text)
        path.chmod(0o600)
    (secrets / "public").write_text(PUBLIC)
    (secrets / "public").chmod(0o644)


def bad_requests() -> list[tuple[dict[str, str], bytes]]:
    """Headers and bodies that are refused, a canary in each."""
    event = '{"specversion": "1.0", "id": "e", "source": "/t", "type": "%s", "data": %s}'
    job, cloud, plain = (
        {"content-type": "application/yaml"},
        {"content-type": "application/cloudevents+json"},
        {"content-type": "application/json"},
    )
    submitted = "penstock.job.submitted.v1"
    attributes = {"ce-specversion": "1.0", "ce-id": "e", "ce-source": "/t", "ce-type": submitted}
    texts: list[tuple[dict[str, str], str]] = [
        (job, "command: [x]\nenv: PASSWORD={}"),
        (job, "command: [x]\nenv: {PASSWORD: '{}}"),
        (job, "command: [x]\npassword: {}"),
        (plain, '{"command": ["x"], "password": "{}"}'),
        (plain, '{"command": ["x"], "env": {"PASSWORD": "{}"'),
        (cloud, event % (submitted, '{"job_id": "j", "spec": {"command": ["x"], "env": "{}"}}')),
        (cloud, event % (submitted, '{"job_id": "j", "spec": {"command": ["x"]}, "password": "{}"}')),
        (cloud, event % ("penstock.job.unheard_of.v1", '{"password": "{}"}')),
        (cloud, event % ("penstock.node.cordoned.v1", '{"node_id": "node-0", "by": "x", "reason": "{}"}')),
        (cloud, event % (submitted, '"{}"')),
        (plain | attributes | {"ce-time": "{}"}, '{"job_id": "j", "spec": {"command": ["x"]}}'),
        (plain | attributes, '{"job_id": "j", "spec": {"command": ["x"], "secrets": {"PASSWORD": "/{}"}}}'),
    ]
    return [
        (
            {name: value.replace("{}", canary) for name, value in headers.items()},
            text.replace("{}", canary).encode(),
        )
        for canary, (headers, text) in zip(REFUSED, texts, strict=True)
    ]


def send_refused(up: Installation) -> None:
    """A confused or hostile client with a token of its own; the answer shows nothing of what it sent."""
    ours = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=up.url, timeout=None) as http:
        for headers, body in bad_requests():
            path = "/v1/events" if b"specversion" in body or "ce-type" in headers else "/v1/jobs"
            answer = http.post(path, content=body, headers=headers | ours)
            assert answer.status_code in (400, 403), (body, answer.text)
            assert found_in(answer.content, CANARIES) == []


async def write_records(dsn: str) -> None:
    """A program with the right to write to the topics, of another version or hostile, writes what cannot be
    read."""
    kinds = [
        (
            Topic.JOBS,
            "penstock.job.submitted.v1",
            '{"job_id": "j", "spec": {"command": ["x"], "env": {"PASSWORD": ["{}"]}}}',
        ),
        (
            Topic.JOBS,
            "penstock.job.submitted.v1",
            '{"job_id": "j", "spec": {"command": ["x"], "env": {"PASSWORD": "{}"',
        ),
        (Topic.JOBS, "penstock.job.submitted.v9", '{"job_id": "j", "password": "{}"}'),
        (Topic.JOBS, "penstock.job.cancel_requested.v1", '{"reason": "{}"}'),
        (Topic.ESTIMATES, "penstock.job.estimated.v1", '{"job_id": "j", "estimate": "{}"}'),
        (Topic.PROPOSALS, "penstock.plan.proposed.v2", '{"proposal_id": ["{}"]}'),
        (Topic.NODES, "penstock.task.exited.v1", '{"node_id": "node-0", "cause": "{}"}'),
        (
            Topic.NODES,
            "penstock.node.cordoned.v1",
            '{"node_id": "node-0", "drain": true, "by": "x", "reason": "{}"}',
        ),
        (Topic.NODES, "penstock.node.joined.v1", "PASSWORD={}"),
        (Topic.ORDERS, "penstock.order.start_task.v1", '{"token": 1, "command": "{}"}'),
    ]
    log = await EmbeddedLog(dsn, "mallory").start()
    for number, (canary, (topic, kind, text)) in enumerate(zip(RECORDS, kinds, strict=True)):
        known = {"ce_specversion": "1.0", "ce_id": f"planted-{number}", "ce_source": "/t", "ce_type": kind}
        headers = tuple((name, value.encode()) for name, value in (known | {"x-password": canary}).items())
        place = Partition(topic, node_partition("node-0") if topic == Topic.ORDERS else 0)
        await log.append([Message(place, text.replace("{}", canary).encode(), headers)])
    await log.close()


def processes() -> bytes:
    """Command lines of all processes, and what node-reporters have in their environment."""
    texts = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            texts.append(command)
            if b"penstock_services.node_reporter" in command:
                texts.append((folder / "environ").read_bytes())
    return b"\n".join(texts)


def reports(up: Installation, folder: Path) -> None:
    """What the product writes about a cell for others to read."""
    for name, words in {
        "report": ("report", "--report", str(folder / "report.html"), "-o", "json"),
        "doctor": ("doctor", "-o", "json"),
    }.items():
        done = up.run(*words)
        (folder / name).write_text(done.stdout + done.stderr)
    assert {path.name for path in folder.iterdir()} >= {"report.html", "report", "doctor"}


def send_in(up: Installation, canaries: list[str]) -> None:
    """What a confused or hostile client sends where it does not belong; every request is refused or does not
    need it."""
    good = up.token_file.read_text().strip()
    with httpx.Client(base_url=up.url, timeout=None) as http:
        for n, canary in enumerate(canaries):
            ours = {"authorization": f"Bearer {good}"}
            match n % 6:
                case 0:
                    assert (
                        http.get("/v1/jobs", headers={"authorization": f"Bearer {canary}"}).status_code == 401
                    )
                case 1:
                    assert http.get("/v1/status", auth=("ana", canary)).status_code == 401
                case 2:
                    refused = http.get("/v1/nodes", params={"token": canary}, headers=ours)
                    assert (refused.status_code, canary in refused.text) == (400, False)
                case 3:
                    more = {"x-api-key": canary, "cookie": f"session={canary}", "x-forwarded-for": canary}
                    job = {"command": ["true"], "name": f"job{n}"}
                    assert http.post("/v1/jobs", json=job, headers=ours | more).status_code == 202
                case 4:
                    wrong = {
                        "command": ["true"],
                        "env": {"KEY": {"value": canary}},
                        "secrets": {"KEY": f"/{canary}"},
                    }
                    refused = http.post("/v1/jobs", json=wrong, headers=ours)
                    assert refused.status_code == 400
                    assert canary not in refused.text
                case 5:
                    refused = http.get(f"/v1/jobs/x?password={canary}", headers=ours)
                    assert (refused.status_code, canary in refused.text) == (400, False)


def send_with_a_token(up: Installation) -> None:
    """A token of which the gateway knows the hash submits and looks."""
    with Path(up.env["PENSTOCK_TOKENS"]).open("a") as file:
        file.write(
            f"sha256:{hashlib.sha256(TOKEN.encode()).hexdigest()} roles=submit,read,operate tenant=ana\n"
        )
    with httpx.Client(base_url=up.url, timeout=None, headers={"authorization": f"Bearer {TOKEN}"}) as http:
        assert http.post("/v1/jobs", json={"command": ["true"], "name": "by-token"}).status_code == 202
        assert http.get("/v1/status").status_code == 200


def damage_tokens(up: Installation) -> None:
    """The token itself was written where its line goes on: every caller gets the message."""
    with Path(up.env["PENSTOCK_TOKENS"]).open("a") as file:
        file.write(f"sha256:{'0' * 64} roles=read {LINE}\n")
    refused = httpx.get(f"{up.url}/v1/status", headers={"authorization": "Bearer any"}, timeout=None)
    assert (refused.status_code, found_in(refused.content, CANARIES)) == (503, [])


def run_jobs(up: Installation) -> None:
    """With secrets, without one that it needs, with one that every user could read, and one that looks
    around."""
    needs = ("--gpus", "1", "--cores", "1")
    flags = [f"--secret=S{n}={'file' if n < 15 else 'env'}-{n}" for n in range(25)]
    done = up.run("submit", "--name", "secret", *needs, *flags, "--", "python3", "-c", TRAIN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hashlib.sha256("".join(CANARIES[:25]).encode()).hexdigest() in up.run("logs", "secret").stdout
    for name, why in (
        ("absent", "has no secret 'absent'"),
        ("public", "every user of this node can read it"),
    ):
        failed = up.run("submit", "--name", name, *needs, "--secret", f"S={name}", "--", "true")
        assert failed.returncode == 10
        assert why in up.run("describe", "job", name, "-o", "json").stdout
    spy = up.run("submit", "--name", "spy", *needs, "--", "python3", "-c", SPY, str(up.folder.parent))
    assert spy.returncode == 0, spy.stderr
    looked = up.run("logs", "spy").stdout
    assert int(looked.split()[1]) >= 2, "at least its own"
    warned = up.run("submit", "--detach", "-e", "WANDB_API_KEY=hunter2", "--", "true")
    assert "env.WANDB_API_KEY looks like a secret" in warned.stderr
    assert "{secret: name-of-it}" in warned.stderr


def whole_stream(up: Installation) -> bytes:
    """The cell's events, once the dead letters of all records that cannot be read are among them, but for an
    order, which is a node's to refuse."""
    ours = {"authorization": f"Bearer {up.token_file.read_text().strip()}"}

    def read() -> bytes:
        status = up.gateway.get("/v1/status")
        span = {"after": "0", "until": min(status["seq"], status["projected_seq"])}
        return httpx.get(f"{up.url}/v1/stream", params=span, headers=ours, timeout=None).content

    wait_until(lambda: read().count(DEAD_LETTER) >= len(RECORDS) - 1, "dead letters")
    return read()


def test_canaries_are_found_nowhere(dsn: str, collector: str, place: Path, start: Start) -> None:
    """Secrets of jobs, passwords in URLs, headers and bodies, tokens and keys, on their way through a whole
    installation."""
    prepare(place)
    (place / "reports").mkdir()
    env = {f"PENSTOCK_SECRET_SHARED__ENV_{n}": CANARIES[n] for n in range(15, 25)}
    url = asyncio.run(password_in(dsn))
    up = None
    try:
        up = start(
            "--nodes",
            "1",
            PENSTOCK_DSN=url,
            PENSTOCK_SECRETS_DIR=str(place / "secrets"),
            PENSTOCK_LOG_LEVEL="DEBUG",
            PENSTOCK_OTLP=collector.replace("://", f"://ana:{OTLP}@"),
            **env,
        )
        assert "the node-reporters have all rights of PENSTOCK_DSN" in up.printed()
        asyncio.run(write_records(dsn))
        send_with_a_token(up)
        run_jobs(up)
        send_in(up, CANARIES[25:50])
        send_refused(up)
        running = processes()
        stream = whole_stream(up)
        reports(up, place / "reports")
        seen = asyncio.run(tables(dsn))
        answers = [
            up.run(*words).stdout
            for words in (
                ("get", "jobs", "-o", "json"),
                ("events", "secret", "-o", "json"),
                ("why", "secret", "-o", "json"),
            )
        ]
        damage_tokens(up)
    finally:
        if up is not None:
            up.stop()
        asyncio.run(drop_role(dsn))
    assert b"penstock.job.ended" in stream
    assert Collector.bodies
    assert b"hunter2" in seen, "what stands in env is in the ledger: the search would find it"
    theirs = {up.folder / name for name in CREDENTIALS}
    assert {path.stat().st_mode & 0o777 for path in theirs} == {0o600}
    output = [path for path in place.rglob("*") if path.is_file() and place / "secrets" not in path.parents]
    assert sum(found_in(path.read_bytes(), CANARIES) != [] for path in theirs) == len(theirs)
    files = b"\n".join(
        path.read_bytes() for path in output if path not in {*theirs, Path(up.env["PENSTOCK_TOKENS"])}
    )
    assert len(files) > 10_000
    everything = {
        "tables": seen,
        "answers": json.dumps(answers).encode(),
        "stream": stream,
        "processes": running,
        "traces": b"\n".join(Collector.bodies),
        "files": files,
        "screen": up.printed().encode(),
    }
    assert {where: found_in(text, allowed(where)) for where, text in everything.items()} == {
        where: [] for where in everything
    }
    assert found_in(b"\n".join(written(CANARIES[7])), CANARIES) == [CANARIES[7]], "the search itself finds"


def allowed(where: str) -> list[str]:
    """Canaries to look for there: a node-reporter has its secrets and the collector's address in its
    environment."""
    return [canary for canary in CANARIES if where != "processes" or canary not in {*CANARIES[15:25], OTLP}]
