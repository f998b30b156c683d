"""A running Penstock as its users meet it: processes, and jobs through the gateway's HTTP.

    with installation(folder, "--otlp", url) as gateway:      # `penstock up`
        job_id = gateway.submit(["true"])
        row = gateway.until_ended(job_id)

All calls block the calling thread.
"""

import contextlib
import json
import math
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.devservers.processes import Child, LaunchError
from tests.support.story import told
from tests.support.waiting import begin_run, left_s, wait_until

PATIENCE_S = 120.0  # of benches, for what takes a second or two on an idle machine
BENCH_S = 7_200.0  # a bench, which is no part of a run of tests, ends so long after its first wait
STORY_RECORDS = 60  # of the ledger: what a cell does in some seconds of a test
STORY_WITHIN_S = 5.0
LOG_CHARS = 4_000


class Gateway:
    """The HTTP door at `url`."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        begin_run(BENCH_S)

    def get(self, path: str) -> Any:
        return json.loads(self._ask("GET", path))

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        return json.loads(self._ask("POST", path, body, headers))

    def submit(self, command: Sequence[str], *, headers: Mapping[str, str] | None = None, **spec: Any) -> str:
        """Submits a job; `spec`: further fields. Returns its id."""
        found = self.post("/v1/jobs", {"command": list(command), **spec}, headers)
        return str(found["job_id"])

    def job(self, job_id: str) -> dict[str, Any]:
        row: dict[str, Any] = self.get(f"/v1/jobs/{job_id}")
        return row

    def events(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        """Data of the job's events of this kind, `task.started` for example, as far as they can be read."""
        found = self.get(f"/v1/jobs/{job_id}/events?limit=1000")["events"]
        return [event["data"] for event in found if event["type"] == f"penstock.{kind}"]

    def until_nodes(self, count: int) -> None:
        """Returns once so many nodes have joined: `penstock up` is ready when they have reported so, which
        may be before the placer has read it."""

        def ready() -> int:
            return sum(node["status"] == "ready" for node in self.get("/v1/nodes")["nodes"])

        wait_until(lambda: ready() >= count, lambda: f"{count} nodes, of which {ready()} have joined")

    def until(self, job_id: str, status: str, timeout_s: float = math.inf) -> dict[str, Any]:
        """The job's row once it has this status. Fails where it ends with another one. `timeout_s`: of a
        bench."""
        return self._until(job_id, lambda row: row["status"] == status, status, timeout_s)

    def until_ended(self, job_id: str, timeout_s: float = math.inf) -> dict[str, Any]:
        """The job's row once it has an outcome. `timeout_s`: of a bench."""
        return self._until(job_id, lambda row: row["outcome"] is not None, "ended", timeout_s)

    def last_events(self) -> str:
        """A line for each of the cell's latest events."""
        bound_s = STORY_WITHIN_S
        status = json.loads(self._ask("GET", "/v1/status", timeout_s=bound_s))  # clock: of a failure's story
        last = min(status["seq"], status["projected_seq"])
        path = f"/v1/stream?after={max(0, last - STORY_RECORDS)}&until={last}"
        text = self._ask("GET", path, timeout_s=bound_s)  # clock: of a failure's story
        return "\n".join(line for line in text.decode().splitlines() if line.startswith("data: "))

    def _until(
        self, job_id: str, holds: Callable[[dict[str, Any]], bool], what: str, timeout_s: float
    ) -> dict[str, Any]:
        ends_s = time.monotonic() + timeout_s  # clock: the bound of a bench; tests give none
        row: dict[str, Any] = {}

        def found() -> dict[str, Any]:
            nonlocal row
            row = self.job(job_id)
            if holds(row):
                return row
            assert row["outcome"] is None, f"{job_id} ended, and is not {what}: {row}"
            assert time.monotonic() < ends_s, f"{job_id} is not {what}: {row}"  # clock: the bound of a bench
            return {}

        return wait_until(found, lambda: f"{job_id} to be {what}: {row}")

    def _ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **self._headers, **(headers or {})}
        request = urllib.request.Request(f"{self.url}{path}", data, sent, method=method)
        try:
            with urllib.request.urlopen(request, None, timeout_s) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from error


def file_ends(paths: Iterable[Path]) -> str:
    """The names of files, and what stands at their ends."""
    return "\n".join(
        f"--- {path.name}\n{path.read_text(errors='replace')[-LOG_CHARS:]}" for path in sorted(paths)
    )


def url_in(printed: str) -> str:
    """Of the gateway, in what `penstock up` has printed; empty: not yet."""
    found = re.search(r"^  export PENSTOCK_SERVER=(\S+)\n", printed, re.MULTILINE)
    return found[1] if found else ""


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without anybody's Penstock settings, and with these."""
    return {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")} | variables


def python_service(name: str, arguments: Sequence[str], *, log_path: Path, env: Mapping[str, str]) -> Child:
    """`python -m penstock.<name>` up to its "ready". Raises `LaunchError` with the log's tail."""
    argv = [sys.executable, "-m", f"penstock_services.{name}", *arguments]
    child = Child(name, argv, log_path=log_path, env=env)
    try:
        child.wait_ready(lambda: "ready" in log_path.read_text().splitlines(), left_s())
    except BaseException:
        child.kill9()
        raise
    return child


@contextlib.contextmanager
def installation(folder: Path, *options: str, **variables: str) -> Iterator[Gateway]:
    """`penstock up` in `folder` (reachable for Postgres' user), with these settings; afterwards ended as by
    Ctrl-C. Failures tell its logs and last events.

    Raises `LaunchError` when it does not come up, or does not end with 0.
    """
    begin_run(BENCH_S)
    argv = [str(Path(sys.executable).with_name("penstock")), "up", "--folder", str(folder), "--port", "0"]
    log_path = folder.with_suffix(".log")
    log_path.unlink(missing_ok=True)
    child = Child("penstock up", [*argv, *options], log_path=log_path, env=clean_environment(**variables))
    logs = folder / "logs"
    with (
        told("penstock up", log_path),
        told("services.log", logs / "services.log"),
        told("the nodes' logs", lambda: file_ends(logs.glob("node-*.log"))),
    ):
        try:
            child.wait_ready(lambda: bool(url_in(log_path.read_text())), left_s())
            gateway = Gateway(url_in(log_path.read_text()))
            with told("the cell's last events", gateway.last_events):
                yield gateway
        except LaunchError as error:
            raise LaunchError(
                f"{error}\nThe logs of its services:\n{file_ends(logs.glob('*.log'))}"
            ) from error
        finally:
            child.stop(max(0.0, left_s()))
        if child.exit_code != 0:
            raise LaunchError(f"penstock up ended with {child.exit_code}:\n{child.log_tail()}")
