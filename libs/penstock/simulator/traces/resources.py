"""Resource request of a trace's job, per worker. Requests that the trace does not have are small, so that
only GPUs limit."""

from collections.abc import Iterator, Sequence
from math import ceil, floor

from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector
from penstock.simulator.traces.jobs import Shape, TraceJob, gang_of
from penstock_services.estimator.core.resources.estimate import estimate

COMMAND = ("simulated",)
HOST_MEMORY_PER_GPU_MIB = 1_024
GPU_MEMORY_MIB = 1_024


def cores_of(job: TraceJob, workers: int, slices_per_core: int) -> int:
    """Cores of one worker whose job has a number of cores, ≥ 1. Whole cores are rounded up: half a core
    cannot be allocated.

    Slices are rounded to the nearest: the error is at most 1/16 of a core and evens out, while rounding up
    would ask for more cores than the trace does (openb: 0.4 points of allocation under dot-product).
    """
    cores = round((job.cores or 0.0) * slices_per_core / workers, 6)
    return max(1, ceil(cores) if slices_per_core == 1 else floor(cores + 0.5))


def request_of(job: TraceJob, shape: Shape, slices_per_core: int) -> ResourceRequest:
    """Request of one worker; cores in slices."""
    gpus = shape.gpus_per_worker
    share_milli = None if job.gpu_share_milli == WHOLE_GPU else job.gpu_share_milli
    cores = slices_per_core * max(1, gpus)
    if job.cores is not None:
        cores = cores_of(job, shape.workers, slices_per_core)
    memory_mib = HOST_MEMORY_PER_GPU_MIB * max(1, gpus)
    if job.host_memory_mib is not None:
        memory_mib = -(-job.host_memory_mib // shape.workers)
    gpu_memory_mib = GPU_MEMORY_MIB * (share_milli or WHOLE_GPU) // WHOLE_GPU
    return ResourceRequest(
        gpus=gpus,
        cores=cores,
        host_memory_mib=max(1, memory_mib),
        gpu_memory_mib=max(1, job.gpu_memory_mib or gpu_memory_mib),
        gpu_share_milli=share_milli,
    )


def workers_of(
    jobs: Sequence[TraceJob], gpus_per_node: int, slices_per_core: int, *, single_gpu_workers: bool
) -> Iterator[tuple[ResourceVector, tuple[str, ...]]]:
    """All workers of the trace: (resources, cores in slices; allowed GPU models)."""
    vectors: dict[ResourceRequest, ResourceVector] = {}
    for job in jobs:
        shape = gang_of(job, gpus_per_node, single_gpu_workers)
        request = request_of(job, shape, slices_per_core)
        if request not in vectors:
            vectors[request] = estimate(JobSpec(command=COMMAND, resources=request), ()).worker
        for _ in range(shape.workers):
            yield vectors[request], job.gpu_models
