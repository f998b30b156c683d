"""Folded state of one job that has not ended, and of its attempt's tasks. Mutable; only `evolve` writes
it."""

from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from penstock.ledger.state.arrays import NO_ARRAY_USE, ArrayUse
from penstock.ledger.state.holds import Hold
from penstock.ledger.state.job.adjusted import (
    AS_PLACED,
    NOT_ADJUSTED,
    Adjustment,
    AdjustmentCounts,
    TaskCores,
)
from penstock.ledger.state.job.checkpoints import NOT_SAVED, Saving
from penstock.ledger.state.job.demand import Demand, DemandKey
from penstock.ledger.state.job.ending import NO_EXIT, NO_STOP, NOT_EXITED, Exit, Stop, TaskExit
from penstock.ledger.state.job.following import NOT_TIED, Following
from penstock.ledger.state.job.moves import NO_MOVES, Moves
from penstock.ledger.state.job.progress import FULL_SPEED, NO_PROGRESS, Pace, Progress
from penstock.ledger.state.job.retries import NO_RETRIES, Retries
from penstock.ledger.state.job.sharing import ALONE, Sharing
from penstock.ledger.state.job.succession import NO_SUCCESSION, Succession
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.model.nouns.types import Estimate, TaskPlacement

WAITING = frozenset({JobStatus.SUBMITTED, JobStatus.QUEUED, JobStatus.BACKOFF})
HOLDING = frozenset({JobStatus.LAUNCHING, JobStatus.RUNNING, JobStatus.STOPPING})


@dataclass(slots=True)
class TaskState:
    """One task of the current attempt."""

    place: TaskPlacement
    status: TaskStatus = TaskStatus.ASSIGNED
    pid: int | None = None
    started_ms: int | None = None
    exit: TaskExit = NOT_EXITED
    lease_ms: int = 0
    """Its node ends it after so long without reaching the log; 0: never."""
    cores: TaskCores = AS_PLACED
    bandwidth_adjusted: Adjustment | None = None
    memory_bandwidth_percent: int | None = None
    """Its bandwidth cap; None: it has none."""
    checkpoint_asked: Adjustment | None = None
    """The latest request for a checkpoint that is not yet answered by one."""
    saving: bool = False
    """Its script has reported the last phase of its run."""
    began_ms: int | None = None
    """When its process began, by its node's clock, like the next two fields; None: its start was not
    reported."""
    ready_ms: int | None = None
    """When its launch was complete, if it then waited for its GPUs."""
    launch_ms: int | None = None
    """Duration of its launch; None: its script has not reported the end of the launch."""

    @property
    def used_cores(self) -> tuple[int, ...]:
        """The cores that it may use."""
        return self.cores.trial or self.place.cores

    @property
    def used_place(self) -> TaskPlacement:
        """Its place with the cores that it may use."""
        return replace(self.place, cores=self.cores.trial) if self.cores.trial else self.place


class Demanded(NamedTuple):
    """The demand that follows from these fields of a job."""

    spec: JobSpec
    estimate: Estimate
    demand: Demand
    key: DemandKey


class Remembered:
    """What follows from a job's fields, computed once: no part of the state."""

    __slots__ = ("_demanded",)
    _demanded: Demanded | None

    def _remember(self, demanded: Demanded | None) -> None:
        self._demanded = demanded


@dataclass(slots=True)
class JobState(Remembered):
    """A job that has not ended. Times are the ledger's, in ms. From `stop` on each field is a part: a frozen
    value, which is replaced as a whole."""

    job_id: str
    spec: JobSpec
    order: int
    """Position in the queue: the seq of its submission; retries do not change it."""
    submitted_ms: int
    status: JobStatus = JobStatus.SUBMITTED
    estimate: Estimate | None = None
    estimated_attempt: int = 0
    """The attempt for which `estimate` was made; 0: the first."""
    attempt: int = 0
    token: int = 0
    """Token of the current attempt's placement (`penstock.model.nouns.token`)."""
    port: int = 0
    """First of its attempt's ports (`penstock.ledger.derived.ports`); 0: it has had no attempt."""
    tasks: dict[str, TaskState] = field(default_factory=dict)
    queued_ms: int | None = None
    placed_ms: int | None = None
    running_ms: int | None = None
    unschedulable: str = ""
    held: Hold | None = None
    """The hold that prevents its start; while the job waits it is outside the queue."""
    commanded_seq: int = 0
    """Record of its latest hold or release: earlier commands are out of date."""
    backfill_count: int = 0
    plans_passed: int = 0
    """Proposed plans that started other jobs while it was first in the queue."""
    version: int = 0
    rank: tuple[int, int, int] | None = None
    """(level, 0 if chosen else 1, position) in a policy that maintains an order; None: by submission."""
    workers: int = 0
    """Worker count of its attempt; without an attempt the smallest with which it can start. 0: as in
    `spec`."""
    stop: Stop = NO_STOP
    exit: Exit = NO_EXIT
    retries: Retries = NO_RETRIES
    progress: Progress = NO_PROGRESS
    pace: Pace = FULL_SPEED
    saving: Saving = NOT_SAVED
    moves: Moves = NO_MOVES
    sharing: Sharing = ALONE
    succession: Succession = NO_SUCCESSION
    array: ArrayUse = NO_ARRAY_USE
    adjustments: AdjustmentCounts = NOT_ADJUSTED
    following: Following = NOT_TIED

    def __post_init__(self) -> None:
        self.workers = self.workers or self.spec.fewest_workers
        self._remember(None)

    @property
    def saves(self) -> bool:
        """Whether a stop saves its work, as far as its spec and its node tell."""
        return self.spec.checkpoint != "none" and self.saving.unsaved is None

    def shaped(self, workers: int) -> "JobState":
        """A read-only copy of a waiting job, as if it could start with this worker count only."""
        found = copy(self)
        found.workers = workers
        return found

    @property
    def preemptible(self) -> bool:
        """Whether it may be stopped in favour of another job. A member of a group may not: its stop would
        free no GPU."""
        return self.spec.preemptible and not self.sharing.group

    @property
    def in_line(self) -> bool:
        """Whether it is in the queue."""
        return self.status is JobStatus.QUEUED and not self.unschedulable and self.held is None

    @property
    def comes_back(self) -> bool:
        """Whether it is being preempted, so that it will wait in the queue again."""
        return self.status is JobStatus.STOPPING and self.stop.reason == "preempted" and not self.target

    @property
    def target(self) -> tuple[TaskPlacement, ...]:
        """Places reserved for its next attempt, in rank order; empty: none, it is not being moved."""
        return () if self.moves.latest is None else self.moves.latest.tasks

    @property
    def awaited_estimate(self) -> int | None:
        """The attempt for which an estimate may arrive now; 0: the first, which waits for it. None: none is
        due.

        A retry in back-off accepts an estimate but does not wait for it; a retry that queues at once uses the
        previous one.
        """
        due = self.attempt + 1 if self.attempt else 0
        if self.status is JobStatus.BACKOFF and self.estimated_attempt != due:
            return due
        return due if self.status is JobStatus.SUBMITTED else None

    @property
    def demand(self) -> Demand:
        """Demand of the gang; of a waiting moldable job the smallest one. Only for jobs with an estimate."""
        return self.demand_of(self.workers)

    def demand_of(self, workers: int) -> Demand:
        """The same with another number of workers."""
        return self._demanded_for(workers).demand

    @property
    def demand_key(self) -> DemandKey:
        """`demand.key`: a pass over the waiting jobs asks for that of each."""
        return self._demanded_for(self.workers).key

    def _demanded_for(self, workers: int) -> Demanded:
        spec, estimate, known = self.spec, self.estimate, self._demanded
        if (
            known is None
            or known.spec is not spec
            or known.estimate is not estimate
            or known.demand.workers != workers
        ):
            assert estimate is not None, f"{self.job_id} has no estimate yet"
            servers, where = spec.parameter_servers, spec.where
            demand = Demand(workers, estimate.worker, servers, estimate.parameter_server, where)
            known = Demanded(spec, estimate, demand, demand.key)
            self._remember(known)
        return known
