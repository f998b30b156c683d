"""Parsers of trace formats, line by line. The table in `importing.py` lists the columns that a format must have."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import unquote

from penstock.model.types import MAX_GPUS_PER_NODE, MAX_JOB_ID_CHARS
from penstock.runtime.csv_import import Row
from penstock.simulator.traces.jobs import WHOLE_GPU_MILLI, Stages, TraceJob

MAX_GANG_GPUS = 4_096  # 256 workers of 16 GPUs: the largest gang there can be
MAX_WORKERS = 256
MAX_CORES = 262_144  # of a whole gang: 256 workers of 1,024
MAX_MEMORY_MIB = 1 << 30
MAX_GPU_MODELS = 16
MAX_BATCH = 1 << 30
MAX_PATIENCE_S = 1e9
MAX_LABELS, MAX_LABELS_CHARS = 64, 16_384  # as a job may have
MODEL_AND_BATCH = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]*)(?: \(batch size ([1-9][0-9]{0,8})\))?")


class Format(NamedTuple):
    """One kind of file. `read` notes what is wrong with a line in its row."""

    columns: tuple[str, ...]
    """That it must have; without a header: what stands in each line, in order."""
    read: Callable[[Row], TraceJob]
    names: Mapping[str, str]
    """Field of a job → the column that it comes from, for what is found wrong later."""
    optional: tuple[str, ...] = ()
    header: bool = True
    delimiter: str = ","
    relative: bool = False
    """Whether times count from the first arrival."""
    endless: bool = False
    """Whether its jobs are there to fill a cluster, rather than to be finished."""
    left_out: tuple[str, ...] = ()
    """Columns of those above that a `TraceJob` cannot hold."""


def _muri(row: Row) -> TraceJob:
    stages = Stages(
        row.number("iteration_time", above=0),
        row.number("resource_time_0"),
        row.number("resource_time_1"),
        row.number("resource_time_2"),
    )
    return TraceJob(
        job_id=row.name("job_id", most=MAX_JOB_ID_CHARS),
        submit_s=row.number("submit_time") / 1_000,
        duration_s=row.number("duration", above=0) / 1_000,
        gpus=_gpus(row, "num_gpu"),
        model=row.name("model_name"),
        batch_size=row.whole("batch_size", least=1, most=MAX_BATCH),
        iterations=row.whole("iterations", least=1),
        stages=stages,
    )


def _tiresias(row: Row) -> TraceJob:
    return TraceJob(
        job_id=row.name("job_id", most=MAX_JOB_ID_CHARS),
        submit_s=row.number("submit_time"),
        duration_s=row.number("duration", above=0),
        gpus=_gpus(row, "num_gpu"),
        model=row.name("model_name"),
        iterations=row.whole("iterations", least=1),
    )


def _philly(row: Row) -> TraceJob:
    return TraceJob(
        job_id=f"philly-{row.line - 1}",
        submit_s=row.moment_s("timestamp"),
        duration_s=row.number("duration", above=0),
        gpus=_gpus(row, "num_gpus"),
        owner=row.name("cluster"),
    )


def _pollux(row: Row) -> TraceJob:
    """It has no run time: that follows from the measured step times (job model `placement-table`)."""
    return TraceJob(
        job_id=row.name("name", most=MAX_JOB_ID_CHARS),
        submit_s=row.number("time"),
        duration_s=0.0,
        gpus=_gpus(row, "num_replicas"),
        model=row.name("application"),
        batch_size=row.whole("batch_size", least=1, most=MAX_BATCH),
    )


def _gavel(row: Row) -> TraceJob:
    """Its run time follows from the measured steps per second (job model `colocation`). The line is the job's id."""
    model, batch_size = _model_and_batch(row)
    return TraceJob(
        job_id=f"gavel-{row.line - 1}",
        submit_s=row.number("arrival"),
        duration_s=0.0,
        gpus=_gpus(row, "scale_factor"),
        model=model,
        batch_size=batch_size,
        iterations=row.whole("total_steps", least=1),
    )


def _shockwave(row: Row) -> TraceJob:
    """Gavel's format with the measured run time; how the batch size grows while it runs is not read."""
    job = _gavel(row)
    return job._replace(job_id=f"shockwave-{row.line - 1}", duration_s=row.number("duration", above=0))


def _model_and_batch(row: Row) -> tuple[str, int | None]:
    text = row.text("job_type")
    found = MODEL_AND_BATCH.fullmatch(text)
    if found is None:
        return row.bad("job_type", f"{text[:40]!r} is no `<model> (batch size <n>)`", ("", None))
    return found[1], int(found[2]) if found[2] else None


def _openb(row: Row) -> TraceJob:
    """A pod: one worker on one node. Its times, where given, are when it ran; pods that never ran have no run time."""
    gpus = row.whole("num_gpu", most=16)
    milli = row.whole("gpu_milli", most=WHOLE_GPU_MILLI)
    if gpus and not milli:
        milli = row.bad("gpu_milli", f"0 of each of {gpus} GPUs", 1)
    if gpus > 1 and milli != WHOLE_GPU_MILLI:
        milli = row.bad("gpu_milli", f"{milli} of each of {gpus} GPUs: only a single one can be shared", 1)
    created_s = row.number("creation_time") if row.has("creation_time") else 0.0
    run_s = 0.0
    if row.has("scheduled_time") and row.has("deletion_time"):
        began_s, ended_s = row.number("scheduled_time"), row.number("deletion_time")
        if ended_s < began_s:
            row.bad("deletion_time", f"{ended_s:g} lies before scheduled_time {began_s:g}", None)
        run_s = max(0.0, ended_s - began_s)
    return TraceJob(
        job_id=row.name("name", most=MAX_JOB_ID_CHARS),
        submit_s=created_s,
        duration_s=run_s,
        gpus=gpus,
        cores=row.number("cpu_milli", most=MAX_CORES * 1_000) / 1_000,
        host_memory_mib=row.whole("memory_mib", most=MAX_MEMORY_MIB),
        gpu_share_milli=milli if gpus else WHOLE_GPU_MILLI,
        gpu_models=_models(row, "gpu_spec"),
        workers=1,
    )


def _csv(row: Row) -> TraceJob:
    cores = row.number("cores", above=0, most=MAX_CORES) if row.has("cores") else None
    gpus = _gpus(row, "gpus", least=1 if cores is None else 0)
    share_milli = WHOLE_GPU_MILLI
    if row.has("gpu_share_milli"):
        share_milli = row.whole("gpu_share_milli", least=1, most=WHOLE_GPU_MILLI)
        if share_milli < WHOLE_GPU_MILLI and gpus != 1:
            share_milli = row.bad(
                "gpu_share_milli", f"a share of {gpus} GPUs: only a single one can be shared", 1
            )
    workers = _optional(row, "workers", MAX_WORKERS)
    if workers is not None and gpus % workers:
        row.bad("workers", f"{gpus} GPUs cannot be cut into {workers} equal workers", None)
    return TraceJob(
        job_id=row.name("job_id", most=MAX_JOB_ID_CHARS),
        submit_s=row.number("submit_s"),
        duration_s=row.number("duration_s", above=0) if row.has("duration_s") else 0.0,
        gpus=gpus,
        model=row.name("model") if row.has("model") else "",
        batch_size=_optional(row, "batch_size", MAX_BATCH),
        owner=row.name("owner") if row.has("owner") else "",
        iterations=_optional(row, "iterations", 1 << 53),
        cores=cores,
        host_memory_mib=_optional(row, "host_memory_mib", MAX_MEMORY_MIB),
        gpu_memory_mib=_optional(row, "gpu_memory_mib", MAX_MEMORY_MIB),
        gpu_share_milli=share_milli,
        gpu_models=_models(row, "gpu_models"),
        workers=workers,
        parameter_servers=(_optional(row, "parameter_servers", MAX_WORKERS, least=0) or 0),
        server_gpus=(_optional(row, "server_gpus", MAX_GPUS_PER_NODE, least=0) or 0),
        patience_s=row.number("patience_s", above=0, most=MAX_PATIENCE_S) if row.has("patience_s") else None,
        inference=_yes(row, "inference"),
        memory_bandwidth=row.number("memory_bandwidth", most=1) if row.has("memory_bandwidth") else 0.0,
        labels=_labels(row, "labels"),
    )


def _yes(row: Row, column: str) -> bool:
    if not row.has(column):
        return False
    text = row.text(column).lower()
    return (
        text == "yes"
        if text in ("yes", "no")
        else row.bad(column, f"{text[:40]!r} is neither yes nor no", False)
    )


def _labels(row: Row, column: str) -> tuple[tuple[str, str], ...]:
    """`name=value|name=value`; what would disturb stands as in URLs: %7C for |."""
    if not row.has(column):
        return ()
    pairs = [part.partition("=") for part in row.text(column).split("|")]
    if any(not name or not equals for name, equals, _ in pairs):
        return row.bad(column, f"{row.text(column)[:40]!r} is no name=value|name=value", ())
    labels = {unquote(name): unquote(value) for name, _, value in pairs}
    if len(labels) < len(pairs):
        return row.bad(column, "a name comes twice", ())
    length = sum(len(name) + len(value) for name, value in labels.items())
    if len(labels) > MAX_LABELS or length > MAX_LABELS_CHARS:
        message = f"{len(labels)} labels, {length} characters; at most {MAX_LABELS} and {MAX_LABELS_CHARS}"
        return row.bad(column, message, ())
    return tuple(labels.items())


def _optional(row: Row, column: str, most: int, least: int = 1) -> int | None:
    return row.whole(column, least=least, most=most) if row.has(column) else None


def _gpus(row: Row, column: str, least: int = 1) -> int:
    gpus = row.whole(column, least=least)
    return gpus if gpus <= MAX_GANG_GPUS else row.bad(column, f"{gpus} exceed {MAX_GANG_GPUS} GPUs", 1)


def _models(row: Row, column: str) -> tuple[str, ...]:
    """Names separated by `|`; none: any model."""
    if not row.has(column):
        return ()
    names = tuple(name.strip() for name in row.text(column).split("|"))
    if len(names) > MAX_GPU_MODELS:
        return row.bad(column, f"{len(names)} models; at most {MAX_GPU_MODELS}", ())
    return tuple(name for name in names if row.checked_name(column, name))


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "muri": Format(
            (
                "job_id", "num_gpu", "submit_time", "iterations", "model_name", "batch_size", "duration",
                "iteration_time", "resource_time_0", "resource_time_1", "resource_time_2",
            ),
            _muri,
            {"gpus": "num_gpu", "model": "model_name", "duration_s": "duration"},
        ),
        "tiresias": Format(
            ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration", "interval"),
            _tiresias,
            {"gpus": "num_gpu", "model": "model_name", "duration_s": "duration"},
            left_out=("interval",),
        ),
        "philly": Format(
            ("timestamp", "duration", "num_gpus", "cluster"),
            _philly,
            {"gpus": "num_gpus", "duration_s": "duration"},
            relative=True,
        ),
        "pollux": Format(
            ("name", "time", "application", "num_replicas", "batch_size"),
            _pollux,
            {"gpus": "num_replicas", "model": "application", "duration_s": "time"},
        ),
        "openb": Format(
            ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"),
            _openb,
            {
                "gpus": "num_gpu", "gpu_models": "gpu_spec", "cores": "cpu_milli",
                "host_memory_mib": "memory_mib", "duration_s": "deletion_time",
            },
            optional=("gpu_spec", "creation_time", "scheduled_time", "deletion_time"),
            endless=True,
        ),
        "gavel": Format(
            (
                "job_type", "command", "working_directory", "steps_argument", "needs_data_dir", "total_steps",
                "scale_factor", "priority_weight", "slo", "arrival",
            ),
            _gavel,
            {"gpus": "scale_factor", "model": "job_type", "duration_s": "total_steps"},
            header=False,
            delimiter="\t",
            left_out=("command", "working_directory", "steps_argument", "needs_data_dir", "priority_weight", "slo"),
        ),
        "shockwave": Format(
            (
                "job_type", "command", "working_directory", "steps_argument", "needs_data_dir", "total_steps",
                "scale_factor", "mode", "priority_weight", "slo", "duration", "arrival",
            ),
            _shockwave,
            {"gpus": "scale_factor", "model": "job_type", "duration_s": "duration"},
            header=False,
            delimiter="\t",
            left_out=("mode", "command", "working_directory", "steps_argument", "needs_data_dir", "priority_weight", "slo"),
        ),
        "csv": Format(
            ("job_id", "submit_s", "duration_s", "gpus"),
            _csv,
            {},
            optional=(
                "model", "batch_size", "owner", "iterations", "cores", "host_memory_mib", "gpu_memory_mib",
                "gpu_share_milli", "gpu_models", "workers", "parameter_servers", "server_gpus", "patience_s",
                "inference", "memory_bandwidth", "labels",
            ),
        ),
    }
)  # fmt: skip
