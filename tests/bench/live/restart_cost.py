"""`python -m tests.bench.live.restart_cost [MIB …]`: what a stop and a start cost in a live cell, by the size
of what a job saves.

`penstock up` on one virtual node. A training holds a state of so many MiB; it is cancelled, saves on SIGTERM
(NumPy, fsync, rename) and ends; the same command starts again and loads it. *Stop*: from the decision to stop
to the end of its last process. *Start*: from the placement to its first iteration, interpreter, NumPy and the
read of the state included; what a framework and a GPU take comes on top. The median of three. `simulate
--restart-cost measured` has the stops (`penstock.simulator.job_models.measurements.measured_restarts`).
"""

import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.bench.live.submit import installation
from tests.bench.servers import bench_folder
from tests.support.installation.system import Gateway

SIZES_MIB = (1, 128, 512, 2_048)
REPEATS = 3
PATIENCE_S = 300.0
GRACE_MS = 300_000

SCRIPT = """
import os, signal, sys, time
import numpy as np
from penstock.sdk.progress import progress
path, mib = sys.argv[1], int(sys.argv[2])
if os.path.exists(path):
    state = np.load(path)
else:
    state = np.random.default_rng(1).random(mib << 17)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
done = 0
while not stopped:
    state[:1000] += 1.0
    done += 1
    progress(done)
    time.sleep(0.01)
with open(path + ".new", "wb") as file:
    np.save(file, state)
    file.flush()
    os.fsync(file.fileno())
os.replace(path + ".new", path)
"""


class Cost(NamedTuple):
    """Seconds."""

    stop_s: float
    start_s: float


def once(gateway: Gateway, folder: Path, mib: int) -> Cost:
    """One stop of a job that has so much to save, and the next start."""
    path = folder / f"state-{mib}.npy"
    command = [sys.executable, "-c", SCRIPT, str(path), str(mib)]
    stop_s = start_s = 0.0
    for _ in range(2):
        job_id = gateway.submit(
            command,
            name="restart-cost",
            resources={"gpus": 1, "cores": 1, "host_memory_mib": 2 * mib + 256, "gpu_memory_mib": 1},
            grace_ms=GRACE_MS,
        )
        first = _wait(gateway, job_id, "penstock.steps.measured")
        placed = _wait(gateway, job_id, "penstock.placement.decided")
        start_s = (first["data"]["at_ms"] - placed["at_ms"]) / 1_000
        gateway.post(f"/v1/jobs/{job_id}/cancel")
        gateway.until_ended(job_id, PATIENCE_S)
        decided = _wait(gateway, job_id, "penstock.stop.decided")
        ended = _wait(gateway, job_id, "penstock.task.exited")
        stop_s = (ended["data"]["exited_ms"] - decided["at_ms"]) / 1_000
    path.unlink()
    return Cost(stop_s, start_s)


def _wait(gateway: Gateway, job_id: str, kind: str) -> Any:
    """The first event of this type of the job."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for event in gateway.get(f"/v1/jobs/{job_id}/events")["events"]:
            if event["type"] == kind:
                return event
        time.sleep(0.05)
    raise TimeoutError(f"{job_id} has no {kind} after {PATIENCE_S:g} s")


async def main(sizes: list[int]) -> None:
    async with installation("embedded") as (url, _):
        with bench_folder() as folder:
            folder.chmod(0o777)
            for mib in sizes:
                found = [await asyncio.to_thread(once, Gateway(url), folder, mib) for _ in range(REPEATS)]
                stop_s, start_s = (median(values) for values in zip(*found, strict=True))
                print(f"{mib:>6,} MiB  stop {stop_s:6.2f} s  start {start_s:6.2f} s", flush=True)


if __name__ == "__main__":
    asyncio.run(main([int(one) for one in sys.argv[1:]] or list(SIZES_MIB)))
