"""A job as a trace has it: what it asked for and what was measured of it. Times in seconds from the trace's start."""

from typing import NamedTuple


class Stages(NamedTuple):
    """One iteration on what the job asked for, and its parts by resource; ms, as measured."""

    iteration_ms: float
    storage_cpu_ms: float
    gpu_ms: float
    network_ms: float


class TraceJob(NamedTuple):
    """One row. `duration_s`: its run time alone on what it asked for, as the trace tells it."""

    job_id: str
    submit_s: float
    duration_s: float
    gpus: int
    model: str = ""
    batch_size: int | None = None
    owner: str = ""
    iterations: int | None = None
    stages: Stages | None = None


class Shape(NamedTuple):
    """A gang as nodes can hold it."""

    workers: int
    gpus_per_worker: int


def shape_of(gpus: int, gpus_per_node: int) -> Shape:
    """One worker if a node can hold the job, else equal workers, as large as divides it."""
    if gpus <= gpus_per_node:
        return Shape(1, gpus)
    each = max(size for size in range(1, gpus_per_node + 1) if gpus % size == 0)
    return Shape(gpus // each, each)
