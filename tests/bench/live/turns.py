"""`python -m tests.bench.live.turns`: four jobs, each bound by another resource, take turns on one virtual
GPU: how fast each of them is, and all together.

`penstock up` on the embedded log, one node with one virtual GPU, profile `fifo`. Each job of
`tilt/jobs/four_stages.py` runs alone first. Then all four are submitted, and a plan that a batcher would
propose makes the three that wait members of a group with the one that runs. *Speed*: of a job's iterations in
the group relative to alone, from the steps that it reports. *Total*: the sum; running in turn, one at a time,
it is 1. Source: Muri Table 2 (four jobs: 2.00).

`--no-turns`: the same with jobs that do not find their group's folder, so that they use everything at once.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from infra.devservers.processes import Child, free_port
from tests.bench.servers import bench_folder
from tests.support.installation.system import Gateway

SCRIPT = Path(__file__).resolve().parents[3] / "tilt" / "jobs" / "four_stages.py"
BOUNDS = ("storage", "cpu", "gpu", "network")
ALONE_ITERATIONS = 40
TOGETHER_S = 12.0
SETTLE_S = 1.0  # after the last of them has reported: windows that began before do not count
PATIENCE_S = 120.0
UP_TIMEOUT_S = 60.0
NEED = {"gpus": 1, "cores": 2, "host_memory_mib": 256, "gpu_memory_mib": 1}


class Measured(NamedTuple):
    """Of one job; milliseconds of an iteration."""

    alone_ms: float
    together_ms: float
    waited_ms: float
    """Of `together_ms`: for turns."""
    missed: int
    """Stages that it entered without a turn."""

    @property
    def speed(self) -> float:
        return self.alone_ms / self.together_ms


def measure(
    gateway: Gateway, folder: Path, *, take_turns: bool = True, seconds: float = TOGETHER_S
) -> dict[str, Measured]:
    """By what each job is bound → what was measured. `folder`: that tasks can write to. All of them have
    ended then."""
    alone = {bound: _alone(gateway, folder, bound, take_turns=take_turns) for bound in BOUNDS}
    gate = folder / f"gate-{time.monotonic_ns()}"
    ids = [submit(gateway, folder, bound, "--until", str(gate), take_turns=take_turns) for bound in BOUNDS]
    gateway.until(ids[0], "running", PATIENCE_S)
    for job_id in ids[1:]:
        gateway.until(job_id, "queued", PATIENCE_S)
    propose_group(gateway, ids)
    for job_id in ids:
        gateway.until(job_id, "running", PATIENCE_S)
    began_ms = max(reported(gateway, job_id)[0]["at_ms"] for job_id in ids) + 1_000 * SETTLE_S
    time.sleep(seconds + SETTLE_S)
    ended_ms = 1_000 * time.time()
    gate.touch()
    for job_id in ids:
        row = gateway.until_ended(job_id, PATIENCE_S)
        assert row["outcome"] == "succeeded", row
    found = {}
    for bound, job_id in zip(BOUNDS, ids, strict=True):
        steps = reported(gateway, job_id)
        windows = [one for one in steps if one["at_ms"] - one["steps"] * one["step_ms"] >= began_ms]
        windows = [one for one in windows if one["at_ms"] <= ended_ms] or windows
        assert windows, f"{job_id} reported nothing from {began_ms} on: {steps}"
        missed = sum(one.get("missed_turns", 0) for one in steps)
        found[bound] = Measured(alone[bound], _mean(windows, "step_ms"), _mean(windows, "waited_ms"), missed)
    return found


def propose_group(gateway: Gateway, ids: list[str]) -> None:
    """As a batcher would."""
    [node] = gateway.get("/v1/nodes")["nodes"]
    jobs = [{"job_id": job_id, "nodes": [node["node_id"]]} for job_id in ids]
    unit = {"jobs": jobs, "explanation": "each is bound by another resource", "kind": "group"}
    name = f"turns-{'-'.join(ids)}"
    plan = {"proposal_id": name, "proposer": "batcher", "units": [unit]}
    kind = {"specversion": "1.0", "source": "/bench", "type": "penstock.plan.proposed.v2"}
    event = {**kind, "id": name, "data": plan}
    gateway.post("/v1/events", event, {"Content-Type": "application/cloudevents+json"})


def _alone(gateway: Gateway, folder: Path, bound: str, *, take_turns: bool) -> float:
    job_id = submit(gateway, folder, bound, "--iterations", str(ALONE_ITERATIONS), take_turns=take_turns)
    row = gateway.until_ended(job_id, PATIENCE_S)
    assert row["outcome"] == "succeeded", row
    return _mean([one for one in reported(gateway, job_id) if one["steps"]], "step_ms")


def submit(gateway: Gateway, folder: Path, bound: str, *arguments: str, take_turns: bool = True) -> str:
    """The job's id."""
    command = [sys.executable, str(SCRIPT), "--bound", bound, "--folder", str(folder / "devices"), *arguments]
    if not take_turns:
        command = ["env", "-u", "PENSTOCK_GROUP", *command]
    return gateway.submit(
        command, name=bound, resources=NEED, model=f"stages-{bound}", batch_size=2_048, checkpoint="sdk"
    )


def reported(gateway: Gateway, job_id: str) -> list[dict[str, Any]]:
    """Its reports of steps, once there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        events = gateway.get(f"/v1/jobs/{job_id}/events?limit=1000")["events"]
        found = [event["data"] for event in events if event["type"] == "penstock.steps.measured"]
        if found:
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{job_id} has reported no steps after {PATIENCE_S:g} s")


def _mean(windows: list[dict[str, Any]], name: str) -> float:
    """Per iteration."""
    steps = sum(one["steps"] for one in windows)
    return float(sum(one["steps"] * one.get(name, 0.0) for one in windows) / steps)


def up(folder: Path, profile: str = "fifo") -> tuple[Child, Gateway]:
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
    env = {**os.environ, "PENSTOCK_DSN": "", "PENSTOCK_LOG": "", "PENSTOCK_PROFILE": profile}
    child = Child("up", argv, log_path=folder / "up.log", env=env)
    try:
        child.wait_ready(lambda: b"Ready" in child.log_path.read_bytes(), UP_TIMEOUT_S)
    except BaseException:
        child.stop()
        raise
    return child, Gateway(f"http://127.0.0.1:{port}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-turns", action="store_true", help="jobs use everything at once")
    parser.add_argument("--seconds", type=float, default=TOGETHER_S, help="together")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        child, gateway = up(folder)
        try:
            gateway.until_nodes(1)
            found = measure(gateway, folder, take_turns=not options.no_turns, seconds=options.seconds)
        finally:
            child.stop()
    if options.json:
        print(json.dumps({bound: {**one._asdict(), "speed": one.speed} for bound, one in found.items()}))
        return
    print("bound by   alone ms  together ms  of it waiting  missed turns  speed")
    for bound, one in found.items():
        print(
            f"{bound:<10} {one.alone_ms:8.1f} {one.together_ms:12.1f} {one.waited_ms:14.1f} {one.missed:13} "
            f"{one.speed:6.2f}"
        )
    print(f"total {sum(one.speed for one in found.values()):.2f} x of running in turn")


if __name__ == "__main__":
    main()
