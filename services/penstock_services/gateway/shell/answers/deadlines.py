"""Odds of a job's deadline: on request, and at its submission once its estimate exists."""

import asyncio

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.gateway.core.forecasts.deadline import (
    NO_ESTIMATE,
    Outlook,
    failed,
    outlook,
    service_class,
)
from penstock_services.gateway.shell.gateway import Gateway

ESTIMATED_WITHIN_S = 0.5  # estimator and placer answer a submission within milliseconds


def outlook_of(gateway: Gateway, job_id: str) -> Outlook | None:
    """Present odds; None: the fold does not hold the job,
    or it names neither a deadline nor a service class."""
    job, now_ms = gateway.follower.state.jobs.get(job_id), gateway.follower.now_ms()
    if job is None:
        return None
    try:
        return outlook(gateway.follower.state, job, now_ms, gateway.follower.forecasts)
    except Exception as error:  # noqa: BLE001 - the policy's bug is the answer
        return failed(job, now_ms, error)


async def at_submission(gateway: Gateway, job_id: str, spec: JobSpec) -> Outlook | None:
    """Waits a moment for the estimate of a job with a deadline or a service class; None: it has neither, or
    it has ended."""
    if not spec.timed:
        return None
    try:
        async with asyncio.timeout(ESTIMATED_WITHIN_S):
            while not _estimated(gateway, job_id):
                await gateway.follower.next_change().wait()
    except TimeoutError:
        return Outlook(job_id, service_class(spec), gateway.follower.now_ms(), None, unknown=NO_ESTIMATE)
    found = outlook_of(gateway, job_id)
    if found is not None and found.starts_ms is not None:
        gateway.follower.forecasts.asked(job_id, found.now_ms, found.starts_ms)
    return found


def _estimated(gateway: Gateway, job_id: str) -> bool:
    """Whether it has its estimate, or has ended."""
    job = gateway.follower.state.jobs.get(job_id)
    return job.estimate is not None if job is not None else job_id in gateway.follower.state.ended
