"""One job of a trace: requested resources and measured times. Times in seconds from the trace's start."""

from typing import NamedTuple

WHOLE_GPU_MILLI = 1_000


class Stages(NamedTuple):
    """Measured times of one iteration on the requested resources, and of its parts by resource; ms."""

    iteration_ms: float
    storage_cpu_ms: float
    gpu_ms: float
    network_ms: float


class TraceJob(NamedTuple):
    """One job. `duration_s`: its run time alone on the requested resources; 0: not in the trace."""

    job_id: str
    submit_s: float
    duration_s: float
    gpus: int
    """GPUs of all its workers; 0: it only computes on cores."""
    model: str = ""
    batch_size: int | None = None
    owner: str = ""
    iterations: int | None = None
    stages: Stages | None = None
    cores: float | None = None
    """Cores of all its workers, like its memory; fractions are allowed.
    None: not given, and then only GPUs limit."""
    host_memory_mib: int | None = None
    gpu_memory_mib: int | None = None
    """Memory on each of its GPUs."""
    gpu_share_milli: int = WHOLE_GPU_MILLI
    """Thousandths of its GPU; less than a whole one only with one GPU."""
    gpu_models: tuple[str, ...] = ()
    """Allowed GPU models; empty: any."""
    workers: int | None = None
    """Number of workers; None: as few as the nodes allow."""
    min_workers: int | None = None
    """Set for a moldable job: it starts with any number from this to `workers`, and its batch size is that of
    all workers. None: with `workers` exactly."""
    parameter_servers: int = 0
    server_gpus: int = 0
    """GPUs of each parameter server, beside those of the workers."""
    patience_s: float | None = None
    """Waiting time after which it leaves without being placed; None: it waits for ever."""
    inference: bool = False
    """It runs only the forward pass: its workers do not communicate."""
    memory_bandwidth: float = 0.0
    """Memory bandwidth of all its workers, as a share of one node's, 0 – 1."""
    labels: tuple[tuple[str, str], ...] = ()
    """Further attributes: service class, category."""

    @property
    def whole_gpus(self) -> float:
        """GPUs by share: half a GPU is 0.5."""
        return self.gpus * self.gpu_share_milli / WHOLE_GPU_MILLI


class Shape(NamedTuple):
    """Shape of a gang: number of workers, and GPUs of each."""

    workers: int
    gpus_per_worker: int


def shape_of(gpus: int, gpus_per_node: int) -> Shape:
    """One worker if a node can hold the job, else equal workers of the largest size that divides it."""
    if gpus <= gpus_per_node:
        return Shape(1, gpus)
    each = max(size for size in range(1, gpus_per_node + 1) if gpus % size == 0)
    return Shape(gpus // each, each)


def gang_of(job: TraceJob, gpus_per_node: int, single_gpu_workers: bool = False) -> Shape:
    """The job's workers: as submitted, or a worker per GPU, or as few as nodes can hold."""
    if job.workers is not None:
        return Shape(job.workers, job.gpus // job.workers)
    if single_gpu_workers and job.gpus:
        return Shape(job.gpus, 1)
    return shape_of(job.gpus, gpus_per_node)
