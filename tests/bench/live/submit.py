"""From `POST /v1/jobs` to the job's own process: the whole installation as `penstock up` starts it.

The job is `date +%s%N`: what it prints into its task log is the moment at which the started process itself
ran, so no time that Penstock reports of itself is used. It includes the program's own start (about 1 ms).
Jobs come one by one at exponential intervals over one kept-alive connection; the clock starts before the
request is sent.
"""

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from infra.devservers.processes import Child, free_port
from penstock.runtime.files.task_logs import log_path
from tests.bench.servers import Servers, bench_folder, process, servers

RATE_PER_S = 5.0
WARM_UP_JOBS = 10  # not counted: first connections, first imports
UP_TIMEOUT_S = 60.0
JOB_TIMEOUT_S = 30.0
GRACE_S = 15.0
JOB = {
    "name": "date",
    "command": ["date", "+%s%N"],
    "resources": {"gpus": 1, "cores": 1, "host_memory_mib": 64, "gpu_memory_mib": 64},
}


@contextlib.asynccontextmanager
async def installation(kind: str) -> AsyncIterator[tuple[str, Path]]:
    """(URL, folder of the task logs): `penstock up` on "embedded"; on "kafka" each service a process of its
    own."""
    if kind == "kafka":
        async with servers(kind) as found, _services(found) as running:
            yield running
    else:
        with bench_folder() as folder:
            child = await asyncio.to_thread(_up, folder)
            try:
                yield _url(child.log_path), folder / "up" / "task-logs"
            finally:
                await asyncio.to_thread(child.stop, GRACE_S)


def _up(folder: Path) -> Child:
    """`penstock up` with one node in a process of its own, once it is ready."""
    argv = [sys.executable, "-m", "penstock.cli.main", "up", "--folder", str(folder / "up"), "--port", "0"]
    argv += ["--nodes", "1", "--virtual-gpus", "8"]
    env = {**os.environ, "PENSTOCK_DSN": "", "PENSTOCK_LOG": ""}
    child = Child("up", argv, log_path=folder / "up.log", env=env)
    try:
        child.wait_ready(lambda: b"Ready" in child.log_path.read_bytes(), UP_TIMEOUT_S)
    except BaseException:
        child.stop(GRACE_S)
        raise
    return child


def _url(path: Path) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+", path.read_text())
    assert found is not None, path.read_text()
    return found[0]


@contextlib.asynccontextmanager
async def _services(found: Servers) -> AsyncIterator[tuple[str, Path]]:
    """As in production: one process per service and per node."""
    logs = found.folder / "task-logs"
    bind = f"127.0.0.1:{free_port()}"
    env = {"PENSTOCK_GATEWAY_BIND": bind}
    async with contextlib.AsyncExitStack() as stack:
        for name in ("placer", "estimator", "batcher", "projector", "gateway"):
            await stack.enter_async_context(process(name, ["-m", f"penstock_services.{name}"], found, env))
        argv = [
            "-m",
            "penstock_services.node_reporter",
            "--node-id",
            "node-0",
            "--drain",
            "--allow-root",
            "--virtual-gpus",
            "8",
        ]
        argv += ["--cores", "8", "--state-dir", str(found.folder / "node"), "--log-dir", str(logs)]
        await stack.enter_async_context(process("node-0", argv, found))
        yield f"http://{bind}", logs


async def measure(kind: str, seconds: float) -> list[float]:
    """Milliseconds per job, in the order of submission."""
    async with installation(kind) as (url, logs):
        sent = await asyncio.to_thread(_submit, url, WARM_UP_JOBS + round(seconds * RATE_PER_S))
        latencies_ms = []
        for job_id, began_s in sent.items():
            ran_s = await _ran_s(log_path(logs, job_id, f"{job_id}.1.w0"))
            latencies_ms.append((ran_s - began_s) * 1_000)
        return latencies_ms[WARM_UP_JOBS:]


def _submit(url: str, count: int) -> dict[str, float]:
    """Job id → when its submission began, in seconds since the epoch."""
    rng, sent, body = random.Random(1), {}, json.dumps(JOB).encode()
    with contextlib.closing(
        http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    ) as connection:
        for _ in range(count):
            time.sleep(rng.expovariate(RATE_PER_S))
            began_s = time.time()
            connection.request("POST", "/v1/jobs", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
            assert answer.status < 300, found
            sent[found["job_id"]] = began_s
    return sent


async def _ran_s(path: Path) -> float:
    """What the job printed, in seconds since the epoch. Raises TimeoutError."""
    async with asyncio.timeout(JOB_TIMEOUT_S):
        while True:
            with contextlib.suppress(OSError):
                text = path.read_text()  # noqa: ASYNC240 - a small local file
                found = re.search(r"^\d{19}$", text, re.MULTILINE)
                if found is not None:
                    return int(found[0]) / 1e9
            await asyncio.sleep(0.02)


if __name__ == "__main__":  # python -m tests.bench.live.submit embedded|kafka [SECONDS]: for work on speed
    from tests.bench.machine import keep_to_two_cores, quantile

    keep_to_two_cores()
    found_ms = asyncio.run(measure(sys.argv[1], float((sys.argv[2:] or ["20"])[0])))
    print(f"{len(found_ms)} jobs: p50 {quantile(found_ms, 0.5):.1f}, p99 {quantile(found_ms, 0.99):.1f} ms")
