"""Own settings of the papers' profiles: what `PlacerSettings.profile_settings` may hold, by profile."""

from typing import Annotated, Literal

from msgspec import Meta

from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    MAX_GPUS_PER_NODE,
    WHOLE_GPU,
    GpuShare,
    Identifier,
    Value,
)
from penstock.scheduling.order.genie import THETA

TIRESIAS_LIMITS_GPU_S = (3_250.0, 7_200.0)  # three queues. Source: the settings of Muri's experiments
MAX_TYPICAL_TASKS = 256  # openb's pod files need 33 groups for 95 % of their tasks


class LiquidSettings(Value, frozen=True, kw_only=True):
    """Of `liquid` and `liquid-levels`."""

    OMITTED = ("batch_exact",)

    batch_exact: bool = False
    """Whether bursts are planned as in Liquid §5.3: one population, containers placed again by first fit
    alone, no exchanges (`penstock_papers.liquid`)."""


class TiresiasSettings(Value, frozen=True, kw_only=True):
    """Of `tiresias` and `tiresias-fifo`."""

    OMITTED = ("queue_limits_gpu_s",)

    queue_limits_gpu_s: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(min_length=1, max_length=15),
    ] = TIRESIAS_LIMITS_GPU_S
    """GPU seconds at which a job leaves the first queue, the second, …; rising."""


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


class FgdSettings(Value, frozen=True, kw_only=True):
    """Of `fgd`."""

    OMITTED = ("typical_tasks",)

    typical_tasks: Annotated[tuple[TypicalTask, ...], Meta(max_length=MAX_TYPICAL_TASKS)] = ()
    """Typical tasks, for which nodes are to remain useful; empty: taken from the jobs in the cell."""


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


class MuriSettings(Value, frozen=True, kw_only=True):
    """Of `muri-s` and `muri-l`."""

    OMITTED = ("grouping",)

    grouping: Grouping = Grouping()


class Genie(Value, frozen=True, kw_only=True):
    """How profile `genie` chooses ⟨nodes, GPUs⟩: Alg. 1, or one of its baselines."""

    OMITTED = ("choose", "theta", "make_way")

    choose: Literal["qos", "protect", "ratio", "performance", "most", "least"] = "qos"
    """qos: Alg. 1. protect: ours, a job that is late already takes few GPUs and comes after jobs that can
    still be in time; a job that may be late gets the placement with the highest probability of being in time
    while no other job waits. ratio, performance, most, least: CERPre, PerfPre, MaxOcc, MinOcc. Source: GENIE
    §IV-A."""
    theta: Annotated[float, Meta(ge=0, le=1_000)] = THETA
    """θ of eq. 5: cost of a further node, beside its GPUs. The source gives no value."""
    make_way: bool = False
    """Whether a running job of class normal that saves checkpoints makes way for one that is urgent, prior or
    has a deadline, by a move or with fewer workers, where that pays."""


class GenieSettings(Value, frozen=True, kw_only=True):
    """Of `genie`."""

    OMITTED = ("genie",)

    genie: Genie = Genie()


class CodaSettings(Value, frozen=True, kw_only=True):
    """Of `coda`, beside the cell's setting `coda`."""

    OMITTED = ("patience_ms",)

    patience_ms: Annotated[int, Meta(ge=0, le=31 * 86_400_000)] = 3_600_000
    """Nodes are reserved for the first job of an array once it has waited this long without fitting."""
