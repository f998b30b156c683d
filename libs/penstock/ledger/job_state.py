"""What the fold knows of one job that has not ended, and of the tasks of its attempt. Mutable; only `evolve` writes it."""

from copy import copy
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.ledger.adjusted import Adjustment
from penstock.ledger.checkpoints import Checkpoint
from penstock.ledger.demand import Demand
from penstock.ledger.holds import Hold
from penstock.ledger.moves import Move
from penstock.ledger.remaining import Remaining
from penstock.ledger.sharing import ALONE, Sharing
from penstock.model.groups import Turns
from penstock.model.transitions import JobStatus, TaskStatus
from penstock.model.types import Estimate, JobSpec, TaskPlacement

WAITING = frozenset({JobStatus.SUBMITTED, JobStatus.QUEUED, JobStatus.BACKOFF})
HOLDING = frozenset({JobStatus.LAUNCHING, JobStatus.RUNNING, JobStatus.STOPPING})


@dataclass(slots=True)
class TaskState:
    """One task of the current attempt."""

    place: TaskPlacement
    status: TaskStatus = TaskStatus.ASSIGNED
    pid: int | None = None
    started_ms: int | None = None
    exited_ms: int | None = None
    succeeded: bool = False
    exit_code: int | None = None
    cause: str = ""
    exhausted: str = ""
    """Which memory an allocation of it failed in (`TaskExited.exhausted`)."""
    lease_ms: int = 0
    """Its node ends it when it has not reached the log for so long; 0: never."""
    cores_adjusted: Adjustment | None = None
    """The latest change of its cores since it was placed; `place` has the cores."""
    placed_cores: int = 0
    """How many it was placed with."""
    trial_cores: tuple[int, ...] = ()
    """Those of its cores that it may use for now: fewer, as a probe. It holds all of its place's, so that it can have them again. Empty: all."""
    core_probes: int = 0
    """How many numbers of cores services have tried it with."""
    cores_settled: bool = False
    """Whether a service's search for its cores has ended, which happens once."""
    throttled_from: int = 0
    """How many cores it had before services took some because of contention; 0: they took none, or gave them back."""
    bandwidth_adjusted: Adjustment | None = None
    memory_bandwidth_percent: int | None = None
    """Its cap; None: it has none."""
    checkpoint_asked: Adjustment | None = None
    """The latest request to save that no checkpoint has answered."""
    saving: bool = False
    """Its script has reported the last phase of its run."""
    began_ms: int | None = None
    """When its process began, by its node's clock, as the two that follow; None: its start was not reported."""
    ready_ms: int | None = None
    """When it had launched, where it waited for its GPUs then."""
    launch_ms: int | None = None
    """How long it launched; None: its script has not reported that it is over."""

    @property
    def used_cores(self) -> tuple[int, ...]:
        """Which it may use."""
        return self.trial_cores or self.place.cores

    @property
    def used_place(self) -> TaskPlacement:
        """Its place with the cores that it may use."""
        return replace(self.place, cores=self.trial_cores) if self.trial_cores else self.place


@dataclass(slots=True)
class JobState:
    """A job that has not ended. Times are the ledger's, in ms."""

    job_id: str
    spec: JobSpec
    order: int
    """Place in the queue: the seq of its submission; retries do not change it."""
    submitted_ms: int
    status: JobStatus = JobStatus.SUBMITTED
    estimate: Estimate | None = None
    estimated_attempt: int = 0
    """For which `estimate` was made; 0: the first."""
    attempt: int = 0
    losses: int = 0
    """Attempts lost to nodes and refusals; bounded, since such a job may be what kills its nodes."""
    infrastructure_retries: int = 0
    """Attempts lost to nodes, refusals or preemption; they do not count against the user's."""
    memory_retries: int = 0
    """Of these, attempts that ran out of memory under a guessed limit; bounded, since more memory may not help."""
    short_of: dict[str, int] = field(default_factory=dict)
    """Role and memory (`penstock.ledger.memory.short_key`) → MiB that such attempts had; what follows must have more."""
    token: int = 0
    """Of the current attempt's placement (`penstock.model.token`)."""
    tasks: dict[str, TaskState] = field(default_factory=dict)
    queued_ms: int | None = None
    placed_ms: int | None = None
    running_ms: int | None = None
    stop_reason: str | None = None
    stop_token: int = 0
    """Of the latest decision to stop."""
    exit_code: int | None = None
    failure: str = ""
    """The attempt's first failure, for people; `failure_cause` is its task's cause."""
    failure_cause: str = ""
    unschedulable: str = ""
    held: Hold | None = None
    """It does not start; while it waits it stands beside the queue."""
    commanded_seq: int = 0
    """Record of its latest hold or the end of one: commands from before are old."""
    backfill_count: int = 0
    plans_passed: int = 0
    """Proposed plans that started others while it was first in the queue."""
    version: int = 0
    served_ms: int = 0
    """Time that earlier attempts ran."""
    attained_s: float | None = None
    """As the job last reported: time run, all attempts together. None: no report; see `penstock.policies.service`."""
    remaining_s: float | None = None
    progress_ms: int = 0
    """Ledger time of its last progress report."""
    progress_attempt: int = 0
    """Its latest attempt then."""
    eta: Remaining | None = None
    """As the estimator answered last. None: it has not, or the job itself has reported `remaining_s` since."""
    checkpoint: Checkpoint | None = None
    """The latest, of whichever attempt. None: none was reported."""
    kept_ms: int = 0
    """Work of earlier attempts on which the present or the next one goes on, ≥ 0: its checkpoint has it."""
    move: Move | None = None
    """The latest, of whichever attempt."""
    converged_ms: int | None = None
    """When its place was judged by its convergence, which happens once (`JobConverged`); None: it has not been."""
    rebalanced: bool = False
    """Whether it was moved for the balance of nodes, which happens once."""
    reclaims: int = 0
    """How often it gave back cores that it had borrowed (`CoresReclaimed`): it is at the head of its array then."""
    borrows: bool = False
    """Its attempt was placed with cores that are reserved for jobs with GPUs."""
    counted_gpus: int = 0
    """That the cell's `arrays` count for it."""
    migrations: int = 0
    """How often a service has moved it by its own rules (`MoveDecided.cause`)."""
    core_changes: int = 0
    """How often a service has changed the cores of one of its tasks; what gave back those of the placement is not counted."""
    throttles: int = 0
    """How often a service has slowed one of its tasks because of contention."""
    sharing: Sharing = ALONE
    rank: tuple[int, int, int] | None = None
    """(level, 0 if chosen else 1, position) in a policy that keeps an order; None: as it came."""
    group: str = ""
    """Of which its attempt is a member (`penstock.ledger.groups`); empty: it has its GPUs alone."""
    turns: Turns | None = None
    """How it and the others of its group take turns, as predicted when it was formed. None: it has its GPUs alone, or nothing was predicted."""
    speed: float = 1.0
    """As its group's plan predicts it, relative to alone (`penstock.ledger.speed`)."""
    speed_ms: int = 0
    """Ledger time since which it counts."""
    slowed_ms: float = 0.0
    """What it would have done more alone until then."""
    after: tuple[str, ...] = ()
    """Jobs that were being stopped, or came to their end, and that its attempt starts, or started, after (`penstock.ledger.succession`)."""
    prelaunch: bool = False
    """Its attempt launches before they have ended."""
    followed: bool = False
    """Others start, or were to start, when its attempt has ended, though nobody stops it."""
    false_ends: int = 0
    """How often the end of its attempt was expected in vain: it trained on after it had reported that it saves, or outlived who waited for it."""
    workers: int = 0
    """Of its attempt; while it has none the fewest that it can start with. 0: as in `spec`."""

    def __post_init__(self) -> None:
        self.workers = self.workers or self.spec.fewest_workers

    def shaped(self, workers: int) -> "JobState":
        """A copy, to be read only, of a job that waits, as if it could start with so many workers and no others."""
        found = copy(self)
        found.workers = workers
        return found

    @property
    def preemptible(self) -> bool:
        """Whether it may be stopped to make way for another job. A member of a group is not: its stop would free no GPU."""
        return self.spec.preemptible and not self.group

    @property
    def in_line(self) -> bool:
        """Whether it is in the queue."""
        return self.status is JobStatus.QUEUED and not self.unschedulable and self.held is None

    @property
    def target(self) -> tuple[TaskPlacement, ...]:
        """What is reserved for its next attempt, in rank order; empty: nothing, it does not move."""
        return () if self.move is None else self.move.tasks

    @property
    def awaited_estimate(self) -> int | None:
        """The attempt whose estimate may come now; 0: the first, which waits for it. None: none is due.

        A retry that backs off takes one and waits for none; one that queues at once keeps the estimate that it had.
        """
        due = self.attempt + 1 if self.attempt else 0
        if self.status is JobStatus.BACKOFF and self.estimated_attempt != due:
            return due
        return due if self.status is JobStatus.SUBMITTED else None

    @property
    def demand(self) -> Demand:
        """What the gang needs, of a moldable job that waits the smallest. Only for jobs with an estimate."""
        assert self.estimate is not None, f"{self.job_id} has no estimate yet"
        return Demand(
            self.workers,
            self.estimate.worker,
            self.spec.parameter_servers,
            self.estimate.parameter_server,
            self.spec.gpu_models,
        )
