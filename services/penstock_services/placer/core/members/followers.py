"""Jobs that are tied to their follower: how long one may be without, and why it is then cancelled
(decision 138)."""

from collections.abc import Iterator
from datetime import UTC, datetime

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import JobCancelRequested, JobReleaseRequested, JobSubmitted
from penstock.model.inputs.followers import FOLLOWER_TIMER, PIPELINE_GONE, FollowerChanged
from penstock.model.schema.event import Event
from penstock_services.placer.core.common import timer
from penstock_services.placer.core.guard import FINAL_STOPS

FIRST_MS = 5_000
"""For the first connection, at least: a client opens it some 50 ms after its submission is answered, on a
busy machine within seconds."""
LEAST_MS = 2_000
"""After a loss, at least: another gateway that has a connection says
so within milliseconds of reading that."""
LAST_DATE_MS = 253_402_300_799_000  # the end of the year 9999


def submitted(state: CellState, event: JobSubmitted | JobReleaseRequested) -> Iterator[Event]:
    """Until its follower has connected, a tied job counts as without one, from its submission on."""
    if isinstance(event, JobSubmitted) and event.spec.tied_to is not None:
        yield timer(state, event.job_id, FOLLOWER_TIMER, max(event.spec.tied_grace_ms, FIRST_MS))


def changed(state: CellState, event: FollowerChanged) -> Iterator[Event]:
    """The time since the loss counts; a connection has dropped the timer."""
    job = state.jobs[event.job_id]
    if not event.connected:
        left_ms = job.spec.tied_grace_ms - event.silent_ms
        yield timer(state, job.job_id, FOLLOWER_TIMER, max(left_ms, LEAST_MS))


def gone(job: JobState) -> JobCancelRequested | None:
    """Its cancellation now that the timer has fired;
    None: it has a follower, or is being stopped for good."""
    if job.following.absent_ms is None or job.stop.reason in FINAL_STOPS:
        return None
    moment = datetime.fromtimestamp(min(job.following.absent_ms, LAST_DATE_MS) / 1_000, UTC)
    reason = f"{PIPELINE_GONE} since {moment:%Y-%m-%dT%H:%M:%SZ}"
    return JobCancelRequested(job_id=job.job_id, reason=reason)
