"""What a command imports, which is nearly all of its processor time."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

SCRIPT = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from penstock.cli.main import main
main()
"""
HEAVY = {
    "asyncio": "an event loop; the commands use the blocking client",
    "click": "httpx's own command line, where another package installed click",
    "penstock.client.aio": "the asynchronous client",
    "penstock.model.wire.codec": "the models of all events",
    "penstock.sdk.job_file.jobfile": "the checks of a job file",
    "pydantic": "the checks of a job file",
    "pygments": "httpx's own command line",
    "rich.live": "tables that are drawn again",
    "rich.progress": "bars",
    "tarfile": "archives of code",
    "yaml": "job files, and -o yaml",
}
"""Module that a command which asks for something and prints the answer does not need → what it is for."""
JOB = {
    "job_id": "digits-of-pi",
    "seq": 7,
    "submitted_seq": 1,
    "owner": "ana",
    "name": "pi",
    "status": "running",
    "outcome": None,
    "workers": 1,
    "parameter_servers": 0,
    "attempt": 1,
    "submitted_ms": 1_000,
    "queued_ms": 1_000,
    "placed_ms": 2_000,
    "running_ms": 3_000,
    "ended_ms": None,
    "nodes": ["n0"],
    "gpus": 1,
    "cores": 2,
    "labels": {},
    "now_ms": 9_000,
}
ANSWERS: dict[str, Any] = {
    "/v1/jobs": {"jobs": [JOB], "total": 1, "now_ms": 9_000, "next_cursor": None},
    "/v1/jobs/digits-of-pi": JOB,
    "/v1/jobs/digits-of-pi/cancel": {"job_id": "digits-of-pi"},
    "/v1/jobs/digits-of-pi/events": {"events": []},
    "/v1/jobs/digits-of-pi/logs": {"task": "w0", "text": "3.14159\n"},
    "/v1/nodes": {"nodes": [], "now_ms": 9_000},
    "/v1/queue": {"jobs": [], "waiting": 0, "now_ms": 9_000},
}


class Answering(BaseHTTPRequestHandler):
    """A gateway that knows one job."""

    def do_GET(self) -> None:
        body = json.dumps(ANSWERS[self.path.partition("?")[0]]).encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Prints nothing."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("get jobs", "digits-of-pi"),
        ("get jobs -o json", '"digits-of-pi"'),
        ("get nodes", "NODE"),
        ("queue", "No job waits."),
        ("events digits-of-pi", ""),
        ("logs digits-of-pi", "3.14159"),
        ("cancel digits-of-pi", "asked to stop"),
    ],
)
def test_a_light_command_imports_nothing_heavy(gateway: str, words: str, printed: str) -> None:
    """Scripts ask for the state of jobs in loops. Each call took 0.9 s of a processor, nearly all of it for
    modules that other commands need."""
    argv = [sys.executable, "-c", SCRIPT, *words.split(), "--server", gateway]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert printed in done.stdout
    assert {"typer", "httpx", "rich.console"} <= loaded
    assert not loaded & set(HEAVY)
