"""Whether a cluster can ever hold a job: what is known before anything runs.

A worker must fit on some empty node, and all workers together must not need more than the cluster has. This is
necessary, not sufficient: a gang whose workers fit one by one may still not fit together.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.model.types import NodeSpec
from penstock.simulator.traces.jobs import TraceJob, gang_of
from penstock.simulator.traces.needs import cores_of

MAX_WORKERS = 256  # of a gang
MAX_NAMED = 8  # kinds of GPUs in a message


class Kind(NamedTuple):
    """Nodes that are alike; or what a worker needs of one."""

    model: str
    gpu_memory_mib: int
    gpus: int
    cores: int
    host_memory_mib: int

    def holds(self, worker: "Kind", most: int) -> int:
        """Workers on one such node, at most `most`."""
        if worker.gpus and worker.gpu_memory_mib > self.gpu_memory_mib:
            return 0
        parts = (
            (self.gpus, worker.gpus),
            (self.cores, worker.cores),
            (self.host_memory_mib, worker.host_memory_mib),
        )
        return min((whole // part for whole, part in parts if part), default=most)


class Room:
    """What a cluster has, by kinds of nodes."""

    def __init__(
        self, nodes: Sequence[NodeSpec], slices_per_core: int = 1, single_gpu_workers: bool = False
    ) -> None:
        self._slices = slices_per_core
        self._single = single_gpu_workers
        self._largest = max((len(node.gpus) for node in nodes), default=0)
        self._gpus: dict[str, int] = {}
        self._kinds: dict[Kind, int] = {}
        for node in nodes:
            model = node.gpus[0].model if node.gpus else ""
            gpu_memory_mib = node.gpus[0].memory_mib if node.gpus else 0
            self._gpus[model] = self._gpus.get(model, 0) + len(node.gpus)
            kind = Kind(model, gpu_memory_mib, len(node.gpus), node.cores, node.host_memory_mib)
            self._kinds[kind] = self._kinds.get(kind, 0) + 1

    def problems(self, job: TraceJob) -> Iterator[tuple[str, str]]:
        """(field of the job, what is wrong); none if nothing is known to be."""
        known = {model: count for model, count in self._gpus.items() if count}
        if job.gpu_models and not known.keys() & set(job.gpu_models):
            here = ", ".join(sorted(known)[:MAX_NAMED])
            yield "gpu_models", f"no node has {' or '.join(job.gpu_models)}; there are {here}"
            return
        allowed = sum(
            count for model, count in known.items() if not job.gpu_models or model in job.gpu_models
        )
        gpus = job.gpus + job.parameter_servers * job.server_gpus
        if gpus > allowed:
            of = f" of {' or '.join(job.gpu_models)}" if job.gpu_models else ""
            yield "gpus", f"{gpus} GPUs; the whole cluster has {allowed}{of}"
            return
        workers, gpus = gang_of(job, self._largest, self._single)
        if workers > MAX_WORKERS:
            told = f"{job.gpus} GPUs on nodes of {self._largest} are {workers} workers; at most {MAX_WORKERS}"
            yield "gpus", told
            return
        kinds = [kind for kind in self._kinds if not job.gpu_models or kind.model in job.gpu_models]
        least_mib = (job.gpu_memory_mib or 0) if job.gpus else 0
        if least_mib > max(kind.gpu_memory_mib for kind in kinds):
            yield "gpu_memory_mib", f"{least_mib} MiB; no GPU has so much"
            return
        if job.parameter_servers and job.server_gpus > max(kind.gpus for kind in kinds):
            yield "server_gpus", f"{job.server_gpus} GPUs; no node has so many"
            return
        cores = self._slices * max(1, gpus)  # as much as a job that tells nothing asks for
        if job.cores is not None:
            cores = cores_of(job, workers, self._slices)
        worker = Kind("", least_mib, gpus, cores, -(-(job.host_memory_mib or 0) // workers))
        places = sum(kind.holds(worker, workers) * self._kinds[kind] for kind in kinds)
        if places < workers:
            wants = [f"{workers} workers of {gpus} GPUs" if workers > 1 else f"{gpus} GPUs"]
            if job.cores is not None:
                wants.append(f"{job.cores / workers:g} cores")
            if job.host_memory_mib is not None:
                wants.append(f"{worker.host_memory_mib} MiB")
            held = f"the nodes hold {places}" if workers > 1 else "no node holds that"
            yield _blamed(worker, kinds), f"{', '.join(wants)}: {held}"
            return
        left = sum(kind.cores * self._kinds[kind] for kind in kinds) - workers * cores
        if job.parameter_servers > left:
            told = f"{job.parameter_servers} beside the workers; there are cores for {left}"
            yield "parameter_servers", told


def _blamed(worker: Kind, kinds: Sequence[Kind]) -> str:
    """The first need that no node meets even alone."""
    if worker.gpus > max(kind.gpus for kind in kinds):
        return "gpus"
    if worker.cores > max(kind.cores for kind in kinds):
        return "cores"
    return "host_memory_mib" if worker.host_memory_mib else "gpus"
