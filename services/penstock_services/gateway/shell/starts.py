"""When a waiting job is expected to start, and who holds what it needs: from the remaining times of what runs."""

from typing import Any

from penstock.policies.forecast import ASSUMES, Start, expected_start
from penstock_services.gateway.core.eta import remaining
from penstock_services.gateway.shell.eta import latest_estimates
from penstock_services.gateway.shell.gateway import Gateway

MAX_RUNNING = 1_000  # jobs whose remaining times are read; in a larger cell no start is forecast


async def start_of(gateway: Gateway, job_id: str) -> dict[str, Any] | None:
    """`starts_ms` (ledger's ms, or null with `unknown`), `holders`, and what the forecast `assumes`. None: the job is not in the queue.

    Raises `Problem`.
    """
    if not _in_line(gateway, job_id):
        return None
    running = [job.job_id for job in gateway.follower.state.holding.values()]
    latest = await latest_estimates(gateway, running[:MAX_RUNNING])
    state, now_ms = gateway.follower.state, gateway.follower.now_ms()
    if not _in_line(gateway, job_id):  # it has started meanwhile
        return None
    ends_ms = {}
    for job in state.holding.values():
        row = {
            "job_id": job.job_id, "status": job.status, "attempt": job.attempt, "running_ms": job.running_ms,
        }  # fmt: skip
        left = remaining(row, job.estimate, latest.get(job.job_id), now_ms)
        if left["ends_ms"] is not None:
            ends_ms[job.job_id] = left["ends_ms"]["middle"]
    found: Start | None
    if state.frozen or len(running) > MAX_RUNNING:
        why = "the cell is frozen" if state.frozen else f"{len(running)} jobs run: too many to look at"
        found = Start(None, why, ())
    else:
        found = expected_start(state, state.jobs[job_id], ends_ms, now_ms)
    if found is None:
        return None
    return found._asdict() | {"holders": [holder._asdict() for holder in found.holders], "assumes": ASSUMES}


def _in_line(gateway: Gateway, job_id: str) -> bool:
    job = gateway.follower.state.jobs.get(job_id)
    return job is not None and job.in_line
