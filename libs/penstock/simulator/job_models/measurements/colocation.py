"""Job model `colocation`: measured steps per second of 26 configurations on three GPU types (Gavel, OSDI
'20).

Two tables, both per GPU type, model and batch size:
- *isolated*: on 1, 2, 4 or 8 GPUs, consolidated (as few nodes as hold the job) or spread (more nodes);
- *pairs*: two jobs that share the same GPUs, both with the same number of them.

`speed` is the steps per second in the job's placement, over those alone and consolidated on the GPU type that
it asked for. Alone it is the isolated figure; with one other job on its GPUs the pair's, times the slowdown
by spreading alone (pairs were only measured consolidated: an assumption).

Not measured, and refused with `NotMeasured`: three and more jobs on a GPU, pairs with different numbers of
GPUs, pairs whose table entry is 0 (they did not run together, mostly for lack of memory), other models, batch
sizes, GPU counts and types. With `split` unmeasured sharing is treated as a slice of time instead: the job's
own share of the GPU, or an equal one where whole GPUs are shared. That is an assumption; no table measures
it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from penstock.simulator.job_models.model import JobModel, Neighbour, NotMeasured, Placement
from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob


class Config(NamedTuple):
    """A measured configuration; `batch` is None for models without a choice of it."""

    gpu: str
    """GPU type, in small letters."""
    model: str
    batch: int | None
    gpus: int

    def __str__(self) -> str:
        batch = "" if self.batch is None else f" with batch {self.batch}"
        return f"{self.model}{batch} on {self.gpus} {self.gpu}"


@dataclass(frozen=True, slots=True)
class Throughputs:
    """Measured steps per second, > 0; a missing entry was not measured."""

    consolidated: Mapping[Config, float]
    spread: Mapping[Config, float]
    pairs: Mapping[tuple[Config, Config], float]
    """(job, the other) → steps per second of the first."""

    @property
    def gpu_types(self) -> frozenset[str]:
        return frozenset(config.gpu for config in self.consolidated)


class Colocation(JobModel):
    """`gpu_of`: node → GPU type; other nodes have `gpu`."""

    name = "colocation"
    neighbours_matter = True

    def __init__(
        self,
        table: Throughputs,
        gpu: str,
        gpu_of: Mapping[str, str],
        gpus_per_node: int,
        *,
        split: bool = False,
    ) -> None:
        self._table = table
        self._gpu = gpu
        self._gpu_of = gpu_of
        self._gpus_per_node = max(1, gpus_per_node)
        self._split = split

    def work_s(self, job: TraceJob) -> float:
        """Time of its iterations alone, consolidated, on the type that it asked for; without iterations its
        run time."""
        steps_per_s = self._asked(job)
        return job.duration_s if job.iterations is None else job.iterations / steps_per_s

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        alone = self._alone(job, placement)
        together = [other for other in neighbours if _shares_gpu(placement, other.placement)]
        return alone * self._left_by(job, placement, together) / self._asked(job)

    def network_share(self, job: TraceJob, placement: Placement) -> float:
        """Share of a step that spreading adds; 0 if spread is not slower."""
        if not self._is_spread(placement):
            return 0.0
        config = self._config(job, placement)
        return max(
            0.0, 1.0 - self._measured(self._table.spread, config, "spread") / self._consolidated(config)
        )

    def _asked(self, job: TraceJob) -> float:
        known = [gpu.lower() for gpu in job.gpu_models if gpu.lower() in self._table.gpu_types]
        gpu = known[0] if known else self._gpu
        return self._consolidated(Config(gpu, job.model, job.batch_size, job.gpus))

    def _alone(self, job: TraceJob, placement: Placement) -> float:
        config = self._config(job, placement)
        if self._is_spread(placement):
            return self._measured(self._table.spread, config, "spread")
        return self._consolidated(config)

    def _left_by(self, job: TraceJob, placement: Placement, together: Sequence[Neighbour]) -> float:
        """Share of its speed beside the other jobs on its GPUs, 0 – 1."""
        if not together:
            return 1.0
        config = self._config(job, placement)
        message = f"{len(together) + 1} jobs on one GPU"
        if len(together) == 1:
            other = self._config(together[0].job, together[0].placement)
            found = self._table.pairs.get((config, other))
            if found is not None:
                return found / self._consolidated(config)
            message = f"{config} together with {other}"
        if not self._split:
            raise NotMeasured(f"colocation: {message} was never measured; {SPLIT_HELPS}")
        share_milli = min(allocation.share_milli for allocation in placement.values())
        return share_milli / WHOLE_GPU_MILLI if share_milli < WHOLE_GPU_MILLI else 1 / (len(together) + 1)

    def _config(self, job: TraceJob, placement: Placement) -> Config:
        """Its configuration on the GPUs that it holds. On nodes of several types the slowest one counts."""
        gpus = _held(placement)
        types = sorted({self._gpu_of.get(node_id, self._gpu) for node_id in placement})
        configs = [Config(gpu, job.model, job.batch_size, gpus) for gpu in types]
        return configs[0] if len(configs) == 1 else min(configs, key=self._consolidated)

    def _is_spread(self, placement: Placement) -> bool:
        return len(placement) > ceil(_held(placement) / self._gpus_per_node)

    def _consolidated(self, config: Config) -> float:
        return self._measured(self._table.consolidated, config, "consolidated")

    def _measured(self, table: Mapping[Config, float], config: Config, how: str) -> float:
        found = table.get(config)
        if found is None:
            raise NotMeasured(f"colocation: {config}, {how}, was never measured")
        return found


SPLIT_HELPS = "`colocation(unmeasured=split)` takes it as slices of time"


def _held(placement: Placement) -> int:
    return sum(len(allocation.gpus) for allocation in placement.values())


def _shares_gpu(one: Placement, other: Placement) -> bool:
    return any(
        node_id in other and not set(allocation.gpus).isdisjoint(other[node_id].gpus)
        for node_id, allocation in one.items()
    )
