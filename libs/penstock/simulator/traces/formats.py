"""Trace formats: per format the columns of a file, and how each field of a job is parsed from its column."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
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

Parse = Callable[[Row, str], Any]
"""(line, column) → value of a field; notes what is wrong in the row."""
Field = tuple[str, Parse]
"""The column that a field comes from, and its parser."""


class Format(NamedTuple):
    """One kind of file."""

    columns: tuple[str, ...]
    """That it must have; without a header: what stands in each line, in order."""
    fields: Mapping[str, Field]
    """By field of `TraceJob`."""
    optional: tuple[str, ...] = ()
    """Columns that may be missing or empty; their fields then have the default of a `TraceJob`."""
    check: Callable[[Row, TraceJob], TraceJob] = lambda row, job: job
    """What concerns several columns."""
    header: bool = True
    delimiter: str = ","
    relative: bool = False
    """Whether times count from the first arrival."""
    endless: bool = False
    """Whether its jobs are there to fill a cluster, rather than to be finished."""
    left_out: tuple[str, ...] = ()
    """Columns of those above that a `TraceJob` cannot hold."""

    def read(self, row: Row) -> TraceJob:
        """One line; what is wrong with it is noted in the row."""
        values = {
            field: parse(row, column)
            for field, (column, parse) in self.fields.items()
            if column not in self.optional or row.has(column)
        }
        return self.check(row, TraceJob(**({"submit_s": 0.0, "duration_s": 0.0} | values)))

    def column(self, field: str) -> str:
        """Where a field of a job comes from, for what is found wrong later."""
        return self.fields[field][0] if field in self.fields else field


# ---------------------------------------------------------------------------------------------- parsers


def _whole(most: int | None = None, least: int = 1) -> Parse:
    return lambda row, column: row.whole(column, least=least, most=most)


def _number(above: float | None = None, most: float = 1e12, per: float = 1.0) -> Parse:
    """Of so many units `per` one of the field's; bounds are in the column's."""
    return lambda row, column: row.number(column, above=above, most=most) / per


def _name(row: Row, column: str) -> str:
    return row.name(column)


def _job_id(row: Row, column: str) -> str:
    return row.name(column, most=MAX_JOB_ID_CHARS)


def _numbered(prefix: str) -> Parse:
    """The line is the job's id."""
    return lambda row, column: f"{prefix}-{row.line - 1}"


def _moment(row: Row, column: str) -> float:
    return row.moment_s(column)


def _unknown(row: Row, column: str) -> float:
    """A run time that follows from measured step times: job models `placement-table` and `colocation`."""
    return 0.0


def _gpus(row: Row, column: str) -> int:
    gpus = row.whole(column, least=1)
    return gpus if gpus <= MAX_GANG_GPUS else row.bad(column, f"{gpus} exceed {MAX_GANG_GPUS} GPUs", 1)


def _gpus_or_none(row: Row, column: str) -> int:
    """A job that gives its cores may have no GPU."""
    return row.whole(column, least=0) if row.has("cores") else _gpus(row, column)


def _models(row: Row, column: str) -> tuple[str, ...]:
    """Names separated by `|`; none: any model."""
    names = tuple(name.strip() for name in row.text(column).split("|"))
    if len(names) > MAX_GPU_MODELS:
        return row.bad(column, f"{len(names)} models; at most {MAX_GPU_MODELS}", ())
    return tuple(name for name in names if row.checked_name(column, name))


def _stages(row: Row, column: str) -> Stages:
    parts = (row.number(f"resource_time_{part}") for part in range(3))
    return Stages(row.number(column, above=0), *parts)


def _model(row: Row, column: str) -> str:
    text = row.text(column)
    found = MODEL_AND_BATCH.fullmatch(text)
    return found[1] if found else row.bad(column, f"{text[:40]!r} is no `<model> (batch size <n>)`", "")


def _batch(row: Row, column: str) -> int | None:
    found = MODEL_AND_BATCH.fullmatch(row.text(column))
    return int(found[2]) if found is not None and found[2] else None


def _yes(row: Row, column: str) -> bool:
    text = row.text(column).lower()
    if text not in ("yes", "no"):
        return row.bad(column, f"{text[:40]!r} is neither yes nor no", False)
    return text == "yes"


def _labels(row: Row, column: str) -> tuple[tuple[str, str], ...]:
    """`name=value|name=value`; what would disturb stands as in URLs: %7C for |."""
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


# -------------------------------------------------------------------------------------- several columns


def _check_pod(row: Row, job: TraceJob) -> TraceJob:
    """A pod is one worker on one node. Pods that never ran have no run time."""
    gpus, milli = job.gpus, job.gpu_share_milli
    if gpus and not milli:
        row.bad("gpu_milli", f"0 of each of {gpus} GPUs", 1)
    elif gpus > 1 and milli != WHOLE_GPU_MILLI:
        row.bad("gpu_milli", f"{milli} of each of {gpus} GPUs: only a single one can be shared", 1)
    ended_s, run_s = job.duration_s, 0.0
    if row.has("scheduled_time") and row.has("deletion_time"):
        began_s = row.number("scheduled_time")
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
    return job


# ---------------------------------------------------------------------------------------------- formats

OWN: Mapping[str, Parse] = MappingProxyType(
    {
        "job_id": _job_id,
        "submit_s": _number(),
        "duration_s": _number(above=0),
        "gpus": _gpus_or_none,
        "model": _name,
        "batch_size": _whole(MAX_BATCH),
        "owner": _name,
        "iterations": _whole(1 << 53),
        "cores": _number(above=0, most=MAX_CORES),
        "host_memory_mib": _whole(MAX_MEMORY_MIB),
        "gpu_memory_mib": _whole(MAX_MEMORY_MIB),
        "gpu_share_milli": _whole(WHOLE_GPU_MILLI),
        "gpu_models": _models,
        "workers": _whole(MAX_WORKERS),
        "parameter_servers": _whole(MAX_WORKERS, least=0),
        "server_gpus": _whole(MAX_GPUS_PER_NODE, least=0),
        "patience_s": _number(above=0, most=MAX_PATIENCE_S),
        "inference": _yes,
        "memory_bandwidth": _number(most=1),
        "labels": _labels,
    }
)
"""Columns of our own CSV, named like the fields of a `TraceJob`."""
NEEDED = ("job_id", "submit_s", "duration_s", "gpus")
MURI: Mapping[str, Field] = {
    "job_id": ("job_id", _job_id),
    "gpus": ("num_gpu", _gpus),
    "model": ("model_name", _name),
    "iterations": ("iterations", _whole()),
}
"""Of the formats of Muri and Tiresias."""
GAVEL: Mapping[str, Field] = {
    "job_id": ("", _numbered("gavel")),
    "submit_s": ("arrival", _number()),
    "duration_s": ("total_steps", _unknown),
    "gpus": ("scale_factor", _gpus),
    "model": ("job_type", _model),
    "batch_size": ("job_type", _batch),
    "iterations": ("total_steps", _whole()),
}
IGNORED = ("command", "working_directory", "steps_argument", "needs_data_dir", "priority_weight", "slo")

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "muri": Format(
            (
                "job_id", "num_gpu", "submit_time", "iterations", "model_name", "batch_size", "duration",
                "iteration_time", "resource_time_0", "resource_time_1", "resource_time_2",
            ),
            {
                **MURI,
                "submit_s": ("submit_time", _number(per=1_000)),
                "duration_s": ("duration", _number(above=0, per=1_000)),
                "batch_size": ("batch_size", _whole(MAX_BATCH)),
                "stages": ("iteration_time", _stages),
            },
        ),
        "tiresias": Format(
            ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration", "interval"),
            {**MURI, "submit_s": ("submit_time", _number()), "duration_s": ("duration", _number(above=0))},
            left_out=("interval",),
        ),
        "philly": Format(
            ("timestamp", "duration", "num_gpus", "cluster"),
            {
                "job_id": ("", _numbered("philly")),
                "submit_s": ("timestamp", _moment),
                "duration_s": ("duration", _number(above=0)),
                "gpus": ("num_gpus", _gpus),
                "owner": ("cluster", _name),
            },
            relative=True,
        ),
        "pollux": Format(
            ("name", "time", "application", "num_replicas", "batch_size"),
            {
                "job_id": ("name", _job_id),
                "submit_s": ("time", _number()),
                "duration_s": ("time", _unknown),
                "gpus": ("num_replicas", _gpus),
                "model": ("application", _name),
                "batch_size": ("batch_size", _whole(MAX_BATCH)),
            },
        ),
        "openb": Format(
            ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"),
            {
                "job_id": ("name", _job_id),
                "submit_s": ("creation_time", _number()),
                "duration_s": ("deletion_time", _number()),
                "gpus": ("num_gpu", _whole(16, least=0)),
                "cores": ("cpu_milli", _number(most=MAX_CORES * 1_000, per=1_000)),
                "host_memory_mib": ("memory_mib", _whole(MAX_MEMORY_MIB, least=0)),
                "gpu_share_milli": ("gpu_milli", _whole(WHOLE_GPU_MILLI, least=0)),
                "gpu_models": ("gpu_spec", _models),
            },
            optional=("gpu_spec", "creation_time", "scheduled_time", "deletion_time"),
            check=_check_pod,
            endless=True,
        ),
        "gavel": Format(
            (
                "job_type", "command", "working_directory", "steps_argument", "needs_data_dir", "total_steps",
                "scale_factor", "priority_weight", "slo", "arrival",
            ),
            GAVEL,
            header=False,
            delimiter="\t",
            left_out=IGNORED,
        ),
        "shockwave": Format(  # how the batch size grows while a job runs is not read
            (
                "job_type", "command", "working_directory", "steps_argument", "needs_data_dir", "total_steps",
                "scale_factor", "mode", "priority_weight", "slo", "duration", "arrival",
            ),
            {
                **GAVEL,
                "job_id": ("", _numbered("shockwave")),
                "duration_s": ("duration", _number(above=0)),
            },
            header=False,
            delimiter="\t",
            left_out=("mode", *IGNORED),
        ),
        "csv": Format(
            NEEDED,
            {name: (name, parse) for name, parse in OWN.items()},
            optional=tuple(name for name in OWN if name not in ("job_id", "submit_s", "gpus")),
            check=_check_own,
        ),
    }
)  # fmt: skip
