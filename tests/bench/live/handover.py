"""`python -m tests.bench.live.handover [PREEMPTIONS]`: how long a GPU is idle between a task that is stopped
and the one that it makes way for.

`penstock up` on the embedded log, one virtual node with one GPU, profile `srtf`. A long job, of which nothing
is known, makes way for a short one whose run time was learned, again and again. *Idle*: from the proven end
of the stopped task (`exited_ms`) to the start of the other (`started_ms`), both by the node's clock.
*Decided*: from that end to the record that places the other; negative where it was decided before.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from infra.devservers.processes import Child, free_port
from tests.bench.servers import bench_folder
from tests.support.installation.system import Gateway

PREEMPTIONS = 25
LEARNING = 2  # runs of the short job before
PATIENCE_S = 120.0
UP_TIMEOUT_S = 60.0
NEED = {"gpus": 1, "cores": 1, "host_memory_mib": 64, "gpu_memory_mib": 1}
LONG, SHORT = ["sleep", "1000"], ["sleep", "0.3"]


class Handover(NamedTuple):
    """Milliseconds."""

    idle_ms: float
    decided_ms: float


def once(gateway: Gateway, long_id: str) -> Handover:
    """One preemption: the long job runs, the short one comes."""
    _event(
        gateway, long_id, "penstock.task.started", gateway.until(long_id, "running", PATIENCE_S)["attempt"]
    )
    attempt = gateway.job(long_id)["attempt"]
    short_id = gateway.submit(SHORT, name="short", resources=NEED)
    gateway.until_ended(short_id, PATIENCE_S)
    exited = _event(gateway, long_id, "penstock.task.exited", attempt)["data"]
    placed = _event(gateway, short_id, "penstock.placement.decided", 1)
    started = _event(gateway, short_id, "penstock.task.started", 1)["data"]
    return Handover(started["started_ms"] - exited["exited_ms"], placed["at_ms"] - exited["exited_ms"])


def _event(gateway: Gateway, job_id: str, kind: str, attempt: int) -> Any:
    """Of this attempt of the job."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = [
            event
            for event in gateway.get(f"/v1/jobs/{job_id}/events?limit=1000")["events"]
            if event["type"] == kind
        ]
        for event in found:
            if event["data"].get("attempt", attempt) == attempt and f".{attempt}." in event["data"].get(
                "task_id", f".{attempt}."
            ):
                return event
        time.sleep(0.05)
    raise TimeoutError(f"{job_id} has no {kind} of attempt {attempt} after {PATIENCE_S:g} s")


def up(folder: Path) -> tuple[Child, Gateway]:
    """One node with one GPU."""
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "up",
        "--folder",
        str(folder / "up"),
        "--port",
        str(port),
    ]
    argv += ["--nodes", "1", "--virtual-gpus", "1"]
    env = {**os.environ, "PENSTOCK_DSN": "", "PENSTOCK_LOG": "", "PENSTOCK_PROFILE": "srtf"}
    child = Child("up", argv, log_path=folder / "up.log", env=env)
    try:
        child.wait_ready(lambda: b"Ready" in child.log_path.read_bytes(), UP_TIMEOUT_S)
    except BaseException:
        child.stop()
        raise
    return child, Gateway(f"http://127.0.0.1:{port}")


def main(preemptions: int) -> None:
    with bench_folder() as folder:
        child, gateway = up(folder)
        try:
            gateway.until_nodes(1)
            for _ in range(LEARNING):
                gateway.until_ended(gateway.submit(SHORT, name="short", resources=NEED), PATIENCE_S)
            long_id = gateway.submit(LONG, name="long", resources=NEED)
            found = [once(gateway, long_id) for _ in range(preemptions)]
        finally:
            child.stop()
    for name, values in zip(("idle", "decided"), zip(*found, strict=True), strict=True):
        p90 = quantiles(values, n=10)[-1]
        print(f"{name:<8} p50 {median(values):7.1f} ms  p90 {p90:7.1f} ms  of {len(values)} preemptions")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PREEMPTIONS)
