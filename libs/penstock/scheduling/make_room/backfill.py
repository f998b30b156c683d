"""EASY backfill behind a reservation: nodes are reserved for the first job in order that does not fit, and
other jobs may use them until they are needed.

Source: EASY backfill (Lifka, JSSPP '95), by nodes and with run times that the estimator has learned. The
nodes are those on which the job would start earliest if running jobs ended as expected. Other jobs may start
there if they are expected to end before that time, and anywhere else. So later jobs never delay the first
job.

- Departure: nodes are reserved only for a job that has waited five times its r
  (`penstock.scheduling.order.fair`), since reserved nodes idle where run times are guessed: with immediate
  reservations the mean completion time of `poisson/12-per-hour` with learned run times was 24 % above
  Liquid's, with this bound it is 20 % below.
- The job starts anywhere as soon as it fits. When the expected time has passed, no other job starts on its
  nodes any more.
- A running job whose end is not known is expected to take as long again as it has run: run times spread over
  orders of magnitude.
- A job that the usable nodes could not hold even when empty (it waits for a Suspect node, a faulted GPU, a
  cordoned node) gets no reservation and delays no other job.
"""

from collections.abc import Callable, Iterator
from heapq import merge
from math import inf

from penstock.cluster.assignment import Plan
from penstock.cluster.gang import EVERYWHERE, workers_by_gpus
from penstock.cluster.view import ClusterView, Fit, living_places
from penstock.ledger.derived.groups import others
from penstock.ledger.state.index import bits, set_of
from penstock.ledger.state.job.demand import Demand, DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.masks import mask_of
from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanUnit
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import within_ms
from penstock.scheduling.make_room.preemption import fit_of, node_ids
from penstock.scheduling.order.fair import has_waited
from penstock.scheduling.order.job_rows import JobRows
from penstock.scheduling.place.together import Together
from penstock.scheduling.remaining_time import ends_s, remaining_s
from penstock.scheduling.stages.regroup import has_whole_gpus

MAX_ENDS = 256  # running jobs that are looked at, those that end first, or last (decision 59)


class Reservation:
    """Implements `penstock.scheduling.stages.protocols.Backfill`. `waits`: for which jobs nodes are reserved
    at all."""

    def __init__(self, place: Together, waits: Callable[[JobState], bool] = lambda job: True) -> None:
        self._place, self._waits = place, waits
        self._made_for: tuple[int, int, PlanUnit] | None = None
        self._trial: ClusterView | None = None
        self._ends: JobRows[tuple[str]] = JobRows(runs=by_end)
        self._demands: JobRows[DemandKey] = JobRows(lambda _, job: (job.demand_key, job.order))

    def unit(self, state: CellState, job: JobState) -> PlanUnit | None:
        """Nodes for a job that does not fit now; None where it has not waited long enough, or the nodes are
        not known."""
        if not self._waits(job) or not has_waited(state, job):
            return None
        unit = state.planned.get(job.job_id)
        if unit is not None and all(_in_use(state, node_id) for node_id in unit.nodes):
            if unit.expected_ms is not None and unit.expected_ms > state.now_ms:
                return unit
        else:
            unit = None
        found = self._first(state, job)
        return unit if found is None or (unit is not None and unit.nodes == found.nodes) else found

    def may_use(self, state: CellState, job: JobState, unit: PlanUnit) -> bool:
        """Whether the job is expected to end before these nodes are needed."""
        left_s = remaining_s(state, job)
        return unit.expected_ms is not None and state.now_ms + left_s * 1_000 <= unit.expected_ms

    def beside(self, state: CellState, job: JobState, unit: PlanUnit) -> Plan | None:
        """A plan for the job that does not delay the reservation: also on reserved nodes, where they have
        more than is reserved."""
        need = job.demand.worker
        if not state.index.candidates(need, job.demand.where):
            return None  # no single worker fits on any node
        if self.may_use(state, job, unit):
            return self._place.place_within(EVERYWHERE, state, job)
        nodes = set_of(
            node.ordinal for node_id in unit.nodes if (node := state.nodes.get(node_id)) is not None
        )
        then = self._then(state, unit)
        spare = set_of(ordinal for ordinal in bits(nodes) if then.free(ordinal).fits(need))
        if spare:
            plan = self._place.place_within(~nodes | spare, state, job)
            if plan is None or then.holds(job.demand, fit_of(state, job.demand, plan.nodes)):
                return plan
        return self._place.place_within(~nodes, state, job)

    def any_fits(self, state: CellState) -> bool:
        """As `Backfill`. O(changes since the last call + demands)."""
        self._demands.update(state)
        demands = (state.jobs[entries[0][2]].demand for entries in self._demands.waiting.values())
        return any(state.index.candidates(one.worker, one.where) for one in demands)

    def _then(self, state: CellState, unit: PlanUnit) -> ClusterView:
        """The reserved nodes at the expected time, after the job has started."""
        made_for = state.change_log.count, state.progress_log.count, unit
        if self._made_for == made_for and self._trial is not None and self._trial.state is state:
            return self._trial
        self._made_for, self._trial = made_for, ClusterView(state)
        ended: dict[str, JobState] = {}
        for node_id in dict.fromkeys(unit.nodes):
            node = state.nodes.get(node_id)
            for job_id in node.tasks.values() if node is not None else ():
                running = state.jobs[job_id]
                if unit.expected_ms is not None and self._end_s(state, running) * 1_000 <= unit.expected_ms:
                    ended[job_id] = running
        for running in ended.values():
            self._trial.release(running)
        owner = state.jobs.get(unit.job_id)
        if owner is not None and all(node_id in state.nodes for node_id in unit.nodes):
            self._trial.claim(owner.demand, fit_of(state, owner.demand, unit.nodes))
        return self._trial

    def _end_s(self, state: CellState, job: JobState) -> float:
        """Ledger time in s at which the job is expected to end."""
        if job.status is JobStatus.STOPPING:
            return state.now_ms / 1_000
        row, key = by_end(state, job)
        return key if row is KNOWN else 2 * state.now_ms / 1_000 - key

    def _first(self, state: CellState, job: JobState) -> PlanUnit | None:
        """The nodes on which the job would start earliest, and when."""
        demand, index = job.demand, state.index
        suited = index.eligible(demand.worker, demand.where) & index.placeable
        if not suited:
            return None
        ended = _Ended(state, demand, suited)
        for number, (end_s, running) in enumerate(self._by_their_ends(state)):
            if number == MAX_ENDS:
                return None
            fit = ended.add(running)
            if fit is not None:
                expected_ms = within_ms(end_s * 1_000)
                return PlanUnit(
                    job_id=job.job_id, nodes=node_ids(state, demand, fit), expected_ms=expected_ms
                )
        return None

    def _by_their_ends(self, state: CellState) -> Iterator[tuple[float, JobState]]:
        """(expected end in s, job), earliest first; jobs that are being stopped end now."""
        now_s = state.now_ms / 1_000
        for _, job in sorted(state.stopping.items()):
            yield now_s, job
        self._ends.update(state)
        rows = self._ends.running
        if UNKNOWN not in rows:
            for end_s, _, job_id, _ in rows.get(KNOWN, ()):
                yield max(now_s, end_s), state.jobs[job_id]
            return
        known = ((max(now_s, end_s), order, job_id) for end_s, order, job_id, _ in rows.get(KNOWN, ()))
        unknown = (
            (2 * now_s - begun_s, order, job_id) for begun_s, order, job_id, _ in reversed(rows[UNKNOWN])
        )
        for end_s, _, job_id in merge(known, unknown):
            yield end_s, state.jobs[job_id]


class _Ended:
    """Where a gang fits once one job after the other has ended. `suited`: nodes that its workers can use.

    Ideal: each job is released in a trial. Departure, for a gang of workers with whole GPUs: only jobs on
    nodes with enough GPUs for a worker then, and only once there are enough for all. The other jobs change no
    result, and most of them end on nodes where too few GPUs become free.
    """

    def __init__(self, state: CellState, demand: Demand, suited: int) -> None:
        self._state, self._demand, self._suited = state, demand, suited
        self._trial, self._tried = ClusterView(state), False
        self._needs = set(demand.needs())
        self._left: list[tuple[JobState, int]] = []
        """Jobs that have ended and are not released in the trial, and their nodes."""
        whole = not demand.parameter_servers and has_whole_gpus(demand.worker)
        self._each = each = demand.worker.gpus if whole else 0
        """GPUs of a worker; 0: GPUs alone exclude nothing."""
        self._open = suited & state.index.gpus.having(each) if whole else EVERYWHERE
        """Nodes with so many GPUs, of those suited."""
        self._room = workers_by_gpus(state, each, demand.workers, suited) if whole else demand.workers
        """How many workers the GPUs suffice for."""
        self._free: dict[int, int] = {}
        """Ordinal → GPUs that are free when those jobs have ended; a node that is not listed has those that
        are free now. Never too few: a faulted GPU counts."""
        self._members: set[str] = set()
        """Ids of members of groups that have ended."""

    def add(self, job: JobState) -> Fit | None:
        """The job ends, too. Returns where the gang fits now; None: nowhere."""
        nodes = self._count(job)
        self._left.append((job, nodes))
        if self._room < self._demand.workers or not nodes & self._suited:
            return None
        trial, changed = self._trial, self._released()
        if self._tried and not any(
            trial.free(ordinal).fits(need) for ordinal in bits(changed) for need in self._needs
        ):
            return None  # no task fits on a node that has changed: the same result as before
        self._tried = True
        return trial.fit(self._demand)

    def _count(self, job: JobState) -> int:
        """Counts the GPUs that are free when this job has ended, too; those of a group's rank when no member
        has a task there. Returns the job's nodes."""
        state, each, nodes = self._state, self._each, 0
        if job.sharing.group:
            self._members.add(job.job_id)
        for place in living_places(job):
            node = state.nodes[place.node_id]
            nodes |= node.bit
            if not each or not node.bit & self._suited or others(state, job, place.rank, self._members):
                continue
            before = self._free.get(node.ordinal, node.healthy_gpu_mask)
            now = self._free[node.ordinal] = before | mask_of(place.gpus)
            self._room += now.bit_count() // each - before.bit_count() // each
            if now.bit_count() >= each:
                self._open |= node.bit
        return nodes

    def _released(self) -> int:
        """Releases the jobs that matter; returns the nodes that have changed."""
        changed, left = 0, []
        for job, nodes in self._left:
            if nodes & self._open:
                self._trial.release(job)
                changed |= nodes
            else:
                left.append((job, nodes))
        self._left = left
        return changed


KNOWN, UNKNOWN = ("known",), ("unknown",)


def by_end(state: CellState, job: JobState) -> tuple[tuple[str], float]:
    """(KNOWN, ledger time in s of its end), else (UNKNOWN, time of its start). A job that is being launched
    counts from its placement."""
    end_s = ends_s(job)
    begun_s = (job.placed_ms or 0) / 1_000
    if end_s is None:
        end_s = begun_s + remaining_s(state, job)
    if end_s == inf:
        return UNKNOWN, begun_s if job.running_ms is None else job.running_ms / 1_000
    return KNOWN, end_s


def _in_use(state: CellState, node_id: str) -> bool:
    node = state.nodes.get(node_id)
    return node is not None and bool(node.bit & state.index.placeable)
