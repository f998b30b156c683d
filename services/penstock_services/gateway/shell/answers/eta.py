"""Remaining time (ETA) of jobs from the replica, as the placer's decisions use it."""

from typing import Any

from msgspec.structs import replace

from penstock.ledger.views import Row
from penstock_services.gateway.core.forecasts.eta import ended, remaining
from penstock_services.gateway.shell.gateway import Gateway


def eta_of(gateway: Gateway, row: Row) -> dict[str, Any]:
    """The ETA now. `row`: the job's, from memory or table."""
    now_ms = gateway.follower.now_ms()
    if row["outcome"] is not None:
        return ended(row["job_id"], row["outcome"], row["ended_ms"], now_ms) | {"unproven": []}
    job = gateway.follower.state.jobs.get(row["job_id"])
    estimate, eta = (None, None) if job is None else (job.estimate, job.progress.eta)
    if job is not None and estimate is not None and estimate.options:
        estimate = replace(estimate, run_ms=estimate.run_ms_with(job.workers, job.spec.fewest_workers))
    return remaining(row, estimate, eta, now_ms) | {"unproven": gateway.follower.unproven(row["job_id"])}
