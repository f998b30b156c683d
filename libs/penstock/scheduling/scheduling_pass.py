"""One pass over the waiting jobs (list scheduling): each job in its turn starts, waits, or has room made for
it.

The placer, forecasts, preemption, bursts and pre-launch run the same pass. They differ in the nodes on which
a job is tried (`Trying`: the state, a forecast, a trial copy), and in what they do with a result: facts of
the ledger, an expected time, a booking on the copy. The caller does so before it asks for the next result.

Pure: reads the state, writes nothing.
"""

from collections.abc import Hashable, Iterable, Iterator
from math import inf
from typing import Generic, TypeAlias, TypeVar

import msgspec

from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.plans import PlanUnit
from penstock.scheduling.stages.protocols import Turns
from penstock.scheduling.stages.reclaim import Reclaimed

Key = TypeVar("Key", bound=Hashable)
Place = TypeVar("Place")


class Starts(msgspec.Struct, Generic[Place], frozen=True, gc=False):
    """The job starts, at this place."""

    job: JobState
    place: Place


class Waits(msgspec.Struct, frozen=True, gc=False):
    """The job does not fit now. `alone`: for a reason of its own, so that a job like it may fit."""

    job: JobState
    alone: bool = False


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The place stage raised this error: the job waits, and jobs like it are tried all the same."""

    job: JobState
    error: str


class Never(msgspec.Struct, frozen=True, gc=False):
    """The job would not fit the empty cell: no other job waits for it."""

    job: JobState
    reason: str


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """The job waits for these nodes, which are reserved for it."""

    job: JobState
    unit: PlanUnit


class Reclaims(msgspec.Struct, frozen=True, gc=False):
    """The job waits for resources that others have borrowed and now give back."""

    job: JobState
    found: Reclaimed


class Unreached(msgspec.Struct, frozen=True, gc=False):
    """The end of the window: neither this job nor any job behind it is tried."""

    job: JobState


class Full(msgspec.Struct, frozen=True, gc=False):
    """The caller's record takes no further job: the pass ends, and another one begins with this job."""

    job: JobState


Tried: TypeAlias = Starts[Place] | Waits | Failed | Full
Result: TypeAlias = Starts[Place] | Waits | Failed | Never | Reserved | Reclaims | Unreached | Full


class Trying(Generic[Key, Place]):
    """Where a caller tries jobs. The defaults: nobody is judged, and nothing reserved."""

    head: JobState | None = None
    """The head of the queue: judged, though other jobs wait already."""
    makes_room = False
    """Whether anything is reserved or reclaimed for jobs that wait."""

    def alike(self, job: JobState) -> Key:
        """Equal for jobs with the same result until one of them starts: where one waits, all do."""
        raise NotImplementedError

    def place(self, job: JobState, key: Key) -> Tried[Place]:
        """The result of a job that is unlike all that wait. `key`: of `alike`."""
        raise NotImplementedError

    def never(self, job: JobState) -> str | None:
        """Why the head of the queue, or the first job that waits, would not fit the empty cell; None: it
        would."""
        return None

    def make_room(self, job: JobState) -> Iterator[Reserved | Reclaims]:
        """What is reserved or reclaimed for a job that waits."""
        return iter(())

    def settled(self) -> bool:
        """Whether all further jobs are certain to wait, after a job that waits."""
        return False


def scheduling_pass(turns: Turns, trying: Trying[Key, Place], window: float = inf) -> Iterator[Result[Place]]:
    """The results of one pass, in order. `turns`: the waiting jobs in the profile's order; `window`: how many
    may be passed over.

    A job may have several results: first whether it starts, then what follows from its wait.
    """
    waiting: set[Key] = set()
    passed = 0
    # 1. The job whose turn it is.
    job = next(turns, None)
    while job is not None:
        # 2. The window: jobs behind its end are not tried.
        if passed >= window:
            yield Unreached(job)
            return
        # 3. Its place; a job like one that waits has none.
        key = trying.alike(job)
        result: Tried[Place] = Waits(job) if key in waiting else trying.place(job, key)
        yield result
        starts = isinstance(result, Starts)
        if not starts:
            if isinstance(result, Full):
                return
            # 4. A job that the empty cell could not hold: no other job waits for it.
            if (not passed or job is trying.head) and (reason := trying.never(job)) is not None:
                yield Never(job, reason)
            # 5. Room for a job that waits: reservations, and stops of those that have borrowed.
            else:
                passed += 1
                if isinstance(result, Waits):
                    if not result.alone:
                        waiting.add(key)
                    if trying.makes_room:
                        yield from trying.make_room(job)
                        if trying.settled():
                            return
        # 6. The order learns whether the job starts, which may change whose turn is next.
        try:
            job = turns.send(starts)
        except StopIteration:
            return


def in_turn(jobs: Iterable[JobState]) -> Turns:
    """These jobs one after the other, whether they start or not."""
    for job in jobs:  # noqa: UP028 - an iterator takes no `send`
        yield job
