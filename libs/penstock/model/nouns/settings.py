"""Settings of a cell: inputs of decisions that are in no log."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    MAX_GPUS_PER_NODE,
    WHOLE_GPU,
    GpuShare,
    Identifier,
    Milliseconds,
    Value,
)

TIRESIAS_LIMITS_GPU_S = (3_250.0, 7_200.0)  # three queues. Source: the settings of Muri's experiments
MAX_BACKFILL_WINDOW = 4_096
MAX_OVERTAKES = 1_000_000
MAX_BATCH_WINDOW_MS = 60_000
MAX_PRELAUNCH_WAIT_MS = 3_600_000
MAX_BATCH_ARRIVALS = 256  # arrival times that the state holds
MAX_TYPICAL_TASKS = 256  # openb's pod files need 33 groups for 95 % of their tasks


class TypicalTask(Value, frozen=True, kw_only=True):
    """A frequent kind of task in the cell; memory is left out."""

    OMITTED = ("gpu_share_milli",)

    cores: Annotated[int, Meta(ge=0, le=MAX_CORES_PER_NODE)]
    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS_PER_NODE)]
    gpu_share_milli: GpuShare = WHOLE_GPU
    gpu_models: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ()
    """Allowed GPU models; empty: any."""
    count: Annotated[int, Meta(ge=1, le=1_000_000)]
    """Number of such tasks; only ratios matter."""


class Grouping(Value, frozen=True, kw_only=True):
    """Parts of Muri's grouping that are on, for profiles `muri-s` and `muri-l`: each can be switched off, for
    ablation."""

    OMITTED = ("split", "matching", "worst_order", "max_members")

    split: bool = True
    """A group is not formed if its iteration would take longer than its members' iterations one after the
    other."""
    matching: bool = True
    """False: jobs are grouped in their order."""
    worst_order: bool = False
    """Members rotate in the worst order."""
    max_members: Annotated[int, Meta(ge=2, le=4)] = 4


class Convergence(Value, frozen=True, kw_only=True):
    """When a job's loss counts as converging, for profile `specon`. Source: SpeCon §VI-C, the settings of
    most experiments."""

    OMITTED = ("alpha", "interval_ms")

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.01
    """Fraction of the range of losses so far: a job that gains more within an interval progresses."""
    interval_ms: Annotated[int, Meta(ge=1_000, le=86_400_000)] = 30_000


class Genie(Value, frozen=True, kw_only=True):
    """How profile `genie` chooses ⟨nodes, GPUs⟩: Alg. 1, or one of its baselines."""

    OMITTED = ("choose", "theta", "make_way")

    choose: Literal["qos", "protect", "ratio", "performance", "most", "least"] = "qos"
    """qos: Alg. 1. protect: ours, a job that is late already takes few GPUs and comes after jobs that can
    still be in time; a job that may be late gets the placement with the highest probability of being in time
    while no other job waits. ratio, performance, most, least: CERPre, PerfPre, MaxOcc, MinOcc. Source: GENIE
    §IV-A."""
    theta: Annotated[float, Meta(ge=0, le=1_000)] = 0.5
    """θ of eq. 5: cost of a further node, beside its GPUs. The source gives no value."""
    make_way: bool = False
    """Profile `genie`: whether a running job of class normal that saves checkpoints makes way for one that is
    urgent, prior or has a deadline, by a move or with fewer workers, where that pays. Under `penstock` it
    does unless `without` has make_way; under other profiles True is refused."""


class Contention(Value, frozen=True, kw_only=True):
    """Settings of the contention-guard. Source: CODA §V-B, V-D."""

    OMITTED = ("search", "users_cores", "eliminate", "throttle")

    search: Literal["doubling", "walk", "none"] = "doubling"
    """Search for the number of cores of running training jobs. walk: in steps of one, as in the source.
    doubling: ours, the fewest cores with 95 % of the speed. none: the cores of the placement remain."""
    users_cores: Literal["respect", "at_least", "override"] = "respect"
    """Whether a number of cores that the user named is changed, too. respect: no. at_least: ours, and that of
    profile `penstock`, a training job may get more cores where that makes it faster, never fewer. override:
    as in the source, more or fewer."""
    eliminate: bool = True
    """Whether jobs without GPUs are throttled where they slow down a training job."""
    throttle: Literal["predicted", "half"] = "predicted"
    """Number of cores taken from such a job at once where threads of the training job wait for cores. half:
    as in the source. predicted: ours, as many as the training job's slowdown requires, at least half."""


class Coda(Value, frozen=True, kw_only=True):
    """Resource arrays, for profiles `coda` and `penstock`. Source: CODA §V-C; it gives no numbers."""

    OMITTED = ("cores_per_gpu", "history_ms", "max_reclaims", "patience_ms")

    cores_per_gpu: Annotated[float, Meta(ge=0, le=MAX_CORES_PER_NODE)] = 3.0
    """Cores reserved for each GPU until there is a history."""
    history_ms: Annotated[int, Meta(ge=60_000, le=31 * 86_400_000)] = 86_400_000
    """Length of a window of the history; sizes are computed from the present window and the one before."""
    max_reclaims: Annotated[int, Meta(ge=0, le=100)] = 3
    """Maximum number of times that a job without GPUs returns borrowed cores; after that it retains them."""
    patience_ms: Annotated[int, Meta(ge=0, le=31 * 86_400_000)] = 3_600_000
    """Nodes are reserved for the first job of an array once it has waited this long without fitting."""


Stage = Literal[
    "deadlines",
    "backfill",
    "bursts",
    "groups",
    "moves",
    "prelaunch",
    "cores",
    "eliminator",
    "reclaim",
    "make_way",
]
"""Stages of profile `penstock`; each can be left out."""


class PlacerSettings(Value, frozen=True, kw_only=True, cache_hash=True):
    """Everything outside the log that a decision depends on; recorded at the start of each term."""

    OMITTED = (
        "queue_limits_gpu_s",
        "typical_tasks",
        "lease_ms",
        "batch_window_ms",
        "batch_arrivals",
        "batch_exact",
        "share_gpus",
        "grouping",
        "convergence",
        "genie",
        "coda",
        "prelaunch_wait_ms",
        "contention",
        "without",
    )

    profile: Identifier = "liquid"
    seed: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    network_weight: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """λ of Liquid §5.2 eq. 4."""
    backfill_window: Annotated[int, Meta(ge=1, le=MAX_BACKFILL_WINDOW)] = 64
    """Number of jobs from the head of the queue that may be tried."""
    max_overtakes: Annotated[int, Meta(ge=0, le=MAX_OVERTAKES)] = 256
    """Number of jobs that may be backfilled before the head of the queue; after that all jobs behind it
    wait."""
    launch_timeout_ms: Annotated[int, Meta(ge=1)] = 60_000
    """An order unanswered for this long makes its node suspect."""
    lease_ms: Milliseconds = 600_000
    """Lease of tasks placed from now on: a node that has not reached the log for this long ends them. 0: they
    continue to run, and a silent node holds them until it is fenced."""
    unschedulable_grace_ms: Annotated[int, Meta(ge=0)] = 300_000
    """A job that does not fit even the empty cell ends after this long."""
    batch_window_ms: Annotated[int, Meta(ge=0, le=MAX_BATCH_WINDOW_MS)] = 0
    """Maximum time that jobs that arrive fast wait for a batch plan; 0: no job waits."""
    batch_arrivals: Annotated[int, Meta(ge=2, le=MAX_BATCH_ARRIVALS)] = 8
    """Number of arrivals within `batch_window_ms` that counts as fast."""
    batch_exact: bool = False
    """Whether bursts are planned as in Liquid §5.3: one population, containers placed again by first fit
    alone, no exchanges (`penstock.scheduling.bursts.gga`)."""
    prelaunch_wait_ms: Annotated[int, Meta(ge=0, le=MAX_PRELAUNCH_WAIT_MS)] = 60_000
    """Maximum time that a job with `prelaunch`, launched while another one holds its GPUs, waits beyond that
    one's expected end; then it is requeued. 0: no job launches before its GPUs are free."""
    freeze_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """If more than this share of nodes is lost within `freeze_window_ms`: freeze (LAW 5)."""
    freeze_window_ms: Annotated[int, Meta(ge=0)] = 60_000
    share_gpus: Literal["never", "fits", "learned"] = "never"
    """Whether jobs without a requested share of a GPU get one where their estimate permits it
    (`penstock.ledger.derived.gpu_shares`). never: whole GPUs. fits: any jobs that fit share. learned: except
    jobs that were measured to slow each other down too much (`penstock.scheduling.place.sharing`)."""
    queue_limits_gpu_s: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(min_length=1, max_length=15),
    ] = TIRESIAS_LIMITS_GPU_S
    """For profile `tiresias`: GPU seconds at which a job leaves the first queue, the second, …; rising."""
    typical_tasks: Annotated[tuple[TypicalTask, ...], Meta(max_length=MAX_TYPICAL_TASKS)] = ()
    """For profile `fgd`: typical tasks, for which nodes are to remain useful; empty: taken from the jobs in
    the cell."""
    grouping: Grouping = Grouping()
    """For profiles `muri-s` and `muri-l`."""
    convergence: Convergence = Convergence()
    """For profiles `specon` and `balance`."""
    genie: Genie = Genie()
    """For profile `genie`; of `penstock` its θ."""
    contention: Contention | None = None
    """For any profile: switches the contention-guard on, with these settings. None: as the profile has it."""
    coda: Coda = Coda()
    """For profile `coda`; for `penstock` without `patience_ms`."""
    without: Annotated[tuple[Stage, ...], Meta(max_length=16)] = ()
    """Stages that profile `penstock` leaves out, for ablation. deadlines: GENIE's order and shapes, and
    make_way with them; backfill: nodes reserved for the job that has waited longest; bursts: plans by the
    grouping genetic algorithm; groups: interleaving, and stops for it; moves: load balancing; prelaunch:
    launches before GPUs are free; cores: the search for the number of cores of running training jobs;
    eliminator: throttling of jobs that slow one down; reclaim: cores reserved for GPUs, which jobs without
    GPUs borrow and return; make_way: running jobs that make way for urgent ones and those with a deadline,
    which needs deadlines."""
