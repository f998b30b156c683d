"""Persistent list order of regroup stages, stored as ranks (`JobRank`), so that a stable sort has the same
result after a restart."""

from bisect import bisect_left
from collections.abc import Sequence

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import MAX_RANKS, JobRank
from penstock.scheduling.groups.candidates import Candidates
from penstock.scheduling.stages.regroup import Candidate, Question

APART = 1 << 20
"""Distance of two positions in the list, so that others fit between them."""


def place_in_list(rank: tuple[int, int, int] | None, order: int) -> tuple[bool, int]:
    """(whether it was in no plan yet, position): the order of jobs with equal keys and GPUs. `order`: of its
    submission."""
    return (True, order * APART) if rank is None else (False, rank[2])


class Listed(Candidates):
    """The candidates in order of `key`; ties: as in the list, jobs already listed, most GPUs, position."""

    def _key_in_row(self, state: CellState, job: JobState) -> tuple[float, ...]:
        return self._key(state, job), *place_in_list(job.rank, job.order)

    def _place(self, key: float, job: Candidate) -> tuple[object, ...]:
        new, position = place_in_list(job.rank, job.order)
        return job.movable or not job.group, key, new, -job.gpus, position, job.order


def list_order(question: Question) -> tuple[JobRank, ...]:
    """The order of the question's jobs, as a minimal set of changes of their ranks, at most as many as one
    plan may have."""
    by_gpus: dict[int, list[Candidate]] = {}
    for job in question.jobs:
        by_gpus.setdefault(job.gpus, []).append(job)
    found: list[JobRank] = []
    for jobs in by_gpus.values():
        was = [place_in_list(job.rank, job.order)[1] for job in jobs]
        for job, before, now in zip(jobs, was, rising(was), strict=True):
            if job.rank is None or now != before:
                found.append(_rank(job, now))
    return tuple(found[:MAX_RANKS])


def rising(positions: Sequence[int]) -> list[int]:
    """Strictly ascending positions: those of a longest ascending subsequence are unchanged, the others are
    placed between. O(n · log n)."""
    tails: list[int] = []
    """Length − 1 → index of the smallest last position of an ascending subsequence of this length."""
    before = [-1] * len(positions)
    for index, position in enumerate(positions):
        length = bisect_left(tails, position, key=positions.__getitem__)
        before[index] = tails[length - 1] if length else -1
        tails[length : length + 1] = [index]
    stays: list[int] = []
    index = tails[-1] if tails else -1
    while index >= 0:
        stays.append(index)
        index = before[index]
    stays.reverse()
    found = list(positions)
    start, low = 0, None
    for stay in [*stays, None]:
        end = len(found) if stay is None else stay
        high = None if stay is None else found[stay]
        _spread(found, start, end, low, high)
        if stay is not None:
            last = found[stay - 1] if stay else None
            if last is not None and last >= found[stay]:
                found[stay] = last + 1
            start, low = stay + 1, found[stay]
    return found


def _spread(found: list[int], start: int, end: int, low: int | None, high: int | None) -> None:
    """Sets the positions of `start` … `end` − 1 between `low` and `high`; if there is no room, the following
    ones are moved."""
    count = end - start
    for number in range(count):
        if low is None:
            found[start + number] = (high or 0) - (count - number) * APART
        elif high is None:
            found[start + number] = low + (number + 1) * APART
        else:
            found[start + number] = max(low + number + 1, low + (high - low) * (number + 1) // (count + 1))


def _rank(job: Candidate, position: int) -> JobRank:
    return JobRank(job_id=job.job_id, level=0, chosen=False, position=position)
