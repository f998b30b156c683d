"""Fifty canary strings, sent in through every door: nowhere in ledger, tables, traces, logs, streams, dead letters."""

import asyncio
import base64
import hashlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import asyncpg
import httpx
import pytest

from tests.e2e.conftest import Installation, new_place

pytestmark = pytest.mark.postgres
CANARIES = [f"canary{n:02d}x{os.urandom(9).hex()}" for n in range(50)]


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


def written(canary: str) -> list[bytes]:
    """As it is, in hexadecimal, and at each place of a base64 text."""
    raw = canary.encode()
    inside = [base64.b64encode(b"\0" * shift + raw)[4 * (shift > 0) : -4] for shift in range(3)]
    return [raw, raw.hex().encode(), *inside]


def found_in(text: bytes) -> list[str]:
    return [canary for canary in CANARIES if any(form in text for form in written(canary))]


async def tables(dsn: str) -> bytes:
    """Every row of every table."""
    connection = await asyncpg.connect(dsn)
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


def send_in(up: Installation, canaries: list[str]) -> None:
    """What a confused or hostile client sends where it does not belong; every request is refused or does not need it."""
    good = up.token_file.read_text().strip()
    with httpx.Client(base_url=up.url, timeout=20) as http:
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
                    assert http.get("/v1/nodes", params={"token": canary}, headers=ours).status_code == 200
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
                    assert http.get(f"/v1/jobs/x?password={canary}", headers=ours).status_code == 404


def test_fifty_canaries_are_found_nowhere(dsn: str, collector: str) -> None:
    """Secrets of jobs, tokens, passwords in headers and URLs, on their way through a whole installation."""
    place = new_place()
    secrets = place / "secrets"
    secrets.mkdir(mode=0o755)
    for n in range(15):
        (secrets / f"file-{n}").write_text(CANARIES[n])
        (secrets / f"file-{n}").chmod(0o600)
    env = {f"PENSTOCK_SECRET_ENV_{n}": CANARIES[n] for n in range(15, 25)}
    up = Installation(
        place, "--nodes", "1", "--otlp", collector, PENSTOCK_DSN=dsn, PENSTOCK_SECRETS_DIR=str(secrets), **env
    )
    try:
        flags = [f"--secret=S{n}={'file' if n < 15 else 'env'}-{n}" for n in range(25)]
        script = "import hashlib, os; print(hashlib.sha256(''.join(os.environ[f'S{n}'] for n in range(25)).encode()).hexdigest())"
        done = up.run(
            "submit", "--name", "secret", "--gpus", "1", "--cores", "1", *flags, "--", "python3", "-c", script
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert hashlib.sha256("".join(CANARIES[:25]).encode()).hexdigest() in up.run("logs", "secret").stdout
        missing = up.run(
            "submit", "--name", "missing", "--gpus", "1", "--cores", "1", "--secret", "S=absent", "--", "true"
        )
        assert missing.returncode == 10
        assert "has no secret 'absent'" in up.run("describe", "job", "missing", "-o", "json").stdout
        warned = up.run("submit", "--detach", "-e", "WANDB_API_KEY=hunter2", "--", "true")
        assert "env.WANDB_API_KEY looks like a secret" in warned.stderr
        assert "{secret: name-of-it}" in warned.stderr
        send_in(up, CANARIES[25:])
        time.sleep(1.0)
        seen = asyncio.run(tables(dsn))
        answers = [
            up.run(*words).stdout
            for words in (
                ("get", "jobs", "-o", "json"),
                ("events", "secret", "-o", "json"),
                ("why", "secret", "-o", "json"),
            )
        ]
        token = up.token_file.read_text().strip()
        stream = subprocess.run(
            ["curl", "-sN", "--max-time", "2", "-H", f"Authorization: Bearer {token}", "-H", "Last-Event-ID: 0", f"{up.url}/v1/stream"],
            capture_output=True, check=False,
        ).stdout  # fmt: skip
    finally:
        up.stop()
    assert b"penstock.job.ended" in stream
    assert Collector.bodies
    assert b"hunter2" in seen, "what stands in env is in the ledger: the search would find it"
    files = b"\n".join(path.read_bytes() for path in up.folder.rglob("*") if path.is_file())
    assert len(files) > 10_000
    everything = {
        "tables": seen, "answers": json.dumps(answers).encode(), "stream": stream,
        "traces": b"\n".join(Collector.bodies), "files": files, "screen": up.printed().encode(),
    }  # fmt: skip
    assert {where: found_in(text) for where, text in everything.items()} == {
        where: [] for where in everything
    }
    assert found_in(b"\n".join(written(CANARIES[7]))) == [CANARIES[7]], "the search itself finds"
