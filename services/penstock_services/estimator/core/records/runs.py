"""Finished run as stored for learning: the job, its allocation, its estimate, and the measurements."""

from typing import Literal, NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import MAX_CORES_PER_NODE, Category, Estimate, Role
from penstock.sdk.progress import PROFILE_ITERATIONS
from penstock_services.estimator.core.records.history import Run, key_of

ASKABLE = ("gpus", "cores", "host_memory_mib", "gpu_memory_mib", "bandwidth_mbps")
MAX_RUN_MS = 366 * 86_400_000  # a year: a longer time is a clock error
MAX_HOST_MEMORY_MIB = 1 << 30  # the wire types' range
MEMORY_SLACK = 1.05  # drivers report a little more than the card's nominal memory


class EstimateSummary(NamedTuple):
    """The estimate with which the job ran."""

    tier: str
    model_version: str | None
    confidence: float
    run_ms: int | None
    cores: int
    host_memory_mib: int
    gpu_memory_mib: int
    gpu_utilisation_percent: float


class JobInfo(NamedTuple):
    """The job's fields that learning needs; small, since there is one for every live job."""

    key: bytes
    owner: str
    model: str | None
    batch_size: int | None
    workers: int
    parameter_servers: int
    asked: tuple[str, ...]
    """Fields named in the user's request."""
    category: Category | None = None
    iterations: int | None = None
    target_loss: float | None = None
    profiled: bool = False
    """It ends after as many iterations as its steps are measured in, so that its run time does not count for
    any other run."""


class Card(NamedTuple):
    """The GPUs of a node. `model` is empty unless all are of one; `memory_mib` of the smallest."""

    model: str
    memory_mib: int


NO_CARD = Card("", 0)


class Allocation(NamedTuple):
    """Allocation of each worker of an attempt."""

    gpus: int
    gpu_share_milli: int
    cores: int
    card: Card


class Steps(NamedTuple):
    """Step times and losses of a job; their totals are in `Run`."""

    placement: tuple[int, ...] = ()
    """GPUs on each node of its last attempt, in ring order; empty: it had none, or only a part of one."""
    windows_ms: tuple[float, ...] = ()
    """Mean step of equally long windows there."""
    curve: tuple[tuple[float, float], ...] = ()
    """(iteration, loss), of all attempts, rising."""


class EtaAtHalf(NamedTuple):
    """The ETA in the ledger when half of the last attempt was over, and the true remaining time."""

    left_ms: float
    low_ms: float
    high_ms: float
    actual_ms: float


class FinishedRun(NamedTuple):
    """One succeeded job, or a task that ran out of memory. `rejected`: why nothing else may be learned from
    it; empty: it is sound."""

    seq: int
    """Number of the ledger record that ended it."""
    job_id: str
    info: JobInfo
    allocation: Allocation
    estimate: EstimateSummary | None
    measured: Run
    rejected: str
    steps: Steps | None = None
    """None: it reported nothing usable."""
    steps_rejected: str = ""
    """Why nothing may be learned from its steps although the rest is sound."""
    eta: EtaAtHalf | None = None
    """None: nothing was published in time."""
    limit_mib: int = 0
    """The worker's cap on host memory; where a task ran out of memory, that task's limit: a lower bound of
    its need."""
    exhausted: Literal["", "host_memory", "gpu_memory"] = ""
    """Which memory, where a task ran out of it; rows of earlier versions are of host memory."""
    role: Role = "worker"
    """Role of that task."""
    corrected: str = ""
    """By what its run time was corrected; empty: it is as measured.
    The run's disturbances are in `measured`."""


def job_info(spec: JobSpec) -> JobInfo:
    """Of a moldable job with its fewest workers; an attempt of it has another, of `spec.shaped`."""
    spec = spec.least
    return JobInfo(
        key=key_of(spec),
        owner=spec.owner,
        model=spec.model,
        batch_size=spec.batch_size,
        workers=spec.workers,
        parameter_servers=spec.parameter_servers,
        asked=tuple(name for name in ASKABLE if getattr(spec.resources, name) is not None),
        category=spec.category,
        iterations=spec.iterations,
        target_loss=spec.target_loss,
        profiled=PROFILE_ITERATIONS in spec.env,
    )


def estimate_summary(estimate: Estimate) -> EstimateSummary:
    worker = estimate.worker
    return EstimateSummary(
        estimate.tier,
        estimate.model_version,
        estimate.confidence,
        estimate.run_ms,
        worker.cores,
        worker.host_memory_mib,
        worker.gpu_memory_mib,
        worker.gpu_utilisation_percent,
    )


def implausible(measured: Run, allocation: Allocation) -> str:
    """Why these measurements are implausible; empty if they are plausible. One broken sensor must not affect
    any estimate.

    NaN stands for *not measured*, which is plausible.
    """
    memory_mib, card_mib = measured.gpu_memory_mib, allocation.card.memory_mib
    if card_mib and memory_mib > card_mib * MEMORY_SLACK:
        return f"gpu_memory_mib: {memory_mib:.0f} on a card of {card_mib}"
    if measured.host_memory_mib > MAX_HOST_MEMORY_MIB:
        return f"host_memory_mib: {measured.host_memory_mib:.0f} is more than any machine has"
    for name in ("gpu_utilisation_percent", "gpu_utilisation_std"):
        value = getattr(measured, name)
        if value > 100 or value < 0:
            return f"{name}: {value:g} is no percentage"
    if measured.busy_cores > MAX_CORES_PER_NODE:
        return f"busy_cores: {measured.busy_cores:.0f} is more than any machine has"
    if measured.run_ms > MAX_RUN_MS:
        return f"run_ms: {measured.run_ms:.0f} is more than a year"
    if not measured.run_ms > 0:
        return "run_ms: the node's clock stepped back, or nothing was measured"
    return ""
