"""Feasibility check: whether a cluster can ever hold a job, before anything runs.

A worker must fit on some empty node, and all workers together must not need more than the cluster has. This
is necessary, not sufficient: a gang whose workers fit one by one may still not fit together.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from penstock.cluster.capacity import slots
from penstock.ledger.state.index import NodeShape, shape_of
from penstock.model.nouns.gpu_names import allows
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.types import MAX_CORES_PER_NODE, MAX_GANG_TASKS, MAX_GPUS_PER_NODE, ResourceVector
from penstock.simulator.traces.cluster import UNKNOWN_GPU
from penstock.simulator.traces.jobs import TraceJob, gang_of
from penstock.simulator.traces.resources import cores_of
from penstock.text.counting import count

MAX_WORKERS = 256  # of a gang
MAX_NAMED = 8  # kinds of GPUs in a message


class ClusterCapacity:
    """Capacity of a cluster, by kinds of nodes."""

    def __init__(
        self, nodes: Sequence[NodeSpec], slices_per_core: int = 1, single_gpu_workers: bool = False
    ) -> None:
        self._slices = slices_per_core
        self._single = single_gpu_workers
        self._largest = max((len(node.gpus) for node in nodes), default=0)
        self._gpus: dict[str, int] = {}
        self._kinds: Counter[NodeShape] = Counter(map(shape_of, nodes))
        for shape, nodes_of in self._kinds.items():
            self._gpus[shape.gpu_model] = self._gpus.get(shape.gpu_model, 0) + shape.gpus * nodes_of

    def problems(self, job: TraceJob) -> Iterator[tuple[str, str]]:
        """(field of the job, problem); none if no problem is known."""
        known = {model: count for model, count in self._gpus.items() if count}
        if job.gpu_models and not any(allows(job.gpu_models, model) for model in known):
            here = ", ".join(sorted(known)[:MAX_NAMED])
            remedy = f": name the model, as in 8x8@{job.gpu_models[0]}" if [*known] == [UNKNOWN_GPU] else ""
            yield "gpu_models", f"no node has {' or '.join(job.gpu_models)}; there are {here}{remedy}"
            return
        allowed = sum(count for model, count in known.items() if allows(job.gpu_models, model))
        gpus = job.gpus + job.parameter_servers * job.server_gpus
        if gpus > allowed:
            of = f" of {' or '.join(job.gpu_models)}" if job.gpu_models else ""
            yield "gpus", f"{count(gpus, 'GPU')}; the whole cluster has {allowed}{of}"
            return
        if beyond := list(self.beyond(job)):
            yield from beyond
            return
        workers, gpus = gang_of(job, self._largest, self._single)
        kinds = [kind for kind in self._kinds if allows(job.gpu_models, kind.gpu_model)]
        least_mib = (job.gpu_memory_mib or 0) if job.gpus else 0
        models = " or ".join(job.gpu_models)
        here = f" with {models}" if models else ""
        if least_mib > max(kind.gpu_memory_mib for kind in kinds):
            yield "gpu_memory_mib", f"{least_mib} MiB; no {models or 'GPU'} has so much"
            return
        if job.parameter_servers and job.server_gpus > max(kind.gpus for kind in kinds):
            yield "server_gpus", f"{job.server_gpus} GPUs; no node{here} has so many"
            return
        cores = self._slices * max(1, gpus)  # the default request of a job without one
        if job.cores is not None:
            cores = cores_of(job, workers, self._slices)
        worker = ResourceVector(
            gpus=gpus,
            cores=cores,
            host_memory_mib=-(-(job.host_memory_mib or 0) // workers),
            gpu_memory_mib=least_mib,
        )
        places = sum(slots(kind, worker, (), workers) * self._kinds[kind] for kind in kinds)
        if places < workers:
            wants = [f"{workers} workers of {count(gpus, 'GPU')}" if workers > 1 else count(gpus, "GPU")]
            if job.cores is not None:
                wants.append(f"{job.cores / workers:g} cores")
            if job.host_memory_mib is not None:
                wants.append(f"{worker.host_memory_mib} MiB")
            held = f"the nodes{here} hold {places}" if workers > 1 else f"no node{here} holds that"
            yield _blamed(worker, kinds), f"{', '.join(wants)}: {held}"
            return
        left = sum(kind.cores * self._kinds[kind] for kind in kinds) - workers * cores
        if job.parameter_servers > left:
            message = f"{job.parameter_servers} beside the workers; there are cores for {left}"
            yield "parameter_servers", message

    def beyond(self, job: TraceJob) -> Iterator[tuple[str, str]]:
        """(field of the job, problem): requests beyond the bounds of any job, for nodes of any size."""
        workers, gpus = gang_of(job, self._largest, self._single)
        if workers > MAX_WORKERS:
            message = f"on nodes of {self._largest} are {workers} workers; at most {MAX_WORKERS}"
            yield "gpus", f"{job.gpus} GPUs {message}"
        elif workers + job.parameter_servers > MAX_GANG_TASKS:
            yield "parameter_servers", f"{workers} workers beside; at most {MAX_GANG_TASKS} together"
        elif gpus > MAX_GPUS_PER_NODE:
            yield "gpus", f"{gpus} GPUs on one node; at most {MAX_GPUS_PER_NODE}"
        elif job.cores is not None and cores_of(job, workers, self._slices) > MAX_CORES_PER_NODE:
            yield (
                "cores",
                f"{job.cores / workers:g} cores on one node; at most {MAX_CORES_PER_NODE // self._slices}",
            )


def _blamed(worker: ResourceVector, kinds: Sequence[NodeShape]) -> str:
    """The first resource of which no node has enough."""
    if worker.gpus > max(kind.gpus for kind in kinds):
        return "gpus"
    if worker.cores > max(kind.cores for kind in kinds):
        return "cores"
    return "host_memory_mib" if worker.host_memory_mib else "gpus"
