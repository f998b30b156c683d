"""The gateway's answers as frozen values. Unknown keys are ignored, so that a newer gateway can be asked.

Units end names; times are milliseconds since 1970, None where not reached. Of another tenant's job `hidden`
names the keys that are None because they are not shown.
"""

from typing import Any, Literal, TypeVar

from msgspec import Struct, field

from penstock.exits import of_job
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate

T = TypeVar("T")


class Answer(Struct, frozen=True, kw_only=True):
    """Base of all answers."""


class Warned(Answer, frozen=True, kw_only=True):
    """A probable mistake in a job that was accepted."""

    field: str
    message: str
    remedy: str


class Deadline(Answer, frozen=True, kw_only=True):
    """Whether a job will be in time. `odds`: that it ends by `due_ms`, 0 to 1; None: not known, and `unknown`
    names the cause."""

    job_id: str
    qos: str
    """urgent, prior or normal; empty: the job has a deadline of its own."""
    now_ms: int
    due_ms: int | None = None
    """None also for an urgent job, which is to end as soon as possible."""
    starts_ms: int | None = None
    ends_ms: int | None = None
    workers: int | None = None
    odds: float | None = None
    level: float
    sure_ms: int | None = None
    """The time by which it ends with odds of `level`."""
    sure_workers: int | None = None
    deadline_ms: int | None = None
    """The shortest deadline, after its submission, that holds with these odds."""
    learned: int = 0
    """Number of earlier forecasts whose errors are in the odds; 0: the start is taken for certain."""
    unknown: str = ""


class Accepted(Answer, frozen=True, kw_only=True):
    """Acknowledgement: the request is in the log. `warnings` and `deadline`: of a submission."""

    job_id: str
    warnings: tuple[Warned, ...] = ()
    deadline: Deadline | None = None
    """None: the job has no deadline."""


class Hold(Answer, frozen=True, kw_only=True):
    """A hold on a job: the user, since when and why."""

    by: str
    reason: str
    at_ms: int
    by_operator: bool


class Job(Answer, frozen=True, kw_only=True):
    """A job as of ledger record `seq`."""

    job_id: str
    seq: int
    owner: str
    status: str
    """submitted, queued, backoff, launching, running, stopping, or the outcome."""
    outcome: str | None = None
    """succeeded, failed, cancelled, timed_out_queued, timed_out_running, unschedulable; None: it has not
    ended."""
    name: str | None = None
    workers: int
    parameter_servers: int
    attempt: int
    infrastructure_retries: int = 0
    submitted_seq: int = 0
    submitted_ms: int
    queued_ms: int | None = None
    placed_ms: int | None = None
    running_ms: int | None = None
    ended_ms: int | None = None
    exit_code: int | None = None
    reason: str | None = None
    stop_reason: str | None = None
    nodes: tuple[str, ...] = ()
    gpus: int = 0
    cores: int = 0
    """Cores that its tasks may use now, in all; 0: it holds none."""
    labels: dict[str, str] | None = None
    estimate: Estimate | None = None
    spec: JobSpec | None = None
    held: Hold | None = None
    """The hold that keeps it from starting until it is released; None: it is not held."""
    trace_id: str | None = None
    hidden: tuple[str, ...] = ()

    @property
    def code(self) -> int | None:
        """The exit code of `penstock submit` for this job; None: it has not ended."""
        return None if self.outcome is None else of_job(self.outcome, self.exit_code, propagate=False)


class Page(Answer, frozen=True, kw_only=True):
    """One page of a list of jobs, the latest first. `total`: on all pages."""

    jobs: tuple[Job, ...]
    total: int
    next_cursor: int | None = None


class Task(Answer, frozen=True, kw_only=True):
    """One task of one attempt."""

    task_id: str
    job_id: str
    attempt: int
    role: str
    rank: int
    node_id: str
    gpus: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    host_memory_mib: int = 0
    status: str
    started_ms: int | None = None
    exited_ms: int | None = None
    exit_code: int | None = None
    cause: str | None = None
    signal: int | None = None


class Node(Answer, frozen=True, kw_only=True):
    """A node with its free capacity."""

    node_id: str
    status: str
    rack: str
    domain: str
    address: str
    gpu_model: str | None = None
    gpus: int
    gpus_free: int
    gpus_faulted: int
    cores: int
    cores_free: int
    host_memory_mib: int
    host_memory_free_mib: int
    bandwidth_mbps: int
    bandwidth_free_mbps: int
    tasks: int


class Event(Answer, frozen=True, kw_only=True):
    """One event of the ledger. `data`: its fields; None where they are hidden."""

    seq: int
    n: int
    at_ms: int
    type: str
    job_id: str | None = None
    node_id: str | None = None
    task_id: str | None = None
    data: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        """The event's position in the stream: give it as `after` to go on behind it."""
        return f"{self.seq}.{self.n}"


class Holder(Answer, frozen=True, kw_only=True):
    """A job that holds resources for which another job waits."""

    job_id: str
    owner: str
    gpus: int
    ends_ms: int | None = None
    """The expected end; None: not known."""


class Start(Answer, frozen=True, kw_only=True):
    """Expected start of a job in the queue."""

    starts_ms: int | None = None
    """In the ledger's ms; None: not known."""
    unknown: str = ""
    """Why the start is not known."""
    holders: tuple[Holder, ...] = ()
    """Jobs on nodes that suit the waiting job, first those that end first; at most five."""
    assumes: str


class Why(Answer, frozen=True, kw_only=True):
    """Why a job waits, or why it was placed where it is, as of ledger record `seq`."""

    job_id: str
    seq: int
    now_ms: int
    status: str
    reason: str | None = None
    text: str
    detail: str | None = None
    next_step: str
    now_or_never: str | None = None
    histogram: dict[str, int] = field(default_factory=dict)
    feasible: int = 0
    position: int | None = None
    """Rank in the order of the cell's profile, from 1."""
    ahead: int = 0
    claim: str = ""
    """The reason for its rank in that order; empty where profiles go by arrival or stop jobs."""
    waited_ms: int | None = None
    placement: dict[str, Any] | None = None
    """The explanation recorded with the latest placement."""
    start: Start | None = None
    """The expected start of a job in the queue; None for a past moment and for other jobs."""


class Bounds(Answer, frozen=True, kw_only=True):
    """An interval and its middle."""

    middle: float
    low: float | None = None
    high: float | None = None


class Eta(Answer, frozen=True, kw_only=True):
    """Remaining time of a job. `left_ms` from `now_ms` on; `level`: how often the interval holds, 0 to 1."""

    job_id: str
    status: str
    answer: Literal["reported", "estimated", "unknown", "waiting", "ended"]
    now_ms: int
    due: str | None = None
    left_ms: Bounds | None = None
    ends_ms: Bounds | None = None
    level: float | None = None
    share: float | None = None
    source: str | None = None
    run_ms: int | None = None
    ended_ms: int | None = None
    outcome: str | None = None
    start: Start | None = None
    """None: the job is not in the queue."""
    deadline: Deadline | None = None
    """None: the job has no deadline."""


class Status(Answer, frozen=True, kw_only=True):
    """State of the cell and its read models."""

    cell: str
    seq: int
    term: int
    now_ms: int
    frozen: str
    """Why nothing is placed; empty: it is not frozen."""
    profile: str
    projected_seq: int
    projector_lag: int
    jobs: dict[str, int]
    nodes: dict[str, int]


class Checkpoint(Answer, frozen=True, kw_only=True):
    """A checkpoint that a node reported. `at_ms`: in the ledger's ms."""

    path: str
    iteration: int | None = None
    """Completed iterations; None: not reported."""
    node_id: str
    attempt: int
    at_ms: int
    save_ms: int
    """Duration of the save."""
    size_bytes: int
    shared: bool
    """Other nodes can read it, too."""
    usual_save_ms: float = 0.0
    """Exponential mean of the job's saves."""
    fetched_from: str = ""
    """The node from which it was fetched; empty: it was saved where it is."""
    problem: str = ""
    """Why the latest attempt could not fetch it; empty: it could."""


class Saved(Answer, frozen=True, kw_only=True):
    job_id: str
    checkpoint: Checkpoint | None = None


class TaskCores(Answer, frozen=True, kw_only=True):
    """A task's cores after a change."""

    task_id: str
    cores: tuple[int, ...]
    applied: bool
    """Its node has confirmed the change."""
    enforced: str = ""
    """How the node limits the task: cpuset, affinity; empty: no answer yet, or by its placement."""
    problem: str = ""
    """Why its node could not apply the change."""


class CoresChanged(Answer, frozen=True, kw_only=True):
    job_id: str
    tasks: tuple[TaskCores, ...]


class Tasks(Answer, frozen=True, kw_only=True):
    tasks: tuple[Task, ...]


class Nodes(Answer, frozen=True, kw_only=True):
    nodes: tuple[Node, ...]
