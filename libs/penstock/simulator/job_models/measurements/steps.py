"""Job models from measured iterations, for jobs whose size is a number of iterations.

`step-times`: Pollux's placement table, one iteration at a time. Unlike job model `placement-table`, which
trains to the end of the measured epochs, a job here is a number of iterations of its total batch, on any
GPUs: its speed is the samples per second on the held GPUs, over those on the requested ones, packed. An
iteration of inference does not synchronise. Each start costs the source's 30 s. Source: GENIE's tasks ⟨b, r⟩
need exactly this.

`stages`: the job's own stage times. Its iteration was measured across nodes; the network part counts only for
the flows that cross nodes: iteration = rest + network · (most flows over one link) / (the same with every
task on a node of its own). On one node a job runs as long as in its trace.
"""

from collections.abc import Mapping, Sequence

from penstock.simulator.job_models.measurements.placement_table import RESTART_S, Model, packed
from penstock.simulator.job_models.model import JobModel, Neighbour, NotMeasured, Placement
from penstock.simulator.job_models.sharing import flows_of, most_flows
from penstock.simulator.traces.jobs import Stages, TraceJob


class StepTimes(JobModel):
    """`models` by name; the requested GPUs of a job count as packed on nodes of the given size."""

    name = "step-times"
    knows_shapes = True

    def __init__(self, models: Mapping[str, Model], gpus_per_node: int) -> None:
        self._models = models
        self._gpus_per_node = max(1, gpus_per_node)

    def work_s(self, job: TraceJob) -> float:
        assert job.iterations is not None, job
        assert job.batch_size is not None, job
        return job.iterations * job.batch_size / self._rate(job, packed(job.gpus, self._gpus_per_node))

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        return self._rate(job, _held(placement)) / self._rate(job, packed(job.gpus, self._gpus_per_node))

    def start_up_s(self, job: TraceJob) -> float:
        return RESTART_S

    def network_share(self, job: TraceJob, placement: Placement) -> float:
        """Synchronising share of an iteration, if the job crosses nodes."""
        held = _held(placement)
        if len(held) < 2 or job.inference:
            return 0.0
        passes_s, sync_s, _ = self._iteration(job, held)
        return sync_s / (passes_s + sync_s)

    def _rate(self, job: TraceJob, held: tuple[int, ...]) -> float:
        """Samples per second."""
        passes_s, sync_s, samples = self._iteration(job, held)
        return samples / (passes_s if job.inference else passes_s + sync_s)

    def _iteration(self, job: TraceJob, held: tuple[int, ...]) -> tuple[float, float, int]:
        """(seconds computing, seconds synchronising, samples) of one iteration."""
        model = self._models.get(job.model)
        if model is None or job.batch_size is None:
            raise NotMeasured(f"step-times: {job.model or 'a job without a model'} was never measured")
        local, steps = model.batching(sum(held), job.batch_size)
        step_s, sync_s = model.step(held, local)
        return (steps + 1) * (step_s - sync_s), sync_s, sum(held) * local * (steps + 1)


def _held(placement: Placement) -> tuple[int, ...]:
    """GPUs held on each node with any."""
    return tuple(len(allocation.gpus) for allocation in placement.values() if allocation.gpus)


class StageTimes(JobModel):
    """Needs no table: the trace has the measured stage times."""

    name = "stages"

    def work_s(self, job: TraceJob) -> float:
        """The job's size, see `JobModel`. Raises `NotMeasured`."""
        _parts(job, {})
        return job.duration_s

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        local_ms, crossing_ms = _parts(job, placement)
        return local_ms / (local_ms + crossing_ms)

    def network_share(self, job: TraceJob, placement: Placement) -> float:
        local_ms, crossing_ms = _parts(job, placement)
        return crossing_ms / (local_ms + crossing_ms)


def _parts(job: TraceJob, placement: Placement) -> tuple[float, float]:
    """(milliseconds of an iteration without network, with the flows that cross nodes in this placement)."""
    stages: Stages | None = job.stages
    if stages is None or not 0 <= stages.network_ms < stages.iteration_ms:
        raise NotMeasured(f"stages: job {job.job_id} has no stage times, or nothing beside its network")
    flows = flows_of(job, placement)
    part = max(flows.values()) / most_flows(job, placement) if flows else 0.0
    return stages.iteration_ms - stages.network_ms, stages.network_ms * part
