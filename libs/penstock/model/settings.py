"""Settings of a cell: what a decision depends on and stands in no log."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.types import (
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
MAX_BATCH_ARRIVALS = 256  # whose times the state keeps
MAX_TYPICAL_TASKS = 256  # openb's pod files need 33 groups for 95 % of their tasks


class TypicalTask(Value, frozen=True, kw_only=True):
    """A kind of task that the cell sees often; memory is left out."""

    OMITTED = ("gpu_share_milli",)

    cores: Annotated[int, Meta(ge=0, le=MAX_CORES_PER_NODE)]
    gpus: Annotated[int, Meta(ge=0, le=MAX_GPUS_PER_NODE)]
    gpu_share_milli: GpuShare = WHOLE_GPU
    gpu_models: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ()
    """Allowed ones; empty: any."""
    count: Annotated[int, Meta(ge=1, le=1_000_000)]
    """How often it was seen; only ratios matter."""


class Grouping(Value, frozen=True, kw_only=True):
    """What of Muri's grouping is on, for profiles `muri-s` and `muri-l`: each can be left out, to show what it brings."""

    OMITTED = ("split", "matching", "worst_order", "max_members")

    split: bool = True
    """A group whose iteration would take longer than its members' one after the other is not formed."""
    matching: bool = True
    """False: jobs are grouped as they come in order."""
    worst_order: bool = False
    """Members rotate in the worst order."""
    max_members: Annotated[int, Meta(ge=2, le=4)] = 4


class Convergence(Value, frozen=True, kw_only=True):
    """When a job's loss counts as converging, for profile `specon`. Source: SpeCon §VI-C, the settings of most experiments."""

    OMITTED = ("alpha", "interval_ms")

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.01
    """Of the range of losses seen so far: who gains more within an interval progresses."""
    interval_ms: Annotated[int, Meta(ge=1_000, le=86_400_000)] = 30_000


class Genie(Value, frozen=True, kw_only=True):
    """How profile `genie` chooses ⟨nodes, GPUs⟩: Alg. 1, or one of its baselines."""

    OMITTED = ("choose", "theta", "make_way")

    choose: Literal["qos", "protect", "ratio", "performance", "most", "least"] = "qos"
    """qos: Alg. 1. protect: ours, who is late already takes few GPUs and lets those pass who can still be in time; who may be late gets the best odds while no other job waits. ratio, performance, most, least: CERPre,
    PerfPre, MaxOcc, MinOcc. Source: GENIE §IV-A."""
    theta: Annotated[float, Meta(ge=0, le=1_000)] = 0.5
    """θ of eq. 5: what another node costs, beside its GPUs. The source gives none."""
    make_way: bool = False
    """Whether a running job of class normal that saves goes on elsewhere, or with fewer workers, for one that is urgent, prior or has a deadline, where that pays."""


class Contention(Value, frozen=True, kw_only=True):
    """What the contention-guard does. Source: CODA §V-B, V-D."""

    OMITTED = ("search", "users_cores", "eliminate", "throttle")

    search: Literal["doubling", "walk", "none"] = "doubling"
    """How the cores of running trainings are searched for. walk: in steps of one, as in the source. doubling: ours, the fewest that keep 95 % of the
    speed. none: they stay as they were placed."""
    users_cores: Literal["respect", "at_least", "override"] = "respect"
    """Whether cores that a user named are searched for, too. respect: they stay. at_least: ours, and that of profile `penstock`, a training may get more of them where
    that makes it faster, never fewer. override: as in the source, more or fewer."""
    eliminate: bool = True
    """Jobs without GPUs are slowed where they slow a training."""
    throttle: Literal["predicted", "half"] = "predicted"
    """How many cores are taken from them at once where threads of the training wait for cores. half: as in the source. predicted: ours, as many as the
    training's loss asks for, half at least."""


class Coda(Value, frozen=True, kw_only=True):
    """Resource arrays, for profiles `coda` and `penstock`. Source: CODA §V-C; it gives no numbers."""

    OMITTED = ("cores_per_gpu", "history_ms", "max_reclaims", "patience_ms")

    cores_per_gpu: Annotated[float, Meta(ge=0, le=MAX_CORES_PER_NODE)] = 3.0
    """Cores reserved for each GPU until there is a history."""
    history_ms: Annotated[int, Meta(ge=60_000, le=31 * 86_400_000)] = 86_400_000
    """Length of a window of the history; sizes rest on the present one and the one before."""
    max_reclaims: Annotated[int, Meta(ge=0, le=100)] = 3
    """A job without GPUs gives back borrowed cores at most so often; then it keeps what it is given."""
    patience_ms: Annotated[int, Meta(ge=0, le=31 * 86_400_000)] = 3_600_000
    """The first in an array that has waited so long without finding room gets nodes kept."""


Stage = Literal[
    "deadlines", "backfill", "bursts", "groups", "moves", "prelaunch", "cores", "eliminator", "reclaim"
]
"""Of profile `penstock`, each of which can be left out."""


class PlacerSettings(Value, frozen=True, kw_only=True):
    """Everything outside the log that a decision depends on; recorded at the start of each term."""

    OMITTED = (
        "queue_limits_gpu_s",
        "typical_tasks",
        "lease_ms",
        "batch_window_ms",
        "batch_arrivals",
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
    """So many jobs from the head of the queue may be tried."""
    max_overtakes: Annotated[int, Meta(ge=0, le=MAX_OVERTAKES)] = 256
    """So many jobs may be backfilled before the head of the queue until everybody behind it waits."""
    launch_timeout_ms: Annotated[int, Meta(ge=1)] = 60_000
    """An order unanswered for so long makes its node Suspect."""
    lease_ms: Milliseconds = 600_000
    """Of tasks placed from now on: a node that has not reached the log for so long ends them. 0: they run on, and a silent node
    keeps them until it is fenced."""
    unschedulable_grace_ms: Annotated[int, Meta(ge=0)] = 300_000
    """A job that fits on no node even when the cell is empty ends after so long."""
    batch_window_ms: Annotated[int, Meta(ge=0, le=MAX_BATCH_WINDOW_MS)] = 0
    """Jobs that arrive fast wait for a batch plan, at most so long; 0: nobody does."""
    batch_arrivals: Annotated[int, Meta(ge=2, le=MAX_BATCH_ARRIVALS)] = 8
    """So many arrivals within `batch_window_ms` are fast."""
    prelaunch_wait_ms: Annotated[int, Meta(ge=0, le=MAX_PRELAUNCH_WAIT_MS)] = 60_000
    """A job with `prelaunch` that launches where another comes to its end waits at most so long beyond the end that was expected, and is
    then given back to the queue; 0: none launches before its GPUs are free."""
    freeze_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """If more than this share of nodes is lost within `freeze_window_ms`: freeze (LAW 5)."""
    freeze_window_ms: Annotated[int, Meta(ge=0)] = 60_000
    share_gpus: Literal["never", "fits", "learned"] = "never"
    """Jobs that did not say how much of a GPU they want get a part of one where their estimate says so (`penstock.ledger.gpu_shares`).
    never: whole ones. fits: whoever fits meets. learned: not those of whom it was measured that they slow each other too much (`penstock.policies.sharing`)."""
    queue_limits_gpu_s: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(min_length=1, max_length=15),
    ] = TIRESIAS_LIMITS_GPU_S
    """Of profile `tiresias`: a job with so many GPU seconds leaves the first queue, the second, …; rising."""
    typical_tasks: Annotated[tuple[TypicalTask, ...], Meta(max_length=MAX_TYPICAL_TASKS)] = ()
    """Of profile `fgd`: the tasks for which nodes shall stay useful; empty: judged by the jobs in the cell."""
    grouping: Grouping = Grouping()
    """Of profiles `muri-s` and `muri-l`."""
    convergence: Convergence = Convergence()
    """Of profiles `specon` and `balance`."""
    genie: Genie = Genie()
    """Of profile `genie`."""
    contention: Contention | None = None
    """Of any profile: the contention-guard acts, and how. None: as the profile has it."""
    coda: Coda = Coda()
    """Of profile `coda`; of `penstock` but for `patience_ms`."""
    without: Annotated[tuple[Stage, ...], Meta(max_length=16)] = ()
    """Stages that profile `penstock` leaves out, to show what each brings. deadlines: GENIE's order and shapes; backfill: nodes reserved for the job that waits longest; bursts: plans by
    the grouping genetic algorithm; groups: interleaving, and stops for it; moves: load balancing; prelaunch: launches before GPUs are free; cores: the search for cores of running trainings; eliminator: slowing who slows one; reclaim: cores
    reserved for GPUs, which jobs without GPUs borrow and give back."""
