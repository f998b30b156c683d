"""Builds the submission of a trace's job: its job spec,
and the estimator core's estimate of its resources."""

from collections.abc import Callable
from math import ceil
from typing import get_args

import msgspec

from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import WHOLE_GPU, Estimate, Qos
from penstock.scheduling.profiles import profile_for
from penstock.simulator.traces.jobs import Shape, TraceJob, gang_of
from penstock.simulator.traces.resources import COMMAND, request_of
from penstock_services.estimator.core.resources.estimate import estimate


def _service_class(job: TraceJob) -> Qos | None:
    """The class in its label `qos`."""
    return next(
        (found for name, label in job.labels for found in get_args(Qos) if (name, label) == ("qos", found)),
        None,
    )


def saves_when_stopped(settings: PlacerSettings) -> Callable[[TraceJob], bool]:
    """Which jobs save when they are stopped and resume there: all under profiles whose services move running
    jobs, jobs with GPUs where cores are reclaimed or jobs make way, none under others."""
    profile = profile_for(settings)
    if profile.migrate is not None:
        return lambda job: True
    stops = profile.reclaim is not None or profile.make_way is not None
    return lambda job: stops and job.gpus > 0


class Submissions:
    """Submissions of one run. Jobs with equal requests share one spec and one estimate,
    except for their names."""

    def __init__(
        self,
        *,
        gpus_per_node: int,
        single_gpu_workers: bool,
        slices_per_core: int,
        grace_ms: int,
        learns: bool,
        saves: Callable[[TraceJob], bool],
        prelaunch: bool,
        names_cores: Callable[[TraceJob], bool] = lambda job: True,
    ) -> None:
        """`gpus_per_node`: of the largest node; `learns`: specs state the number of iterations; `saves`:
        which jobs' specs state that they save when they are stopped; others as in `Options`."""
        self._saves, self._names_cores = saves, names_cores
        self._prelaunch = prelaunch
        self._gpus_per_node = gpus_per_node
        self._single_gpu_workers = single_gpu_workers
        self._slices_per_core = slices_per_core
        self._grace_ms = grace_ms
        self._learns = learns
        self._needs: dict[tuple[float | None, ...], tuple[ResourceRequest, Estimate]] = {}
        self._specs: dict[tuple[object, ...], JobSpec] = {}

    def of(self, job: TraceJob) -> tuple[JobSpec, Estimate]:
        """A job's spec, with its id as the name, and its estimate without a run time."""
        shape = gang_of(job, self._gpus_per_node, self._single_gpu_workers)
        request, need = self._need(job, shape)
        return self._spec(job, shape, request), need

    def _spec(self, job: TraceJob, shape: Shape, request: ResourceRequest) -> JobSpec:
        """The spec, validated once for jobs that differ in their names only; the name is the id, which is
        validated anyway."""
        alike = (
            job.owner,
            shape,
            job.min_workers,
            job.parameter_servers,
            id(request),
            job.model,
            job.batch_size,
        )
        iterations = job.iterations if self._learns else None
        named = self._names_cores(job)
        asked = (alike, job.gpu_models, job.labels, job.patience_s, iterations, named)
        found = self._specs.get(asked)
        if found is None:
            found = self._specs[asked] = JobSpec(
                name=job.job_id,
                owner=job.owner or "unknown",
                command=COMMAND,
                workers=shape.workers,
                parameter_servers=job.parameter_servers,
                resources=request if named else msgspec.structs.replace(request, cores=None),
                model=job.model or None,
                min_workers=job.min_workers,
                batch_size=job.batch_size if job.min_workers is None else None,
                global_batch_size=None if job.min_workers is None else job.batch_size,
                gpu_models=job.gpu_models,
                labels=dict(job.labels),
                qos=_service_class(job),
                grace_ms=self._grace_ms,
                iterations=iterations,
                prelaunch=self._prelaunch,
                checkpoint="signal" if self._saves(job) else "none",
                queue_timeout_ms=None if job.patience_s is None else max(1, ceil(job.patience_s * 1_000)),
            )
        return msgspec.structs.replace(found, name=job.job_id)

    def _need(self, job: TraceJob, shape: Shape) -> tuple[ResourceRequest, Estimate]:
        """The request of a worker, and the estimator core's answer to it."""
        gpus = shape.gpus_per_worker
        share_milli = None if job.gpu_share_milli == WHOLE_GPU else job.gpu_share_milli
        memory = job.host_memory_mib, job.gpu_memory_mib
        asked = (gpus, shape.workers, job.cores, *memory, share_milli, job.server_gpus)
        found = self._needs.get(asked)
        if found is None:
            request = request_of(job, shape, self._slices_per_core)
            need = estimate(JobSpec(command=COMMAND, resources=request), ())
            server = msgspec.structs.replace(need.parameter_server, gpus=job.server_gpus)
            found = request, msgspec.structs.replace(need, parameter_server=server)
            self._needs[asked] = found
        return found
