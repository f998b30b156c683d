"""Fold of groups: which jobs are members;
a job joins by its placement and leaves when its attempt is over."""

from msgspec.structs import replace

from penstock.ledger.derived.promises import compare
from penstock.ledger.derived.speed import set_speed
from penstock.ledger.state.apart import remember
from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import GroupDecided, GroupDissolved


def group_decided(state: CellState, fact: GroupDecided) -> None:
    """Bookings stay as they are: a running member already holds what it will share."""
    for job_id in fact.job_ids:
        job = state.jobs[job_id]
        if job.status in HOLDING and job.sharing.group != fact.group_id:
            leave(state, job)
            join(state, job, fact.group_id)
    if fact.turns is not None:
        for job_id, speed in zip(fact.turns.job_ids, fact.turns.speeds, strict=True):
            job = state.jobs[job_id]
            job.sharing = replace(job.sharing, turns=fact.turns)
            set_speed(job, speed, state.now_ms)
            _changed(state, job)
    for job in state.groups.get(fact.group_id, {}).values():
        compare(state, job)


def group_dissolved(state: CellState, fact: GroupDissolved) -> None:
    """The members leave when their attempts are over; their kinds are remembered from now on."""
    remember(state.apart, fact, state.now_ms)


def join(state: CellState, job: JobState, group_id: str) -> None:
    """The job joins the group, before any node's resources are booked for it."""
    members = state.groups.setdefault(group_id, {})
    members[job.job_id] = job
    job.sharing = replace(job.sharing, group=group_id)
    for member in members.values():
        _changed(state, member)
        compare(state, member)


def leave(state: CellState, job: JobState) -> None:
    """The job leaves its group when its attempt is over. A group with one member left is dissolved."""
    if not job.sharing.group:
        return
    members = state.groups[job.sharing.group]
    del members[job.job_id]
    _alone(state, job)
    for member in (job, *members.values()):
        _changed(state, member)
    for member in members.values():
        if member.sharing.short_ms is not None:
            member.sharing = replace(member.sharing, short_ms=state.now_ms)
    if len(members) > 1:
        return
    for last in members.values():
        del state.groups[last.sharing.group]
        _alone(state, last)
        return


def _alone(state: CellState, job: JobState) -> None:
    if job.sharing.turns is not None:
        set_speed(job, 1.0, state.now_ms)
    job.sharing = replace(job.sharing, group="", turns=None, measured=None, short_ms=None)


def _changed(state: CellState, job: JobState) -> None:
    job.version += 1
    state.change_log.add(job.job_id)
