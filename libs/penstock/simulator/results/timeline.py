"""Time series and Gantt bars folded from a ledger: GPU occupancy, queue length, free capacity.

The only input are records, from a running simulation or an exported ledger, or the events that a gateway
streams: the same ledger gives the same charts. Times are the ledger's, in ms since its first record.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ledger.derived.succession import predecessors, successors
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events as ledger
from penstock.model.decisions.adjustments import BandwidthDecided, CoresDecided
from penstock.model.decisions.arrays import CoresReclaimed
from penstock.model.decisions.groups import GroupDecided
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock.model.nouns.types import WHOLE_GPU, TaskPlacement
from penstock.model.schema.event import Event
from penstock.simulator.held_gpus import HeldGpus
from penstock.simulator.results.sharings import Sharings
from penstock.simulator.traces.jobs import Shape, shape_of

SIZES = (1, 2, 4, 8, 16, 32, 64)  # GPUs of the jobs whose free capacity is counted: the sizes in traces
EXITED, STOPPED, STILL, SHARED = 0, 1, 2, 3
"""End of a bar: its task exited by itself; its job was ordered to stop; it has not ended yet; the members of
its group changed, and the task goes on."""
NEVER = -1
QUEUED = frozenset({JobStatus.SUBMITTED, JobStatus.QUEUED})
TASK_ENDS = external_events.TaskExited | external_events.OrderRefused | ledger.TaskLost

BAR = np.dtype(
    [
        (name, np.int64)
        for name in (
            "job",
            "node",
            "y",
            "height",
            "start_ms",
            "end_ms",
            "attempt",
            "how",
            "sharing",
            "place",
            "parts",
        )
    ]
)
"""A rectangle of the Gantt chart: `job` is an index of `Timeline.jobs`, `node` the node's ordinal, `y` and
`height` as in `Block`, `sharing`, `place` and `parts` as in `Piece`."""
STEP = np.dtype(
    [(name, np.float64) for name in ("at_ms", "held", "working", "waiting", "gpus")]
    + [("startable", np.float64, (len(SIZES),))]
)
"""Values that hold from `at_ms` until the next row. `held`, `working`: GPUs given to jobs, and GPUs of jobs
that run and are not being stopped; shares count as fractions. `waiting`: jobs in the queue. `gpus`: of the
nodes that are not gone. `startable`: per size of `SIZES`, number of further jobs of that size that could
start, if no other did."""

Rows = NDArray[np.void]


@dataclass(slots=True)
class Job:
    """One job's times, ms; `NEVER` if not reached."""

    job_id: str
    model: str
    submitted_ms: int
    owner: str = ""
    name: str = ""
    gpus: float = 0.0
    """GPUs of the whole gang; a share of a GPU counts as a fraction."""
    ended_ms: int = NEVER
    outcome: str = ""
    ran_ms: int = 0
    """Run time from the start of all its tasks until the first was stopped or exited;
    all attempts together."""
    running_since_ms: int = NEVER
    waiting: bool = False
    """Whether it is in the queue."""
    timed: bool = False
    """Whether its estimate had a run time."""
    trained: int = 0
    """The latest attempt that reported phase `train`."""

    @property
    def jct_ms(self) -> int:
        return self.ended_ms - self.submitted_ms


class Term(NamedTuple):
    """A placer that took over in record `seq`."""

    seq: int
    placer_id: str
    profile: str
    code_version: str


class Block(NamedTuple):
    """A rectangle inside a node: both in thousandths of a GPU, `y` from the node's first."""

    y: int
    height: int


@dataclass(slots=True)
class Timeline:
    """Fold of a ledger: call `take` with each record's bytes in order, or give `see` to the replica; then
    read the fields."""

    replica: Replica = field(default_factory=Replica)
    state: CellState = field(init=False)
    """The replica's state."""
    now_ms: int = 0
    preemptions: int = 0
    core_changes: int = 0
    """Changes of running tasks' cores, except those that slow a task; `slowed`: steps that slow a task for a
    training beside it, by cores or bandwidth."""
    slowed: int = 0
    prelaunches: int = 0
    """Attempts that launched before their GPUs were free;
    `given_back`: of these, attempts that never got them."""
    given_back: int = 0
    early_ms: "array[int]" = field(default_factory=lambda: array("q"))
    """For their tasks, from the start of the process until it had its GPUs."""
    terms: list[Term] = field(default_factory=list)
    foreseen: bool = False
    """Whether a run time was given before any job had ended."""
    starts_ms: "array[int]" = field(default_factory=lambda: array("q"))
    """For each attempt, from placement until all its tasks ran."""
    trains_ms: "array[int]" = field(default_factory=lambda: array("q"))
    """For each attempt that reported it, from placement until the training began."""
    saves_ms: "array[int]" = field(default_factory=lambda: array("q"))
    """Length of each save that a task reported."""
    jobs: list[Job] = field(default_factory=list)
    sharings: Sharings = field(default_factory=Sharings)
    _bars: "array[int]" = field(default_factory=lambda: array("q"))
    _steps: "array[float]" = field(default_factory=lambda: array("d"))
    _zero_ms: int | None = None
    _job_at: dict[str, int] = field(default_factory=dict)
    _blocks: dict[str, Sequence[Block]] = field(default_factory=dict)
    """Task → rectangles of its GPUs."""
    _shared: dict[tuple[str, int], list[Block]] = field(default_factory=dict)
    """(node, GPU) → its allocated shares."""
    _saving_ms: dict[str, int] = field(default_factory=dict)
    """Task → beginning of its present save."""
    _ended: bool = False
    """Whether any job has ended."""
    _gpus_held: HeldGpus = field(default_factory=HeldGpus)
    _begun_ms: dict[str, int] = field(default_factory=dict)
    """Task id → end of the tasks before it, for a task that starts after others."""
    _waiting: int = 0
    _capacity_version: int = 0
    _gpus: int = 0
    _largest: int = 0
    """GPUs of the largest node so far."""
    _shapes: Sequence[Shape] = ()
    """Gangs of the jobs of `SIZES` on such nodes."""

    def __post_init__(self) -> None:
        self.state = self.replica.state

    @property
    def bars(self) -> Rows:
        """Rows of `BAR`."""
        return np.array(self._bars).view(BAR)

    @property
    def shapes(self) -> Mapping[int, Shape]:
        """Size of a job → its gang on the largest nodes so far."""
        return dict(zip(SIZES, self._shapes, strict=False))

    @property
    def steps(self) -> Rows:
        """Rows of `STEP`, at most one per moment."""
        self._note()
        return np.array(self._steps).view(STEP)

    def take(self, value: bytes) -> bool:
        """Folds one record; False for a void one. Raises `UndecodableRecord`."""
        return self.replica.take(value, self.replica.offset, self.see) is not None

    def until(self, at_ms: int) -> None:
        """Advances the time to `at_ms` without changes: jobs ran and waited on."""
        if self._zero_ms is not None and at_ms - self._zero_ms > self.now_ms:
            self._note()
            self.now_ms = at_ms - self._zero_ms

    def close(self) -> None:
        """Ends the ledger: GPUs that are still held get a bar up to now."""
        for node in self.state.nodes.values():
            for task_id, job_id in node.tasks.items():
                job = self.state.jobs[job_id]
                self._bar(job, job.tasks[task_id].place, self._blocks.pop(task_id, ()), STILL)

    def _note(self) -> None:
        """Adds a row of `steps` for the present moment, if it differs from the last;
        the row may still change."""
        state, width = self.state, STEP.itemsize // 8
        if state.capacity_version != self._capacity_version:
            self._capacity_version = state.capacity_version
            sizes = [
                len(node.spec.gpus) for node in state.nodes.values() if node.status is not NodeStatus.GONE
            ]
            self._gpus = sum(sizes)
            self._largest = max(self._largest, *sizes, 0)
            self._shapes = [shape_of(size, self._largest) for size in SIZES] if self._largest else []
        counts = (
            self._gpus_held.held / WHOLE_GPU,
            self._gpus_held.working / WHOLE_GPU,
            self._waiting,
            self._gpus,
            *self._startable(),
        )
        row = array("d", (self.now_ms, *counts))
        if self._steps and self._steps[-width] == self.now_ms:
            del self._steps[-width:]
        if self._steps[1 - width :] != row[1:]:
            self._steps.extend(row)

    def _startable(self) -> list[int]:
        """The counts `startable` of `STEP`."""
        free = [self.state.index.gpus.having(gpus).bit_count() for gpus in range(self._largest + 1)]
        return [sum(free[each::each]) // workers for workers, each in self._shapes] or [0] * len(SIZES)

    # ------------------------------------------------------------------------------------------ facts

    def see(self, record: RawRecord, n: int, event: Event) -> None:
        """The replica's hook."""
        state = self.state
        if self._zero_ms is None:
            self._zero_ms = state.now_ms
        now_ms = state.now_ms - self._zero_ms
        if now_ms != self.now_ms:
            self._note()
            self.now_ms = now_ms
        if isinstance(event, external_events.TaskStarted | TASK_ENDS):
            self._of_task(event)
            return
        groups = self._groups(event)
        evolve(state, event)
        self._regrouped(groups)
        self._count(event)
        job_id = getattr(event, "job_id", None)
        if job_id in self._job_at:
            self._wait(job_id)

    def _of_task(self, event: Any) -> None:
        """Folds the start or end of a task."""
        state = self.state
        job = job_of_task(state, event.node_id, event.task_id)
        if job is None:
            raise KeyError(event.task_id)
        if isinstance(event, TASK_ENDS):
            self._task_ends(job, job.tasks[event.task_id].place)
        before, groups = job.status, {job.sharing.group}
        evolve(state, event)
        self._regrouped(groups)
        if isinstance(event, external_events.TaskStarted) and event.opened_ms is not None:
            self.early_ms.append(max(0, event.opened_ms - event.started_ms))
        if before is JobStatus.LAUNCHING and job.status is JobStatus.RUNNING:
            self._job(job.job_id).running_since_ms = self.now_ms
            self._gpus_held.starts(job)
            self._began(job, self.starts_ms)

    def _count(self, event: Event) -> None:
        """Counts an event that is folded."""
        match event:
            case external_events.JobSubmitted():
                self._job_at[event.job_id] = len(self.jobs)
                spec = event.spec
                self.jobs.append(Job(event.job_id, spec.model or "", self.now_ms, spec.owner, spec.name))
                self._sized(event.job_id)
            case JobEstimated():
                self._sized(event.job_id)
                if event.estimate.run_ms is not None and event.job_id in self._job_at:
                    self._job(event.job_id).timed = True
                    self.foreseen |= not self._ended
            case external_events.TaskPhaseChanged():
                self._phase(event)
            case ledger.TermStarted():
                self.terms.append(
                    Term(self.state.seq, event.placer_id, event.settings.profile, event.code_version)
                )
            case ledger.PlacementDecided():
                self._placed(event)
                self.prelaunches += event.prelaunch
            case ledger.StopDecided():
                self._halt(self.state.jobs[event.job_id])
                self.given_back += event.reason == "predecessor_late"
            case ledger.JobPreempted() | CoresReclaimed():
                self.preemptions += 1
            case CoresDecided() | BandwidthDecided():
                slows = event.cause == "contention"
                self.slowed += slows
                self.core_changes += isinstance(event, CoresDecided) and not slows
            case ledger.JobEnded():
                ended = self._job(event.job_id)
                ended.ended_ms, ended.outcome = self.now_ms, event.outcome
                self._ended = True

    def _groups(self, event: Event) -> set[str]:
        """Groups that an event may change."""
        if isinstance(event, GroupDecided):
            return {event.group_id, *(self.state.jobs[job_id].sharing.group for job_id in event.job_ids)}
        if isinstance(event, ledger.PlacementDecided):
            return {event.group or ""}
        job = self.state.jobs.get(getattr(event, "job_id", ""))
        return set() if job is None else {job.sharing.group}

    def _regrouped(self, groups: set[str]) -> None:
        for group_id in sorted(groups - {""}):
            self.sharings.note(self.state, group_id, self.now_ms)

    def _job(self, job_id: str) -> Job:
        return self.jobs[self._job_at[job_id]]

    def _began(self, job: JobState, spans_ms: "array[int]") -> None:
        if job.placed_ms is not None:
            spans_ms.append(self.state.now_ms - job.placed_ms)

    def _phase(self, event: external_events.TaskPhaseChanged) -> None:
        """Records the launch once per attempt, and each save."""
        job = job_of_task(self.state, event.node_id, event.task_id)
        if job is None:
            return
        self._saved(event.task_id)
        if event.phase == "save":
            self._saving_ms[event.task_id] = self.now_ms
        elif event.phase == "train" and self._job(job.job_id).trained != job.attempt:
            self._job(job.job_id).trained = job.attempt
            self._began(job, self.trains_ms)

    def _saved(self, task_id: str) -> None:
        since_ms = self._saving_ms.pop(task_id, None)
        if since_ms is not None:
            self.saves_ms.append(self.now_ms - since_ms)

    def _wait(self, job_id: str) -> None:
        """Counts the job if it is in the queue; unschedulable jobs are not."""
        job, found = self._job(job_id), self.state.jobs.get(job_id)
        waits = found is not None and found.status in QUEUED and not found.unschedulable
        self._waiting += waits - job.waiting
        job.waiting = waits

    def _sized(self, job_id: str) -> None:
        found = self.state.jobs.get(job_id)
        if found is not None and found.estimate is not None:
            worker = found.estimate.worker
            self._job(job_id).gpus = found.workers * worker.gpus * worker.gpu_share_milli / WHOLE_GPU

    def _placed(self, fact: ledger.PlacementDecided) -> None:
        for place in fact.tasks:
            self._blocks[place.task_id] = self._give(place)
        held_milli = sum(len(place.gpus) * place.gpu_share_milli for place in fact.tasks)
        self._gpus_held.placed(self.state, fact)
        self._job(fact.job_id).gpus = held_milli / WHOLE_GPU

    def _halt(self, held: JobState) -> None:
        """Ends the progress of a gang at the first stop or exit of a task."""
        job = self._job(held.job_id)
        if job.running_since_ms != NEVER:
            job.ran_ms += self.now_ms - job.running_since_ms
            job.running_since_ms = NEVER
            self._gpus_held.halts(held)

    def _task_ends(self, job: JobState, place: TaskPlacement) -> None:
        """Draws the task's bars; call it before the fold frees the task's resources."""
        self._saved(place.task_id)
        blocks = self._blocks.pop(place.task_id, ())
        self._halt(job)
        for later in successors(self.state, job, place):
            self._begun_ms[later.task_id] = self.now_ms
        self._bar(job, place, blocks, EXITED if job.stop.reason is None else STOPPED)
        self._gpus_held.ends(place.task_id)
        if place.gpu_share_milli < WHOLE_GPU:
            for gpu in place.gpus:
                given = self._shared[place.node_id, gpu]
                given[:] = [block for block in given if block not in blocks]

    # ------------------------------------------------------------------------------------------- bars

    def _bar(self, job: JobState, place: TaskPlacement, blocks: Sequence[Block], how: int) -> None:
        assert job.placed_ms is not None, job.job_id
        assert self._zero_ms is not None, job.job_id
        begun_ms = self._begun_ms.pop(place.task_id, job.placed_ms)
        if any(predecessors(self.state, job, place)):
            return  # it never had these GPUs
        at, node = self._job_at[job.job_id], self.state.nodes[place.node_id].ordinal
        times = begun_ms - self._zero_ms, self.now_ms
        for piece in self.sharings.pieces(job.job_id, *times):
            ends = how if piece.end_ms == times[1] else SHARED
            parts = piece.sharing, piece.place, piece.parts
            for y, height in blocks:
                self._bars.extend(
                    (at, node, y, height, piece.start_ms, piece.end_ms, job.attempt, ends, *parts)
                )

    def _give(self, place: TaskPlacement) -> Sequence[Block]:
        """Rectangles of a task's GPUs; neighbouring whole GPUs are one."""
        blocks: list[Block] = []
        for gpu in place.gpus:
            y = gpu * WHOLE_GPU
            if place.gpu_share_milli < WHOLE_GPU:
                blocks += _shelve(self._shared.setdefault((place.node_id, gpu), []), place.gpu_share_milli, y)
            elif blocks and blocks[-1].y + blocks[-1].height == y:
                blocks[-1] = Block(blocks[-1].y, blocks[-1].height + WHOLE_GPU)
            else:
                blocks.append(Block(y, WHOLE_GPU))
        return blocks


def _shelve(blocks: list[Block], share: int, base: int) -> list[Block]:
    """Assigns a share to the gaps of its GPU, lowest first, split if necessary;
    the excess overlaps at the top."""
    pieces: list[Block] = []
    y, left = base, share
    for block in [*sorted(blocks), Block(base + WHOLE_GPU, 0)]:
        piece = min(left, block.y - y)
        if piece > 0:
            pieces.append(Block(y, piece))
            left -= piece
        y = max(y, block.y + block.height)
    if left:
        pieces.append(Block(base + WHOLE_GPU - left, left))
    blocks += pieces
    return pieces
