"""Liveness of a cell (LAW 7): no job waits beside free resources that nobody before it could use.

A job *delays nobody* where it fits now on nodes that no other waiting job could ever use; in a cell without
running jobs on any nodes, since no end is awaited there. Such a job has no reason to wait: the placer starts
it even behind the end of its backfill window (`Undelaying`), and where it waits all the same, and nothing is
under way that would start it, the cell is *stalled* (`stalled`), which the gateway reports.
"""

from collections.abc import Callable, Collection
from functools import partial
from itertools import chain

import msgspec

from penstock.cluster.chance import LazyRng
from penstock.cluster.view import ClusterView
from penstock.ledger.state.job.demand import Demand, DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.ledger.state.timers import timer_id
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.make_room.preemption import node_ids
from penstock.scheduling.order.job_rows import JobRows
from penstock.scheduling.place.moldable import as_it_waits
from penstock.scheduling.profiles import in_force, known_profile
from penstock.scheduling.stages.protocols import Profile

Row = tuple[str, DemandKey]
"""(owner, demand)."""


class Undelaying:
    """Finds waiting jobs that delay nobody. Keeps only an index of the waiting jobs, a function of the
    state."""

    def __init__(self) -> None:
        self._with_gpus: JobRows[Row] = JobRows(lambda _, job: _row(job, gpus=True))
        self._without: JobRows[Row] = JobRows(lambda _, job: _row(job, gpus=False))

    def first(
        self, state: CellState, without: Collection[str] = (), takes: Callable[[JobState], bool] | None = None
    ) -> tuple[JobState, tuple[str, ...]] | None:
        """The first such job that is not in `without`, and nodes on which it fits; None: there is none.

        `takes`: whether the policy places a job that fits; None: every job. A refused job waits on for its
        nodes. Of jobs with the same owner and demand the one with the highest priority, then the earliest.
        O(changes + different demands), but for those with GPUs only where GPUs are free; in a cell with
        running jobs mostly less: the first demands that fit nowhere want all nodes.
        """
        index, jobs, fitting = state.index, state.jobs, dict[Row, JobState]()
        self._without.update(state)
        rows, gpus = self._without.waiting.items(), self._with_gpus.waiting.items()
        free_gpus = bool(index.gpus.having(1) or index.shared)
        if free_gpus:
            self._with_gpus.update(state)
        wanted = _Wanted(state)
        for row, entries in chain(rows, gpus) if free_gpus else rows:
            head = jobs[entries[0][2]]
            if head.estimate is not None and index.candidates(head.estimate.worker, head.spec.where):
                job = next((jobs[name] for _, _, name, _ in entries if name not in without), None)
                if job is not None and fits_now(state, job.demand) and (takes is None or takes(job)):
                    fitting[row] = job
                    continue
            if wanted.everywhere_with(head):
                return None
        if not fitting:
            return None
        if not free_gpus:
            self._with_gpus.update(state)
            if any(wanted.everywhere_with(jobs[entries[0][2]]) for _, entries in gpus):
                return None
        for job in sorted(fitting.values(), key=lambda found: found.order):
            fit = ClusterView(state).fit(job.demand, wanted.nodes)
            if fit is not None:
                return job, node_ids(state, job.demand, fit)
        return None


class _Wanted:
    """Set of the nodes that some waiting job could use; empty where nothing runs, since no end is awaited."""

    def __init__(self, state: CellState) -> None:
        self.nodes = 0
        self._index = state.index
        self._holding = bool(state.holding)

    def everywhere_with(self, job: JobState) -> bool:
        """Adds those of one more job. Whether no node is left on which anything may be placed."""
        if not self._holding:
            return False
        self.nodes |= self._index.eligible(job.demand.worker, job.demand.where)
        return not self._index.placeable & ~self.nodes


def fits_now(state: CellState, demand: Demand) -> bool:
    """Whether the whole gang fits, in any arrangement: tasks of two kinds may block each other."""
    if demand.parameter_servers:
        return ClusterView(state).fit(demand) is not None
    return ClusterView(state).tasks_that_fit(demand) == demand.tasks


def strict(settings: PlacerSettings, profile: Profile) -> bool:
    """Whether nobody starts before the head of the queue, wherever that could run: the profile promises that
    order."""
    return settings.backfill_window == 1 or not profile.beside_stops


class Stall(msgspec.Struct, frozen=True):
    """A job that waits beside free resources though it delays nobody and nothing is under way."""

    job_id: str
    nodes: tuple[str, ...]
    """Where it fits."""
    cause: str


def stalled(state: CellState, undelaying: Undelaying | None = None) -> Stall | None:
    """The first stalled job. O(different demands).

    None: no job stalls, or something is under way that may start it: a stop, a move, a window, a pass.
    """
    if state.frozen or not state.queue or state.stopping or state.moving or state.window_until_ms:
        return None
    if timer_id("cell", "place_more") in state.timers:
        return None
    settings = in_force(state.settings)
    profile = known_profile(settings)
    if profile is None:  # of a newer placer
        return None
    if state.holding and (profile.regroup is not None or strict(settings, profile)):
        return None  # a plan decides who runs, or it waits for its turn
    takes = partial(_placeable, state, profile) if state.holding else None
    found = (undelaying or Undelaying()).first(state, takes=takes)
    if found is None:
        return None
    job, nodes = found
    return Stall(job.job_id, nodes, _cause(state, nodes))


def _placeable(state: CellState, profile: Profile, job: JobState) -> bool:
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


def _row(job: JobState, *, gpus: bool) -> tuple[Row, float] | None:
    """None: the job belongs in the other index, or has no estimate yet."""
    if job.estimate is None or bool(job.estimate.worker.gpus) is not gpus:
        return None
    return (job.spec.owner, job.demand_key), -job.spec.priority
