"""Types of a cluster, as frozen values. Units end names; every number has a range.

Cell ⊃ network domain ⊃ rack ⊃ node ⊃ GPU. A cell is one scheduling domain: one total order, one ledger.
A job is a gang of tasks (parameter servers and workers) that start together or not at all; each task runs
on one node. Source of the job model: Liquid §3 (parameter servers + workers); a job without parameter
servers synchronises by all-reduce, a job of one worker not at all.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

MAX_GPUS_PER_NODE = 16  # the largest boards sold hold 16
MAX_CORES_PER_NODE = 1024
MAX_GANG_TASKS = 512
MAX_WORKERS = 256
MAX_MS = 1 << 53  # the largest whole number that every reader of JSON holds exactly
MAX_OPTIONS = 16  # shapes in an estimate, which stays below 3 KiB with them
MAX_PAIRS = 32  # pairs of kinds in an estimate
MAX_ENV_ENTRIES = 128
MAX_TEXT = 1_024
MAX_DIGEST = 64  # of a state: its format and 32 digits
MAX_PARENTS = 16  # room in the events; the gateway allows fewer
WHOLE_GPU = 1_000  # shares of a GPU are counted in thousandths
MAX_JOB_ID_CHARS = 113
"""Ids of its tasks and timers are derived from it: 128 less `:launch_timeout`, the longest suffix."""

Identifier = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*\Z")]
ShortText = Annotated[str, Meta(max_length=MAX_TEXT)]
SecretName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
"""Also the name of a file on the node."""
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
SHARED_TENANT = "shared"
"""Used in place of a tenant's name for secrets that every tenant may request."""
_WORD = r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}"
NodeTerm = Annotated[str, Meta(pattern=rf"^{_WORD}(={_WORD})?(&{_WORD}(={_WORD})?){{0,7}}\Z")]
"""Nodes: an id, `LABEL=VALUE`, or several of these that must all hold, joined by `&`."""
NodeTerms = Annotated[tuple[NodeTerm, ...], Meta(max_length=64)]
Mebibytes = Annotated[int, Meta(ge=0, le=1 << 30)]
Megabits = Annotated[int, Meta(ge=0, le=10_000_000)]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_MS)]
GpuIndex = Annotated[int, Meta(ge=0, lt=MAX_GPUS_PER_NODE)]
CoreId = Annotated[int, Meta(ge=0, lt=MAX_CORES_PER_NODE)]
GpuShare = Annotated[int, Meta(ge=1, le=WHOLE_GPU)]
"""Thousandths of a GPU's time."""


def within_ms(ms: float) -> int:
    """A computed time as events hold it (`Milliseconds`): whole, 0 to `MAX_MS`; beyond, it saturates."""
    return max(0, round(ms)) if ms < MAX_MS else MAX_MS


Role = Literal["ps", "worker"]
Category = Literal["cv", "nlp", "speech"]
Trait = Literal["pipelined", "many_weights", "heavy_preprocessing"]
"""Property of a training job that changes how many cores it needs. Source: CODA §V-B1."""
Priority = Annotated[int, Meta(ge=-10, le=10)]
Qos = Literal["urgent", "prior", "normal"]
"""Service class: how soon a job is expected to be done. Source: GENIE §III-A."""
Companions = Literal["tenant", "any"]
CheckpointKind = Literal["none", "sdk", "signal"]
"""How a job saves its progress. `sdk`: by `penstock.sdk.checkpoint`, or in the same way, in a folder that its
node provides; `signal`: on SIGTERM and SIGUSR1, in a place of the script's choice; `none`: a stop loses all
progress."""


class Value(Struct, frozen=True, gc=False):
    """A frozen value. Decoding checks the constraints of its fields; construction checks its rules only.

    A rule checks what no constraint can express. Rules run wherever a value is made, also when it is decoded,
    and raise ValueError with the problem and a remedy. Input from users and programs is checked by
    `penstock.model.schema.validation`, which reports every mistake at once.
    """

    RULES: ClassVar[Mapping[str, Callable[[Any], None]]] = {}
    """Field → rule of its value alone. A rule that spans fields is in `__post_init__`."""
    OMITTED: ClassVar[tuple[str, ...]] = ()
    """Fields that are left out of the JSON of events while they have their default."""
    ALWAYS: ClassVar[tuple[str, ...]] = ()
    """In place of OMITTED: the fields that are never left out, those of the first release."""
    FORMER: ClassVar[tuple[str, ...]] = ()
    """Fields that earlier releases wrote under the same version: read for ever, into other fields
    (`penstock.model.wire.upcasters.FOLDED`), never written."""


class ResourceVector(Value, frozen=True, kw_only=True):
    """Resources of one task. Source: Liquid §4 ⟨N·GPU, GMem, Bandwidth⟩, with cores and host memory added."""

    OMITTED = ("gpu_share_milli",)

    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS_PER_NODE)] = 0
    cores: Annotated[int, Meta(ge=0, le=MAX_CORES_PER_NODE)] = 1
    host_memory_mib: Mebibytes = 0
    gpu_memory_mib: Mebibytes = 0
    """On each of its GPUs, the maximum over the run."""
    gpu_utilisation_percent: Annotated[float, Meta(ge=0, le=100)] = 100.0
    """Mean over the run, of each of its GPUs."""
    bandwidth_mbps: Megabits = 0
    gpu_share_milli: GpuShare = WHOLE_GPU
    """Share of its GPU; below a whole one only for a task with one GPU, which other tasks may then share."""

    def __post_init__(self) -> None:
        if self.gpu_share_milli < WHOLE_GPU:
            shares_one_gpu(self.gpu_share_milli, self.gpus)


def shares_one_gpu(share_milli: int, gpus: int) -> None:
    """Raises ValueError: a task shares one GPU or has whole ones."""
    if share_milli < WHOLE_GPU and gpus != 1:
        raise ValueError(
            f"gpu_share_milli {share_milli} needs gpus 1, not {gpus}; ask for one GPU or for whole ones"
        )


class TaskPlacement(Value, frozen=True, kw_only=True):
    """Placement of one task of a gang: its node and what it may use there; leaves the node no choice."""

    OMITTED = ("gpu_share_milli", "host_memory_cap_mib")

    task_id: Identifier
    role: Role
    rank: Annotated[int, Meta(ge=0, lt=MAX_GANG_TASKS)]
    """Over the whole gang: workers first (rank 0 is the chief), then parameter servers."""
    node_id: Identifier
    gpus: tuple[GpuIndex, ...] = ()
    """Slots of the node; each belongs to one UUID as long as a task holds it (`NodeState.slots` in the
    ledger)."""
    cores: tuple[CoreId, ...] = ()
    host_memory_mib: Mebibytes = 0
    gpu_memory_mib: Mebibytes = 0
    """Memory booked for it on each of its GPUs: a limit while other tasks have a part of them, too. 0: no
    amount was promised."""
    bandwidth_mbps: Megabits = 0
    gpu_share_milli: GpuShare = WHOLE_GPU
    host_memory_cap_mib: Mebibytes = 0
    """Cap that the node enforces, where it is more than the promised memory; 0: `host_memory_mib` is the
    cap."""

    @property
    def cap_mib(self) -> int:
        """Host memory that the node enforces; 0: no cap."""
        return self.host_memory_cap_mib or self.host_memory_mib


class ShapeOption(Value, frozen=True, kw_only=True):
    """A number of workers for a moldable job, packed as densely as the cell's nodes allow, with the resulting
    iteration time."""

    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    nodes: Annotated[int, Meta(ge=1, le=MAX_WORKERS)]
    gpus_per_node: Annotated[int, Meta(ge=1, le=MAX_GPUS_PER_NODE)]
    """Number of GPUs on the node with most of them."""
    step_ms: Annotated[float, Meta(gt=0, le=1e11)]
    low_ms: Annotated[float, Meta(gt=0, le=1e11)]
    """Lower end of the 90 % interval; where the job itself has run in this shape, its fastest run, or a tenth
    below `step_ms` if that is lower."""
    high_ms: Annotated[float, Meta(gt=0, le=1e11)]


class StageTimes(Value, frozen=True, kw_only=True, cache_hash=True):
    """How long one iteration uses each resource, alone on its GPUs, in the order in which it uses them.
    Source: Muri §4.1."""

    storage_ms: Annotated[float, Meta(ge=0, le=1e11)]
    cpu_ms: Annotated[float, Meta(ge=0, le=1e11)]
    gpu_ms: Annotated[float, Meta(ge=0, le=1e11)]
    network_ms: Annotated[float, Meta(ge=0, le=1e11)]
    iteration_ms: Annotated[float, Meta(gt=0, le=1e11)]
    """From one iteration to the next: more than the sum where some of it is idle, less where stages
    overlap."""


class PairSpeed(Value, frozen=True, kw_only=True):
    """Measured speeds of two jobs that share one GPU with no third one, relative to their speeds alone on
    such a GPU; noise lifts some above 1."""

    model: Identifier | Literal[""] = ""
    """Model of the other job; empty: it named none."""
    batch_size: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    """Batch size of the other job."""
    gpu_model: Identifier
    own: Annotated[float, Meta(gt=0, le=2)]
    other: Annotated[float, Meta(gt=0, le=2)]
    runs: Annotated[int, Meta(ge=1, le=1 << 30)]


class Estimate(Value, frozen=True, kw_only=True):
    """Estimate of a job's resources and run time, with its confidence and source."""

    OMITTED = ("guessed", "first_of_kind", "options", "stages", "pairs", "launch_ms")

    worker: ResourceVector
    parameter_server: ResourceVector = ResourceVector()
    run_ms: Milliseconds | None = None
    confidence: Annotated[float, Meta(ge=0, le=1)]
    tier: Literal["user", "history", "model", "nearest", "default"]
    source: ShortText
    """For display: the runs, model or rule that it is based on."""
    model_version: Identifier | None = None
    guessed: Annotated[tuple[Role, ...], Meta(max_length=2)] = ()
    """In estimates of earlier versions: roles with a guessed host memory. No estimate is a cap (decision
    136)."""
    first_of_kind: Annotated[tuple[Literal["network", "gpu_model"], ...], Meta(max_length=2)] = ()
    """Parts without training data: the job's network, or the GPU model that its promise of GPU memory is
    for."""
    options: Annotated[tuple[ShapeOption, ...], Meta(max_length=MAX_OPTIONS)] = ()
    """Shapes of a moldable job, or of one with a service class or deadline, the fewest workers first;
    `run_ms` is for the fewest. Empty: its iteration times are not known."""
    stages: StageTimes | None = None
    """Stage times on the requested GPUs; None: not known, so the job is not grouped."""
    pairs: Annotated[tuple[PairSpeed, ...], Meta(max_length=MAX_PAIRS)] = ()
    """Measured speeds of similar jobs next to jobs of other kinds, the most often measured first; pairs that
    are not listed were not measured."""
    launch_ms: Milliseconds | None = None
    """Time until it trains, as earlier runs reported it; included in `run_ms`. None: not known. Source:
    Liquid §6.1 (T_l)."""

    def run_ms_with(self, workers: int, fewest: int) -> int | None:
        """`run_ms` with another number of workers than the fewest, scaled by the ratio of their step times;
        unscaled where one of these is not known."""
        steps_ms: dict[int, float] = {}
        for option in self.options:
            steps_ms.setdefault(
                option.workers, option.step_ms
            )  # the densest of several placements comes first
        here_ms, least_ms = steps_ms.get(workers), steps_ms.get(fewest)
        if self.run_ms is None or here_ms is None or least_ms is None:
            return self.run_ms
        return within_ms(self.run_ms * here_ms / least_ms)


class Usage(Value, frozen=True, kw_only=True):
    """Resource usage of a task, measured on its node; a field is None where it could not be measured."""

    cpu_ms: Annotated[int, Meta(ge=0)] | None = None
    host_memory_mib: Annotated[int, Meta(ge=0)] | None = None
    gpu_memory_mib: Annotated[int, Meta(ge=0)] | None = None
    gpu_utilisation_percent: Annotated[float, Meta(ge=0, le=100)] | None = None
    gpu_utilisation_std: Annotated[float, Meta(ge=0, le=100)] | None = None
