"""Submits 20 jobs of several kinds to a cell with two nodes of four GPUs, and waits for their ends.

Exit status: 0 when each job ended as it should.
"""

import sys
from typing import Any

from penstock.client import Client

LIMIT_S = 300.0  # so long the last job may take; together they need less than a minute of eight GPUs


def step(name: str, seconds: float, gpus: int = 1, **fields: Any) -> dict[str, Any]:
    needs = {"gpus": gpus, "cores": 1, "host_memory": "64MiB"}
    return {"name": name, "command": ["sleep", str(seconds)], "resources": needs, **fields}


JOBS: list[tuple[str, dict[str, Any]]] = [
    *(("succeeded", step(f"small-{n}", 1 + n % 4)) for n in range(8)),
    *(("succeeded", step(f"half-{n}", 2, gpus=2)) for n in range(3)),
    *(("succeeded", step(f"gang-{n}", 2, workers=4)) for n in range(2)),
    ("succeeded", step("servers", 2, workers=2, parameter_servers=1)),
    ("succeeded", step("whole-node", 2, gpus=4)),
    *(("succeeded", step(f"cores-{n}", 1, gpus=0)) for n in range(2)),
    ("failed", step("fails", 1) | {"command": ["false"]}),
    ("failed", step("no-program", 1) | {"command": ["no-such-program"]}),
    ("cancelled", step("endless", 1_000_000)),
]
"""Expected outcome and fields of a job file; the last one is cancelled when all others have ended."""


def main() -> int:
    with Client() as client:
        handles = [client.submit(job) for _, job in JOBS]
        ids = [handle.job_id for handle in handles]
        client.wait(*ids[:-1], timeout_s=LIMIT_S)
        handles[-1].cancel()
        done = client.wait(*ids, timeout_s=LIMIT_S)
    wrong = 0
    for (expected, job), ended in zip(JOBS, done, strict=True):
        wrong += ended.outcome != expected
        remark = "" if ended.outcome == expected else f", and not {expected}"
        print(f"{job['name']:12} {ended.outcome}{remark}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
