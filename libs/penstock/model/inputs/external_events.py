"""External events, which enter from outside: jobs, nodes, tasks, telemetry."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import Fault, GpuFault, NodeSpec
from penstock.model.nouns.types import (
    MAX_GPUS_PER_NODE,
    GpuIndex,
    Identifier,
    Mebibytes,
    Milliseconds,
    ShortText,
    Usage,
    Value,
)
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import MAX_EVENT_BYTES, Topic

Token = Annotated[int, Meta(ge=0, le=1 << 53)]
Attempt = Annotated[int, Meta(ge=1, le=1_000_000)]
Said = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Number of a node's report: increases with each, across restarts and boots. 0: the reporter does not
count."""
PublicKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{86}\Z")]
Operator = Annotated[str, Meta(min_length=1, max_length=255)]
"""User who acted: the tenant and name of the token, as `ops/on-call`; without tokens the user who runs the
gateway, as `ada@workstation-7`."""


@event
class JobSubmitted(Event, frozen=True, kw_only=True):
    """A user submits a job."""

    TYPE = "penstock.job.submitted"
    TOPIC = Topic.JOBS
    MAX_BYTES = 4 * MAX_EVENT_BYTES  # with the longest command, which may not shrink when it is packed

    job_id: Identifier
    spec: JobSpec


@event
class JobCancelRequested(Event, frozen=True, kw_only=True):
    """A user cancels a job; its running tasks are stopped."""

    TYPE = "penstock.job.cancel_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant")

    job_id: Identifier
    reason: ShortText = "asked by the user"
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """The caller may cancel only jobs of this tenant; None: any job, as an operator may."""


@event
class JobHoldRequested(Event, frozen=True, kw_only=True):
    """A user holds a job: it does not start until it is released. A running attempt continues; no further one
    starts."""

    TYPE = "penstock.job.hold_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant", "after")

    job_id: Identifier
    reason: ShortText = ""
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """The caller may hold only jobs of this tenant; None: any job, as an operator may."""
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq up to which the caller's gateway knew the job: a copy sent after a newer command is refused.
    0: not known."""


@event
class JobReleaseRequested(Event, frozen=True, kw_only=True):
    """A user ends a hold: the job queues at its place by submission, and its waiting time starts anew."""

    TYPE = "penstock.job.release_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant", "after")

    job_id: Identifier
    reason: ShortText = ""
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """The caller may release only jobs of this tenant that no operator holds; None: any job."""
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq up to which the caller's gateway knew the job: a copy sent after a newer command is refused.
    0: not known."""


@event
class JobCheckpointRequested(Event, frozen=True, kw_only=True):
    """A user asks a running job to save a checkpoint and to continue training."""

    TYPE = "penstock.job.checkpoint_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant")

    job_id: Identifier
    reason: ShortText = ""
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """The caller may ask only jobs of this tenant; None: any job, as an operator may."""


class RunningTask(Value, frozen=True, kw_only=True):
    """A task that a node found alive when it (re)joined."""

    task_id: Identifier
    token: Token


@event
class NodeJoined(Event, frozen=True, kw_only=True):
    """A node-reporter (re)started. `tasks`: all tasks of Penstock that are alive there."""

    TYPE = "penstock.node.joined"
    TOPIC = Topic.NODES
    OMITTED = ("faults", "leases", "public_key", "said", "version")

    node: NodeSpec
    tasks: Annotated[tuple[RunningTask, ...], Meta(max_length=1_024)] = ()
    incarnation: Token = 0
    """Increases with each joining of this node, across restarts and boots: a joining that is not above the
    last one is a late copy. 0: not reported."""
    faults: Annotated[tuple[GpuFault, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """Faults of the machine: a restart of its reporter does not repair them."""
    leases: bool = False
    """Whether the reporter ends tasks with an expired lease (`StartTask.lease_ms`); reporters of earlier
    versions do not."""
    public_key: PublicKey | None = None
    """Ed25519 and X25519, in URL-safe base64: the node signs its events from now on. None: it does not
    sign."""
    said: Said = 0
    """Reports of this node up to this number are late copies from now on."""
    version: ShortText = ""
    """Version of Penstock that the reporter is of; empty: not reported."""

    def subject(self) -> str:
        return self.node.node_id


@event
class NodeChanged(Event, frozen=True, kw_only=True):
    """The node's own inventory changed (a GPU came back, memory was hot-plugged)."""

    TYPE = "penstock.node.changed"
    TOPIC = Topic.NODES
    OMITTED = ("incarnation",)

    node: NodeSpec
    incarnation: Token = 0
    """Incarnation of the joining before the change; 0: not reported."""

    def subject(self) -> str:
        return self.node.node_id


class NodeEvent(Event, frozen=True, kw_only=True):
    """Base of events about one node."""

    TOPIC = Topic.NODES

    node_id: Identifier


class TaskEvent(NodeEvent, frozen=True, kw_only=True):
    """Base of a node's reports about a task. `token`: of the order that started it, or that is refused."""

    task_id: Identifier
    token: Token


class CountedTaskEvent(TaskEvent, frozen=True, kw_only=True):
    """Base of those on which a copy would act again: refused where `said` is not above the node's latest."""

    OMITTED: ClassVar[tuple[str, ...]] = ("said",)

    said: Said = 0


@event
class NodeLeft(NodeEvent, frozen=True, kw_only=True):
    """The node is proven gone; `proof` is the kind of proof (LAW 5)."""

    TYPE = "penstock.node.left"
    OMITTED = ("by", "reason", "probe")

    boot_id: Identifier
    proof: Literal["shutdown", "deleted", "fenced", "lease_outlived"]
    """`fenced`: a person or a program made sure of it (power cut, machine destroyed); accepted even while the
    cell is frozen."""
    incarnation: Token = 0
    """Incarnation of the joining that this ends; 0: not known."""
    by: ShortText = ""
    """The person who made sure, if one did; `reason`: why."""
    reason: ShortText = ""
    probe: Token = 0
    """Token of the unanswered probe; 0: the end of the lease is known from another source."""


@event
class NodeCordoned(NodeEvent, frozen=True, kw_only=True):
    """An operator takes a node out of use: no further task is placed there until it is uncordoned, however
    often it joins."""

    TYPE = "penstock.node.cordoned"
    OMITTED = ("drain", "after")

    drain: bool = False
    """Its jobs are stopped, too, and placed elsewhere."""
    by: Operator
    reason: ShortText
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq up to which the operator's gateway knew the node: a copy sent after a newer command is
    refused. 0: not known."""


@event
class NodeUncordoned(NodeEvent, frozen=True, kw_only=True):
    """An operator ends a cordon, and a drain with it."""

    TYPE = "penstock.node.uncordoned"
    OMITTED = ("after",)

    by: Operator
    reason: ShortText
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq up to which the operator's gateway knew the node: a copy sent after a newer command is
    refused. 0: not known."""


@event
class NodeSuspected(NodeEvent, frozen=True, kw_only=True):
    """A node was noticed to be silent (a watch broke, a node lease was missed). Silence is not death (LAW
    5)."""

    TYPE = "penstock.node.suspected"

    reason: ShortText


@event
class ProbeSent(NodeEvent, frozen=True, kw_only=True):
    """A probe is in the log, where its node can read it: the node's time to answer starts."""

    TYPE = "penstock.node.probe_sent"

    probe: Token
    """The order's token."""


@event
class GpuFaulted(NodeEvent, frozen=True, kw_only=True):
    """A GPU failed: no further task is placed on it until its node joins without the fault, or changes."""

    TYPE = "penstock.gpu.faulted"

    OMITTED = ("uuid", "incarnation", "said")

    gpu: GpuIndex
    """Its index at the time of the fault."""
    uuid: Identifier | None = None
    """Identifies the GPU. None, from earlier versions: the index identifies it."""
    fault: Fault
    code: Annotated[int, Meta(ge=0)] = 0
    detail: ShortText = ""
    incarnation: Token = 0
    """Incarnation of the joining before the fault; a later joining lists the remaining faults. 0: not
    reported."""
    said: Said = 0


@event
class TaskStarted(TaskEvent, frozen=True, kw_only=True):
    """A task's process is running."""

    TYPE = "penstock.task.started"
    OMITTED = ("opened_ms",)

    pid: Annotated[int, Meta(ge=0)]
    started_ms: Milliseconds
    opened_ms: Milliseconds | None = None
    """Of a task that launched while others held its GPUs: when these were proven dead. The event is reported
    then; before, the task had no GPU."""


@event
class TaskPhaseChanged(CountedTaskEvent, frozen=True, kw_only=True):
    """The training script reported its phase. Source: Liquid §3 eq. 1 (launch, train, save).

    `ready`: the script has launched, and waits for its GPUs (`JobSpec.prelaunch`).
    """

    TYPE = "penstock.task.phase_changed"

    phase: Literal["launch", "ready", "train", "save"]
    at_ms: Milliseconds


@event
class TaskCheckpointed(CountedTaskEvent, frozen=True, kw_only=True):
    """The training script has saved its state and can resume from there."""

    TYPE = "penstock.task.checkpointed"
    OMITTED = ("said", "iteration", "size_bytes", "save_ms", "shared")

    at_ms: Milliseconds
    path: ShortText = ""
    """Folder of the checkpoint, as a path on the node."""
    iteration: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    """Iterations done when it was saved; None: not reported."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    save_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    """Time that saving took; training paused meanwhile."""
    shared: bool = False
    """Other nodes find it under the same name in their own folder of checkpoints."""


@event
class CheckpointFetched(CountedTaskEvent, frozen=True, kw_only=True):
    """Before a task starts, its node has fetched the job's checkpoint from the node that saved it, or failed
    to."""

    TYPE = "penstock.task.checkpoint_fetched"
    OMITTED = ("said", "path", "iteration", "size_bytes", "fetch_ms", "problem")

    at_ms: Milliseconds
    from_node: Identifier
    """The node that was asked for it."""
    path: ShortText = ""
    """Folder of the checkpoint on this node; empty: it was not fetched."""
    iteration: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    """Iterations done when it was saved. None: it was not fetched."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    fetch_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    problem: ShortText = ""
    """Why it was not fetched, with the remedy; the task starts nevertheless."""


@event
class StepsMeasured(CountedTaskEvent, frozen=True, kw_only=True):
    """Progress of a training job: at growing intervals, so that the number of events grows with the logarithm
    of the job's length, and where a member of a group waits for another part of its time (`SPEED_STEP`)."""

    TYPE = "penstock.steps.measured"
    OMITTED = ("said", "waited_ms", "missed_turns")

    at_ms: Milliseconds
    done: Annotated[int, Meta(ge=1, le=1 << 53)]
    """Iterations since the job began; a script that resumes continues the count of its checkpoint."""
    total: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    """Planned number of iterations; None: not reported."""
    steps: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Iterations in the window over which `step_ms` is the mean; 0: no window yet."""
    step_ms: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    loss: Annotated[float, Meta(ge=-1e100, le=1e100)] | None = None
    waited_ms: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Part of `step_ms` spent waiting for its turn at a resource, as a member of a group."""
    missed_turns: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Number of stages in the window that were entered while another member, which did not leave in time, was
    still in them."""


class StageSample(Value, frozen=True, kw_only=True):
    """Resource usage of an iteration during `lasted_ms`; each resource has its own unit."""

    lasted_ms: Annotated[float, Meta(gt=0, le=86_400_000)]
    storage: Annotated[float, Meta(ge=0)] = 0.0
    cpu: Annotated[float, Meta(ge=0)] = 0.0
    gpu: Annotated[float, Meta(ge=0)] = 0.0
    network: Annotated[float, Meta(ge=0)] = 0.0


@event
class StagesMeasured(CountedTaskEvent, frozen=True, kw_only=True):
    """Resource usage of some whole iterations, as consecutive samples. Source: Muri §5 (tens of iterations
    make a stable profile)."""

    TYPE = "penstock.stages.measured"

    at_ms: Milliseconds
    iterations: Annotated[int, Meta(ge=1, le=1_000_000)]
    samples: Annotated[tuple[StageSample, ...], Meta(min_length=1, max_length=256)]


class JobProgress(Value, frozen=True, kw_only=True):
    """Progress of a job as it reported it. Real numbers, since thresholds and ties are compared on them."""

    job_id: Identifier
    attained_s: Annotated[float, Meta(ge=0)]
    """Time it has run, all attempts together."""
    remaining_s: Annotated[float, Meta(ge=0)] | None = None
    """Remaining run time alone on the requested resources; None: not known."""


@event
class WorkProgressed(NodeEvent, frozen=True, kw_only=True):
    """Progress of jobs, reported at a threshold or when a change of another job makes it relevant."""

    TYPE = "penstock.work.progressed"

    jobs: Annotated[tuple[JobProgress, ...], Meta(min_length=1, max_length=256)]


@event
class TaskExited(TaskEvent, frozen=True, kw_only=True):
    """A task's process group is proven to have ended; only now may its GPUs be allocated to other tasks."""

    TYPE = "penstock.task.exited"
    OMITTED = ("exhausted", "gpu_memory_limit_mib")

    cause: Literal["exited", "stopped", "start_failed", "out_of_memory", "lost"]
    """`lost`: it ended while no process could read its exit code (its machine rebooted)."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, Meta(ge=1, le=64)] | None = None
    started_ms: Milliseconds
    exited_ms: Milliseconds
    usage: Usage = Usage()
    detail: ShortText = ""
    exhausted: Literal["", "host_memory", "gpu_memory"] = ""
    """The memory in which an allocation of the task failed, whatever its `cause`, by the kernel's kill or the
    task's last lines. Empty: none, or not reported."""
    gpu_memory_limit_mib: Mebibytes = 0
    """Limit under which it ran out of GPU memory, of each of its GPUs, where other tasks had a part of them.
    0: none, or not reported."""


@event
class OrderRefused(TaskEvent, frozen=True, kw_only=True):
    """A node refused an order: its token is older than one already obeyed, or it cannot be carried out."""

    TYPE = "penstock.order.refused"

    OMITTED = ("missing_gpus",)

    reason: Literal["stale_token", "unknown_gpu", "occupied", "unknown_task", "wrong_node"]
    highest_token: Token
    missing_gpus: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """UUIDs that the order names and the node does not have: no task is placed there until the node joins or
    changes again."""
    detail: ShortText = ""


@event
class TelemetrySampled(Event, frozen=True, kw_only=True):
    """A sample that crossed a threshold on its node; an idle node sends none."""

    TYPE = "penstock.telemetry.sampled"
    TOPIC = Topic.TELEMETRY
    OMITTED = ("step_ms", "cpu_stalled_percent", "memory_bandwidth_percent")

    node_id: Identifier
    task_id: Identifier | None = None
    """None: the sample is of the node as a whole."""
    at_ms: Milliseconds
    gpu: GpuIndex | None = None
    gpu_utilisation_percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    gpu_memory_mib: Mebibytes | None = None
    host_memory_mib: Mebibytes | None = None
    cpu_percent: Annotated[float, Meta(ge=0)] | None = None
    loss: float | None = None
    step_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Mean time of an iteration in the latest window of the training script; rank 0 reports it for its
    gang."""
    cpu_stalled_percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    """Part of the time in which some thread of the task, or of the node, waited for a core (pressure stall
    information, `cpu.pressure`, some)."""
    memory_bandwidth_percent: Annotated[float, Meta(ge=0)] | None = None
    """Memory traffic of the task, or of the node, in percent of the node's memory bandwidth (resctrl,
    MBM)."""
