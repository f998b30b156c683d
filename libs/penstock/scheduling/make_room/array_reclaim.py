"""Reclaim stage of profiles `coda` and `penstock`: preemption of jobs on borrowed cores, and migration of
small jobs out of the 4-GPU sub-array. Source: CODA §V-C.

- A job with GPUs that fits nowhere gets a node on which enough GPUs are free and cores are lent: jobs without
  GPUs that borrow there are aborted, those placed last first and as few as necessary, until the CPU array
  holds only its own cores there. They return to the head of the CPU array.
- A job of four GPUs or more gets a node of the 4-GPU sub-array from which small jobs migrate (checkpoint,
  stop, start elsewhere), largest first. A node's cost is the GPUs that have to move, then the core time that
  is lost; ties: the lowest ordinal.
- Training is stopped only to resume elsewhere at once: only a running job that saves checkpoints, was moved
  fewer than `MAX_MIGRATIONS` times and fits in the 1-GPU sub-array now. Departure: the source moves all jobs
  that are in the way.
- Departure: cores are reclaimed from a job at most `max_reclaims` times: the source has no bound, and a job
  could be aborted for ever.
"""

from collections.abc import Iterator
from itertools import islice

from penstock.cluster.view import ClusterView, Fit, Undo
from penstock.ledger.fold.evolve_arrays import gpus_of
from penstock.ledger.state.arrays import LARGE_GPUS
from penstock.ledger.state.index import bits, set_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.arrays import ArraysSized
from penstock.model.decisions.moves import MAX_MIGRATIONS
from penstock.model.decisions.plans import PlanUnit
from penstock.model.nouns.settings import Coda
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_TEXT, WHOLE_GPU, ResourceVector
from penstock.scheduling.make_room.clearing import MAX_LOOKED_AT
from penstock.scheduling.make_room.preemption import node_ids
from penstock.scheduling.order.job_rows import JobRows
from penstock.scheduling.place.arrays import CPU, LARGE, SMALL, array_of, large_nodes, sized
from penstock.scheduling.place.borrowing import reserved_for
from penstock.scheduling.stages.reclaim import MovesOut, Reclaimed


class ArrayReclaim:
    """Implements `penstock.scheduling.stages.reclaim.Reclaim`."""

    def __init__(self, settings: Coda, *, loses_ms: int | None = None) -> None:
        """`loses_ms`: a job that does not save is aborted only within this time of its placement; None: at
        any time."""
        self.settings, self.loses_ms = settings, loses_ms
        self.small: JobRows[tuple[int]] = JobRows(runs=_on_one_node)
        """Ordinal of a node → its small jobs, largest first; keys are -GPUs."""

    def sizes(self, state: CellState) -> ArraysSized | None:
        return sized(state, self.settings)

    def reclaim(self, state: CellState, job: JobState) -> Reclaimed | None:
        """O(nodes examined × tasks there)."""
        array = array_of(job)
        if job.estimate and array != CPU and _reclaimable(state, job.estimate.worker, large=array == LARGE):
            self.small.update(state)
            return _Taking(state, job, self).all()
        return None

    def idle(self, state: CellState) -> bool:
        """As `Reclaim`: whether no GPU is free, wholly or in part."""
        return not state.index.gpus.having(1) and not state.index.shared


def _on_one_node(state: CellState, job: JobState) -> tuple[tuple[int], float] | None:
    """The row of a running job; None: it has several tasks, or many GPUs."""
    demand = job.demand
    small = array_of(job) == SMALL and demand.tasks == 1 and demand.worker.gpu_share_milli == WHOLE_GPU
    if job.status is not JobStatus.RUNNING or not small:
        return None
    (task,) = job.tasks.values()
    return (state.nodes[task.place.node_id].ordinal,), -float(demand.worker.gpus)


def _reclaimable(state: CellState, need: ResourceVector, *, large: bool) -> bool:
    """Whether cores are lent where a worker's GPUs are free, or small jobs could move: a fast test before the
    trial. `large`: the job's array is the 4-GPU sub-array."""
    index = state.index
    free = index.sharing(need)
    if free and any(state.node(ordinal).borrowed_cores > 0 for ordinal in bits(free)):
        return True
    if not large or need.gpus < LARGE_GPUS:
        return False
    elsewhere = index.gpus.having(1) & index.placeable
    return bool(elsewhere and elsewhere & ~large_nodes(state))


class _Taking:
    """What is reclaimed for one job, in a what-if trial."""

    def __init__(self, state: CellState, job: JobState, stage: ArrayReclaim) -> None:
        self._state, self._job, self._stage = state, job, stage
        self._trial = ClusterView(state)
        self._stops: list[JobState] = []
        self._moves: list[MovesOut] = []
        self._large = large_nodes(state)
        self._own, self._others = reserved_for(state, job, state.planned.values())

    def all(self) -> Reclaimed | None:
        """Assigns each worker to the node of the lowest cost."""
        demand = self._job.demand
        if demand.parameter_servers:
            return None  # parameter servers need no GPU, and fit without a reclaim
        fit: list[int] = []
        for _ in range(demand.workers):
            ordinal = self._worker()
            if ordinal is None:
                return None
            self._trial.claim_task(demand.worker, ordinal)
            fit.append(ordinal)
        if not self._stops and not self._moves:
            return None
        unit = PlanUnit(job_id=self._job.job_id, nodes=node_ids(self._state, demand, tuple(fit)))
        return Reclaimed(unit, self._stops, self._moves, self._why(fit))

    def _why(self, fit: list[int]) -> str:
        where = ", ".join(dict.fromkeys(self._state.node_at[ordinal] for ordinal in fit))
        parts = []
        if self._stops:
            parts.append("cores reserved for GPUs are given back")
        if self._moves:
            parts.append(f"small jobs leave the {LARGE}")
        return f"{' and '.join(parts)} on {where}"[:MAX_TEXT]

    def _worker(self) -> int | None:
        """The node for the next worker; the jobs that have to leave it are released in the trial."""
        state, demand = self._state, self._job.demand
        need, index = demand.worker, state.index
        free = self._trial.candidates(need, demand.where) & ~self._others
        if free:
            return next(bits(free))
        suited = index.eligible(need, demand.where) & index.placeable & ~self._others
        may_move = array_of(self._job) == LARGE and need.gpus >= LARGE_GPUS and self._gpus_elsewhere()
        nodes = suited & (index.sharing(need) | (self._large if may_move else 0))
        best: tuple[tuple[int, int, int], list[JobState], list[MovesOut]] | None = None
        possible = self._possible(nodes, may_move=may_move)
        nodes &= (1 << possible.bit_length()) - 1
        for ordinal in islice(self._worth(nodes, may_move=may_move), MAX_LOOKED_AT):
            found = self._node(ordinal, may_move=may_move) if possible >> ordinal & 1 else None
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            return None
        for job in (*best[1], *(move.job for move in best[2])):
            self._trial.release(job)
        for move in best[2]:
            self._trial.claim(move.job.demand, self._fit_of(move))
        self._stops += best[1]
        self._moves += best[2]
        return best[0][2]

    def _gpus_elsewhere(self) -> bool:
        """Whether a small job, however few GPUs it has, could resume elsewhere at all."""
        index = self._state.index
        return bool(index.gpus.having(1) & index.placeable & ~(self._large | self._own | self._others))

    def _possible(self, nodes: int, *, may_move: bool) -> int:
        """Those of these nodes on which cores are lent, or that have enough GPUs without the small jobs that
        may move: on no other one a trial finds room."""
        need, index = self._job.demand.worker, self._state.index
        free = nodes if need.gpu_share_milli < WHOLE_GPU else nodes & index.sharing(need)
        found = set_of(ordinal for ordinal in bits(free) if self._state.node(ordinal).borrowed_cores > 0)
        if may_move:
            for (ordinal,), entries in self._stage.small.running.items():
                if self._state.node(ordinal).entered.gpus - sum(key for key, *_ in entries) >= need.gpus:
                    found |= 1 << ordinal & nodes & self._large
        return found

    def _worth(self, nodes: int, *, may_move: bool) -> Iterator[int]:
        """Those of these nodes on which a reclaim could make room."""
        need = self._job.demand.worker
        for ordinal in bits(nodes):
            node = self._state.node(ordinal)
            lacks = need.gpus - node.entered.gpus
            if lacks <= 0 or need.gpu_share_milli < WHOLE_GPU:
                lent = node.cpu_core_mask.bit_count()
                if node.borrowed_cores > 0 and (self._moves or node.entered.cores + lent >= need.cores):
                    yield ordinal
            elif may_move and self._large >> ordinal & 1:
                for job_id in node.tasks.values():
                    if (gpus := gpus_of(self._state.jobs[job_id])) < LARGE_GPUS:
                        lacks -= gpus
                if lacks <= 0:
                    yield ordinal

    def _fit_of(self, move: MovesOut) -> Fit:
        return tuple(self._state.nodes[node_id].ordinal for node_id in move.nodes)

    def _node(
        self, ordinal: int, *, may_move: bool
    ) -> tuple[tuple[int, int, int], list[JobState], list[MovesOut]] | None:
        """((GPUs moved, core seconds lost, ordinal), jobs to stop, jobs to move) so that a worker fits; None:
        it would not fit. The trial is left unchanged."""
        trial, need = self._trial, self._job.demand.worker
        released: list[JobState] = []
        moves: list[MovesOut] = []
        stops: list[JobState] = []
        undos: dict[str, Undo] = {}
        moved_gpus = 0
        if may_move and self._large >> ordinal & 1 and trial.free(ordinal).gpus < need.gpus:
            for job in self._movable(ordinal):
                if trial.free(ordinal).gpus >= need.gpus:
                    break
                undos[job.job_id] = trial.release(job)
                released.append(job)
        if trial.free(ordinal).gpus >= need.gpus or need.gpu_share_milli < WHOLE_GPU:
            over = self._state.node(ordinal).borrowed_cores
            for job in self._borrowers(ordinal):
                if over <= 0 or trial.free(ordinal).fits(need):
                    break
                over -= _cores_on(self._state, job, ordinal)
                undos[job.job_id] = trial.release(job)
                stops.append(job)
        fits = trial.free(ordinal).fits(need)
        if fits:
            for job in list(reversed(stops)):
                undos[job.job_id]()
                if trial.free(ordinal).fits(need):
                    stops.remove(job)
                else:
                    trial.release(job)
            found = self._elsewhere(released)
            fits = found is not None
            moves = found or []
            moved_gpus = sum(move.job.demand.worker.gpus for move in moves)
        for job in reversed([*released, *stops]):
            undos[job.job_id]()
        if not fits:
            return None
        lost = sum(_lost(self._state, job) for job in stops)
        return (moved_gpus, lost, ordinal), stops, moves

    def _movable(self, ordinal: int) -> Iterator[JobState]:
        """Small jobs of one task that may resume elsewhere, largest first."""
        for _, _, job_id, _ in self._stage.small.running.get((ordinal,), ()):
            job = self._state.jobs[job_id]
            saves = job.saves and job.preemptible and job.held is None and not job.succession.followed
            if saves and job.moves.migrations < MAX_MIGRATIONS and job_id not in self._trial.ended:
                yield job

    def _borrowers(self, ordinal: int) -> list[JobState]:
        """Jobs without GPUs that hold borrowed cores there and may be aborted, the last placed first."""
        state = self._state
        jobs = {job_id: state.jobs[job_id] for job_id in state.node(ordinal).tasks.values()}
        found = [
            job
            for job in jobs.values()
            if job.array.borrows
            and job.status in (JobStatus.LAUNCHING, JobStatus.RUNNING)
            and job.preemptible
            and job.array.reclaims < self._stage.settings.max_reclaims
            and self._loses_little(job)
            and job.job_id not in self._trial.ended
        ]
        return sorted(found, key=lambda job: (-(job.placed_ms or 0), -job.order))

    def _loses_little(self, job: JobState) -> bool:
        """Whether the job saves checkpoints, or was placed recently."""
        loses_ms = self._stage.loses_ms
        return loses_ms is None or job.saves or self._state.now_ms - (job.placed_ms or 0) <= loses_ms

    def _elsewhere(self, jobs: list[JobState]) -> list[MovesOut] | None:
        """A node of the 1-GPU sub-array for each of these jobs; None: one of them fits nowhere."""
        trial, found = ClusterView(self._state), []
        avoid = self._large | self._own | self._others
        for move in self._moves:
            trial.claim(move.job.demand, self._fit_of(move))
        for job in jobs:
            fit = trial.fit(job.demand, avoid)
            if fit is None:
                return None
            trial.claim(job.demand, fit)
            found.append(MovesOut(job, node_ids(self._state, job.demand, fit)))
        return found


def _cores_on(state: CellState, job: JobState, ordinal: int) -> int:
    node_id = state.node_at[ordinal]
    return sum(len(task.place.cores) for task in job.tasks.values() if task.place.node_id == node_id)


def _lost(state: CellState, job: JobState) -> int:
    """Core seconds of the attempt."""
    ran_s = (state.now_ms - (job.placed_ms or state.now_ms)) // 1_000
    return job.demand.workers * job.demand.worker.cores * ran_s
