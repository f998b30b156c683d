"""From `POST /v1/jobs` to the job's own process: the whole installation as `penstock up` starts it.

The job is `date +%s%N`: what it prints into its task log is the moment at which the started process itself ran,
so nothing that Penstock says about itself is trusted. It includes the program's own start (about 1 ms). Jobs come
one by one at exponential intervals over one kept-alive connection; the clock starts before the request is sent.
"""

import asyncio
import contextlib
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from tests.bench.servers import bench_folder

from penstock.kernel.task_logs import log_path
from penstock.testing.kafka import kafka_broker, penstock_topics
from penstock.testing.processes import Child

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


@contextlib.contextmanager
def _installation(folder: Path, log_url: str | None) -> "contextlib.Iterator[str]":
    """`penstock up` in a process of its own; yields the gateway's URL."""
    argv = [sys.executable, "-m", "penstock.local", "up", "--folder", str(folder / "up"), "--port", "0"]
    argv += ["--nodes", "1", "--virtual-gpus", "8"] + (["--log", log_url] if log_url else [])
    child = Child("up", argv, log_path=folder / "up.log", env={**os.environ, "PENSTOCK_DSN": ""})
    try:
        child.wait_ready(lambda: b"Ready" in child.log_path.read_bytes(), UP_TIMEOUT_S)
        found = re.search(r"http://127\.0\.0\.1:\d+", child.log_path.read_text())
        assert found is not None, child.log_tail()
        yield found[0]
    finally:
        child.stop(GRACE_S)


@contextlib.asynccontextmanager
async def installation(kind: str) -> AsyncIterator[tuple[str, Path]]:
    """(URL, folder of the task logs) on "embedded" or "kafka"."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(bench_folder())
        url = None
        if kind == "kafka":
            broker = await asyncio.to_thread(stack.enter_context, kafka_broker())
            broker.create_topics(penstock_topics())
            url = broker.url()
        gateway = await asyncio.to_thread(stack.enter_context, _installation(folder, url))
        yield gateway, folder / "up" / "task-logs"


async def measure(kind: str, seconds: float) -> list[float]:
    """Milliseconds per job, in the order of submission."""
    async with installation(kind) as (url, logs), httpx.AsyncClient(base_url=url, timeout=10) as client:
        chance = random.Random(1)
        sent: dict[str, float] = {}
        for _ in range(WARM_UP_JOBS + round(seconds * RATE_PER_S)):
            await asyncio.sleep(chance.expovariate(RATE_PER_S))
            began_s = time.time()
            answer = await client.post("/v1/jobs", json=JOB)
            answer.raise_for_status()
            sent[answer.json()["job_id"]] = began_s
        latencies_ms = []
        for job_id, began_s in sent.items():
            ran_s = await _ran_s(log_path(logs, job_id, f"{job_id}.1.w0"))
            latencies_ms.append((ran_s - began_s) * 1_000)
        return latencies_ms[WARM_UP_JOBS:]


async def _ran_s(path: Path) -> float:
    """What the job printed, in seconds since the epoch. Raises TimeoutError."""
    async with asyncio.timeout(JOB_TIMEOUT_S):
        while True:
            with contextlib.suppress(OSError):
                found = re.search(r"^\d{19}$", path.read_text(), re.MULTILINE)  # noqa: ASYNC240 - a small local file
                if found is not None:
                    return int(found[0]) / 1e9
            await asyncio.sleep(0.02)


if __name__ == "__main__":  # python -m tests.bench.submit embedded|kafka [SECONDS]: for work on speed
    from tests.bench.machine import keep_to_two_cores, quantile

    keep_to_two_cores()
    found_ms = asyncio.run(measure(sys.argv[1], float((sys.argv[2:] or ["20"])[0])))
    print(f"{len(found_ms)} jobs: p50 {quantile(found_ms, 0.5):.1f}, p99 {quantile(found_ms, 0.99):.1f} ms")
