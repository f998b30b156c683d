"""Queue position: the order of waiting jobs under the cell's profile, now and in a forecast.

A profile without its own order uses arrival: the first job may be overtaken only `max_overtakes` times, and a
bounded number of jobs that do not fit is skipped.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import lru_cache
from typing import NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.profiles import profile_for
from penstock.scheduling.stages.protocols import Order, Profile, Turns


class Line(NamedTuple):
    """The queue in the profile's order."""

    profile: Profile
    places: Mapping[str, int] | None
    """Job → its position, from 0; None: by arrival."""


class Places(Mapping[str, int]):
    """Job → its position, from 0, in order. The order is computed only as far as it is asked for, so the
    state must not change until then."""

    def __init__(self, ids: Iterator[str]) -> None:
        self._ids = ids
        self._order: list[str] = []
        self._found: dict[str, int] = {}

    def __getitem__(self, job_id: str) -> int:
        found = self._found.get(job_id)
        while found is None:
            later = self._next()
            if later is None:
                raise KeyError(job_id)
            found = self._found.get(job_id)
        return found

    def __iter__(self) -> Iterator[str]:
        number = 0
        while number < len(self._order) or self._next() is not None:
            yield self._order[number]
            number += 1

    def __len__(self) -> int:
        while self._next() is not None:
            pass
        return len(self._order)

    def _next(self) -> str | None:
        job_id = next(self._ids, None)
        if job_id is not None:
            self._found[job_id] = len(self._order)
            self._order.append(job_id)
        return job_id


@lru_cache(1)
def _profile_of(settings: PlacerSettings) -> Profile:
    """The profile, with its stages' caches from one answer to the next. Raises `UnknownProfile`."""
    return profile_for(settings)


def line_of(state: CellState, now_ms: int) -> Line:
    """The queue's order. O(jobs · log jobs) for a profile with its own order, as far as the order is read;
    else O(1)."""
    profile = _profile_of(state.settings)
    if profile.preempt is not None:
        ranked = (job_id for job_id in profile.preempt.ranking(state) if state.jobs[job_id].in_line)
        return Line(profile, Places(ranked))
    if profile.order is None:
        return Line(profile, None)
    return Line(profile, Places(all_start(state, profile.order, now_ms)))


def all_start(state: CellState, order: Order, at_ms: int) -> Iterator[str]:
    """Ids of the queue's jobs in their order if each of them starts."""
    turns = order.ranking(state).turns(at_ms)
    try:
        job = next(turns)
        while True:
            yield job.job_id
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
