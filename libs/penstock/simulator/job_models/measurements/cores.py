"""Job model `cpu`: throughput of models by cores and host memory, from measurements (Synergy, OSDI '22).

The table has, per model, number of GPUs, and cores and memory per GPU, the throughput relative to that at
three cores: 1 – 24 cores, and five sizes of memory. Seven models were also measured on 2 and 4 GPUs; for
other numbers of GPUs the figures of one GPU count (CODA §5a: the demand is linear in GPUs on one node).
`speed` is the figure at the given resources over that at the requested ones; a job that asked for no cores
counts as one that asked for three per GPU, a job that asked for no memory as one with plenty. Between
measured points it is linear, first over cores, then over memory; it is constant beyond 24 cores or 250 GB.

Not measured, and refused with `NotMeasured`: other models, less than one core per GPU, less than the smallest
memory.

Jobs without GPUs slow down with fewer cores than they asked for by Amdahl's law: a run on c cores takes (1 −
p) + p / c of one on a single core. No table here measured a job without GPUs, so p is an assumption, the same
for all (`PARALLEL`). More cores than requested do not speed it up: it has as many threads as it asked for.
"""

from collections.abc import Mapping, Sequence

from penstock.simulator.job_models.measurements.interpolation import interpolate
from penstock.simulator.job_models.model import JobModel, Neighbour, NotMeasured, Placement
from penstock.simulator.traces.jobs import TraceJob

BASE_CORES = 3.0
"""Cores per GPU at which the table is 1."""
MIB_PER_GB = 1_000_000_000 / (1 << 20)
TOLERANCE = 1e-9
PARALLEL = 0.95
"""Part of the work of a job without GPUs that runs on all its cores. An assumption: preprocessing and
inference are parallel over samples, reading and writing are not."""

Curve = Sequence[tuple[float, float]]
"""(memory in GB, relative throughput), rising."""
Sensitivity = Mapping[tuple[str, int], Sequence[tuple[float, Curve]]]
"""(model, GPUs) → (cores, curve over memory) per GPU, by rising cores; every model with one GPU."""


class Cpu(JobModel):
    """`slices_per_core`: nodes' units per core. `parallel`: p of jobs without GPUs, 0 – 1."""

    name = "cpu"

    def __init__(self, table: Sensitivity, slices_per_core: int = 1, parallel: float = PARALLEL) -> None:
        self._table = table
        self._parallel = parallel
        self._slices_per_core = slices_per_core
        self._relative: dict[tuple[str, float, float | None, int], float] = {}
        """Results of `relative`."""

    def work_s(self, job: TraceJob) -> float:
        """The job's size, see `JobModel`. Raises `NotMeasured`."""
        if job.gpus:
            self._as_asked(job)
        return job.duration_s

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        cores = sum(allocation.cores for allocation in placement.values()) / self._slices_per_core
        if job.gpus == 0:
            return amdahl(cores, job.cores or 1.0, self._parallel)
        memory_gb = None
        if job.host_memory_mib is not None:
            memory_gb = (
                sum(allocation.host_memory_mib for allocation in placement.values()) / MIB_PER_GB / job.gpus
            )
        return self.relative(job.model, cores / job.gpus, memory_gb, job.gpus) / self._as_asked(job)

    def relative(self, model: str, cores: float, memory_gb: float | None = None, gpus: int = 1) -> float:
        """Throughput over that at three cores and plenty of memory; cores and memory per GPU. `memory_gb`
        None: plenty."""
        key = model, cores, memory_gb, gpus
        if key not in self._relative:
            self._relative[key] = self._interpolated(*key)
        return self._relative[key]

    def _interpolated(self, model: str, cores: float, memory_gb: float | None, gpus: int) -> float:
        rows = self._table.get((model, gpus)) or self._table.get((model, 1))
        if rows is None:
            known = ", ".join(sorted({known for known, _ in self._table}))
            raise NotMeasured(
                f"cpu: {model or 'a job without a model'} was never measured; there are {known}"
            )
        if cores < rows[0][0] - TOLERANCE:
            raise NotMeasured(
                f"cpu: {model} with {cores:g} cores per GPU; the fewest measured are {rows[0][0]:g}"
            )
        points = [(at, _over_memory(model, curve, memory_gb)) for at, curve in rows]
        return interpolate(points, cores)[0]

    def _as_asked(self, job: TraceJob) -> float:
        cores = BASE_CORES if job.cores is None else job.cores / job.gpus
        memory_gb = None if job.host_memory_mib is None else job.host_memory_mib / MIB_PER_GB / job.gpus
        return self.relative(job.model, cores, memory_gb, job.gpus)


def amdahl(cores: float, asked: float, parallel: float) -> float:
    """Speed on `cores` cores over that on the `asked` ones, at most 1. `parallel`: 0 – 1."""
    if cores >= asked - TOLERANCE:
        return 1.0
    return ((1 - parallel) + parallel / asked) / ((1 - parallel) + parallel / cores)


def _over_memory(model: str, curve: Curve, memory_gb: float | None) -> float:
    if memory_gb is None:
        return curve[-1][1]
    if memory_gb < curve[0][0] - TOLERANCE:
        raise NotMeasured(
            f"cpu: {model} with {memory_gb:.1f} GB per GPU; the least measured is {curve[0][0]:g}"
        )
    return interpolate(curve, memory_gb)[0]
