"""Streams as signs of life of pipelines: reports to the ledger whether jobs that are tied to their follower
have one (decision 138)."""

import asyncio
import logging
import secrets
import time

from penstock.backoff import Backoff, retry
from penstock.clock import wall_ms
from penstock.errors import LogError
from penstock.log.port import Partition
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope
from penstock.runtime.race import first_of
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.gateway import Gateway
from penstock_services.gateway.shell.routes.jobs import SOURCE

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0

logger = logging.getLogger(__name__)


async def report(gateway: Gateway) -> None:
    """Runs until cancelled, from when the gateway listens: looks after each change of the ledger or of the
    streams, and when a report falls due."""
    gateway.followers.began_s = time.monotonic()
    jobs = Partition(Topic.JOBS, gateway.settings.cell_index)
    ends = await retry(
        lambda: gateway.log.end_offsets([jobs]), (LogError,), first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S
    )
    gateway.followers.jobs_end = ends[jobs]
    backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    while True:
        changed = gateway.follower.next_change()
        events, next_s = gateway.followers.due(gateway.follower.state, time.monotonic())
        envelopes = [
            Envelope(id=f"follower-{secrets.token_hex(8)}", source=SOURCE, time_ms=wall_ms(), data=event)
            for event in events
        ]
        try:
            if envelopes:
                await gateway.appender.append(envelopes)
                backoff.reset()
        except Problem as problem:
            gateway.followers.failed(events)
            logger.warning("followers of jobs are not reported: %s", problem.detail)
            await asyncio.sleep(backoff.next_s())
            continue
        await first_of(changed.wait(), timeout_s=next_s)
