"""Which members leave a group that keeps its promise to others no longer.

The member with most of its speed beyond its promise holds the turns for which the others wait. It and those
who are slower than promised are separated: that member is stopped, or they are where that costs less by more
than the minute for which they have waited. A job that does not save is stopped only within an hour of its
start, so it repeats at most an hour of work.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from penstock.ledger.derived.promises import promised
from penstock.ledger.state.apart import kind_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import KindsApart, Shortfall
from penstock.proposals.plan_stops import stays
from penstock.scheduling.stop_cost import LOSES_MS, stop_cost_s

PATIENCE_MS = 60_000
"""A member that is slower than promised for so long ends its group: some ten of the SDK's reports, and longer
than any bounded wait for turns (`turns.MAX_HOLDERS` times `turns.MAX_WAIT_S`)."""
APART_MS = 86_400_000
"""Jobs of these kinds are grouped again after a day: then a pair that never works loses a minute and a
restart a day."""


class Dissolution(NamedTuple):
    """How a group is dissolved."""

    members: Sequence[JobState]
    """Those that run, oldest first."""
    short: Sequence[Shortfall]
    leaves: Sequence[JobState]
    """The members to stop; the others go on."""
    stays: JobState
    """Of those that go on the one for which they are stopped."""
    apart: Sequence[KindsApart]


def dissolution(state: CellState, group_id: str) -> Dissolution | None:
    """None: no member is slower than promised, or those who would have to leave may not be stopped. Not for a
    group of which a member is being stopped."""
    members = sorted(state.groups[group_id].values(), key=lambda job: job.order)
    short = [job for job in members if job.sharing.short_ms is not None]
    able = [job for job in members if job not in short] or members
    holder = max(able, key=lambda job: (_gain(state, job), job.order))
    harmed = [job for job in short if job is not holder]
    if not harmed:
        return None
    of_holder, of_harmed = _cost_s(state, holder), sum(_cost_s(state, job) for job in harmed)
    if of_holder == of_harmed == inf:
        return None
    leaves = [holder] if of_holder <= of_harmed + PATIENCE_MS / 1_000 else harmed
    pairs = {tuple(sorted((kind_of(holder), kind_of(job)))) for job in harmed}
    return Dissolution(
        members,
        [
            Shortfall(job_id=job.job_id, promised=promised(state, job), measured=job.sharing.measured or 0.0)
            for job in short
        ],
        leaves,
        harmed[0] if leaves == [holder] else holder,
        [KindsApart(one=one, other=other) for one, other in sorted(pairs)],
    )


def _gain(state: CellState, job: JobState) -> float:
    """Its speed over what was promised; a member that has reported no waits has had none."""
    return (1.0 if job.sharing.measured is None else job.sharing.measured) / promised(state, job)


def _cost_s(state: CellState, job: JobState) -> float:
    """What stopping it loses; infinite: it may not be stopped."""
    if stays(state, job) is not None:
        return inf
    if job.saves:
        return stop_cost_s(state, job)
    ran_ms = 0 if job.running_ms is None else state.now_ms - job.running_ms
    return ran_ms / 1_000 if ran_ms <= LOSES_MS else inf
