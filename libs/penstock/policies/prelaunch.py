"""Pre-scheduling (Liquid §6.1): which waiting job launches where a running one comes to its end, and when.

Ideal: the next job trains as soon as the one before it saves. Departure: it launches beside it, and has the GPUs when the one before is proven
dead (LAW 4). So what can be won is the launch, not the save: it begins as long before the expected end as the job takes to launch, or when the
script reports that it saves, whichever comes first.

Who: the job that the profile would try next, if it fits on what the ending ones leave and its script waits for its GPUs (`JobSpec.prelaunch`).
One that does not wait for them is passed by nobody: it gets the GPUs when they are free.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import ceil, inf
from typing import NamedTuple

from penstock.ledger.job_state import JobState
from penstock.ledger.plans import reserved_nodes
from penstock.ledger.state import CellState
from penstock.model.transitions import JobStatus, TaskStatus
from penstock.policies.base import Profile
from penstock.policies.overlay import Placed
from penstock.policies.preemption import node_ids, set_of
from penstock.policies.service import ends_s
from penstock.policies.succession import NextMembers
from penstock.policies.trial import Trial

MAX_TRIED = 8  # jobs in the profile's order, at one moment
MAX_ENDING = 64  # running jobs that come to their end at one moment, the first ones; each costs a trial copy of its nodes
MAX_FALSE_ENDS = 2  # of one attempt: after so many nobody waits for its end any more


class Ending(NamedTuple):
    """A running job and when it is expected to have ended, in ms of the ledger's time; now, where it saves."""

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
    """Whether every task of the running job has reported the last phase, and that was not in vain in this attempt."""
    return not job.false_ends and all(
        task.saving or task.status is TaskStatus.EXITED for task in job.tasks.values()
    )


def look_ahead(state: CellState, profile: Profile) -> Next:
    """Of the jobs that wait the first that may launch now. O(jobs that run), where any job of the cell may launch early."""
    if not state.settings.prelaunch_wait_ms or not state.prelaunching or not state.queue or state.frozen:
        return Next()
    ending = _endings(state)
    wake_ms = inf
    for job in _first(state, profile) if ending else ():
        begins = [(one, one.at_ms - _lead_ms(job, one.job)) for one in ending]
        near = [one for one, at_ms in begins if one.saves or at_ms <= state.now_ms][:MAX_ENDING]
        found = _placed(state, job, near) if near else None
        if found is not None and found.after and job.spec.prelaunch:
            ends = (one.at_ms for one in near if one.job.job_id in found.after)  # others are being stopped
            late_ms = max((state.now_ms, *ends)) + state.settings.prelaunch_wait_ms
            return Next(found, int(late_ms))
        if job.spec.prelaunch:
            later = (at_ms for one, at_ms in begins if at_ms > state.now_ms and at_ms < one.at_ms)
            wake_ms = min(wake_ms, min(later, default=inf))
        if found is not None or profile.backfill is not None:
            break  # what they leave is this one's
    return Next(wake_ms=None if wake_ms == inf else max(state.now_ms + 1, ceil(wake_ms)))


def _launch_ms(job: JobState) -> int:
    """As it is expected to take; 0: not known."""
    return 0 if job.estimate is None else job.estimate.launch_ms or 0


def _lead_ms(job: JobState, before: JobState) -> int:
    """How long before the end of another job this one begins to launch; 0: it is not known how long it takes, so it begins when the other saves.

    Where the estimator does not know it, it is taken to be as long as the other took, if both train the same model.
    """
    if (known := _launch_ms(job)) or job.spec.model is None or job.spec.model != before.spec.model:
        return known
    return max((task.launch_ms or 0 for task in before.tasks.values()), default=0)


def _endings(state: CellState) -> list[Ending]:
    """Running jobs after which others may come, with GPUs of their own; who saves first, then those that are expected to end first."""
    found: list[Ending] = []
    for job in state.holding.values():
        if job.status is not JobStatus.RUNNING or job.group or job.false_ends >= MAX_FALSE_ENDS:
            continue
        if saves(job):
            found.append(Ending(state.now_ms, job, True))
        elif (end_ms := _end_ms(job)) < inf:
            found.append(Ending(end_ms, job, False))
    return sorted(found, key=lambda one: (not one.saves, one.at_ms, one.job.order))


def _end_ms(job: JobState) -> float:
    """The ledger's time at which it is expected to end; infinite where that is not known. A run time has a launch in it, which was over when
    its GPUs came where it launched early."""
    end_s = ends_s(job)
    if end_s is None:
        return inf
    early = job.prelaunch and job.remaining_s is None and job.eta is None
    return end_s * 1_000 - (_launch_ms(job) if early else 0)


def _first(state: CellState, profile: Profile) -> Iterator[JobState]:
    """Jobs that wait, in the profile's order, up to one behind which all others wait."""
    waiting: Iterable[str] = profile.order.order(state) if profile.order is not None else state.queue.values()
    head = state.head_of_queue()
    for job_id in islice(waiting, min(MAX_TRIED, state.settings.backfill_window)):
        if job_id in state.planned and state.planned[job_id].proposed is not None:
            continue  # it starts with its unit
        yield state.jobs[job_id]
        if profile.order is None and head is not None and head.backfill_count >= state.settings.max_overtakes:
            return


def _placed(state: CellState, job: JobState, near: list[Ending]) -> Placed | None:
    """Where it starts after them; a gang on several nodes only after such as save, so that its members do not wait long for each other.

    None where it does not fit there, or fits somewhere without them. Without `Placed.after` it fits, and not as a next member.
    """
    trial = Trial(state)
    for one in near:
        trial.release(one.job)
    kept = (state.nodes[node_id] for node_id in reserved_nodes(state) if node_id in state.nodes)
    fit = trial.fit(job.demand, set_of(node.ordinal for node in kept))
    if fit is None:
        return None
    nodes = node_ids(state, job.demand, fit)
    several = len(set(nodes)) > 1
    [placed] = NextMembers(state, {one.job.job_id for one in near if one.saves or not several}).give(
        [(job, nodes)]
    ) or [None]
    return placed or Placed(job, ())
