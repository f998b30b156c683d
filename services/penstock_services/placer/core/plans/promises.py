"""The promise of a group's plan: a member that is slower for a minute ends the group
(`penstock.proposals.dissolution`).

The placer does so by itself, from nodes' reports and a timer of its own, so that no group rests on a batcher
that lives. A node that is silent reports nothing: the last report counts.
"""

from collections.abc import Iterator

from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.decisions.groups import GroupDissolved
from penstock.model.decisions.ledger_events import JobPreempted
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_TEXT, within_ms
from penstock.model.schema.event import Event
from penstock.proposals.dissolution import APART_MS, PATIENCE_MS, Dissolution, dissolution
from penstock.scheduling.groups.validate_groups import bound
from penstock.scheduling.stages.protocols import Profile
from penstock_services.placer.core.common import stop, timer

TURNS = "turns"
"""Kind of the timer."""


def dissolves(profile: Profile) -> bool:
    """Whether groups are dissolved: not where the profile itself forms none."""
    return profile.regroup is not None and bound(profile)


def measured(state: CellState, profile: Profile, event: StepsMeasured) -> Iterator[Event]:
    """Sets the timer of a member that is slower than promised, unless it is set."""
    job = job_of_task(state, event.node_id, event.task_id)
    if job is None or job.sharing.short_ms is None or not dissolves(profile):
        return
    if timer_id(job.job_id, TURNS) not in state.timers:
        yield timer(state, job.job_id, TURNS, PATIENCE_MS, job.attempt)


def due(state: CellState, profile: Profile, job: JobState) -> Iterator[Event]:
    """The timer of this member has fired."""
    if job.sharing.short_ms is None or not job.sharing.group or not dissolves(profile):
        return
    left_ms = job.sharing.short_ms + PATIENCE_MS - state.now_ms
    members = state.groups[job.sharing.group].values()
    if left_ms <= 0 and (state.frozen or any(member.status is JobStatus.STOPPING for member in members)):
        left_ms = PATIENCE_MS
    if left_ms > 0:
        yield timer(state, job.job_id, TURNS, left_ms, job.attempt)
        return
    found = dissolution(state, job.sharing.group)
    if found is None:  # none of them may be stopped; the next report asks again
        return
    reason, leaving = _reason(found), [member.job_id for member in found.leaves]
    yield GroupDissolved(
        group_id=job.sharing.group,
        job_ids=tuple(member.job_id for member in found.members),
        short=tuple(found.short),
        leaves=tuple(leaving),
        apart=tuple(found.apart),
        until_ms=within_ms(state.now_ms + APART_MS),
        reason=reason,
    )
    for member in found.leaves:
        yield JobPreempted(
            job_id=member.job_id, attempt=member.attempt, by_job_id=found.stays.job_id, reason=reason
        )
        yield from stop(state, member, "preempted")
    for short in found.short:  # whether those who go on have what they were promised then
        if short.job_id not in leaving:
            yield timer(state, short.job_id, TURNS, PATIENCE_MS, state.jobs[short.job_id].attempt)


def _reason(found: Dissolution) -> str:
    """`a has had 2 % of its speed for a minute, promised were 60 %`"""
    texts = (
        f"{short.job_id} has had {short.measured:.0%} of its speed, promised were {short.promised:.0%}"
        for short in found.short
    )
    return f"for a minute {'; '.join(texts)}"[:MAX_TEXT]
