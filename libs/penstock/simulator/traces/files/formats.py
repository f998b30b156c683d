"""Registry of trace formats: per format the columns of a file, and the parser of each field of a job."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.model.nouns.types import MAX_GPUS_PER_NODE
from penstock.model.nouns.worker_range import wrong_shape
from penstock.runtime.files.csv_import import Row
from penstock.simulator.traces.files.batch_systems import BATCH_SYSTEMS
from penstock.simulator.traces.files.fields import (
    MAX_BATCH,
    MAX_CORES,
    MAX_GANG_GPUS,
    MAX_MEMORY_MIB,
    MAX_PATIENCE_S,
    MAX_WORKERS,
    Field,
    Format,
    Parse,
    batch,
    gpu_models,
    gpus,
    gpus_or_none,
    job_id,
    labels,
    model,
    moment,
    name,
    number,
    numbered,
    span,
    stages,
    unknown_time,
    whole,
    yes_or_no,
)
from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, TraceJob
from penstock.text.counting import count

# -------------------------------------------------------------------------------------- several columns


def _check_pod(row: Row, job: TraceJob) -> TraceJob:
    """A pod is one worker on one node. Pods that never ran have no run time."""
    gpus, milli = job.gpus, job.gpu_share_milli
    if gpus and not milli:
        row.bad("gpu_milli", f"0 of each of {count(gpus, 'GPU')}", 1)
    elif gpus > 1 and milli != WHOLE_GPU_MILLI:
        row.bad("gpu_milli", f"{milli} of each of {gpus} GPUs: only a single one can be shared", 1)
    ended_s, run_s = job.duration_s, 0.0
    if row.has("scheduled_time") and row.has("deletion_time"):
        began_s = row.moment_s("scheduled_time")
        run_s = max(0.0, ended_s - began_s)
        if ended_s < began_s:
            row.bad("deletion_time", f"{ended_s:g} lies before scheduled_time {began_s:g}", None)
    return job._replace(duration_s=run_s, gpu_share_milli=milli if gpus else WHOLE_GPU_MILLI, workers=1)


def _check_own(row: Row, job: TraceJob) -> TraceJob:
    if job.gpus > MAX_GANG_GPUS:
        row.bad("gpus", f"{job.gpus} exceed {MAX_GANG_GPUS} GPUs", 1)
    if job.gpu_share_milli < WHOLE_GPU_MILLI and job.gpus != 1:
        row.bad("gpu_share_milli", f"a share of {job.gpus} GPUs: only a single one can be shared", 1)
    if job.workers is not None and job.gpus % job.workers:
        row.bad("workers", f"{job.gpus} GPUs cannot be cut into {job.workers} equal workers", None)
    if job.min_workers is not None and (wrong := _wrong_range(job)):
        row.bad("min_workers", wrong, None)
    return job


def _wrong_range(job: TraceJob) -> str:
    """Why the job's range of workers is not valid; empty: it is valid."""
    if job.workers is None or job.batch_size is None:
        return (
            "a range needs the columns workers, the most that it may have, and batch_size, of all of them "
            "together"
        )
    wrong = wrong_shape(job.min_workers, job.workers, job.parameter_servers, None, job.batch_size)
    return "" if wrong is None else "{}: {}".format(*wrong)


# ---------------------------------------------------------------------------------------------- formats

OWN: Mapping[str, Parse] = MappingProxyType(
    {
        "job_id": job_id,
        "submit_s": moment(),
        "duration_s": span(),
        "gpus": gpus_or_none,
        "model": name,
        "batch_size": whole(MAX_BATCH),
        "owner": name,
        "iterations": whole(1 << 53),
        "cores": number(above=0, most=MAX_CORES),
        "host_memory_mib": whole(MAX_MEMORY_MIB),
        "gpu_memory_mib": whole(MAX_MEMORY_MIB),
        "gpu_share_milli": whole(WHOLE_GPU_MILLI),
        "gpu_models": gpu_models,
        "workers": whole(MAX_WORKERS),
        "min_workers": whole(MAX_WORKERS),
        "parameter_servers": whole(MAX_WORKERS, least=0),
        "server_gpus": whole(MAX_GPUS_PER_NODE, least=0),
        "patience_s": number(above=0, most=MAX_PATIENCE_S),
        "inference": yes_or_no,
        "memory_bandwidth": number(most=1),
        "labels": labels,
    }
)
"""Columns of our own CSV, named like the fields of a `TraceJob`."""
NEEDED = ("job_id", "submit_s", "duration_s", "gpus")
MURI: Mapping[str, Field] = {
    "job_id": ("job_id", job_id),
    "gpus": ("num_gpu", gpus),
    "model": ("model_name", name),
    "iterations": ("iterations", whole()),
}
"""Fields of the formats of Muri and Tiresias."""
GAVEL: Mapping[str, Field] = {
    "job_id": ("", numbered("gavel")),
    "submit_s": ("arrival", moment()),
    "duration_s": ("total_steps", unknown_time),
    "gpus": ("scale_factor", gpus),
    "model": ("job_type", model),
    "batch_size": ("job_type", batch),
    "iterations": ("total_steps", whole()),
}
IGNORED = ("command", "working_directory", "steps_argument", "needs_data_dir", "priority_weight", "slo")

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "csv": Format(
            NEEDED,
            {name: (name, parse) for name, parse in OWN.items()},
            optional=tuple(name for name in OWN if name not in ("job_id", "submit_s", "gpus")),
            check=_check_own,
        ),
        "muri": Format(
            (
                "job_id",
                "num_gpu",
                "submit_time",
                "iterations",
                "model_name",
                "batch_size",
                "duration",
                "iteration_time",
                "resource_time_0",
                "resource_time_1",
                "resource_time_2",
            ),
            {
                **MURI,
                "submit_s": ("submit_time", moment(per=1_000)),
                "duration_s": ("duration", span(per=1_000)),
                "batch_size": ("batch_size", whole(MAX_BATCH)),
                "stages": ("iteration_time", stages),
            },
        ),
        "tiresias": Format(
            ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration", "interval"),
            {**MURI, "submit_s": ("submit_time", moment()), "duration_s": ("duration", span())},
            left_out=("interval",),
        ),
        "philly": Format(
            ("timestamp", "duration", "num_gpus", "cluster"),
            {
                "job_id": ("", numbered("philly")),
                "submit_s": ("timestamp", moment()),
                "duration_s": ("duration", span()),
                "gpus": ("num_gpus", gpus),
                "owner": ("cluster", name),
            },
        ),
        "pollux": Format(
            ("name", "time", "application", "num_replicas", "batch_size"),
            {
                "job_id": ("name", job_id),
                "submit_s": ("time", moment()),
                "duration_s": ("time", unknown_time),
                "gpus": ("num_replicas", gpus),
                "model": ("application", name),
                "batch_size": ("batch_size", whole(MAX_BATCH)),
            },
        ),
        "openb": Format(
            ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"),
            {
                "job_id": ("name", job_id),
                "submit_s": ("creation_time", moment()),
                "duration_s": ("deletion_time", moment()),
                "gpus": ("num_gpu", whole(16, least=0)),
                "cores": ("cpu_milli", number(most=MAX_CORES * 1_000, per=1_000)),
                "host_memory_mib": ("memory_mib", whole(MAX_MEMORY_MIB, least=0)),
                "gpu_share_milli": ("gpu_milli", whole(WHOLE_GPU_MILLI, least=0)),
                "gpu_models": ("gpu_spec", gpu_models),
            },
            optional=("gpu_spec", "creation_time", "scheduled_time", "deletion_time"),
            check=_check_pod,
            endless=True,
        ),
        "gavel": Format(
            (
                "job_type",
                "command",
                "working_directory",
                "steps_argument",
                "needs_data_dir",
                "total_steps",
                "scale_factor",
                "priority_weight",
                "slo",
                "arrival",
            ),
            GAVEL,
            header=False,
            delimiter="\t",
            left_out=IGNORED,
        ),
        "shockwave": Format(  # the growth of the batch size during a job is not read
            (
                "job_type",
                "command",
                "working_directory",
                "steps_argument",
                "needs_data_dir",
                "total_steps",
                "scale_factor",
                "mode",
                "priority_weight",
                "slo",
                "duration",
                "arrival",
            ),
            {
                **GAVEL,
                "job_id": ("", numbered("shockwave")),
                "duration_s": ("duration", span()),
            },
            header=False,
            delimiter="\t",
            left_out=("mode", *IGNORED),
        ),
        **BATCH_SYSTEMS,
    }
)
