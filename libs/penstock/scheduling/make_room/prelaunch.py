"""Pre-scheduling (Liquid §6.1): which waiting job launches where a running one comes to its end, and when.

Ideal: the next job trains as soon as the job before it saves. Departure: the next job launches beside it, and
gets the GPUs when the former job is proven dead (LAW 4). This saves the start-up time: the launch starts one
launch time before the expected end, or when the former job's script reports that it saves, whichever comes
first.

Which job: the one that would start there if the jobs that are about to end did so as expected, task after
task, and nothing else happened. Launching early does not reorder jobs: only the job that would start on the
freed resources without it launches early on them (decision 88). A job whose script does not wait for its GPUs
(`JobSpec.prelaunch`) gets them when they are free, and no job launches there.

Departures: nodes are found by first fit; tenants' shares are those of now, so a job that ends counts for its
owner; of jobs that are alike the first one is looked at until it has launched; no job uses nodes beside what
a reservation needs of them, unless it is expected to end in time.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import ceil, inf
from typing import NamedTuple

from penstock.cluster.view import ClusterView, Fit, Placed
from penstock.ledger.fold.plans import reserved_nodes, units_of_profile, units_of_reclaim
from penstock.ledger.state.index import set_of
from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import within_ms
from penstock.scheduling.make_room.preemption import MAX_TRIALS, node_ids
from penstock.scheduling.make_room.succession import Succession
from penstock.scheduling.place.borrowing import reserved_for
from penstock.scheduling.remaining_time import ends_s
from penstock.scheduling.scheduling_pass import (
    Reclaims,
    Reserved,
    Starts,
    Trying,
    Waits,
    in_turn,
    scheduling_pass,
)
from penstock.scheduling.stages.protocols import Profile

MAX_ENDING = 64  # running jobs that come to their end at one moment, the first ones
MAX_FITS = 512  # of one look ahead: trials of a job on what is free then, about 10 µs each
MAX_FALSE_ENDS = 2  # of one attempt: after so many no job waits for its end any more


class Ending(NamedTuple):
    """A running job and when it is expected to have ended, in ms of the ledger's time; now, where it
    saves."""

    at_ms: float
    job: JobState
    saves: bool


class Next(NamedTuple):
    """What comes of a look ahead."""

    placed: Placed | None = None
    """The job that launches now, on places that ending ones leave."""
    late_ms: int = 0
    """Ledger time at which it is given back to the queue, if those before it have not ended."""
    wake_ms: int | None = None
    """Ledger time at which the answer changes although nothing happens; None: it does not."""


def saves(job: JobState) -> bool:
    """Whether every task of the running job has reported the last phase, and that was not in vain in this
    attempt."""
    return not job.succession.false_ends and all(
        task.saving or task.status is TaskStatus.EXITED for task in job.tasks.values()
    )


def look_ahead(state: CellState, profile: Profile) -> Next:
    """Of the jobs that wait the first that may launch now. O(jobs that run + tasks that end × jobs that are
    tried), where any job of the cell may launch early."""
    if not state.settings.prelaunch_wait_ms or not state.prelaunching or not state.queue or state.frozen:
        return Next()
    waiting = list(_first(state, profile))
    if not any(job.spec.prelaunch for job in waiting):
        return Next()
    near, wake_ms = _near(state, waiting)
    line = _Line(state, profile, waiting)
    for number, one in enumerate(near):
        for job, nodes in line.start_when(one.job):
            begins_ms = state.now_ms if one.saves else one.at_ms - _lead_ms(job, one.job)
            if not _launches(job) or state.now_ms < begins_ms == one.at_ms:
                continue  # it starts when they are free, or launches when the other saves
            if begins_ms > state.now_ms:
                wake_ms = min(wake_ms, begins_ms)
                continue
            placed = _placed(state, job, nodes, near[: number + 1])
            if placed is not None:
                ends = (before.at_ms for before in near if before.job.job_id in placed.after)
                late_ms = max((state.now_ms, *ends)) + state.settings.prelaunch_wait_ms
                return Next(placed, within_ms(int(late_ms)))
    return Next(wake_ms=None if wake_ms == inf else within_ms(max(state.now_ms + 1, ceil(wake_ms))))


def _launches(job: JobState) -> bool:
    """Whether it may launch early. One with a deadline and a range of workers waits for a shape that is
    chosen when it starts."""
    return job.spec.prelaunch and not (job.spec.timed and job.spec.min_workers is not None)


def _launch_ms(job: JobState) -> int:
    """As it is expected to take; 0: not known."""
    return 0 if job.estimate is None else job.estimate.launch_ms or 0


def _lead_ms(job: JobState, before: JobState) -> int:
    """How long before the end of another job this one begins to launch; 0: it is not known how long it takes,
    so it begins when the other saves.

    Where the estimator does not know it, it is taken to be as long as the other took, if both train the same
    model.
    """
    if (known := _launch_ms(job)) or job.spec.model is None or job.spec.model != before.spec.model:
        return known
    return _took_ms(before)


def _took_ms(job: JobState) -> int:
    """To launch; 0: not known."""
    return max((task.launch_ms or 0 for task in job.tasks.values()), default=0)


def _endings(state: CellState) -> list[Ending]:
    """Running jobs after which others may come, with GPUs of their own; who saves first, then those that are
    expected to end first."""
    found: list[Ending] = []
    for job in state.holding.values():
        missed = job.succession.false_ends >= MAX_FALSE_ENDS
        if missed or job.status is not JobStatus.RUNNING or job.sharing.group:
            continue
        if saves(job):
            found.append(Ending(state.now_ms, job, True))
        elif (end_ms := _end_ms(job)) < inf:
            found.append(Ending(end_ms, job, False))
    return sorted(found, key=lambda one: (not one.saves, one.at_ms, one.job.order))


def _end_ms(job: JobState) -> float:
    """The ledger's time at which it is expected to end; infinite where that is not known.

    An estimated run time has one launch in it. A job that launched early had finished its launch when it got
    its GPUs; a job that goes on from an earlier attempt launches once more.
    """
    end_s = ends_s(job)
    if end_s is None:
        return inf
    if job.progress.remaining_s is not None or job.progress.eta is not None:
        return end_s * 1_000
    return end_s * 1_000 + _launch_ms(job) * ((job.progress.served_ms > 0) - job.succession.prelaunch)


def _first(state: CellState, profile: Profile) -> Iterator[JobState]:
    """Jobs that wait, in the profile's order, up to one behind which all others wait."""
    waiting: Iterable[str] = profile.order.order(state) if profile.order is not None else state.queue.values()
    head = state.head_of_queue()
    for job_id in islice(waiting, min(MAX_TRIALS, state.settings.backfill_window)):
        if job_id in state.planned and state.planned[job_id].proposed is not None:
            continue  # it starts with its unit
        yield state.jobs[job_id]
        if profile.order is None and head is not None and head.backfill_count >= state.settings.max_overtakes:
            return


def _near(state: CellState, waiting: Sequence[JobState]) -> tuple[Sequence[Ending], float]:
    """(endings up to the last one beside which one of these jobs might launch by now, when that changes: ms,
    infinite where it does not)."""
    early = [job for job in waiting if job.spec.prelaunch]
    longest = max((_launch_ms(job) for job in early), default=0)
    models = {job.spec.model for job in early if not _launch_ms(job)} - {None}
    ending = _endings(state)
    near, wake_ms = 0, inf
    for number, one in enumerate(ending[:MAX_ENDING], 1):
        lead_ms = max(longest, _took_ms(one.job)) if one.job.spec.model in models else longest
        if one.saves or one.at_ms - lead_ms <= state.now_ms:
            near = number
        elif lead_ms:
            wake_ms = min(wake_ms, one.at_ms - lead_ms)
    return ending[:near], wake_ms


Alike = tuple[int, DemandKey]
"""(nodes that are reserved for others, demand)."""


class _Line(Trying[Alike, tuple[JobState, Fit]]):
    """Those that wait, tried in their order as what others hold comes free, task by task. Who starts takes
    what it needs."""

    def __init__(self, state: CellState, profile: Profile, waiting: Sequence[JobState]) -> None:
        self._state, self._profile = state, profile
        self._waiting = list(waiting)
        self._trial = ClusterView(state)
        self._fits = MAX_FITS
        self._reserved_nodes = set_of(
            state.nodes[node_id].ordinal for node_id in reserved_nodes(state) if node_id in state.nodes
        )
        self._reserved = next(
            (unit for unit in units_of_profile(state) if unit.expected_ms is not None), None
        )
        self._behind = False
        """Whether the job for which nodes are reserved waits, in this pass."""

    def start_when(self, ended: JobState) -> Iterator[tuple[JobState, tuple[str, ...]]]:
        """(job, nodes of its tasks) of those that start when this one has ended, too."""
        for _ in self._trial.release_by_task(ended):
            self._behind = False
            for result in scheduling_pass(in_turn(list(self._waiting)), self):
                if isinstance(result, Starts):
                    shaped, fit = result.place
                    self._trial.claim(shaped.demand, fit)
                    self._waiting.remove(result.job)
                    yield result.job, node_ids(self._state, shaped.demand, fit)

    def alike(self, job: JobState) -> Alike:
        """As `Trying`."""
        return self._avoid(job), job.demand_key

    def place(self, job: JobState, key: Alike) -> Starts[tuple[JobState, Fit]] | Waits:
        """As `Trying`. A moldable job may wait for more workers than one like it."""
        found = self._fit(job, key[0])
        return Waits(job, alone=job.spec.min_workers is not None) if found is None else Starts(job, found)

    makes_room = True

    def make_room(self, job: JobState) -> Iterator[Reserved | Reclaims]:
        """Behind the job for which nodes are reserved, they bind the others."""
        self._behind |= self._reserved is not None and self._reserved.job_id == job.job_id
        return iter(())

    def _avoid(self, job: JobState) -> int:
        """Set of the nodes that are reserved for others."""
        if not self._state.planned:
            return 0
        _, others = reserved_for(self._state, job, units_of_reclaim(self._state))
        unit, stage = self._reserved, self._profile.backfill
        if (
            self._behind
            and unit is not None
            and not (stage is not None and stage.may_use(self._state, job, unit))
        ):
            others |= reserved_for(self._state, job, (unit,))[1]
        return self._reserved_nodes | others

    def _fit(self, job: JobState, avoid: int) -> tuple[JobState, Fit] | None:
        """(the job with the workers that it starts with, where); None where it does not fit, or too much was
        tried."""
        if job.spec.min_workers is None:
            fit = self._fit_as(job, avoid)
            return None if fit is None else (job, fit)
        low, high = job.spec.fewest_workers - 1, job.spec.workers
        while low < high:
            middle = (low + high + 1) // 2
            if self._fit_as(job.shaped(middle), avoid) is None:
                high = middle - 1
            else:
                low = middle
        if low < job.spec.fewest_workers:
            return None
        shape = self._profile.shape
        wanted = low if shape is None else shape.shape(self._state, job, low)[0]
        if wanted > low:
            return None
        shaped = job.shaped(wanted)
        fit = self._fit_as(shaped, avoid)
        return None if fit is None else (shaped, fit)

    def _fit_as(self, job: JobState, avoid: int) -> Fit | None:
        self._fits -= 1
        return None if self._fits < 0 else self._trial.fit(job.demand, avoid)


def _placed(state: CellState, job: JobState, nodes: Sequence[str], near: Sequence[Ending]) -> Placed | None:
    """Where it starts after them; a gang on several nodes only after such as save, so that its members do not
    wait long for each other.

    None where it does not fit there beside them, or does so without any of them.
    """
    several = len(set(nodes)) > 1
    after = {one.job.job_id for one in near if one.saves or not several}
    found = Succession(ClusterView(state), after).place([(job, nodes)])
    return found[0] if found and found[0].after else None
