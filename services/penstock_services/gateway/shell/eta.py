"""How long jobs still take: the estimator's latest report in the events table, and the estimate from the replica."""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from penstock.ledger.views import Row
from penstock_services.gateway.core.eta import EtaReport, ended, read_report, remaining
from penstock_services.gateway.shell.gateway import Gateway

logger = logging.getLogger(__name__)

# Per job one look backwards along the index of its events; nothing is read of jobs that are not named.
_REPORTS = """
SELECT json_build_object('job_id', report.job_id, 'at_ms', report.at_ms, 'data', report.data)::text FROM unnest($1::text[]) AS asked (job_id)
CROSS JOIN LATERAL (
    SELECT job_id, at_ms, data FROM events
    WHERE job_id = asked.job_id AND type = 'penstock.job.eta_estimated' ORDER BY seq DESC, n DESC LIMIT 1
) AS report
"""


async def latest_estimates(gateway: Gateway, job_ids: Sequence[str]) -> dict[str, EtaReport]:
    """Job → its latest report, of those that have one. Raises `Problem`."""
    found = {}
    for text in await gateway.store.rows(_REPORTS, list(job_ids)) if job_ids else ():
        row = orjson.loads(text)
        try:
            found[row["job_id"]] = read_report(orjson.dumps(row["data"]), row["at_ms"])
        except msgspec.DecodeError as error:
            logger.warning("the remaining time of job %s cannot be read: %s", row["job_id"], error)
    return found


def eta_of(gateway: Gateway, row: Row, report: EtaReport | None) -> dict[str, Any]:
    """The answer as of now. `row`: the job's, from memory or table."""
    now_ms = gateway.follower.now_ms()
    if row["outcome"] is not None:
        return ended(row["job_id"], row["outcome"], row["ended_ms"], now_ms) | {"unproven": []}
    job = gateway.follower.state.jobs.get(row["job_id"])
    found = remaining(row, None if job is None else job.estimate, report, now_ms)
    return found | {"unproven": gateway.follower.unproven(row["job_id"])}
