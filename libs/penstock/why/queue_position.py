"""Queue position: the order of waiting jobs under the cell's profile, now and in a forecast.

A profile without its own order uses arrival: the first job may be overtaken only `max_overtakes` times, and a
bounded number of jobs that do not fit is skipped.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from typing import NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.profiles import profile_for
from penstock.scheduling.stages.protocols import Profile, Turns


class Line(NamedTuple):
    """The queue in the profile's order."""

    profile: Profile
    places: Mapping[str, int] | None
    """Job → its position, from 0; None: by arrival."""


def line_of(state: CellState, now_ms: int) -> Line:
    """The queue's order. O(jobs · log jobs) for a profile with its own order, else O(1)."""
    profile = profile_for(state.settings)
    if profile.preempt is not None:
        ranked = (job_id for job_id in profile.preempt.ranking(state) if state.jobs[job_id].in_line)
        return Line(profile, {job_id: place for place, job_id in enumerate(ranked)})
    if profile.order is None:
        return Line(profile, None)
    waiting = [state.jobs[job_id] for job_id in state.queue.values()]
    turns = profile.order.ranking(state, waiting, state.holding.values(), now_ms)
    return Line(profile, {job.job_id: place for place, job in enumerate(all_start(turns))})


def all_start(turns: Turns) -> Iterable[JobState]:
    """The jobs in their order if each of them starts."""
    try:
        job = next(turns)
        while True:
            yield job
            job = turns.send(True)
    except StopIteration:
        return


def by_arrival(waiting: Iterable[JobState], overtaken: MutableMapping[str, int], max_overtakes: int) -> Turns:
    """Waiting jobs in the given order. `overtaken`: job → how often it has been overtaken; incremented
    here."""
    head: JobState | None = None
    for job in waiting:
        if head is not None and overtaken.get(head.job_id, head.backfill_count) >= max_overtakes:
            return
        started = yield job
        if not started:
            head = head or job
        elif head is not None:
            overtaken[head.job_id] = overtaken.get(head.job_id, head.backfill_count) + 1
