"""Forecast of a waiting job's start, and the holders of the resources it needs: from the remaining times of
running jobs."""

from typing import Any

from penstock.errors import one_line
from penstock.why.forecast import Start, expected_start
from penstock.why.queue_position import Line
from penstock_services.gateway.core.forecasts.eta import ends_ms
from penstock_services.gateway.shell.gateway import Gateway


def start_of(gateway: Gateway, job_id: str, line: Line | None = None) -> dict[str, Any] | None:
    """`starts_ms` (ledger's ms, or null with `unknown`), `holders`, and what the forecast `assumes`. None:
    the job is not in the queue. `line`: of the present state, for a caller that has it."""
    state, now_ms = gateway.follower.state, gateway.follower.now_ms()
    asked = state.jobs.get(job_id)
    if asked is None or not asked.in_line:
        return None
    ends = {job.job_id: end for job in state.holding.values() if (end := ends_ms(job, now_ms)) is not None}
    found: Start | None
    if state.frozen:
        found = Start(None, "the cell is frozen", ())
    else:
        try:
            found = expected_start(state, asked, ends, now_ms, line)
        except Exception as error:  # noqa: BLE001 - the policy's bug is the answer
            found = Start(None, f"the profile's order failed: {one_line(error)}", ())
    if found is None:
        return None
    return found._asdict() | {"holders": [holder._asdict() for holder in found.holders]}
