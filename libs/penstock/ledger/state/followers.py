"""Fold of followers: whether a job that is tied to its follower has one, and since when it has none."""

from penstock.ledger.state.job.following import Following
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import drop_timers
from penstock.model.inputs.followers import FOLLOWER_TIMER, FollowerChanged


def follower_changed(state: CellState, fact: FollowerChanged) -> None:
    job = state.jobs[fact.job_id]
    if fact.connected:
        job.following = Following(fact.gateway, None, state.seq)
        drop_timers(state, job.job_id, FOLLOWER_TIMER)
    else:
        absent_ms = max(job.submitted_ms, state.now_ms - fact.silent_ms)
        job.following = Following("", absent_ms, state.seq)
