"""External events, which enter from outside: jobs, nodes, tasks, telemetry, dead letters."""

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.model.event import Event, event
from penstock.model.nodes import NodeSpec
from penstock.model.outline import MAX_OUTLINE_CHARS
from penstock.model.topics import MAX_EVENT_BYTES, Topic
from penstock.model.types import (
    MAX_GPUS_PER_NODE,
    GpuIndex,
    Identifier,
    JobSpec,
    Mebibytes,
    Milliseconds,
    ShortText,
    Usage,
    Value,
)

Token = Annotated[int, Meta(ge=0, le=1 << 53)]
Attempt = Annotated[int, Meta(ge=1, le=1_000_000)]
PublicKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{86}\Z")]
Operator = Annotated[str, Meta(min_length=1, max_length=255)]
"""Who acted: the tenant and name of the token, as `ops/on-call`; without tokens the user who runs the gateway, as `ada@workstation-7`."""


@event
class JobSubmitted(Event, frozen=True, kw_only=True):
    """A user asks for a job to be run."""

    TYPE = "penstock.job.submitted"
    TOPIC = Topic.JOBS

    job_id: Identifier
    spec: JobSpec


@event
class JobCancelRequested(Event, frozen=True, kw_only=True):
    """A user no longer wants a job; what runs of it is stopped."""

    TYPE = "penstock.job.cancel_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant")

    job_id: Identifier
    reason: ShortText = "asked by the user"
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """Whose jobs alone the caller may cancel; None: any job, as an operator may."""


@event
class JobHoldRequested(Event, frozen=True, kw_only=True):
    """A job is not to start until it is released. What runs of it runs on; it does not start again after that."""

    TYPE = "penstock.job.hold_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant", "after")

    job_id: Identifier
    reason: ShortText = ""
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """Whose jobs alone the caller may hold; None: any job, as an operator may."""
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq as of which the caller's gateway knew the job: sent again later, the command is not obeyed. 0: not known."""


@event
class JobReleaseRequested(Event, frozen=True, kw_only=True):
    """The end of a hold: the job waits at its place by submission, and its wait begins anew."""

    TYPE = "penstock.job.release_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant", "after")

    job_id: Identifier
    reason: ShortText = ""
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """Whose jobs alone the caller may release, where no operator holds them; None: any job."""
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq as of which the caller's gateway knew the job: sent again later, the command is not obeyed. 0: not known."""


@event
class JobCheckpointRequested(Event, frozen=True, kw_only=True):
    """A running job is to save what it has done, and to train on."""

    TYPE = "penstock.job.checkpoint_requested"
    TOPIC = Topic.JOBS
    OMITTED = ("by", "tenant")

    job_id: Identifier
    reason: ShortText = ""
    by: ShortText = ""
    """As `Operator`; empty: not known."""
    tenant: Identifier | None = None
    """Whose jobs alone the caller may ask; None: any job, as an operator may."""


class RunningTask(Value, frozen=True, kw_only=True):
    """A task that a node found alive when it (re)joined."""

    task_id: Identifier
    token: Token


Fault = Literal["xid", "ecc", "fell_off_bus", "thermal"]


class GpuFault(Value, frozen=True, kw_only=True):
    """A GPU that broke since its machine booted, and was not repaired."""

    uuid: Identifier
    fault: Fault
    code: Annotated[int, Meta(ge=0)] = 0


@event
class NodeJoined(Event, frozen=True, kw_only=True):
    """A node-reporter (re)started. `tasks`: everything of ours that is alive there."""

    TYPE = "penstock.node.joined"
    TOPIC = Topic.NODES
    OMITTED = ("faults", "leases", "public_key")

    node: NodeSpec
    tasks: Annotated[tuple[RunningTask, ...], Meta(max_length=1_024)] = ()
    incarnation: Token = 0
    """Rises with each joining of this node, over restarts and boots: what is not above the last is a late copy. 0: not reported."""
    faults: Annotated[tuple[GpuFault, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """They belong to the machine: a restart of its reporter repairs nothing."""
    leases: bool = False
    """Whether it ends tasks whose lease has run out (`StartTask.lease_ms`); reporters of earlier versions do not."""
    public_key: PublicKey | None = None
    """Ed25519 and X25519, in URL-safe base64: what the node sends is signed from now on. None: it does not sign."""

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
    """Of the joining after which it changed; 0: not reported."""

    def subject(self) -> str:
        return self.node.node_id


class NodeEvent(Event, frozen=True, kw_only=True):
    """Base of events about one node."""

    TOPIC = Topic.NODES

    node_id: Identifier


class TaskEvent(NodeEvent, frozen=True, kw_only=True):
    """Base of what a node reports of a task. `token`: of the order that started it, or that is refused."""

    task_id: Identifier
    token: Token


@event
class NodeLeft(NodeEvent, frozen=True, kw_only=True):
    """The node is gone for sure; `proof` is how that is known (LAW 5)."""

    TYPE = "penstock.node.left"
    OMITTED = ("by", "reason", "probe")

    boot_id: Identifier
    proof: Literal["shutdown", "deleted", "fenced", "lease_outlived"]
    """`fenced`: somebody made sure of it (power cut, machine destroyed); believed even while the cell is frozen."""
    incarnation: Token = 0
    """Of the joining that this ends; 0: not known."""
    by: ShortText = ""
    """Who made sure, where a person did; `reason`: why."""
    reason: ShortText = ""
    probe: Token = 0
    """Of the probe that stayed unanswered; 0: somebody else knows of the lease."""


@event
class NodeCordoned(NodeEvent, frozen=True, kw_only=True):
    """An operator takes a node out of use: nothing new is placed there until it is uncordoned, however often it joins."""

    TYPE = "penstock.node.cordoned"
    OMITTED = ("drain", "after")

    drain: bool = False
    """Its jobs are stopped, too, and placed elsewhere."""
    by: Operator
    reason: ShortText
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq as of which the operator's gateway knew the node: sent again later, the command is not obeyed. 0: not known."""


@event
class NodeUncordoned(NodeEvent, frozen=True, kw_only=True):
    """An operator ends a cordon, and a drain with it."""

    TYPE = "penstock.node.uncordoned"
    OMITTED = ("after",)

    by: Operator
    reason: ShortText
    after: Annotated[int, Meta(ge=0)] = 0
    """Ledger seq as of which the operator's gateway knew the node: sent again later, the command is not obeyed. 0: not known."""


@event
class NodeSuspected(NodeEvent, frozen=True, kw_only=True):
    """Somebody noticed silence (a watch broke, a node lease was missed). Silence is not death."""

    TYPE = "penstock.node.suspected"

    reason: ShortText


@event
class ProbeSent(NodeEvent, frozen=True, kw_only=True):
    """A probe is in the log, where its node can read it: from now on the time counts."""

    TYPE = "penstock.node.probe_sent"

    probe: Token
    """The order's token."""


@event
class GpuFaulted(NodeEvent, frozen=True, kw_only=True):
    """A GPU broke: nothing new is placed on it until its node joins without the fault, or changes."""

    TYPE = "penstock.gpu.faulted"

    OMITTED = ("uuid", "incarnation")

    gpu: GpuIndex
    """Its index when it broke."""
    uuid: Identifier | None = None
    """Names the GPU. None, from earlier versions: the index does."""
    fault: Fault
    code: Annotated[int, Meta(ge=0)] = 0
    detail: ShortText = ""
    incarnation: Token = 0
    """Of the joining after which it broke; a later joining names what is still broken. 0: not reported."""


@event
class TaskStarted(TaskEvent, frozen=True, kw_only=True):
    """A task's process is running."""

    TYPE = "penstock.task.started"
    OMITTED = ("opened_ms",)

    pid: Annotated[int, Meta(ge=0)]
    started_ms: Milliseconds
    opened_ms: Milliseconds | None = None
    """When those before it on its GPUs were proven dead, where it launched beside them: it is reported then, and had no GPU before."""


@event
class TaskPhaseChanged(TaskEvent, frozen=True, kw_only=True):
    """The training script reported its phase. Source: Liquid §3 eq. 1 (launch, train, save).

    `ready`: it has launched, and waits for its GPUs (`JobSpec.prelaunch`).
    """

    TYPE = "penstock.task.phase_changed"

    phase: Literal["launch", "ready", "train", "save"]
    at_ms: Milliseconds


@event
class TaskCheckpointed(TaskEvent, frozen=True, kw_only=True):
    """The training script has saved its state and can resume from there."""

    TYPE = "penstock.task.checkpointed"
    OMITTED = ("iteration", "size_bytes", "save_ms", "shared")

    at_ms: Milliseconds
    path: ShortText = ""
    """Its folder, as the node knows it."""
    iteration: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    """How many were over; None: not reported."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    save_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    """What saving it took; training stood still."""
    shared: bool = False
    """Other nodes find it at the same name in their own folder of checkpoints."""


@event
class CheckpointFetched(TaskEvent, frozen=True, kw_only=True):
    """A task that is about to start has its job's checkpoint from the node that saved it, or does without."""

    TYPE = "penstock.task.checkpoint_fetched"
    OMITTED = ("path", "iteration", "size_bytes", "fetch_ms", "problem")

    at_ms: Milliseconds
    from_node: Identifier
    """That was asked for it."""
    path: ShortText = ""
    """Its folder on this node; empty: it was not fetched."""
    iteration: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    """How many were over when it was saved. None: it was not fetched."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    fetch_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 0
    problem: ShortText = ""
    """Why it was not fetched, with the remedy; the task starts all the same."""


@event
class StepsMeasured(TaskEvent, frozen=True, kw_only=True):
    """A training reported how far it has come. Reported at growing distances, so that a long job's events grow with its log."""

    TYPE = "penstock.steps.measured"
    OMITTED = ("waited_ms", "missed_turns")

    at_ms: Milliseconds
    done: Annotated[int, Meta(ge=1, le=1 << 53)]
    """Iterations since the job began; a script that resumes goes on counting from its checkpoint."""
    total: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    """How many it means to do, if it reported that."""
    steps: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Iterations in the window that `step_ms` is the mean of; 0: no window yet."""
    step_ms: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    loss: Annotated[float, Meta(ge=-1e100, le=1e100)] | None = None
    waited_ms: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Of `step_ms`: what it waited for its turn at a resource, as a member of a group."""
    missed_turns: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    """Stages of the window that were entered beside another member, who did not leave in time."""


class StageSample(Value, frozen=True, kw_only=True):
    """What an iteration used during `lasted_ms`, of each resource in a unit of its own."""

    lasted_ms: Annotated[float, Meta(gt=0, le=86_400_000)]
    storage: Annotated[float, Meta(ge=0)] = 0.0
    cpu: Annotated[float, Meta(ge=0)] = 0.0
    gpu: Annotated[float, Meta(ge=0)] = 0.0
    network: Annotated[float, Meta(ge=0)] = 0.0


@event
class StagesMeasured(TaskEvent, frozen=True, kw_only=True):
    """What some whole iterations used, piece by piece. Source: Muri §5 (tens of iterations make a stable profile)."""

    TYPE = "penstock.stages.measured"

    at_ms: Milliseconds
    iterations: Annotated[int, Meta(ge=1, le=1_000_000)]
    samples: Annotated[tuple[StageSample, ...], Meta(min_length=1, max_length=256)]


class JobProgress(Value, frozen=True, kw_only=True):
    """What a job has reported of itself. Reals, since thresholds and ties are judged on them."""

    job_id: Identifier
    attained_s: Annotated[float, Meta(ge=0)]
    """Time it has run, all attempts together."""
    remaining_s: Annotated[float, Meta(ge=0)] | None = None
    """Time it still needs alone on what it asked for; None where that is not known."""


@event
class WorkProgressed(NodeEvent, frozen=True, kw_only=True):
    """Jobs reported how far they are: at a threshold, or because somebody else's change made it matter."""

    TYPE = "penstock.work.progressed"

    jobs: Annotated[tuple[JobProgress, ...], Meta(min_length=1, max_length=256)]


@event
class TaskExited(TaskEvent, frozen=True, kw_only=True):
    """A task's process group is proven to have ended; only now may its GPUs be given to others."""

    TYPE = "penstock.task.exited"
    OMITTED = ("exhausted",)

    cause: Literal["exited", "stopped", "start_failed", "out_of_memory", "lost"]
    """`lost`: died while nobody could read its code (its machine rebooted)."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    signal: Annotated[int, Meta(ge=1, le=64)] | None = None
    started_ms: Milliseconds
    exited_ms: Milliseconds
    usage: Usage = Usage()
    detail: ShortText = ""
    exhausted: Literal["", "host_memory", "gpu_memory"] = ""
    """Which memory an allocation of the task failed in, whatever its `cause`: the kernel's kill, or what its last lines report. Empty:
    none, or not reported."""


@event
class OrderRefused(TaskEvent, frozen=True, kw_only=True):
    """A node refused an order: its token is older than one already obeyed, or it cannot be carried out."""

    TYPE = "penstock.order.refused"

    OMITTED = ("missing_gpus",)

    reason: Literal["stale_token", "unknown_gpu", "occupied", "unknown_task", "wrong_node"]
    highest_token: Token
    missing_gpus: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """UUIDs that the order names and the node does not have: nothing is placed there until it joins or changes again."""
    detail: ShortText = ""


@event
class TelemetrySampled(Event, frozen=True, kw_only=True):
    """A sample that crossed a threshold on its node; an idle node sends none."""

    TYPE = "penstock.telemetry.sampled"
    TOPIC = Topic.TELEMETRY
    OMITTED = ("step_ms", "cpu_stalled_percent", "memory_bandwidth_percent")

    node_id: Identifier
    task_id: Identifier | None = None
    """None: of the node as a whole."""
    at_ms: Milliseconds
    gpu: GpuIndex | None = None
    gpu_utilisation_percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    gpu_memory_mib: Mebibytes | None = None
    host_memory_mib: Mebibytes | None = None
    cpu_percent: Annotated[float, Meta(ge=0)] | None = None
    loss: float | None = None
    step_ms: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    """Mean time of an iteration in the latest window of the training script; rank 0 reports it for its gang."""
    cpu_stalled_percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    """Part of the time in which some thread of the task, or of the node, waited for a core (pressure stall information, `cpu.pressure`, some)."""
    memory_bandwidth_percent: Annotated[float, Meta(ge=0)] | None = None
    """Memory traffic of the task, or of the node, in percent of what the node can do (resctrl, MBM)."""


@event
class DeadLettered(Event, frozen=True, kw_only=True):
    """A record that could not be read or applied, with the reason. The record itself lies at its place, whole."""

    TYPE = "penstock.record.dead_lettered"
    VERSION = 2
    TOPIC = Topic.DEAD_LETTERS
    MAX_BYTES = 5 * MAX_EVENT_BYTES  # the outline and 32 headers, of which every character may be escaped

    source_topic: ShortText
    source_partition: Annotated[int, Meta(ge=0)]
    source_offset: Annotated[int, Meta(ge=0)]
    service: Identifier
    reason: Literal[
        "undecodable",
        "unknown_type",
        "unknown_version",
        "invalid",
        "too_large",
        "wrong_topic",
        "failed",
        "forged",
    ]
    detail: ShortText
    headers: dict[str, str] = field(default_factory=dict)
    """The event's attributes; of other headers the length."""
    size_bytes: Annotated[int, Meta(ge=0)]
    """Of the record's value."""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Of the record's value."""
    outline: Annotated[str, Meta(max_length=MAX_OUTLINE_CHARS)]
    """The value's names, kinds and lengths as JSON, without its texts and numbers: they may be secrets."""

    def subject(self) -> str:
        return f"{self.source_topic}/{self.source_partition}/{self.source_offset}"
