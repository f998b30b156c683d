"""Summary statistics of a trace: the figures of `penstock traces describe`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob

PERCENTILES = (1, 10, 25, 50, 75, 90, 99)
SHARED = "shared"
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Times:
    """Distribution of times in seconds. `percentiles`: per cent → value."""

    mean: float
    least: float
    most: float
    percentiles: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Size:
    """The jobs with one number of GPUs; `shared`: with a part of one."""

    gpus: str
    jobs: int
    gpu_hours: float


@dataclass(frozen=True, slots=True)
class Description:
    """A trace in figures; times in seconds."""

    jobs: int
    first_s: float
    span_s: float
    """Time from the first arrival to the last."""
    run_s: Times | None
    """Run times of the jobs for which they are known; None if there are none."""
    unknown_run_times: int
    gpu_hours: float
    """GPU hours of the jobs whose run time is known."""
    asked_gpus: float
    """GPUs requested by all jobs together."""
    largest_gpus: int
    sizes: Sequence[Size]
    models: Mapping[str, int]
    """Model → jobs, most frequent first; empty if the trace names none."""
    owners: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a trace on a cluster."""

    gpus: int
    asked: float
    """Requested GPUs of all jobs together, over the cluster's GPUs."""
    work: float | None
    """GPU seconds over GPUs × span: above 1 the queue only grows; None if no run time or no span is known."""
    misfits: int
    """Jobs that can never run there."""


def describe(jobs: Sequence[TraceJob]) -> Description:
    """Describes a trace. `jobs`: at least one, by arrival."""
    known = sorted(job.duration_s for job in jobs if job.duration_s > 0)
    groups: dict[tuple[int, int], list[TraceJob]] = {}
    for job in jobs:
        shared = job.gpu_share_milli < WHOLE_GPU_MILLI
        groups.setdefault((0, 1) if shared else (1, job.gpus), []).append(job)
    sizes = [
        Size(SHARED if not whole else str(gpus), len(some), sum(map(_gpu_hours, some)))
        for (whole, gpus), some in sorted(groups.items())
    ]
    return Description(
        jobs=len(jobs),
        first_s=jobs[0].submit_s,
        span_s=jobs[-1].submit_s - jobs[0].submit_s,
        run_s=_times(known) if known else None,
        unknown_run_times=len(jobs) - len(known),
        gpu_hours=sum(map(_gpu_hours, jobs)),
        asked_gpus=sum(job.whole_gpus for job in jobs),
        largest_gpus=max(job.gpus for job in jobs),
        sizes=sizes,
        models=_counted(job.model for job in jobs),
        owners=_counted(job.owner for job in jobs),
    )


def load_on(gpus: int, misfits: int, found: Description) -> Load:
    """Load on a cluster with `gpus` GPUs."""
    known = found.run_s is not None and found.span_s > 0 and gpus
    work = found.gpu_hours * HOUR_S / (gpus * found.span_s) if known else None
    return Load(gpus, found.asked_gpus / gpus if gpus else 0.0, work, misfits)


def _gpu_hours(job: TraceJob) -> float:
    return job.whole_gpus * job.duration_s / HOUR_S


def _times(known: Sequence[float]) -> Times:
    """Distribution of `known`: rising, at least one."""
    last = len(known) - 1
    percentiles = {f"p{percent}": known[round(last * percent / 100)] for percent in PERCENTILES}
    return Times(sum(known) / len(known), known[0], known[-1], percentiles)


def _counted(names: Iterable[str]) -> Mapping[str, int]:
    found = Counter(name for name in names if name)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
