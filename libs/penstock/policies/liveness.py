"""Liveness of a cell (LAW 7): no job waits beside free resources that nobody before it could use.

A job *delays nobody* where it fits now on nodes that no other waiting job could ever use; in a cell without running jobs on any nodes, since no
end is awaited there. Such a job has no reason to wait: the placer starts it even behind the end of its backfill window (`Undelaying`), and where
it waits all the same, and nothing is under way that would start it, the cell is *stalled* (`stalled`), which the gateway reports.
"""

from collections.abc import Collection

import msgspec

from penstock.ledger.demand import DemandKey
from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.ledger.timers import timer_id
from penstock.model.settings import PlacerSettings
from penstock.policies.base import LazyRng, Profile
from penstock.policies.gang import tasks_that_fit
from penstock.policies.job_rows import JobRows
from penstock.policies.moldable import as_it_waits
from penstock.policies.preemption import node_ids
from penstock.policies.profiles import in_force, profile_for
from penstock.policies.trial import Trial

Row = tuple[str, DemandKey]
"""(owner, demand)."""


class Undelaying:
    """Finds waiting jobs that delay nobody. Keeps only an index of the waiting jobs, a function of the state."""

    def __init__(self) -> None:
        self._rows: JobRows[Row] = JobRows(_row)

    def first(
        self, state: CellState, without: Collection[str] = ()
    ) -> tuple[JobState, tuple[str, ...]] | None:
        """The first such job that is not in `without`, and nodes on which it fits; None: there is none. Of jobs with the same owner and demand the one
        with the highest priority, then the earliest. O(changes + different demands)."""
        self._rows.update(state)
        index = state.index
        free = index.gpus.having(1) or index.shared
        fitting: list[JobState] = []
        others: list[JobState] = []
        for entries in self._rows.waiting.values():
            job = next((state.jobs[name] for _, _, name, _ in entries if name not in without), None)
            if job is None:
                others.append(state.jobs[entries[0][2]])
                continue
            demand = job.demand
            can = (free or not demand.worker.gpus) and index.candidates(demand.worker, demand.gpu_models)
            (fitting if can and tasks_that_fit(state, demand) == demand.tasks else others).append(job)
        if not fitting:
            return None
        avoid = 0
        for other in others if state.holding else ():
            avoid |= index.eligible(other.demand.worker, other.demand.gpu_models)
        for job in sorted(fitting, key=lambda found: found.order):
            fit = Trial(state).fit(job.demand, avoid)
            if fit is not None:
                return job, node_ids(state, job.demand, fit)
        return None


def strict(settings: PlacerSettings, profile: Profile) -> bool:
    """Whether the profile promises strict order of arrival: nobody starts before the head of its queue, wherever that could run."""
    return settings.backfill_window == 1 or not profile.beside_stops


class Stall(msgspec.Struct, frozen=True):
    """A job that waits beside free resources though it delays nobody and nothing is under way."""

    job_id: str
    nodes: tuple[str, ...]
    """Where it fits."""
    cause: str


def stalled(state: CellState, undelaying: Undelaying | None = None) -> Stall | None:
    """The first stalled job; None: no job stalls, or something is under way that may start it (a stop, a move, a window, a pass). O(different demands)."""
    if state.frozen or not state.queue or state.stopping or state.moving or state.in_window:
        return None
    if timer_id("cell", "place_more") in state.timers:
        return None
    settings = in_force(state.settings)
    profile = profile_for(settings)
    if state.holding and (profile.regroup is not None or strict(settings, profile)):
        return None  # a plan decides who runs, or it waits for its turn
    found = (undelaying or Undelaying()).first(state)
    if found is None:
        return None
    job, nodes = found
    if state.holding and not _placeable(state, job, profile):
        return None
    return Stall(job.job_id, nodes, _cause(state, nodes))


def _placeable(state: CellState, job: JobState, profile: Profile) -> bool:
    """Whether the profile's own place stage would place it."""
    rng = LazyRng(state.settings.seed, f"stalled:{job.job_id}")
    return profile.place.place(state, as_it_waits(state, job, profile.shape), rng) is not None


def _cause(state: CellState, nodes: Collection[str]) -> str:
    reserving = [unit.job_id for unit in state.planned.values() if not set(nodes).isdisjoint(unit.nodes)]
    if reserving:
        return f"its nodes are reserved for {reserving[0]}, for which nothing is awaited"
    failed = state.failed_choices
    if failed.in_a_row:
        return f"choices fail: {failed.error}"
    return "the placer passed it over; this is a bug"


def _row(state: CellState, job: JobState) -> tuple[Row, float] | None:
    return ((job.spec.owner, job.demand.key), -job.spec.priority) if job.estimate is not None else None
