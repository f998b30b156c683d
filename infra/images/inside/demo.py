"""Submits 20 jobs of several kinds to a cell with two nodes of four GPUs, and waits for their ends.

Exit status: 0 when each job ended as it should.
"""

import sys
from typing import Any

from penstock.client import Client

LIMIT_S = 300.0  # so long the last job may take; together they need less than a minute of eight GPUs


def step(name: str, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"name": name, "command": ["sleep", str(seconds)], **fields}


JOBS: list[tuple[str, dict[str, Any]]] = [
    *(("succeeded", step(f"small-{n}", 1 + n % 4, resources={"gpus": 1})) for n in range(8)),
    *(("succeeded", step(f"half-{n}", 2, resources={"gpus": 2})) for n in range(3)),
    *(("succeeded", step(f"gang-{n}", 2, workers=4, resources={"gpus": 1})) for n in range(2)),
    ("succeeded", step("servers", 2, workers=2, parameter_servers=1, resources={"gpus": 1})),
    ("succeeded", step("whole-node", 2, resources={"gpus": 4})),
    *(("succeeded", step(f"cores-{n}", 1, resources={"cores": 1})) for n in range(2)),
    ("failed", {"name": "fails", "command": ["false"], "resources": {"gpus": 1}}),
    ("failed", {"name": "no-program", "command": ["no-such-program"]}),
    ("unschedulable", step("too-big", 1, resources={"gpus": 16})),
]
"""Expected outcome and fields of a job file."""


def main() -> int:
    wrong = 0
    with Client() as client:
        handles = [client.submit(job) for _, job in JOBS]
        done = {job.job_id: job for job in client.wait(*(handle.job_id for handle in handles), timeout_s=LIMIT_S)}
    for handle, (expected, job) in zip(handles, JOBS, strict=True):
        found = str(done[handle.job_id].outcome)
        wrong += found != expected
        print(f"{job['name']:12} {found}{'' if found == expected else f', and not {expected}'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
