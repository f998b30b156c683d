"""A running Penstock as its users meet it: processes, and jobs through the gateway's HTTP.

    with installation(folder, "--otlp", url) as gateway:      # `penstock up`
        job_id = gateway.submit(["sleep", "1"])
        row = gateway.until_ended(job_id)

All calls block the calling thread.
"""

import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.devservers.processes import Child, LaunchError, free_port

START_TIMEOUT_S = 120.0  # longer than the bounds of what is started, whose errors are more exact
STOP_GRACE_S = 60.0
REQUEST_TIMEOUT_S = 15.0
POLL_S = 0.03
PATIENCE_S = 120.0  # for what takes a second or two on an idle machine
MAX_LOG_CHARS = 4_000


class Gateway:
    """The HTTP door at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        return self._ask("GET", path)

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        return self._ask("POST", path, body, headers)

    def submit(self, command: Sequence[str], *, headers: Mapping[str, str] | None = None, **spec: Any) -> str:
        """Submits a job; `spec`: further fields. Returns its id."""
        found = self.post("/v1/jobs", {"command": list(command), **spec}, headers)
        return str(found["job_id"])

    def job(self, job_id: str) -> dict[str, Any]:
        row: dict[str, Any] = self.get(f"/v1/jobs/{job_id}")
        return row

    def until_nodes(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        """Returns once so many nodes have joined: `penstock up` is ready when they have reported so, which may be before
        the placer has read it. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while len(ready := [n for n in self.get("/v1/nodes")["nodes"] if n["status"] == "ready"]) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(ready)} of {count} nodes have joined after {timeout_s:g} s")
            time.sleep(POLL_S)

    def until(self, job_id: str, status: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The job's row once it has this status. Raises `TimeoutError` with the row as it is then."""
        deadline = time.monotonic() + timeout_s
        while (row := self.job(job_id))["status"] != status:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job_id} is not {status} after {timeout_s:g} s: {row}")
            time.sleep(POLL_S)
        return row

    def until_ended(self, job_id: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The job's row once it has an outcome. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        while (row := self.job(job_id))["outcome"] is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job_id} has not ended after {timeout_s:g} s: {row}")
            time.sleep(POLL_S)
        return row

    def _ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"{self.url}{path}", data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from error


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without anybody's Penstock settings, and with these."""
    return {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")} | variables


def python_service(name: str, arguments: Sequence[str], *, log_path: Path, env: Mapping[str, str]) -> Child:
    """`python -m penstock.<name>` up to its "ready". Raises `LaunchError` with the log's tail."""
    argv = [sys.executable, "-m", f"penstock_services.{name}", *arguments]
    child = Child(name, argv, log_path=log_path, env=env)
    try:
        child.wait_ready(lambda: "ready" in log_path.read_text().splitlines(), START_TIMEOUT_S)
    except BaseException:
        child.kill9()
        raise
    return child


@contextlib.contextmanager
def installation(folder: Path, *options: str) -> Iterator[Gateway]:
    """`penstock up` in `folder` (reachable for Postgres' user); afterwards ended as by Ctrl-C.

    Raises `LaunchError` when it does not come up, or does not end with 0 within its bound.
    """
    port = free_port()
    argv = [
        str(Path(sys.executable).with_name("penstock")),
        "up",
        "--folder",
        str(folder),
        "--port",
        str(port),
    ]
    child = Child(
        "penstock up", [*argv, *options], log_path=folder.with_suffix(f".{port}.log"), env=clean_environment()
    )
    try:
        child.wait_ready(lambda: "Ready" in child.log_path.read_text(), START_TIMEOUT_S)
        yield Gateway(f"http://127.0.0.1:{port}")
    except LaunchError as error:
        log = folder / "logs" / "services.log"
        text = log.read_text() if log.exists() else "(none)"
        raise LaunchError(f"{error}\nThe log of its services:\n{text[-MAX_LOG_CHARS:]}") from error
    finally:
        child.stop(STOP_GRACE_S)
    if child.exit_code != 0:
        raise LaunchError(f"penstock up ended with {child.exit_code}:\n{child.log_tail()}")
